"""Attention of many branches over the shared prefixes, a context block and their own block: one Mosaic GPU kernel for Hopper.

An online softmax (arXiv 2205.14135) over segments of `block` keys that are numbered by absolute position: the cache's first, then the
context and the own block. A turn takes the next KEYS keys; of a tile of 64 query rows, warpgroup w of four takes the turns whose number
is w modulo 4, in increasing order, and the four states are merged in the order 0, 1, 2, 3. How sums are rounded so depends on positions
alone: the bits are the same whether a block is read from the cache or from this call, for any number of branches and sequences
(kernels_pallas/README.md, "The order of attention").
"""

import math
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.arguments import require, require_main
from kernels_pallas.launch import SWIZZLED, THREAD, interpreting, launch
from kernels_pallas.tiles import ROWS

WARPGROUPS = 4
KEYS = 64
"""Keys of a turn: one block, two or four."""
BLOCKS = (16, 32, 64)
HEAD_DIMS = (64, 128)
CAPACITY_MULTIPLE = 8
"""Rows of a tile in shared memory, of which a copy fetches whole ones."""
SLOTS_BYTES = 192 * 1024
"""Of shared memory, for keys and values on their way."""
LOWEST = float(jnp.finfo(jnp.float32).min)
"""The maximum of nothing: finite, so that no difference of two maxima is NaN."""
PART = 64
"""Columns of values that a program sums up: two programs share a tile of wider heads, for one would spill registers."""


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


def _body(qkv, k_prefix, v_prefix, layer, count, branch, o, *, interpreted):
    n = lax.axis_index("branch")

    @pl.when(n < count[0])
    def _():
        _attention(qkv, k_prefix, v_prefix, layer[0], n, [branch[field, n] for field in range(4)], o, interpreted)


def _attention(qkv, k_prefix, v_prefix, layer, n, about, o, interpreted):
    """One CTA: ROWS rows (head of the group, position) of branch n, all keys, some columns of the values."""
    _, block, heads, head_dim = o.shape
    kv_heads = k_prefix.shape[3]
    dtype, group, tile_heads, segments = o.dtype, heads // kv_heads, ROWS // block, KEYS // block
    slots = min(SLOTS_BYTES // (WARPGROUPS * KEYS * (head_dim + PART) * dtype.itemsize), 3)
    quarter = PART // WARPGROUPS
    kv_head, tile, part, wg = (lax.axis_index(name) for name in ("kv_head", "tile", "part", THREAD))
    first_head, first_column = kv_head * group + tile * tile_heads, part * PART

    b, length, is_causal, behind = about
    cached = lax.div(length + (block - 1), block)
    own = cached + (behind >= 0).astype(jnp.int32)
    turns = lax.div(lax.div(own, segments) - wg + WARPGROUPS, WARPGROUPS)

    def first_segment(turn):
        return (turn * WARPGROUPS + wg) * segments

    def slot_of(turn):
        return wg * slots + lax.rem(turn, slots)

    def attend(q_smem, k_smem, v_smem, q_ready, k_ready, v_ready):
        """This warpgroup's part of the keys (maybe none) -> maximum, sum [ROWS] and weighted values [ROWS, PART], fp32."""
        keys = k_prefix, heads + kv_head, pl.ds(0, head_dim), k_smem, k_ready
        values = v_prefix, heads + kv_heads + kv_head, pl.ds(first_column, PART), v_smem, v_ready

        def fetch(turn, _=None):
            """Starts the copies of this warpgroup's keys and values of a turn, if there is one."""

            def copy(s, _):
                segment, slot = first_segment(turn) + s, slot_of(turn)

                @pl.when(segment < cached)
                def _():
                    for cache, _, at, smem, ready in (keys, values):
                        source = cache.at[layer, b, pl.ds(segment * block, block), kv_head, at]
                        plgpu.copy_gmem_to_smem(source, smem.at[slot, pl.ds(s * block, block)], ready.at[slot])

                @pl.when(segment >= cached)
                def _():  # past its own place the own block is copied again, and not seen
                    for _, head, at, smem, ready in (keys, values):
                        source = qkv.at[jnp.where(segment < own, behind, n), :, head, at]
                        plgpu.copy_gmem_to_smem(source, smem.at[slot, pl.ds(s * block, block)], ready.at[slot])

            lax.fori_loop(0, jnp.where(turn < turns, segments, 0), copy, None)

        @pl.when(wg < tile_heads)
        def _():  # rows past the group's last head repeat it and are not stored
            head = jnp.minimum(first_head + wg, (kv_head + 1) * group - 1)
            plgpu.copy_gmem_to_smem(qkv.at[n, :, head], q_smem.at[pl.ds(wg * block, block)], q_ready)

        lax.fori_loop(0, slots, fetch, None)
        plgpu.barrier_wait(q_ready)

        def step(turn, state):
            top, mass, acc = state
            slot, start = slot_of(turn), first_segment(turn) * block
            plgpu.barrier_wait(k_ready.at[slot])

            def scores(acc_ref):
                plgpu.wgmma(acc_ref, q_smem, k_smem.at[slot].transpose((1, 0)))
                return acc_ref[...]

            score = pl.run_scoped(scores, plgpu.ACC((ROWS, KEYS), jnp.float32))
            i, j = (plgpu.broadcasted_iota(jnp.int32, score.shape, axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1))
            end = (own + 1) * block - start - is_causal * (block - 1 - lax.rem(i, block))
            seen = (j < length - start) | ((j >= cached * block - start) & (j < end))
            score = jnp.where(seen, score * (head_dim**-0.5 * math.log2(math.e)), -jnp.inf)
            highest = jnp.maximum(top, score.max(axis=1))
            weight = jnp.exp2(score - lax.broadcast_in_dim(highest, score.shape, [0]))
            keep = jnp.exp2(top - highest)
            mass = mass * keep + weight.sum(axis=1)
            acc = acc * lax.broadcast_in_dim(keep, acc.shape, [0])
            plgpu.barrier_wait(v_ready.at[slot])
            acc = _add_product(acc, weight.astype(dtype), v_smem.at[slot], interpreted)
            fetch(turn + slots)
            return highest, mass, acc

        row = plgpu.Layout.WGMMA.reduce(1)
        state = (
            plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), row),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), row),
            plgpu.layout_cast(jnp.zeros((ROWS, PART), jnp.float32), plgpu.Layout.WGMMA),
        )
        return lax.fori_loop(0, turns, step, state)

    def merge(state, top_smem, mass_smem, acc_smem, o_smem, written):
        """Warpgroup w adds up the w-th quarter of the columns over the four states, in fixed order, and stores it."""
        top_smem[wg], mass_smem[wg], acc_smem[wg] = state
        plgpu.barrier_arrive(written)
        plgpu.barrier_wait(written)
        row, mine = plgpu.Layout.WGMMA.reduce(1), pl.ds(wg * quarter, quarter)
        tops = [plgpu.load(top_smem.at[w], layout=row) for w in range(WARPGROUPS)]
        highest = reduce(jnp.maximum, tops)
        mass, acc = 0.0, 0.0
        for w, top in enumerate(tops):
            keep = jnp.exp2(top - highest)
            mass = mass + plgpu.load(mass_smem.at[w], layout=row) * keep
            share = plgpu.load(acc_smem.at[w, :, mine], layout=plgpu.Layout.WGMMA)
            acc = acc + share * lax.broadcast_in_dim(keep, share.shape, [0])
        o_smem[wg] = (acc / lax.broadcast_in_dim(mass, acc.shape, [0])).astype(dtype)
        plgpu.commit_smem()
        for h in range(tile_heads):

            @pl.when(tile * tile_heads + h < group)
            def _(h=h):
                stored = o.at[n, :, first_head + h, pl.ds(first_column + wg * quarter, quarter)]
                plgpu.copy_smem_to_gmem(o_smem.at[wg, pl.ds(h * block, block)], stored)

        plgpu.wait_smem_to_gmem(0)

    state = pl.run_scoped(
        attend,
        plgpu.SMEM((ROWS, head_dim), dtype, transforms=SWIZZLED),
        plgpu.SMEM((WARPGROUPS * slots, KEYS, head_dim), dtype, transforms=SWIZZLED),
        plgpu.SMEM((WARPGROUPS * slots, KEYS, PART), dtype, transforms=SWIZZLED),
        plgpu.Barrier(num_arrivals=tile_heads),
        *[plgpu.Barrier(num_arrivals=segments, num_barriers=WARPGROUPS * slots)] * 2,
        collective_axes=THREAD,
    )
    pl.run_scoped(
        partial(merge, state),
        *[plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32)] * 2,
        _smem((WARPGROUPS, ROWS, PART), jnp.float32, quarter),
        _smem((WARPGROUPS, ROWS, quarter), dtype, quarter),
        plgpu.Barrier(num_arrivals=WARPGROUPS),
        collective_axes=THREAD,
    )


def _smem(shape, dtype, columns):
    """Shared memory in tiles of 8 rows by `columns`, swizzled over a tile's whole row."""
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * jnp.dtype(dtype).itemsize))
    )


def _add_product(acc, weight, value_smem, interpreted):
    """acc [rows, columns] + weight [rows, keys] @ value_smem [keys, columns]."""
    if interpreted:  # the interpreter takes wgmma operands from memory only and starts every accumulator at zero
        acc = acc + jnp.dot(weight, value_smem[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # an ordinary read, unlike a wgmma's, must be ordered before the next copy
        return acc
    return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, weight, value_smem))(plgpu.ACC.init(acc))
