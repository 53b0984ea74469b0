"""The packed rows: which rows are computed and where the others find theirs, gathered and normed for the product that follows."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kernels_pallas.arguments import require, require_main
from kernels_pallas.launch import launch
from kernels_pallas.rows import Norm
from kernels_pallas.tiles import LANES


@jax.jit
def pack(
    x: Float[Array, "rows width"],
    flags: Int[Array, " flags"],
    parent: Int[Array, " branch"],
    row_count: Int[Array, "1"],
    norm: Norm,
) -> tuple[Float[Array, "rows width"], Int[Array, "1"], Int[Array, " rows"], Int[Array, " rows"]]:
    """The RMSNorm of the rows whose flag is set, in order and without gaps; their count; and of every row its slot and its source.

    Rows are (branch, position), flags padded with 0 to a multiple of 128; the first `row_count` rows exist, none of the others is flagged.
    A row's source is the nearest flagged row among itself and its branch's ancestors' rows at the same position; its slot is the
    source's place in the packed order. Packed rows from `count` on are unspecified, and so are slots and sources of rows that do not
    exist or have nothing flagged.
    """
    require_main("x", x, "rows width")
    rows, width = x.shape
    branches = parent.shape[0]
    require("flags", flags, (-(-rows // LANES) * LANES,), jnp.int32)
    require("parent", parent, (branches,), jnp.int32)
    require("row_count", row_count, (1,), jnp.int32)
    require("weight", norm.weight, (width,), x.dtype)
    if rows % branches:
        raise ValueError(f"{rows=} must be branch {branches} x block")
    block = rows // branches

    def body(
        x_ref: Any,
        flags_ref: Any,
        parent_ref: Any,
        row_count_ref: Any,
        weight_ref: Any,
        out: Any,
        count_out: Any,
        slot_out: Any,
        source_out: Any,
    ) -> None:
        row = lax.axis_index("row")
        every, within = flags_ref[...], row % block

        @pl.when(row == 0)
        def _() -> None:
            count_out[0] = jnp.sum(every)

        @pl.when(row < row_count_ref[0])
        def _() -> None:
            def climb(state: tuple[Array, Array]) -> tuple[Array, Array]:
                branch, _ = state
                above = parent_ref[branch]
                return above, (flags_ref[above * block + within] > 0) | (above == branch)

            branch = lax.while_loop(lambda state: ~state[1], climb, (row // block, flags_ref[row] > 0))[0]
            source = branch * block + within
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
    return launch("pack", body, outs, {"row": rows}, x, flags, parent, row_count, norm.weight)
