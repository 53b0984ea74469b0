"""Products of packed rows with a weight, at the speed at which the weight arrives.

A program multiplies a tile of rows with a tile of the weight's rows, in blocks of 64 rows as far as `count` goes; tiles past it return at
once. One warpgroup loads, into as many stages as the blocks leave room for; others multiply. The programs of a cluster, neighbours along
the weight's rows, each load a part of the rows of x for all.

Narrow weights are split along the summed axis too, so that every multiprocessor reads its share: each split leaves a sum of its own, and
the kernel that reads them adds them in order. The split follows from the weight's shape alone, so a row's bits do not depend on the rows
beside it.

Shared memory is a ring of stages of DEPTH summed entries each, over which the sums are put in the end. A stage holds rows of x, as many
as the count asks for, and behind them the tile's rows of the weight; of a pair, gate's and up's:

    | x: LOADED ... tile.held rows | weight, part 0: tile.columns rows | part 1: tile.columns rows |

Warpgroup `tile.warpgroups` loads (`_load`); the others multiply, each its blocks of 64 rows (`_multiply`), or have none (`_skip`).

    barrier         arrives                                 waits                    what it says
    loaded[stage]   the copies of x and each weight part    multiplying warpgroups   the stage is filled
    freed[stage]    multiplying warpgroups of the cluster   loading warpgroups       nobody reads the stage any more
    multiplied      multiplying warpgroups, in the end      the same                 no stage is read: sums may take their place
    handed          multiplying warpgroups, sums written    the same                 both halves of a shared block are written

A warpgroup without rows arrives where the others do, so that nobody waits for it, but does not wait for `multiplied`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.arguments import require, require_main
from kernels_pallas.launch import THREAD, launch
from kernels_pallas.layouts import SWIZZLED
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
    columns, depth = weight.shape
    tile = tile or product_tile(columns, depth, x.shape[0])
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


Finish = Callable[[Array, Array], Array]
"""From the products with the gate's and with up's weight to the result."""


def _product(
    name: str, x: Array, weight: Array, count: Array, tile: Tile, finish: Finish | None = None
) -> Float[Array, "splits rows columns"]:
    """fp32 sums of x @ weight.T; or finish(x @ first.T, x @ second.T), in x's type, of the halves of the weight's rows."""
    parts, dtype = (2, x.dtype) if finish else (1, jnp.float32)
    rows, columns = x.shape[0], weight.shape[0] // parts
    sizes = _Sizes(tile, rows, columns, parts, weight.shape[1] // DEPTH // tile.splits)
    if tile.stages < min(sizes.steps, 2):
        raise ValueError(f"{tile} must have 2 stages or more: one is freed when the next is read")
    grid = {"split": tile.splits, "column": -(-columns // (tile.columns * tile.cluster)), "row": -(-rows // sizes.height)}
    return launch(
        name,
        partial(_body, sizes, finish),
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


@dataclass(frozen=True)
class _Sizes:
    """A product's sizes: `parts` weights of `columns` rows, side by side; `steps` of DEPTH summed entries in a split."""

    tile: Tile
    rows: int
    columns: int
    parts: int
    steps: int

    @property
    def height(self) -> int:
        """Rows of a tile."""
        return self.tile.blocks * ROWS

    @property
    def loads(self) -> list[int]:
        """Numbers of rows of x that one copy may load."""
        return self.tile.loads(self.rows)

    @property
    def shared(self) -> bool:
        """Whether two warpgroups share the last block."""
        return self.tile.shares_last(self.parts)


@dataclass(frozen=True)
class _Program:
    """One program of the grid as one of its warpgroups sees it: references, barriers, and where its tile is.

    `group`: the warpgroup; `first`: the first of the tile's columns; `blocks`: how many blocks have rows to compute; `load`: which of
    `sizes.loads` holds them. A stage has `stride` rows, the weight's from `weights` on, and there are `stages`.
    """

    sizes: _Sizes
    x: Any
    weight: Any
    out: Any
    tiles: Any
    results: Any
    loaded: Any
    freed: Any
    multiplied: Any
    handed: Any
    split: Array
    row: Array
    group: Array
    first: Array
    blocks: Array
    load: Array | int
    weights: Array | int
    stride: Array | int
    stages: Array


def _body(
    sizes: _Sizes, finish: Finish | None, x_ref: Any, weight_ref: Any, count_ref: Any, out_ref: Any, memory: Any, *barriers: Any
) -> None:
    """Nothing for a tile past `count`; else every warpgroup's part."""
    tile = sizes.tile
    (tiles, results), (loaded, freed, together) = memory, barriers
    multiplied, handed = together.at[0], together.at[1]
    split, row, group = (lax.axis_index(name) for name in ("split", "row", THREAD))
    first = (lax.axis_index("column") * tile.cluster + lax.axis_index(CLUSTER)) * tile.columns
    rows = jnp.clip(count_ref[0] - row * sizes.height, 0, tile.held(sizes.rows))
    blocks, load = -(-rows // ROWS), sum((rows > size).astype(jnp.int32) for size in sizes.loads[:-1])
    # A sum of multiples of LOADED, so that the compiler sees that weights begin at a whole tile of shared memory.
    weights = sum(jnp.where(load == n, size // LOADED, 0) for n, size in enumerate(sizes.loads)) * LOADED
    stride = weights + weight_rows(tile.columns, sizes.parts)
    stages = jnp.minimum(min(MOST_STAGES, sizes.steps), tile.stage_rows(sizes.rows, sizes.parts) // stride)
    references = x_ref, weight_ref, out_ref, tiles, results, loaded, freed, multiplied, handed
    program = _Program(sizes, *references, split, row, group, first, blocks, load, weights, stride, stages)

    @pl.when(blocks > 0)
    def _() -> None:
        pl.when(group == tile.warpgroups)(partial(_load, program))

        @pl.when(group < tile.warpgroups)
        def _() -> None:
            most = tile.blocks // tile.warpgroups if sizes.shared else -(-tile.blocks // tile.warpgroups)
            whole = [partial(_multiply, program, finish, n + 1, False) for n in range(most)]
            half = [partial(_multiply, program, finish, most, True)] * sizes.shared
            number = -(-(blocks - group) // tile.warpgroups)  # of this warpgroup's blocks
            plgpu.set_max_registers(_registers(tile.warpgroups), action="increase")
            lax.switch(
                jnp.where(blocks == tile.blocks, most + 1, number) if sizes.shared else number, [partial(_skip, program), *whole, *half]
            )
            if finish is not None:
                _finish(program, finish, number)
            plgpu.wait_smem_to_gmem(0)


def _load(p: _Program) -> None:
    """All steps. A stage is filled again when the whole cluster has freed it; in the end no copy is in flight."""
    sizes, tile = p.sizes, p.sizes.tile
    plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

    def fill(step: Array, _: None) -> None:
        stage, summed = lax.rem(step, p.stages), pl.ds((p.split * sizes.steps + step) * DEPTH, DEPTH)

        @pl.when(step >= p.stages)
        def _() -> None:
            plgpu.barrier_wait(p.freed.at[stage])

        for n in range(sizes.parts):
            source, target = (
                pl.ds(start, tile.columns) for start in (n * sizes.columns + p.first, stage * p.stride + p.weights + n * tile.columns)
            )
            plgpu.copy_gmem_to_smem(p.weight.at[source, summed], p.tiles.at[target], p.loaded.at[stage])

        def rows_of_x(size: int) -> None:
            source, target = (pl.ds(start, size) for start in (p.row * sizes.height, stage * p.stride))
            plgpu.copy_gmem_to_smem(p.x.at[source, summed], p.tiles.at[target], p.loaded.at[stage], collective_axes=CLUSTER)

        lax.switch(p.load, [partial(rows_of_x, size) for size in sizes.loads])

    def drain(step: Array, _: None) -> None:
        plgpu.barrier_wait(p.freed.at[lax.rem(step, p.stages)])

    lax.fori_loop(0, sizes.steps, fill, None)
    lax.fori_loop(sizes.steps - p.stages, sizes.steps, drain, None)


def _multiply(p: _Program, finish: Finish | None, whole: int, half: bool) -> None:
    """The sums of this warpgroup's `whole` blocks, and of its `half` of a shared one; left in shared memory, in place of the stages."""
    sizes, tile = p.sizes, p.sizes.tile
    mine = [n * tile.warpgroups + p.group for n in range(whole)] + [tile.blocks - 1] * half
    takes = [(0, sizes.parts)] * whole + [(p.group, 1)] * half  # the first of the weight's parts, and their number

    def summed(*sums: Any) -> list[Array]:
        def add(step: Array, stage: Array) -> Array:
            plgpu.barrier_wait(p.loaded.at[stage])
            for total, block, (part, number) in zip(sums, mine, takes, strict=True):
                factor = p.tiles.at[pl.ds(stage * p.stride + block * ROWS, ROWS)]
                columns = pl.ds(stage * p.stride + p.weights + part * tile.columns, number * tile.columns)
                plgpu.wgmma(total, factor, p.tiles.at[columns].transpose((1, 0)))
            plgpu.wgmma_wait(len(sums))  # those of the step before are done

            @pl.when(step > 0)
            def _() -> None:
                plgpu.barrier_arrive(p.freed.at[jnp.where(stage == 0, p.stages, stage) - 1])

            return jnp.where(stage == p.stages - 1, 0, stage + 1)

        lax.fori_loop(0, sizes.steps, add, jnp.int32(0))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(p.freed.at[lax.rem(sizes.steps - 1, p.stages)])
        return [total[...] for total in sums]

    totals = pl.run_scoped(summed, *[plgpu.ACC((ROWS, number * tile.columns), jnp.float32) for _, number in takes])
    plgpu.barrier_arrive(p.multiplied)
    plgpu.barrier_wait(p.multiplied)
    for total, block, (part, number) in zip(totals, mine, takes, strict=True):
        for n in range(number):
            p.results[block, part + n] = total[:, n * tile.columns : (n + 1) * tile.columns].astype(p.out.dtype)
        if finish is None:
            _send(p, block)


def _skip(p: _Program) -> None:
    """A warpgroup without rows frees every stage.

    One thread arrives for all four warps. Nothing else keeps them together here, and a warp that fell behind by all stages would wait for
    a phase that is over, for ever: they meet before it does.
    """

    def free(step: Array, _: None) -> None:
        plgpu.barrier_wait(p.loaded.at[lax.rem(step, p.stages)])
        plgpu.commit_smem()
        plgpu.barrier_arrive(p.freed.at[lax.rem(step, p.stages)])

    lax.fori_loop(0, p.sizes.steps, free, None)
    plgpu.barrier_arrive(p.multiplied)


def _finish(p: _Program, finish: Finish, number: Array) -> None:
    """What comes of the sums of all this warpgroup's blocks, a few rows at a time.

    One piece of code for them all, however many: the kernels in between put it out of the cache, and programs wait for it.
    """

    def store(n: Array, _: None) -> None:
        block = n * p.sizes.tile.warpgroups + p.group

        def some_rows(n: Array, _: None) -> None:
            some = pl.ds(n * LOADED, LOADED)
            p.results[block, 0, some] = finish(p.results[block, 0, some], p.results[block, 1, some])

        lax.fori_loop(0, ROWS // LOADED, some_rows, None)
        _send(p, block)

    if p.sizes.shared:
        plgpu.barrier_arrive(p.handed)
        plgpu.barrier_wait(p.handed)
    lax.fori_loop(0, number, store, None)


def _send(p: _Program, block: Array | int) -> None:
    """Starts the copy of a block's results."""
    plgpu.commit_smem()
    target = pl.ds(p.row * p.sizes.height + block * ROWS, ROWS), pl.ds(p.first, p.sizes.tile.columns)
    plgpu.copy_smem_to_gmem(p.results.at[block, 0], p.out.at[p.split].at[target])


def _registers(warpgroups: int) -> int:
    """A thread's, in warpgroups that multiply: their share of what the program is launched with, or the last would wait for ever."""
    launched = 512 // (warpgroups + 1) // 8 * 8
    return min(256, (launched * (warpgroups + 1) - MEMORY_REGISTERS) // warpgroups // 8 * 8)
