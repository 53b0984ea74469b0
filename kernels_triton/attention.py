"""Attention of many branches over one shared prefix, a context block and their own block.

Two kernels run the same online softmax (arXiv 2205.14135), one segment of `block` keys at a time: first the computed queries of all
branches stream over the sequence's prefix, stored once; then every position, folded ones with their source's query and state, goes on
over its own branch's keys (the correction). Carrying the running maximum, sum and accumulator in fp32 merges the two parts as
log-sum-exp would, and gives the same bits whether a block is read from the cache or from this call.
"""

# Triton compiles kernels from their text: to a type checker, tl.sum may give a tuple.
# pyright: reportOperatorIssue=false

import torch
import triton
import triton.language as tl

from kernels_triton.arguments import require, require_head_dim, require_main
from kernels_triton.numerics import dot, narrow
from kernels_triton.tiles import constants, padded

STAGES = 3
LONGEST_BLOCK = 128


def branch_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    source: torch.Tensor,
    k_prefix: torch.Tensor,
    v_prefix: torch.Tensor,
    prefix: torch.Tensor,
    causal: torch.Tensor,
    context: torch.Tensor | None,
) -> torch.Tensor:
    """o [batch, branch, block, heads, head_dim]: the query of (b, n, i) is q[b, source[b, n, i], i], its keys k[b, source[b, n, j], j].

    `q` [batch, branch, block, heads, head_dim]; `k`, `v` [batch, branch, block, kv_heads, head_dim]; `source` int32 [batch, branch,
    block]; `k_prefix`, `v_prefix` [batch, capacity, kv_heads, head_dim], any strides but the last, of which the first `prefix` (int32
    [batch]) count; `causal` bool [batch]: inside the block; `context` int32 [batch, branch]: the branch whose block comes before, or -1.
    """
    require_main("q", q, "batch branch block heads head_dim")
    require_main("k", k, "batch branch block kv_heads head_dim")
    batch, branches, block, heads, head_dim = q.shape
    kv_heads, device = k.shape[3], q.device
    require_head_dim(head_dim)
    if heads % kv_heads:
        raise ValueError(f"{kv_heads=} must divide {heads=}")
    if block > LONGEST_BLOCK:
        raise NotImplementedError(f"{block=} positions are not supported; the kernel takes up to {LONGEST_BLOCK}")
    for name, tensor in (("k", k), ("v", v)):
        require(name, tensor, (batch, branches, block, kv_heads, head_dim), q.dtype, device)
    require("source", source, (batch, branches, block), torch.int32, device)
    _require_prefix(k_prefix, v_prefix, q, kv_heads)
    require("prefix", prefix, (batch,), torch.int32, device)
    require("causal", causal, (batch,), torch.bool, device)
    if context is not None:
        require("context", context, (batch, branches), torch.int32, device)
    rows, group = branches * block, heads // kv_heads
    top, total = (torch.empty(batch, rows, heads, dtype=torch.float32, device=device) for _ in range(2))
    out = torch.empty(batch, rows, heads, head_dim, dtype=torch.float32, device=device)
    o = torch.empty_like(q)
    sizes = (branches, block, head_dim**-0.5)
    tile_rows, warps = (16, 8) if q.dtype == torch.float32 else (64, 4)
    tile = constants(
        HEADS=heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        LANES=padded(head_dim),
        ROWS=tile_rows,
        KEYS=padded(block),
        num_warps=warps,
        num_stages=STAGES,
    )
    k_strides, v_strides = ((x.stride(0), x.stride(1), x.stride(2)) for x in (k_prefix, v_prefix))
    _prefix[triton.cdiv(rows * group, tile_rows), kv_heads, batch](
        *(q, source, k_prefix, v_prefix, prefix, top, total, out, *sizes, *k_strides, *v_strides), **tile
    )
    _block[triton.cdiv(block * group, tile_rows), branches * kv_heads, batch](
        *(q, k, v, source, causal, context, top, total, out, o, *sizes), **constants(HAS_CONTEXT=context is not None), **tile
    )
    return o


def _require_prefix(k_prefix: torch.Tensor, v_prefix: torch.Tensor, q: torch.Tensor, kv_heads: int) -> None:
    for name, tensor in (("k_prefix", k_prefix), ("v_prefix", v_prefix)):
        fits = tensor.ndim == 4 and tensor.shape[0] == q.shape[0] and tensor.shape[2:] == (kv_heads, q.shape[-1])
        if not fits or tensor.shape != k_prefix.shape or tensor.dtype != q.dtype or tensor.device != q.device:
            wanted = f"{q.dtype} [{q.shape[0]}, capacity, {kv_heads}, {q.shape[-1]}] on {q.device}"
            raise ValueError(f"{name} must be {wanted}, not {tensor.dtype} {list(tensor.shape)} on {tensor.device}")
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous along head_dim, not of strides {tensor.stride()}")


@triton.jit
def _attend(query, key, value, visible, scale, top, total, out):
    """One segment of an online softmax. query [ROWS, LANES], key [LANES, KEYS], value [KEYS, LANES]; state fp32 [ROWS], [ROWS, LANES]."""
    score = dot(query, key, tl.zeros([query.shape[0], key.shape[1]], tl.float32)) * scale
    score = tl.where(visible, score, float("-inf"))
    highest = tl.maximum(top, tl.max(score, 1))
    shift = tl.where(highest == float("-inf"), 0.0, highest)  # nothing seen yet
    weight = tl.exp(score - shift[:, None])
    keep = tl.exp(top - shift)
    total = total * keep + tl.sum(weight, 1)
    out = dot(narrow(weight, value.dtype), value, out * keep[:, None])
    return highest, total, out


@triton.jit
def _prefix(
    q, source, k, v, prefix, top_out, total_out, out_out, branches, block, scale,
    k_batch, k_position, k_head, v_batch, v_position, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS (computed query, head of a group) pairs of one sequence, whatever their branches, over the whole prefix."""
    kv_head, batch = tl.program_id(1), tl.program_id(2)
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wanted = pair // GROUP  # the how-manieth computed row
    rows = branches * block
    row, count = tl.zeros([ROWS], tl.int32), 0
    for start in range(0, rows, 64):
        some = start + tl.arange(0, 64)
        own = tl.load(source + batch * rows + some, mask=some < rows, other=-1) == some // block
        number = count + tl.cumsum(own.to(tl.int32), 0) - 1
        row += tl.sum(tl.where(own[None] & (number[None] == wanted[:, None]), some[None], 0), 1)
        count += tl.sum(own.to(tl.int32), 0)
    if tl.program_id(0) * ROWS >= count * GROUP:
        return
    live = wanted < count
    at = (batch * rows + row).to(tl.int64) * HEADS + kv_head * GROUP + pair % GROUP
    lane = tl.arange(0, LANES)
    mask = live[:, None] & (lane < HEAD_DIM)[None]
    query = tl.load(q + at[:, None] * HEAD_DIM + lane[None], mask=mask, other=0.0)
    key_of = k + batch.to(tl.int64) * k_batch + kv_head * k_head
    value_of = v + batch.to(tl.int64) * v_batch + kv_head * v_head
    length = tl.load(prefix + batch)
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, LANES], tl.float32)
    for start in range(0, length, block):
        j = start + tl.arange(0, KEYS)
        seen = (j < start + block) & (j < length)
        key = tl.load(key_of + j[None] * k_position + lane[:, None], mask=seen[None] & (lane < HEAD_DIM)[:, None], other=0.0)
        value = tl.load(value_of + j[:, None] * v_position + lane[None], mask=seen[:, None] & (lane < HEAD_DIM)[None], other=0.0)
        top, total, out = _attend(query, key, value, seen[None], scale, top, total, out)
    tl.store(top_out + at, top, mask=live)
    tl.store(total_out + at, total, mask=live)
    tl.store(out_out + at[:, None] * HEAD_DIM + lane[None], out, mask=mask)


@triton.jit
def _block_keys(
    k, v, source, first, before, block, kv_head, kv_heads, HEAD_DIM: tl.constexpr, LANES: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """The keys [LANES, KEYS] and values [KEYS, LANES] of the branch whose first row is `first`, each from its source branch."""
    j, lane = tl.arange(0, KEYS), tl.arange(0, LANES)
    exists = j < block
    computed_by = tl.load(source + first + j, mask=exists, other=0)
    at = ((before + computed_by * block + j).to(tl.int64) * kv_heads + kv_head) * HEAD_DIM
    key = tl.load(k + at[None] + lane[:, None], mask=exists[None] & (lane < HEAD_DIM)[:, None], other=0.0)
    value = tl.load(v + at[:, None] + lane[None], mask=exists[:, None] & (lane < HEAD_DIM)[None], other=0.0)
    return key, value


@triton.jit
def _block(
    q, k, v, source, causal, context, top_in, total_in, out_in, o, branches, block, scale, HAS_CONTEXT: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS (position, head of a group) pairs of one branch. Goes on from the prefix's state of each position's source."""
    KV_HEADS: tl.constexpr = HEADS // GROUP
    branch, kv_head, batch = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS, tl.program_id(2)
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i, head = pair // GROUP, kv_head * GROUP + pair % GROUP
    live = i < block
    before = batch * branches * block  # rows of earlier sequences
    first = before + branch * block
    computed_by = tl.load(source + first + i, mask=live, other=0)
    at = (before + computed_by * block + i).to(tl.int64) * HEADS + head
    lane, j = tl.arange(0, LANES), tl.arange(0, KEYS)
    mask = live[:, None] & (lane < HEAD_DIM)[None]
    query = tl.load(q + at[:, None] * HEAD_DIM + lane[None], mask=mask, other=0.0)
    top = tl.load(top_in + at, mask=live, other=float("-inf"))
    total = tl.load(total_in + at, mask=live, other=0.0)
    out = tl.load(out_in + at[:, None] * HEAD_DIM + lane[None], mask=mask, other=0.0)
    seen = (j < block)[None]
    if HAS_CONTEXT:
        behind = tl.load(context + batch * branches + branch)
        if behind >= 0:
            key, value = _block_keys(k, v, source, before + behind * block, before, block, kv_head, KV_HEADS, HEAD_DIM, LANES, KEYS)
            top, total, out = _attend(query, key, value, seen, scale, top, total, out)
    seen = seen & ((tl.load(causal + batch) == 0) | (j[None] <= i[:, None]))
    key, value = _block_keys(k, v, source, first, before, block, kv_head, KV_HEADS, HEAD_DIM, LANES, KEYS)
    top, total, out = _attend(query, key, value, seen, scale, top, total, out)
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    o += ((first + i).to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + lane[None]
    tl.store(o, narrow(out, o.dtype.element_ty), mask=mask)
