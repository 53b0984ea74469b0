"""The packed rows: which rows are computed and where the others find theirs, gathered and normed for the product that follows."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kernels_pallas.launch import LANES, check, check_main, launch
from kernels_pallas.rows import Norm


@jax.jit
def pack(
    x: Float[Array, "rows width"],
    flags: Int[Array, " flags"],
    parent: Int[Array, "batch branch"],
    norm: Norm,
) -> tuple[Float[Array, "rows width"], Int[Array, "1"], Int[Array, " rows"], Int[Array, " rows"]]:
    """The RMSNorm of the rows whose flag is set, in order and without gaps; their count; and of every row its slot and its source.

    Rows are (batch, branch, position), flags padded with 0 to a multiple of 128. A row's source is the nearest flagged row among itself
    and its branch's ancestors' rows at the same position; its slot is the source's place in the packed order. Packed rows from `count` on
    are unspecified, and so are slots where nothing was flagged.
    """
    check_main("x", x, "rows width")
    rows, width = x.shape
    batch, branches = parent.shape
    check("flags", flags, (-(-rows // LANES) * LANES,), jnp.int32)
    check("parent", parent, (batch, branches), jnp.int32)
    check("weight", norm.weight, (width,), x.dtype)
    if rows % (batch * branches):
        raise ValueError(f"{rows=} must be batch {batch} x branch {branches} x block")
    block = rows // (batch * branches)

    def body(
        x_ref: Any, flags_ref: Any, parent_ref: Any, weight_ref: Any, out: Any, count_out: Any, slot_out: Any, source_out: Any
    ) -> None:
        row = lax.axis_index("row")
        every = flags_ref[...]

        @pl.when(row == 0)
        def _() -> None:
            count_out[0] = jnp.sum(every)

        first, within = row // (branches * block) * branches, row % block

        def at(branch: Array) -> Array:
            return (first + branch) * block + within

        def climb(state: tuple[Array, Array]) -> tuple[Array, Array]:
            branch, _ = state
            above = parent_ref[first + branch]
            return above, (flags_ref[at(above)] > 0) | (above == branch)

        branch, _ = lax.while_loop(lambda state: ~state[1], climb, (row // block - first, flags_ref[row] > 0))
        source = at(branch)
        slot = jnp.sum(jnp.where(lax.broadcasted_iota(jnp.int32, every.shape, 0) < source, every, 0))
        slot_out[row], source_out[row] = slot, source

        @pl.when(flags_ref[row] > 0)
        def _() -> None:
            out[slot] = norm(x_ref[row], weight_ref[...])

    outs = (
        jax.ShapeDtypeStruct((rows, width), x.dtype),
        jax.ShapeDtypeStruct((1,), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )
    return launch("pack", body, outs, {"row": rows}, x, flags, parent.reshape(-1), norm.weight)
