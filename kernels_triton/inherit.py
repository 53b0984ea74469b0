"""The residual stream takes the update of the branch that computed it."""

import torch
import triton
import triton.language as tl

from kernels_triton.arguments import require, require_main
from kernels_triton.numerics import narrow
from kernels_triton.tiles import constants

DEPTH = 1024


def add_inherited(x: torch.Tensor, update: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """x[b, n, i] + update[b, source[b, n, i], i]; `x`, `update` [batch, branch, block, dim], `source` int32 [batch, branch, block]."""
    require_main("x", x, "batch branch block dim")
    require("update", update, tuple(x.shape), x.dtype, x.device)
    require("source", source, tuple(x.shape[:3]), torch.int32, x.device)
    batch, branches, block, dim = x.shape
    out = torch.empty_like(x)
    _add_inherited[batch * branches * block, triton.cdiv(dim, DEPTH)](
        x, update, source, out, branches, block, dim, **constants(DEPTH=DEPTH, num_warps=4)
    )
    return out


@triton.jit
def _add_inherited(x, update, source, out, branches, block, dim, DEPTH: tl.constexpr):
    """One program: a stretch of one row."""
    row = tl.program_id(0)
    k = tl.program_id(1) * DEPTH + tl.arange(0, DEPTH)
    batch, position = row // (branches * block), row % block
    other = (batch * branches + tl.load(source + row)) * block + position
    mine = tl.load(x + row.to(tl.int64) * dim + k, mask=k < dim).to(tl.float32)
    theirs = tl.load(update + other.to(tl.int64) * dim + k, mask=k < dim).to(tl.float32)
    tl.store(out + row.to(tl.int64) * dim + k, narrow(mine + theirs, x.dtype.element_ty), mask=k < dim)
