"""RMSNorm, fused gate and up projections and their SiLU-gated product, over packed rows."""

import torch
import triton
import triton.language as tl

from kernels_triton.arguments import require, require_main, require_packed
from kernels_triton.numerics import dot, inverse_rms, load_normed, load_weight, narrow
from kernels_triton.tiles import constants, product_tile


def packed_silu_pair(
    x: torch.Tensor, packed: tuple[torch.Tensor, torch.Tensor], norm: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """silu(g) * u of RMSNorm(x) @ weight.T for packed rows, [batch, branch, block, hidden]; other rows are unspecified.

    `x` [batch, branch, block, dim], `packed` as `pack` returns it, `norm` [dim], `weight` [2 * hidden, dim] with the gate's rows first.
    """
    require_main("x", x, "batch branch block dim")
    require_main("weight", weight, "two_hidden dim")
    if weight.shape[0] % 2:
        raise ValueError(f"weight must have an even number of rows, the gate's and as many behind them, not {weight.shape[0]}")
    dim, hidden, rows = x.shape[-1], weight.shape[0] // 2, x.numel() // x.shape[-1]
    require("norm", norm, (dim,), x.dtype, x.device)
    require("weight", weight, (2 * hidden, dim), x.dtype, x.device)
    require_packed(packed, rows, x.device)
    h = torch.empty(*x.shape[:-1], hidden, dtype=x.dtype, device=x.device)
    tile = product_tile(hidden, x.dtype)
    width = max(tile.columns // 2, 32)  # two accumulators
    _silu_pair[triton.cdiv(rows, tile.rows), triton.cdiv(hidden, width)](
        *(x, *packed, norm, weight, h, dim, hidden, eps),
        **constants(
            ROWS=tile.rows,
            COLUMNS=width,
            DEPTH=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
        ),
    )
    return h


@triton.jit
def _silu_pair(
    x, index, count, norm, weight, h, dim, hidden, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """One program: ROWS packed rows by COLUMNS of both halves. Programs past `count` return at once."""
    first, total = tl.program_id(0) * ROWS, tl.load(count)
    if first >= total:
        return
    packed = first + tl.arange(0, ROWS)
    live = packed < total
    row = tl.load(index + packed, mask=live, other=0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < hidden
    scale = inverse_rms(x, row, live, dim, eps, ROWS, DEPTH)
    gate, up = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, dim, DEPTH):
        k = start + tl.arange(0, DEPTH)
        a = load_normed(x, row, live, k, dim, scale, norm)
        gate = dot(a, load_weight(weight, column, exists, k, dim), gate)
        up = dot(a, load_weight(weight, hidden + column, exists, k, dim), up)
    out = gate / (1 + tl.exp(-gate)) * up
    tl.store(h + row[:, None] * hidden + column[None], narrow(out, h.dtype.element_ty), mask=live[:, None] & exists[None])
