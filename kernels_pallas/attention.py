"""Attention of many branches over one shared prefix, a context block and their own block: one Mosaic GPU kernel for Hopper.

An online softmax (arXiv 2205.14135) over segments of `block` keys that are numbered by absolute position: the cache's first, then the
context and the own block. Of a tile of 64 query rows, warpgroup w of four takes the segments whose number is w modulo 4, in increasing
order; the four states are merged in the order 0, 1, 2, 3. How sums are rounded so depends on segment numbers alone: the bits are the
same whether a block is read from the cache or from this call (decisions.md 11), for any number of branches and sequences.
"""

import math
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.launch import SWIZZLED, THREAD, check, check_main, interpreting, launch
from kernels_pallas.tiles import ROWS

WARPGROUPS = 4
BLOCKS = (16, 32, 64)
HEAD_DIMS = (64, 128)
CAPACITY_MULTIPLE = 8
"""Rows of a tile in shared memory, of which a copy fetches whole ones."""
LOWEST = float(jnp.finfo(jnp.float32).min)
"""The maximum of nothing: finite, so that no difference of two maxima is NaN."""


def check_sizes(block: int, head_dim: int) -> None:
    """NotImplementedError for a block or head_dim that the kernel lacks."""
    for name, size, known in (("block", block, BLOCKS), ("head_dim", head_dim, HEAD_DIMS)):
        if size not in known:
            raise NotImplementedError(f"{name}={size} is not supported by the Pallas kernels, which take {', '.join(map(str, known))}")


@partial(jax.jit, static_argnames="heads")
def branch_attention(
    qkv: Float[Array, "batch branch block all_heads head_dim"],
    k_prefix: Float[Array, "layers batch capacity kv_heads head_dim"],
    v_prefix: Float[Array, "layers batch capacity kv_heads head_dim"],
    layer: Int[Array, "1"],
    prefix: Int[Array, " batch"],
    causal: Bool[Array, " batch"],
    context: Int[Array, "batch branch"] | None,
    heads: int,
) -> Float[Array, "batch branch block heads head_dim"]:
    """Every query sees the first `prefix` (at most capacity) cache entries of its layer, then its context block, then its own block.

    `qkv` holds query heads, key heads and value heads, and maybe more behind them; it is dense: folded rows hold their source's values.
    `causal`: inside the own block, key j is seen by query i only if j <= i. `context`: the branch whose block comes right before, or -1.
    The cache must be finite up to the end of the block that `prefix` ends in: what is not seen there is multiplied by 0.
    ValueError for arguments that do not fit each other, NotImplementedError for sizes or types that the kernel lacks.
    """
    check_main("qkv", qkv, "batch branch block all_heads head_dim")
    check_main("k_prefix", k_prefix, "layers batch capacity kv_heads head_dim")
    batch, branches, block, every, head_dim = qkv.shape
    layers, _, capacity, kv_heads, _ = k_prefix.shape
    check_sizes(block, head_dim)
    if heads % kv_heads:
        raise ValueError(f"{kv_heads=} must divide {heads=}")
    if heads + 2 * kv_heads > every:
        raise ValueError(f"qkv holds {every} heads, not {heads=} + 2 x {kv_heads=}")
    if capacity % CAPACITY_MULTIPLE or capacity < block:
        raise NotImplementedError(f"{capacity=} is not supported; the kernel takes multiples of {CAPACITY_MULTIPLE} from {block=} on")
    for name, x in (("k_prefix", k_prefix), ("v_prefix", v_prefix)):
        check(name, x, (layers, batch, capacity, kv_heads, head_dim), qkv.dtype)
    check("layer", layer, (1,), jnp.int32)
    check("prefix", prefix, (batch,), jnp.int32)
    check("causal", causal, (batch,), jnp.bool_)
    context = jnp.full((batch, branches), -1, jnp.int32) if context is None else context
    check("context", context, (batch, branches), jnp.int32)
    return launch(
        "attention",
        partial(_body, interpreted=interpreting()),
        jax.ShapeDtypeStruct((batch, branches, block, heads, head_dim), qkv.dtype),
        # programs that read the same head of a prefix run next to each other
        {"batch": batch, "kv_head": kv_heads, "branch": branches, "tile": pl.cdiv(heads // kv_heads, ROWS // block)},
        *(qkv, k_prefix, v_prefix, layer, prefix, causal.astype(jnp.int32), context),
        warpgroups=WARPGROUPS,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )


def _body(qkv, k_prefix, v_prefix, layer, prefix, causal, context, o, *, interpreted):
    """One CTA: ROWS rows (head of the group, position) of one branch, all keys."""
    _, _, block, heads, head_dim = o.shape
    kv_heads = k_prefix.shape[3]
    dtype, group, tile_heads = o.dtype, heads // kv_heads, ROWS // block
    slots = 2 if block * head_dim <= 4096 else 1  # so that all warpgroups' keys and values take at most 128 KiB
    quarter = head_dim // WARPGROUPS
    b, kv_head, n, tile, wg = (lax.axis_index(name) for name in ("batch", "kv_head", "branch", "tile", THREAD))
    first_head = kv_head * group + tile * tile_heads

    behind, length, is_causal = context[b, n], prefix[b], causal[b]
    cached = lax.div(length + (block - 1), block)
    total = cached + (behind >= 0).astype(jnp.int32) + 1
    turns = lax.div(total - wg + (WARPGROUPS - 1), WARPGROUPS)

    def fetch(turn, cache, first, smem, ready):
        """Starts the copy of this warpgroup's keys or values number `turn`, if there are as many; `first`: their first head."""
        segment, slot = turn * WARPGROUPS + wg, wg * slots + lax.rem(turn, slots)

        @pl.when(segment < cached)
        def _():
            plgpu.copy_gmem_to_smem(cache.at[layer[0], b, pl.ds(segment * block, block), kv_head], smem.at[slot], ready.at[slot])

        @pl.when((segment >= cached) & (segment < total))
        def _():
            branch = jnp.where(segment == total - 1, n, behind)
            plgpu.copy_gmem_to_smem(qkv.at[b, branch, :, first + kv_head], smem.at[slot], ready.at[slot])

    def attend(q_smem, k_smem, v_smem, q_ready, k_ready, v_ready):
        """This warpgroup's part of the keys (maybe none) -> maximum, sum [ROWS] and weighted values [ROWS, head_dim], fp32."""
        fetch_key = partial(fetch, cache=k_prefix, first=heads, smem=k_smem, ready=k_ready)
        fetch_value = partial(fetch, cache=v_prefix, first=heads + kv_heads, smem=v_smem, ready=v_ready)

        @pl.when(wg < tile_heads)
        def _():  # rows past the group's last head repeat it and are not stored
            head = jnp.minimum(first_head + wg, (kv_head + 1) * group - 1)
            plgpu.copy_gmem_to_smem(qkv.at[b, n, :, head], q_smem.at[pl.ds(wg * block, block)], q_ready)

        for turn in range(slots):
            fetch_key(turn)
            fetch_value(turn)
        plgpu.barrier_wait(q_ready)

        def step(turn, state):
            top, mass, acc = state
            segment, slot = turn * WARPGROUPS + wg, wg * slots + lax.rem(turn, slots)
            plgpu.barrier_wait(k_ready.at[slot])

            def scores(acc_ref):
                plgpu.wgmma(acc_ref, q_smem, k_smem.at[slot].transpose((1, 0)))
                return acc_ref[...]

            score = pl.run_scoped(scores, plgpu.ACC((ROWS, block), jnp.float32))
            fetch_key(turn + slots)
            i, j = (plgpu.broadcasted_iota(jnp.int32, score.shape, axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1))
            by_row = (segment == total - 1) & (is_causal != 0)
            last = jnp.where(segment < cached, length - segment * block - 1, jnp.where(by_row, 0, block))
            seen = j <= last + lax.rem(i, block) * by_row.astype(jnp.int32)
            score = jnp.where(seen, score * (head_dim**-0.5 * math.log2(math.e)), -jnp.inf)
            highest = jnp.maximum(top, score.max(axis=1))
            weight = jnp.exp2(score - lax.broadcast_in_dim(highest, score.shape, [0]))
            keep = jnp.exp2(top - highest)
            mass = mass * keep + weight.sum(axis=1)
            acc = acc * lax.broadcast_in_dim(keep, acc.shape, [0])
            plgpu.barrier_wait(v_ready.at[slot])
            acc = _add_product(acc, weight.astype(dtype), v_smem.at[slot], interpreted)
            fetch_value(turn + slots)
            return highest, mass, acc

        row = plgpu.Layout.WGMMA.reduce(1)
        state = (
            plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), row),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), row),
            plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA),
        )
        return lax.fori_loop(0, turns, step, state)

    def merge(state, top_smem, mass_smem, acc_smem, o_smem, written):
        """Warpgroup w adds up the w-th quarter of the columns over the four states, in fixed order, and stores it."""
        top_smem[wg], mass_smem[wg], acc_smem[wg] = state
        plgpu.barrier_arrive(written)
        plgpu.barrier_wait(written)
        row, columns = plgpu.Layout.WGMMA.reduce(1), pl.ds(wg * quarter, quarter)
        tops = [plgpu.load(top_smem.at[w], layout=row) for w in range(WARPGROUPS)]
        highest = reduce(jnp.maximum, tops)
        mass, acc = 0.0, 0.0
        for w, top in enumerate(tops):
            keep = jnp.exp2(top - highest)
            mass = mass + plgpu.load(mass_smem.at[w], layout=row) * keep
            part = plgpu.load(acc_smem.at[w, :, columns], layout=plgpu.Layout.WGMMA)
            acc = acc + part * lax.broadcast_in_dim(keep, part.shape, [0])
        o_smem[wg] = (acc / lax.broadcast_in_dim(mass, acc.shape, [0])).astype(dtype)
        plgpu.commit_smem()
        for h in range(tile_heads):

            @pl.when(tile * tile_heads + h < group)
            def _(h=h):
                plgpu.copy_smem_to_gmem(o_smem.at[wg, pl.ds(h * block, block)], o.at[b, n, :, first_head + h, columns])

        plgpu.wait_smem_to_gmem(0)

    state = pl.run_scoped(
        attend,
        plgpu.SMEM((ROWS, head_dim), dtype, transforms=SWIZZLED),
        plgpu.SMEM((WARPGROUPS * slots, block, head_dim), dtype, transforms=SWIZZLED),
        _smem((WARPGROUPS * slots, block, head_dim), dtype, block),  # a product's swizzle spans its summed axis
        plgpu.Barrier(num_arrivals=tile_heads),
        *[plgpu.Barrier(num_barriers=WARPGROUPS * slots)] * 2,
        collective_axes=THREAD,
    )
    pl.run_scoped(
        partial(merge, state),
        *[plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32)] * 2,
        _smem((WARPGROUPS, ROWS, head_dim), jnp.float32, quarter),
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
    """acc [rows, head_dim] + weight [rows, block] @ value_smem [block, head_dim]."""
    if interpreted:  # the interpreter takes wgmma operands from memory only and starts every accumulator at zero
        acc = acc + jnp.dot(weight, value_smem[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # an ordinary read, unlike a wgmma's, must be ordered before the next copy
        return acc
    return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, weight, value_smem))(plgpu.ACC.init(acc))
