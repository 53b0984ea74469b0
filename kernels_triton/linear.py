"""A linear layer over packed rows, with the residual added and the rows scattered back behind it."""

import torch
import triton
import triton.language as tl

from kernels_triton.arguments import require, require_main, require_packed
from kernels_triton.numerics import dot, load_weight, narrow
from kernels_triton.tiles import constants, product_tile


def packed_linear(
    x: torch.Tensor, packed: tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor, residual: torch.Tensor | None
) -> torch.Tensor:
    """y[r] = (residual[r] +) x[r] @ weight.T for packed rows, [batch, branch, block, out]; other rows are unspecified.

    `x` [batch, branch, block, in], `packed` as `pack` returns it, `weight` [out, in], `residual` like the result.
    """
    require_main("x", x, "batch branch block in")
    require_main("weight", weight, "out in")
    columns, dim = weight.shape
    rows = x.numel() // x.shape[-1]
    require("weight", weight, (columns, x.shape[-1]), x.dtype, x.device)
    require_packed(packed, rows, x.device)
    y = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
    if residual is not None:
        require("residual", residual, tuple(y.shape), x.dtype, x.device)
    tile = product_tile(columns, x.dtype)
    _linear[triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns)](
        *(x, *packed, weight, residual, y, dim, columns),
        **constants(
            HAS_RESIDUAL=residual is not None,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
        ),
    )
    return y


@triton.jit
def _linear(
    x, index, count, weight, residual, y, dim, columns,
    HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One program: ROWS packed rows by COLUMNS. The grid covers the capacity; programs past `count` return at once."""
    first, total = tl.program_id(0) * ROWS, tl.load(count)
    if first >= total:
        return
    packed = first + tl.arange(0, ROWS)
    live = packed < total
    row = tl.load(index + packed, mask=live, other=0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    out = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, dim, DEPTH):
        k = start + tl.arange(0, DEPTH)
        a = tl.load(x + row[:, None] * dim + k[None], mask=live[:, None] & (k < dim)[None], other=0.0)  # [ROWS, DEPTH]
        out = dot(a, load_weight(weight, column, column < columns, k, dim), out)
    at = row[:, None] * columns + column[None]
    mask = live[:, None] & (column < columns)[None]
    if HAS_RESIDUAL:
        out += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, narrow(out, y.dtype.element_ty), mask=mask)
