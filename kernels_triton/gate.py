"""The gate: which rows to compute, and which branch the others take their values from, in one pass over the hidden states."""

# Triton compiles kernels from their text: to a type checker, tl.static_range is no iterable and tl.sum may give a tuple.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from typing import Literal

import torch
import triton
import triton.language as tl

from kernels_triton.arguments import require, require_main
from kernels_triton.tiles import constants, padded

BRANCH_TILE, DEPTH = 8, 512


def gate(
    x: torch.Tensor,
    parent: torch.Tensor,
    revealed: torch.Tensor,
    valid: torch.Tensor,
    tau: float,
    *,
    reference: Literal["parent", "source"],
    force_revealed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`computed` bool and `source` int32, both [batch, branch, block].

    A position is computed in a valid branch if not ||x - ref||^2 <= tau^2 ||ref||^2 (fp32), if the branch is its own parent, or, with
    `force_revealed`, if `revealed`. `x` [batch, branch, block, dim]; `parent` int32 [batch, branch], parents before children;
    `revealed` bool [batch, branch, block]; `valid` bool [batch, branch].
    """
    require_main("x", x, "batch branch block dim")
    batch, branches, block, dim = x.shape
    require("parent", parent, (batch, branches), torch.int32, x.device)
    require("revealed", revealed, (batch, branches, block), torch.bool, x.device)
    require("valid", valid, (batch, branches), torch.bool, x.device)
    if reference not in ("parent", "source"):
        raise ValueError(f"{reference=} must be 'parent' or 'source'")
    if not tau >= 0:
        raise ValueError(f"{tau=} must be at least 0")
    computed = torch.empty_like(revealed)
    source = torch.empty(revealed.shape, dtype=torch.int32, device=x.device)
    _gate[block, batch](
        *(x, parent, revealed, valid, computed, source, float(tau), branches, block, dim),
        **constants(
            FORCE=force_revealed,
            BY_SOURCE=reference == "source",
            BRANCHES=padded(branches, 1),
            ROUNDS=max(branches - 1, 1).bit_length(),
            TILE=BRANCH_TILE,
            DEPTH=DEPTH,
            num_warps=4,
        ),
    )
    return computed, source


@triton.jit
def _exceeds(x, here, there, exists, dim, tau, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """not ||x[here] - x[there]||^2 <= tau^2 ||x[there]||^2, so that NaN exceeds; offsets and result [TILE]."""
    delta, size = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for start in range(0, dim, DEPTH):
        k = start + tl.arange(0, DEPTH)
        mask = exists[:, None] & (k < dim)[None]
        mine = tl.load(x + here[:, None] + k[None], mask=mask, other=0.0).to(tl.float32)
        other = tl.load(x + there[:, None] + k[None], mask=mask, other=0.0).to(tl.float32)
        delta += tl.sum((mine - other) * (mine - other), 1)
        size += tl.sum(other * other, 1)
    return ~(delta <= tau * tau * size)


@triton.jit
def _gate(
    x, parent, revealed, valid, computed, source, tau, branches, block, dim,
    FORCE: tl.constexpr, BY_SOURCE: tl.constexpr, BRANCHES: tl.constexpr, ROUNDS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One program: all branches of one position of one sequence."""
    position, batch = tl.program_id(0), tl.program_id(1)
    branch = tl.arange(0, BRANCHES)
    exists = branch < branches
    at = (batch * branches + branch) * block + position
    parent += batch * branches
    above = tl.load(parent + branch, mask=exists, other=0)
    may = tl.load(valid + batch * branches + branch, mask=exists, other=0) != 0
    forced = above == branch
    if FORCE:
        forced = forced | (tl.load(revealed + at, mask=exists, other=0) != 0)
    x += (batch * branches * block + position).to(tl.int64) * dim
    stride = block * dim  # between branches
    if BY_SOURCE:  # a branch's reference depends on what was decided before it
        own = tl.zeros([BRANCHES], tl.int1)
        origin = tl.zeros([BRANCHES], tl.int32)
        for n in range(0, branches):
            inherited = tl.sum(tl.where(branch == tl.load(parent + n), origin, 0), 0)
            one = n + tl.arange(0, 1)
            far = tl.sum(_exceeds(x, one * stride, (one * 0 + inherited) * stride, one < branches, dim, tau, 1, DEPTH).to(tl.int32), 0)
            mine = (branch == n) & may & (forced | (far > 0))
            own = own | mine
            origin = tl.where(mine, n, tl.where(branch == n, inherited, origin))
    else:
        far = tl.zeros([BRANCHES], tl.int32)
        for first in range(0, branches, TILE):
            some = first + tl.arange(0, TILE)
            theirs = tl.load(parent + some, mask=some < branches, other=0)
            exceeds = _exceeds(x, some * stride, theirs * stride, some < branches, dim, tau, TILE, DEPTH)
            far += tl.sum(tl.where(branch[:, None] == some[None], exceeds.to(tl.int32)[None], 0), 1)
        own = ((far > 0) | forced) & may
        origin = tl.where(own, branch, above)
        for _ in tl.static_range(ROUNDS):  # pointer jumping: each round doubles how far up the chain an entry points
            origin = tl.sum(tl.where(origin[:, None] == branch[None], origin[None], 0), 1)
    tl.store(computed + at, own, mask=exists)
    tl.store(source + at, origin, mask=exists)
