"""Arrays with a leading batch axis, in which each row selects, reads or writes at an index of its own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int


def write(buffer: Array, values: Array, start: Int[Array, " batch"]) -> Array:
    """Writes `values` [batch, n, ...] into `buffer` [batch, m, ...], each row's from its own `start` on."""
    return jax.vmap(lambda b, v, s: lax.dynamic_update_slice_in_dim(b, v, s, axis=0))(buffer, values, start)


def of_branch(x: Array, branch: Int[Array, " batch"]) -> Array:
    """x[b, branch[b]]."""
    return jnp.take_along_axis(x, branch.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)[:, 0]


def where_row(condition: Bool[Array, " batch"], new: Any, old: Any) -> Any:
    """Selects whole rows of two pytrees with a leading batch axis."""
    return jax.tree.map(lambda a, b: jnp.where(condition.reshape(-1, *(1,) * (a.ndim - 1)), a, b), new, old)


def ravel_rows[T](rows: T) -> tuple[Int[Array, "batch numbers"], Callable[[Array], T]]:
    """Packs a pytree of integers and booleans with a leading batch axis into one array. Returns it with the function that unpacks it.

    A loop on the device starts at least one kernel for each array that it carries. With a few numbers a row, starting them is most of the
    loop's time, and one array needs fewer kernels.

    >>> rows = {"canvas": jnp.array([[1, 2], [3, 4]]), "start": jnp.array([8, 4]), "stopped": jnp.array([True, False])}
    >>> packed, unpack = ravel_rows(rows)
    >>> packed.tolist()
    [[1, 2, 8, 1], [3, 4, 4, 0]]
    >>> unpack(packed)["stopped"].tolist()
    [True, False]
    """
    leaves, tree = jax.tree.flatten(rows)
    flat = [leaf.astype(jnp.int32).reshape(leaf.shape[0], -1) for leaf in leaves]
    ends = np.cumsum([x.shape[1] for x in flat])[:-1].tolist()

    def unpack(packed: Array) -> T:
        parts = jnp.split(packed, ends, axis=1)
        return jax.tree.unflatten(tree, [x.reshape(leaf.shape).astype(leaf.dtype) for x, leaf in zip(parts, leaves, strict=True)])

    return jnp.concatenate(flat, axis=1), unpack
