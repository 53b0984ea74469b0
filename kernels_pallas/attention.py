"""Attention of many branches over the shared prefixes, a context block and their own block: one Mosaic GPU kernel for Hopper.

An online softmax (arXiv 2205.14135) over segments of `block` keys that are numbered by absolute position: the cache's first, then the
context and the own block. A turn takes the next KEYS keys; of a tile of 64 query rows, warpgroup w of four takes the turns whose number
is w modulo 4, in increasing order, and the four states are merged in the order 0, 1, 2, 3. How sums are rounded so depends on positions
alone: the bits are the same whether a block is read from the cache or from this call, for any number of branches and sequences
(kernels_pallas/README.md, "The order of attention"). With blocks of 32, a prefix of 160 and a context block:

    segment        0      1      2      3      4      5        6
    holds          cache  cache  cache  cache  cache  context  own
    turn           0      0      1      1      2      2        3
    warpgroup      0      0      1      1      2      2        3

Each warpgroup copies the keys and values of its own turns, a few turns ahead, and waits for no other one until the merge:

    barrier        arrives                            waits                what it says
    q_ready        each copy of a head's queries      every warpgroup      the tile's queries are in shared memory
    k_ready[slot]  each copy of a segment's keys      the slot's owner     the turn's keys are in the slot
    v_ready[slot]  each copy of a segment's values    the slot's owner     the turn's values are in the slot
    written        every warpgroup, after its turns   every warpgroup      all four states are in shared memory
"""

import math
from functools import partial, reduce
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.arguments import require, require_main
from kernels_pallas.launch import THREAD, interpreting, launch
from kernels_pallas.layouts import SWIZZLED, swizzled
from kernels_pallas.tiles import ROWS

WARPGROUPS = 4
KEYS = 64
"""Keys of a turn: one block, two or four."""
BLOCKS = (16, 32, 64)
HEAD_DIMS = (64, 128)
CAPACITY_MULTIPLE = 8
"""Rows of a tile in shared memory, of which a copy fetches whole ones."""
SLOTS_BYTES = 192 * 1024
"""Of shared memory, for keys and values in flight."""
LOWEST = float(jnp.finfo(jnp.float32).min)
"""The maximum of nothing: finite, so that no difference of two maxima is NaN."""
PART = 64
"""Columns of values that a program sums up. Two programs share a tile of wider heads, because one would spill registers."""
QUARTER = PART // WARPGROUPS
"""Columns that a warpgroup merges and stores."""


def require_sizes(block: int, head_dim: int) -> None:
    """NotImplementedError for a block or head_dim that the kernel lacks."""
    for name, size, known in (("block", block, BLOCKS), ("head_dim", head_dim, HEAD_DIMS)):
        if size not in known:
            raise NotImplementedError(f"{name}={size} is not supported by the Pallas kernels, which take {', '.join(map(str, known))}")


@partial(jax.jit, static_argnames="heads")
def branch_attention(
    qkv: Float[Array, "branch block all_heads head_dim"],
    k_prefix: Float[Array, "layers batch capacity kv_heads head_dim"],
    v_prefix: Float[Array, "layers batch capacity kv_heads head_dim"],
    layer: Int[Array, "1"],
    sequence: Int[Array, " branch"],
    prefix: Int[Array, " batch"],
    causal: Bool[Array, " batch"],
    context: Int[Array, " branch"] | None,
    count: Int[Array, "1"],
    heads: int,
) -> Float[Array, "branch block heads head_dim"]:
    """Every query sees the first `prefix` (at most capacity) cache entries of its layer, then its context block, then its own block.

    Branches of all sequences lie in one list, in any order; `sequence` says whose each is. Those from `count` on are unspecified.
    `qkv` holds query heads, key heads and value heads, and maybe more behind them; it is dense: folded rows hold their source's values.
    `causal`: inside the own block, key j is seen by query i only if j <= i. `context`: the branch whose block comes right before, or -1.
    The cache must be finite up to the end of the block that `prefix` ends in: what is not seen there is multiplied by 0.
    ValueError for arguments that do not fit each other, NotImplementedError for sizes or types that the kernel lacks.
    """
    require_main("qkv", qkv, "branch block all_heads head_dim")
    require_main("k_prefix", k_prefix, "layers batch capacity kv_heads head_dim")
    branches, block, every, head_dim = qkv.shape
    layers, batch, capacity, kv_heads, _ = k_prefix.shape
    require_sizes(block, head_dim)
    if heads % kv_heads:
        raise ValueError(f"{kv_heads=} must divide {heads=}")
    if heads + 2 * kv_heads > every:
        raise ValueError(f"qkv holds {every} heads, not {heads=} + 2 x {kv_heads=}")
    if capacity % CAPACITY_MULTIPLE or capacity < block:
        raise NotImplementedError(f"{capacity=} is not supported; the kernel takes multiples of {CAPACITY_MULTIPLE} from {block=} on")
    for name, x in (("k_prefix", k_prefix), ("v_prefix", v_prefix)):
        require(name, x, (layers, batch, capacity, kv_heads, head_dim), qkv.dtype)
    require("prefix", prefix, (batch,), jnp.int32)
    require("causal", causal, (batch,), jnp.bool_)
    context = jnp.full((branches,), -1, jnp.int32) if context is None else context
    for name, x, size in (("layer", layer, 1), ("sequence", sequence, branches), ("context", context, branches), ("count", count, 1)):
        require(name, x, (size,), jnp.int32)
    # programs that read the same head of a prefix run next to each other
    grid = {"kv_head": kv_heads, "branch": branches, "tile": pl.cdiv(heads // kv_heads, ROWS // block)}
    return launch(
        "attention",
        partial(_body, interpreted=interpreting()),
        jax.ShapeDtypeStruct((branches, block, heads, head_dim), qkv.dtype),
        {**grid, "part": head_dim // PART},
        *(qkv, k_prefix, v_prefix, layer, count),
        jnp.stack([sequence, prefix[sequence], causal[sequence].astype(jnp.int32), context]),
        warpgroups=WARPGROUPS,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )


class _Branch(NamedTuple):
    """A program's branch: its number and sequence, how much of that is cached, whether its mask is causal, its context (-1: none)."""

    n: Int[Array, ""]
    sequence: Int[Array, ""]
    prefix: Int[Array, ""]
    causal: Int[Array, ""]
    context: Int[Array, ""]


def _body(qkv: Any, k_prefix: Any, v_prefix: Any, layer: Any, count: Any, branches: Any, o: Any, *, interpreted: bool) -> None:
    """One program, given references to the arguments; `branches` [field, branch]."""
    n = lax.axis_index("branch")

    @pl.when(n < count[0])
    def _() -> None:
        _attention(qkv, k_prefix, v_prefix, layer[0], _Branch(n, *(branches[field, n] for field in range(4))), o, interpreted)


def _attention(qkv: Any, k_prefix: Any, v_prefix: Any, layer: Array, branch: _Branch, o: Any, interpreted: bool) -> None:
    """One CTA: ROWS rows (head of the group, position) of a branch, all keys, some columns of the values."""
    _, block, heads, head_dim = o.shape
    kv_heads = k_prefix.shape[3]
    group = heads // kv_heads
    tile_heads = ROWS // block
    slots = min(SLOTS_BYTES // (WARPGROUPS * KEYS * (head_dim + PART) * o.dtype.itemsize), 3)
    kv_head, tile, part, wg = (lax.axis_index(name) for name in ("kv_head", "tile", "part", THREAD))
    first_head, first_column = kv_head * group + tile * tile_heads, part * PART
    schedule = _Schedule.of(branch, block, slots, wg)

    def attend(q_smem: Any, k_smem: Any, v_smem: Any, q_ready: Any, k_ready: Any, v_ready: Any) -> _State:
        """This warpgroup's part of the keys (maybe none)."""
        keys = _Stream(k_prefix, heads + kv_head, pl.ds(0, head_dim), k_smem, k_ready)
        values = _Stream(v_prefix, heads + kv_heads + kv_head, pl.ds(first_column, PART), v_smem, v_ready)

        def fetch(turn: Array, _: None = None) -> None:
            _fetch_turn(qkv, keys, values, schedule, branch, layer, kv_head, turn)

        def step(turn: Array, state: _State) -> _State:
            state = _attend_turn(state, q_smem, keys, values, schedule, branch, turn, interpreted)
            fetch(turn + slots)
            return state

        @pl.when(wg < tile_heads)
        def _() -> None:  # rows past the group's last head repeat it and are not stored
            head = jnp.minimum(first_head + wg, (kv_head + 1) * group - 1)
            plgpu.copy_gmem_to_smem(qkv.at[branch.n, :, head], q_smem.at[pl.ds(wg * block, block)], q_ready)

        lax.fori_loop(0, slots, fetch, None)
        plgpu.barrier_wait(q_ready)
        return lax.fori_loop(0, schedule.turns, step, _State.empty())

    def store(state: _State, top_smem: Any, mass_smem: Any, acc_smem: Any, o_smem: Any, written: Any) -> None:
        """This warpgroup's quarter of the columns, of every head."""
        o_smem[wg] = _merged(state, wg, top_smem, mass_smem, acc_smem, written).astype(o.dtype)
        plgpu.commit_smem()
        for h in range(tile_heads):

            @pl.when(tile * tile_heads + h < group)
            def _(h: int = h) -> None:
                stored = o.at[branch.n, :, first_head + h, pl.ds(first_column + wg * QUARTER, QUARTER)]
                plgpu.copy_smem_to_gmem(o_smem.at[wg, pl.ds(h * block, block)], stored)

        plgpu.wait_smem_to_gmem(0)

    state = pl.run_scoped(
        attend,
        plgpu.SMEM((ROWS, head_dim), o.dtype, transforms=SWIZZLED),
        plgpu.SMEM((WARPGROUPS * slots, KEYS, head_dim), o.dtype, transforms=SWIZZLED),
        plgpu.SMEM((WARPGROUPS * slots, KEYS, PART), o.dtype, transforms=SWIZZLED),
        plgpu.Barrier(num_arrivals=tile_heads),
        *[plgpu.Barrier(num_arrivals=KEYS // block, num_barriers=WARPGROUPS * slots)] * 2,
        collective_axes=THREAD,
    )
    pl.run_scoped(
        partial(store, state),
        *[plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32)] * 2,
        swizzled((WARPGROUPS, ROWS, PART), jnp.float32, QUARTER),
        swizzled((WARPGROUPS, ROWS, QUARTER), o.dtype, QUARTER),
        plgpu.Barrier(num_arrivals=WARPGROUPS),
        collective_axes=THREAD,
    )


class _Schedule(NamedTuple):
    """The segments of a branch, and which are warpgroup `wg`'s: its `turns` turns, held in turn by its `slots` slots.

    Segments below `cached` are the prefix's, number `own` is the own block, and one between them is the context.
    """

    block: int
    slots: int
    wg: Array
    cached: Array
    own: Array
    turns: Array

    @classmethod
    def of(cls, branch: _Branch, block: int, slots: int, wg: Array) -> Self:
        """What follows from a branch."""
        cached = lax.div(branch.prefix + (block - 1), block)
        own = cached + (branch.context >= 0).astype(jnp.int32)
        return cls(block, slots, wg, cached, own, lax.div(lax.div(own, KEYS // block) - wg + WARPGROUPS, WARPGROUPS))

    def slot(self, turn: Array) -> Array:
        """Where the keys and values of a turn are held."""
        return self.wg * self.slots + lax.rem(turn, self.slots)

    def first(self, turn: Array) -> Array:
        """The first segment of a turn."""
        return (turn * WARPGROUPS + self.wg) * (KEYS // self.block)


class _Stream(NamedTuple):
    """Keys or values: where they are, in the cache and in a branch (`head` of qkv, `columns` of it), and where they go."""

    cache: Any
    head: Array
    columns: Any
    smem: Any
    ready: Any


class _State(NamedTuple):
    """An online softmax over some of the keys: their maximum, the sum of their weights, their weighted values; fp32."""

    top: Float[Array, " rows"]
    mass: Float[Array, " rows"]
    acc: Float[Array, "rows columns"]

    @classmethod
    def empty(cls) -> Self:
        """Over no keys."""
        row = plgpu.Layout.WGMMA.reduce(1)
        return cls(
            plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), row),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), row),
            plgpu.layout_cast(jnp.zeros((ROWS, PART), jnp.float32), plgpu.Layout.WGMMA),
        )


def _fetch_turn(
    qkv: Any, keys: _Stream, values: _Stream, schedule: _Schedule, branch: _Branch, layer: Array, kv_head: Array, turn: Array
) -> None:
    """Starts the copies of this warpgroup's keys and values of a turn, if there is one."""
    block = schedule.block

    def copy(s: Array, _: None) -> None:
        segment, slot = schedule.first(turn) + s, schedule.slot(turn)

        @pl.when(segment < schedule.cached)
        def _() -> None:
            for stream in (keys, values):
                source = stream.cache.at[layer, branch.sequence, pl.ds(segment * block, block), kv_head, stream.columns]
                plgpu.copy_gmem_to_smem(source, stream.smem.at[slot, pl.ds(s * block, block)], stream.ready.at[slot])

        @pl.when(segment >= schedule.cached)
        def _() -> None:  # behind the own block, it is copied again and masked
            for stream in (keys, values):
                source = qkv.at[jnp.where(segment < schedule.own, branch.context, branch.n), :, stream.head, stream.columns]
                plgpu.copy_gmem_to_smem(source, stream.smem.at[slot, pl.ds(s * block, block)], stream.ready.at[slot])

    lax.fori_loop(0, jnp.where(turn < schedule.turns, KEYS // block, 0), copy, None)


def _attend_turn(
    state: _State, q_smem: Any, keys: _Stream, values: _Stream, schedule: _Schedule, branch: _Branch, turn: Array, interpreted: bool
) -> _State:
    """The state with the keys of one more turn."""
    block, head_dim = schedule.block, q_smem.shape[1]
    slot, start = schedule.slot(turn), schedule.first(turn) * block
    plgpu.barrier_wait(keys.ready.at[slot])

    def scores(acc_ref: Any) -> Array:
        plgpu.wgmma(acc_ref, q_smem, keys.smem.at[slot].transpose((1, 0)))
        return acc_ref[...]

    score = pl.run_scoped(scores, plgpu.ACC((ROWS, KEYS), jnp.float32))
    i, j = (plgpu.broadcasted_iota(jnp.int32, score.shape, axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1))
    end = (schedule.own + 1) * block - start - branch.causal * (block - 1 - lax.rem(i, block))
    seen = (j < branch.prefix - start) | ((j >= schedule.cached * block - start) & (j < end))
    score = jnp.where(seen, score * (head_dim**-0.5 * math.log2(math.e)), -jnp.inf)
    top = jnp.maximum(state.top, score.max(axis=1))
    weight = jnp.exp2(score - lax.broadcast_in_dim(top, score.shape, [0]))
    keep = jnp.exp2(state.top - top)
    mass = state.mass * keep + weight.sum(axis=1)
    acc = state.acc * lax.broadcast_in_dim(keep, state.acc.shape, [0])
    plgpu.barrier_wait(values.ready.at[slot])
    return _State(top, mass, _add_product(acc, weight.astype(q_smem.dtype), values.smem.at[slot], interpreted))


def _merged(state: _State, wg: Array, top_smem: Any, mass_smem: Any, acc_smem: Any, written: Any) -> Float[Array, "rows quarter"]:
    """The attention output in the wg-th quarter of the columns: the four warpgroups' states added up in fixed order."""
    top_smem[wg], mass_smem[wg], acc_smem[wg] = state
    plgpu.barrier_arrive(written)
    plgpu.barrier_wait(written)
    row, mine = plgpu.Layout.WGMMA.reduce(1), pl.ds(wg * QUARTER, QUARTER)
    tops = [plgpu.load(top_smem.at[w], layout=row) for w in range(WARPGROUPS)]
    highest = reduce(jnp.maximum, tops)
    mass: Any = 0.0
    acc: Any = 0.0
    for w, top in enumerate(tops):
        keep = jnp.exp2(top - highest)
        mass = mass + plgpu.load(mass_smem.at[w], layout=row) * keep
        share = plgpu.load(acc_smem.at[w, :, mine], layout=plgpu.Layout.WGMMA)
        acc = acc + share * lax.broadcast_in_dim(keep, share.shape, [0])
    return acc / lax.broadcast_in_dim(mass, acc.shape, [0])


def _add_product(
    acc: Float[Array, "rows columns"], weight: Float[Array, "rows keys"], value_smem: Any, interpreted: bool
) -> Float[Array, "rows columns"]:
    """acc + weight @ value_smem [keys, columns]."""
    if interpreted:  # the interpreter takes wgmma operands from memory only and starts every accumulator at zero
        acc = acc + jnp.dot(weight, value_smem[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # an ordinary read, unlike a wgmma's, must be ordered before the next copy
        return acc
    multiply: Any = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, weight, value_smem))
    return multiply(plgpu.ACC.init(acc))
