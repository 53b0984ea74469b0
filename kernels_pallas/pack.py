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
        index = lax.broadcasted_iota(jnp.int32, every.shape, 0)

        def before(end: Array) -> Array:
            """How many of the rows before `end` are flagged."""
            return jnp.sum(jnp.where(index < end, every, 0))

        count = jnp.sum(every)

        @pl.when(row == 0)
        def _() -> None:
            count_out[0] = count

        first, within = row // (branches * block) * branches, row % block

        def at(branch: Array) -> Array:
            return (first + branch) * block + within

        def climb(_: Array, branch: Array) -> Array:
            return jnp.where(flags_ref[at(branch)] > 0, branch, parent_ref[first + branch])

        source = at(lax.fori_loop(0, branches - 1, climb, row // block - first))
        slot_out[row], source_out[row] = before(source), source

        @pl.when(row < count)
        def _() -> None:
            def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
                low, high = ends  # before(low) <= row < before(high)
                middle = (low + high) // 2
                enough = before(middle) > row
                return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

            steps = (flags.shape[0] - 1).bit_length() + 1
            low, _ = lax.fori_loop(0, steps, halve, (jnp.int32(0), jnp.int32(flags.shape[0])))
            out[row] = norm(x_ref[low], weight_ref[...])

    outs = (
        jax.ShapeDtypeStruct((rows, width), x.dtype),
        jax.ShapeDtypeStruct((1,), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )
    return launch("pack", body, outs, {"row": rows}, x, flags, parent.reshape(-1), norm.weight)
