"""Arrays with a leading batch axis: each row selects, reads or writes at a place of its own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int


def write(buffer: Array, values: Array, start: Int[Array, " batch"]) -> Array:
    """Writes values [batch, n, ...] into buffer [batch, m, ...] at each row's start."""
    return jax.vmap(lambda b, v, s: lax.dynamic_update_slice_in_dim(b, v, s, axis=0))(buffer, values, start)


def of_branch(x: Array, branch: Int[Array, " batch"]) -> Array:
    """x[b, branch[b]]."""
    return jnp.take_along_axis(x, branch.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)[:, 0]


def where_row(condition: Bool[Array, " batch"], new: Any, old: Any) -> Any:
    """Row-wise select over pytrees with a leading batch axis."""
    return jax.tree.map(lambda a, b: jnp.where(condition.reshape(-1, *(1,) * (a.ndim - 1)), a, b), new, old)


def ravel_rows[T](rows: T) -> tuple[Int[Array, "batch numbers"], Callable[[Array], T]]:
    """A pytree of whole numbers and flags with a leading batch axis as one array, and the way back.

    A loop copies and computes each array it carries by a kernel of its own, which for a few numbers is all they cost.
    """
    leaves, tree = jax.tree.flatten(rows)
    flat = [leaf.astype(jnp.int32).reshape(leaf.shape[0], -1) for leaf in leaves]
    ends = np.cumsum([x.shape[1] for x in flat])[:-1].tolist()

    def back(packed: Array) -> T:
        parts = jnp.split(packed, ends, axis=1)
        return jax.tree.unflatten(tree, [x.reshape(leaf.shape).astype(leaf.dtype) for x, leaf in zip(parts, leaves, strict=True)])

    return jnp.concatenate(flat, axis=1), back
