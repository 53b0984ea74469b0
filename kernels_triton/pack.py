"""The row list: flat numbers of the computed rows, in ascending order, with their count left on the device."""

# Triton compiles kernels from their text: to a type checker, tl.sum may give a tuple.
# pyright: reportOperatorIssue=false

import torch
import triton
import triton.language as tl

from kernels_triton.arguments import require, require_device
from kernels_triton.tiles import constants

TILE = 1024


def pack(computed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`index` int32 [rows], the computed rows first and the number of rows as filler; `count` int32 []. `computed`: bool, any shape."""
    require_device(computed.device)
    require("computed", computed, tuple(computed.shape), torch.bool, computed.device)
    rows = computed.numel()
    if not rows:
        raise ValueError(f"computed must have at least one row, not shape {list(computed.shape)}")
    index = torch.empty(rows, dtype=torch.int32, device=computed.device)
    count = torch.empty((), dtype=torch.int32, device=computed.device)
    _pack[(triton.cdiv(rows, TILE),)](computed, index, count, rows, **constants(TILE=TILE, num_warps=4))
    return index, count


@triton.jit
def _pack(computed, index, count, rows, TILE: tl.constexpr):
    """One program: one tile's flags. Each counts all flags itself (a byte a row), so none waits for another."""
    tile = tl.program_id(0)
    row = tile * TILE + tl.arange(0, TILE)
    flag = tl.load(computed + row, mask=row < rows, other=0).to(tl.int32)
    before, total = 0, 0
    for start in range(0, rows, TILE):
        at = start + tl.arange(0, TILE)
        found = tl.sum(tl.load(computed + at, mask=at < rows, other=0).to(tl.int32), 0)
        before += tl.where(start < tile * TILE, found, 0)
        total += found
    tl.store(index + before + tl.cumsum(flag, 0) - 1, row, mask=flag != 0)
    tl.store(index + row, rows, mask=(row >= total) & (row < rows))
    tl.store(count, total, mask=tile == 0)
