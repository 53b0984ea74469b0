"""Products of packed rows with a weight, at the speed at which the weight arrives.

A program multiplies a tile of rows with a tile of the weight's rows, in blocks of 64 rows as far as `count` goes; tiles past it return at
once. One warpgroup loads, into as many stages as the blocks leave room for; others multiply. The programs of a cluster, neighbours along
the weight's rows, each load a part of the rows of x for all.

Narrow weights are split along the summed axis too, so that every multiprocessor reads its share: each split leaves a sum of its own, and
the kernel that reads them adds them in order. The split follows from the weight's shape alone, so a row's bits do not depend on the rows
beside it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.arguments import require, require_main
from kernels_pallas.launch import SWIZZLED, THREAD, launch
from kernels_pallas.tiles import DEPTH, LOADED, MOST_STAGES, ROWS, Tile, pair_tile, product_tile, weight_rows

MEMORY_REGISTERS = 24
"""A thread's, in the warpgroup that loads."""
CLUSTER = "neighbour"
"""The axis of programs that load their rows of x together."""


@partial(jax.jit, static_argnames="tile")
def linear(
    x: Float[Array, "rows width"], weight: Float[Array, "out in"], count: Int[Array, "1"], tile: Tile | None = None
) -> Float[Array, "splits rows out"]:
    """fp32 sums, one per split of `in`, of x @ weight.T for the first `count` rows; other rows are unspecified.

    Columns of x beyond the weight's are padding, and not read.
    """
    _require(x, weight, count, parts=1)
    tile = tile or product_tile(*weight.shape, x.shape[0])
    return _product("linear", x, weight, count, tile)


@partial(jax.jit, static_argnames="tile")
def silu_pair(
    x: Float[Array, "rows width"], weight: Float[Array, "two_hidden in"], count: Int[Array, "1"], tile: Tile | None = None
) -> Float[Array, "rows hidden"]:
    """silu(gate) * up of x @ weight.T (gate rows first), for the first `count` rows; other rows are unspecified."""
    _require(x, weight, count, parts=2)
    tile = tile or pair_tile(weight.shape[0] // 2, x.shape[0])
    return _product("silu_pair", x, weight, count, tile, _gated)[0]


def _gated(gate: Array, up: Array) -> Array:
    wide = gate.astype(jnp.float32)
    return (wide / (1 + jnp.exp(-wide))).astype(up.dtype) * up


def _require(x: Array, weight: Array, count: Array, parts: int) -> None:
    require_main("x", x, "rows width")
    rows, depth = x.shape[0], weight.shape[-1]
    require("weight", weight, (weight.shape[0], min(depth, x.shape[1])), x.dtype)
    require("count", count, (1,), jnp.int32)
    if depth % DEPTH or weight.shape[0] % (8 * parts) or rows % 8:
        wanted = f"in a multiple of {DEPTH}, out of {8 * parts}, rows of 8"
        raise NotImplementedError(f"x {list(x.shape)} @ weight {list(weight.shape)}.T is not supported; the kernel needs {wanted}")


def _product(
    name: str, x: Array, weight: Array, count: Array, tile: Tile, finish: Callable[[Array, Array], Array] | None = None
) -> Float[Array, "splits rows columns"]:
    """fp32 sums of x @ weight.T; or finish(x @ first.T, x @ second.T), in x's type, of the halves of the weight's rows."""
    parts, dtype = (2, x.dtype) if finish else (1, jnp.float32)
    rows, columns = x.shape[0], weight.shape[0] // parts
    height, steps = tile.blocks * ROWS, weight.shape[1] // DEPTH // tile.splits
    sizes, held = tile.loads(rows), tile.held(rows)
    shared = tile.shares_last(parts)
    if tile.stages < min(steps, 2):
        raise ValueError(f"{tile} must have 2 stages or more: one is freed when the next is read")

    def body(x_ref: Any, weight_ref: Any, count_ref: Any, out_ref: Any, memory: Any, *barriers: Any) -> None:
        (tiles, results), (loaded, freed, together) = memory, barriers
        multiplied, handed = together.at[0], together.at[1]
        split, row, group = (lax.axis_index(name) for name in ("split", "row", THREAD))
        first = (lax.axis_index("column") * tile.cluster + lax.axis_index(CLUSTER)) * tile.columns
        here = jnp.clip(count_ref[0] - row * height, 0, held)
        blocks, way_of_x = -(-here // ROWS), sum((here > size).astype(jnp.int32) for size in sizes[:-1])
        # Where weights begin in a stage, behind the rows of x; said so that it is seen to be whole tiles of shared memory.
        weights = sum(jnp.where(way_of_x == n, size // LOADED, 0) for n, size in enumerate(sizes)) * LOADED
        stride = weights + weight_rows(tile.columns, parts)
        stages = jnp.minimum(min(MOST_STAGES, steps), tile.stage_rows(rows, parts) // stride)

        def load() -> None:
            """All steps. A stage is filled again when the whole cluster has freed it; in the end nothing is under way."""
            plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

            def fill(step: Array, _: None) -> None:
                stage, summed = lax.rem(step, stages), pl.ds((split * steps + step) * DEPTH, DEPTH)

                @pl.when(step >= stages)
                def _() -> None:
                    plgpu.barrier_wait(freed.at[stage])

                for n in range(parts):
                    part, there = (
                        pl.ds(start, tile.columns) for start in (n * columns + first, stage * stride + weights + n * tile.columns)
                    )
                    plgpu.copy_gmem_to_smem(weight_ref.at[part, summed], tiles.at[there], loaded.at[stage])

                def rows_of_x(size: int) -> None:
                    some, there = (pl.ds(start, size) for start in (row * height, stage * stride))
                    plgpu.copy_gmem_to_smem(x_ref.at[some, summed], tiles.at[there], loaded.at[stage], collective_axes=CLUSTER)

                lax.switch(way_of_x, [partial(rows_of_x, size) for size in sizes])

            def drain(step: Array, _: None) -> None:
                plgpu.barrier_wait(freed.at[lax.rem(step, stages)])

            lax.fori_loop(0, steps, fill, None)
            lax.fori_loop(steps - stages, steps, drain, None)

        def compute(high: int, half: bool) -> None:
            """The sums of `high` blocks, this warpgroup's, and of its part of one that is shared, left where loads were."""
            mine = [n * tile.warpgroups + group for n in range(high)] + [tile.blocks - 1] * half
            takes = [(0, parts)] * high + [(group, 1)] * half  # the first of the weight's parts, and their number

            def summed(*sums: Any) -> list[Array]:
                def add(step: Array, stage: Array) -> Array:
                    plgpu.barrier_wait(loaded.at[stage])
                    for total, block, (part, number) in zip(sums, mine, takes, strict=True):
                        factor = tiles.at[pl.ds(stage * stride + block * ROWS, ROWS)]
                        columns = pl.ds(stage * stride + weights + part * tile.columns, number * tile.columns)
                        plgpu.wgmma(total, factor, tiles.at[columns].transpose((1, 0)))
                    plgpu.wgmma_wait(len(sums))

                    @pl.when(step > 0)
                    def _() -> None:
                        plgpu.barrier_arrive(freed.at[jnp.where(stage == 0, stages, stage) - 1])

                    return jnp.where(stage == stages - 1, 0, stage + 1)

                lax.fori_loop(0, steps, add, jnp.int32(0))
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(freed.at[lax.rem(steps - 1, stages)])
                return [total[...] for total in sums]

            totals = pl.run_scoped(summed, *[plgpu.ACC((ROWS, number * tile.columns), jnp.float32) for _, number in takes])
            plgpu.barrier_arrive(multiplied)
            plgpu.barrier_wait(multiplied)
            for total, block, (part, number) in zip(totals, mine, takes, strict=True):
                for n in range(number):
                    results[block, part + n] = total[:, n * tile.columns : (n + 1) * tile.columns].astype(dtype)
                if finish is None:
                    send(block)

        def skip() -> None:
            """A warpgroup without rows.

            One thread arrives for all four warps. Nothing else keeps them together here, and a warp that fell behind by all stages would
            wait for a phase that is over, for ever: they meet before it does.
            """

            def free(step: Array, _: None) -> None:
                plgpu.barrier_wait(loaded.at[lax.rem(step, stages)])
                plgpu.commit_smem()
                plgpu.barrier_arrive(freed.at[lax.rem(step, stages)])

            lax.fori_loop(0, steps, free, None)
            plgpu.barrier_arrive(multiplied)

        def finish_all(mine: Array, finish: Callable[[Array, Array], Array]) -> None:
            """What comes of the sums of all this warpgroup's blocks, a few rows at a time.

            One piece of code for them all, however many: the kernels in between put it out of the cache, and programs wait for it.
            """

            def store(n: Array, _: None) -> None:
                block = n * tile.warpgroups + group

                def some_rows(n: Array, _: None) -> None:
                    some = pl.ds(n * LOADED, LOADED)
                    results[block, 0, some] = finish(results[block, 0, some], results[block, 1, some])

                lax.fori_loop(0, ROWS // LOADED, some_rows, None)
                send(block)

            if shared:
                plgpu.barrier_arrive(handed)
                plgpu.barrier_wait(handed)
            lax.fori_loop(0, mine, store, None)

        def send(block: Array | int) -> None:
            plgpu.commit_smem()
            where = pl.ds(row * height + block * ROWS, ROWS), pl.ds(first, tile.columns)
            plgpu.copy_smem_to_gmem(results.at[block, 0], out_ref.at[split].at[where])

        @pl.when(blocks > 0)
        def _() -> None:
            pl.when(group == tile.warpgroups)(load)

            @pl.when(group < tile.warpgroups)
            def _() -> None:
                most = tile.blocks // tile.warpgroups if shared else -(-tile.blocks // tile.warpgroups)
                ways = [skip, *(partial(compute, n + 1, False) for n in range(most)), *[partial(compute, most, True)] * shared]
                mine = -(-(blocks - group) // tile.warpgroups)
                plgpu.set_max_registers(_registers(tile.warpgroups), action="increase")
                lax.switch(jnp.where(blocks == tile.blocks, most + 1, mine) if shared else mine, ways)
                if finish is not None:
                    finish_all(mine, finish)
                plgpu.wait_smem_to_gmem(0)

    grid = {"split": tile.splits, "column": -(-columns // (tile.columns * tile.cluster)), "row": -(-rows // height)}
    return launch(
        name,
        body,
        jax.ShapeDtypeStruct((tile.splits, rows, columns), dtype),
        grid,
        x,
        weight,
        count,
        warpgroups=tile.warpgroups + 1,
        cluster=(tile.cluster,),
        cluster_names=(CLUSTER,),
        scratch_types=[
            plgpu.RefUnion(
                plgpu.SMEM((tile.stage_rows(rows, parts), DEPTH), x.dtype, transforms=SWIZZLED),
                plgpu.SMEM((tile.blocks, parts, ROWS, tile.columns), dtype),
            ),
            plgpu.Barrier(num_arrivals=parts + 1, num_barriers=MOST_STAGES),
            plgpu.ClusterBarrier(collective_axes=(CLUSTER,), num_arrivals=tile.warpgroups, num_barriers=MOST_STAGES),
            plgpu.Barrier(num_arrivals=tile.warpgroups, num_barriers=2),
        ],
    )


def _registers(warpgroups: int) -> int:
    """A thread's, in warpgroups that multiply: their share of what the program is launched with, or the last would wait for ever."""
    launched = 512 // (warpgroups + 1) // 8 * 8
    return min(256, (launched * (warpgroups + 1) - MEMORY_REGISTERS) // warpgroups // 8 * 8)
