"""Products of packed rows with a weight, at the speed at which the weight arrives.

A program multiplies a tile of rows with a tile of the weight's rows; tiles past `count` return at once. Narrow weights are split along
the summed axis too, so that every multiprocessor reads its share: each split leaves a sum of its own, and the kernel that reads them adds
them in order. The split follows from the weight's shape alone, so a row's bits do not depend on the rows beside it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.launch import SWIZZLED, THREAD, check, check_main, launch
from kernels_pallas.tiles import DEPTH, ROWS, Tile, pair_tile, product_tile

MEMORY_REGISTERS = 40


@partial(jax.jit, static_argnames="tile")
def linear(
    x: Float[Array, "rows width"], weight: Float[Array, "out in"], count: Int[Array, "1"], tile: Tile | None = None
) -> Float[Array, "splits rows out"]:
    """fp32 sums, one per split of `in`, of x @ weight.T for the first `count` rows; other rows are unspecified.

    Columns of x beyond the weight's are padding, and not read.
    """
    _check(x, weight, count, parts=1)
    tile = tile or product_tile(*weight.shape, x.shape[0])
    return _product("linear", x, weight, count, tile, (weight.shape[0],), lambda total: total, jnp.float32)


@partial(jax.jit, static_argnames="tile")
def silu_pair(
    x: Float[Array, "rows width"], weight: Float[Array, "two_hidden in"], count: Int[Array, "1"], tile: Tile | None = None
) -> Float[Array, "rows hidden"]:
    """silu(gate) * up of x @ weight.T (gate rows first), for the first `count` rows; other rows are unspecified."""
    _check(x, weight, count, parts=2)
    hidden, dtype = weight.shape[0] // 2, x.dtype
    tile = tile or pair_tile(hidden, x.shape[0])

    def finish(gate: Array, up: Array) -> Array:
        wide = gate.astype(dtype).astype(jnp.float32)
        return (wide / (1 + jnp.exp(-wide))).astype(dtype) * up.astype(dtype)

    return _product("silu_pair", x, weight, count, tile, (hidden, hidden), finish, dtype)[0]


def _check(x: Array, weight: Array, count: Array, parts: int) -> None:
    check_main("x", x, "rows width")
    rows, depth = x.shape[0], weight.shape[-1]
    check("weight", weight, (weight.shape[0], min(depth, x.shape[1])), x.dtype)
    check("count", count, (1,), jnp.int32)
    if depth % DEPTH or weight.shape[0] % (8 * parts) or rows % 8:
        wanted = f"in a multiple of {DEPTH}, out of {8 * parts}, rows of 8"
        raise NotImplementedError(f"x {list(x.shape)} @ weight {list(weight.shape)}.T is not supported; the kernel needs {wanted}")


def _product(
    name: str, x: Array, weight: Array, count: Array, tile: Tile, parts: Sequence[int], finish: Callable[..., Array], dtype: Any
) -> Float[Array, "splits rows columns"]:
    """finish(x @ part.T for the equal parts of the weight's rows), tile by tile."""
    rows, columns = x.shape[0], parts[0]
    height, steps = tile.warpgroups * ROWS, weight.shape[1] // DEPTH // tile.splits

    def body(x_ref: Any, weight_ref: Any, count_ref: Any, out_ref: Any) -> None:
        split, column, row = (lax.axis_index(name) for name in ("split", "column", "row"))
        group = lax.axis_index(THREAD)
        mine = pl.ds(group * ROWS, ROWS)

        def pipeline(compute: Callable[..., Any], context: Callable[..., Any]) -> Any:
            block = partial(plgpu.BlockSpec, transforms=SWIZZLED, delay_release=1)
            return plgpu.emit_pipeline_warp_specialized(
                compute,
                grid=(steps,),
                memory_registers=MEMORY_REGISTERS,
                in_specs=[
                    block((height, DEPTH), lambda k: (row, split * steps + k)),
                    *(block((tile.columns, DEPTH), lambda k: (column, split * steps + k)) for _ in parts),
                ],
                wg_axis=THREAD,
                num_compute_wgs=tile.warpgroups,
                max_concurrent_steps=min(tile.stages, max(steps, 2)),
                compute_context=context,
            )

        def multiply(_: Any, x_tile: Any, *tiles_and_sums: Any) -> Any:
            *tiles, sums = tiles_and_sums
            for total, weight_tile in zip(sums, tiles, strict=True):
                plgpu.wgmma(total, x_tile.at[mine], weight_tile.transpose((1, 0)))
            plgpu.wgmma_wait(1)
            return sums

        def store(evaluate: Callable[..., Any], out_tile: Any) -> None:
            def summed(*sums: Any) -> Array:
                evaluate(sums)
                return finish(*(total[...] for total in sums))

            out_tile[group] = pl.run_scoped(summed, *(plgpu.ACC((ROWS, tile.columns), jnp.float32) for _ in parts)).astype(dtype)
            plgpu.commit_smem()
            here = pl.ds(row * height + group * ROWS, ROWS), pl.ds(column * tile.columns, tile.columns)
            plgpu.copy_smem_to_gmem(out_tile.at[group], out_ref.at[split].at[*here])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(row * height < count_ref[0])
        def _() -> None:
            @partial(pl.run_scoped, out_tile=plgpu.SMEM((tile.warpgroups, ROWS, tile.columns), dtype), collective_axes=THREAD)
            def _(out_tile: Any) -> None:
                weights = [weight_ref.at[pl.ds(sum(parts[:n]), part)] for n, part in enumerate(parts)]
                pipeline(multiply, lambda evaluate: store(evaluate, out_tile))(x_ref, *weights)

    grid = {"split": tile.splits, "column": -(-columns // tile.columns), "row": -(-rows // height)}
    out = jax.ShapeDtypeStruct((tile.splits, rows, columns), dtype)
    return launch(name, body, out, grid, x, weight, count, warpgroups=tile.warpgroups + 1)
