"""RMSNorm, fused projection, bias, q/k norm, rotary embedding and query scale over packed rows: one head per program."""

import torch
import triton
import triton.language as tl

from kernels_triton.arguments import require, require_head_dim, require_main, require_packed
from kernels_triton.numerics import dot, inverse_rms, load_normed, load_weight, narrow
from kernels_triton.tiles import constants, padded, product_tile


def packed_qkv(
    x: torch.Tensor,
    packed: tuple[torch.Tensor, torch.Tensor],
    norm: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    eps: float,
    rope_scale: float,
    query_scale_beta: float,
    query_scale_length: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [batch, branch, block, heads, head_dim] and k, v [batch, branch, block, kv_heads, head_dim]; rows not packed are unspecified.

    `x` [batch, branch, block, dim], `packed` as `pack` returns it, `norm` [dim], `weight` [(heads + 2 kv_heads) head_dim, dim], `bias`
    like its rows, `q_norm`, `k_norm` [head_dim], `positions` int32 [batch, branch, block], `inv_freq` fp32 [head_dim / 2]. Queries are
    multiplied by 1 + query_scale_beta ln(1 + position // query_scale_length).
    """
    require_main("x", x, "batch branch block dim")
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads=} must be a multiple of {kv_heads=}, both at least 1")
    if query_scale_length < 1:
        raise ValueError(f"{query_scale_length=} must be at least 1")
    dim, head_dim, rows = x.shape[-1], 2 * inv_freq.numel(), x.numel() // x.shape[-1]
    require_head_dim(head_dim)
    columns = (heads + 2 * kv_heads) * head_dim
    require("norm", norm, (dim,), x.dtype, x.device)
    require("weight", weight, (columns, dim), x.dtype, x.device)
    require("positions", positions, tuple(x.shape[:-1]), torch.int32, x.device)
    require("inv_freq", inv_freq, (head_dim // 2,), torch.float32, x.device)
    require_packed(packed, rows, x.device)
    if bias is not None:
        require("bias", bias, (columns,), x.dtype, x.device)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm must both be given or both be None")
    if q_norm is not None and k_norm is not None:
        require("q_norm", q_norm, (head_dim,), x.dtype, x.device)
        require("k_norm", k_norm, (head_dim,), x.dtype, x.device)
    q, k, v = (torch.empty(*x.shape[:-1], n, head_dim, dtype=x.dtype, device=x.device) for n in (heads, kv_heads, kv_heads))
    tile = product_tile(columns, x.dtype)
    _qkv[triton.cdiv(rows, tile.rows), heads + 2 * kv_heads](
        *(x, *packed, norm, weight, bias, q_norm, k_norm, positions, inv_freq, q, k, v, dim, eps),
        *(float(rope_scale), float(query_scale_beta), query_scale_length),
        **constants(
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=head_dim // 2,
            HAS_BIAS=bias is not None,
            HAS_QK_NORM=q_norm is not None,
            HAS_QUERY_SCALE=query_scale_beta != 0,
            HALF_TILE=padded(head_dim // 2),
            ROWS=tile.rows,
            DEPTH=min(tile.depth, 64),  # two accumulators
            num_warps=tile.warps,
            num_stages=3,
        ),
    )
    return q, k, v


@triton.jit
def _qkv(
    x, index, count, norm, weight, bias, q_norm, k_norm, positions, inv_freq, q, k, v, dim, eps, rope_scale, beta, length,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_QK_NORM: tl.constexpr,
    HAS_QUERY_SCALE: tl.constexpr, HALF_TILE: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One program: ROWS packed rows of one head, its halves apart (the rotation pairs them). Programs past `count` return at once."""
    begin, total = tl.program_id(0) * ROWS, tl.load(count)
    if begin >= total:
        return
    packed = begin + tl.arange(0, ROWS)
    live = packed < total
    row = tl.load(index + packed, mask=live, other=0).to(tl.int64)
    head = tl.program_id(1)
    lane = tl.arange(0, HALF_TILE)
    exists = lane < HALF
    column = head * 2 * HALF + lane
    scale = inverse_rms(x, row, live, dim, eps, ROWS, DEPTH)
    first, second = tl.zeros([ROWS, HALF_TILE], tl.float32), tl.zeros([ROWS, HALF_TILE], tl.float32)
    for start in range(0, dim, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        a = load_normed(x, row, live, depth, dim, scale, norm)
        first = dot(a, load_weight(weight, column, exists, depth, dim), first)
        second = dot(a, load_weight(weight, column + HALF, exists, depth, dim), second)
    if HAS_BIAS:
        first += tl.load(bias + column, mask=exists, other=0.0).to(tl.float32)[None]
        second += tl.load(bias + column + HALF, mask=exists, other=0.0).to(tl.float32)[None]
    if head < HEADS + KV_HEADS:
        if HAS_QK_NORM:
            gain = q_norm if head < HEADS else k_norm
            inverse = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
            first *= inverse * tl.load(gain + lane, mask=exists, other=0.0).to(tl.float32)[None]
            second *= inverse * tl.load(gain + lane + HALF, mask=exists, other=0.0).to(tl.float32)[None]
        position = tl.load(positions + row, mask=live, other=0)
        angle = position.to(tl.float32)[:, None] * tl.load(inv_freq + lane, mask=exists, other=0.0)[None]
        cos, sin = tl.cos(angle) * rope_scale, tl.sin(angle) * rope_scale
        first, second = first * cos - second * sin, second * cos + first * sin
        if HAS_QUERY_SCALE:
            stretch = 1 + beta * tl.log(1 + (position // length).to(tl.float32))
            stretch = tl.where(head < HEADS, stretch, 1.0)[:, None]
            first, second = first * stretch, second * stretch
    if head < HEADS:
        out, at = q, row * HEADS + head
    elif head < HEADS + KV_HEADS:
        out, at = k, row * KV_HEADS + head - HEADS
    else:
        out, at = v, row * KV_HEADS + head - HEADS - KV_HEADS
    out += at[:, None] * 2 * HALF + lane[None]
    mask = live[:, None] & exists[None]
    tl.store(out, narrow(first, q.dtype.element_ty), mask=mask)
    tl.store(out + HALF, narrow(second, q.dtype.element_ty), mask=mask)
