"""Acceptance: vanilla transitions replayed on the branches of a check, for as long as a branch is the state they lead to."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_torch_ref.diffusion import reveal
from specfold_torch_ref.diffusion.arrays import of_branch, where_row
from specfold_torch_ref.diffusion.distribution import Distributions
from specfold_torch_ref.diffusion.row import COMMIT, DONE, Row, committed, revealed
from specfold_torch_ref.models.check import Branches


class Chain(NamedTuple):
    """`row`: the state reached; `branch`: the branch that evaluated it (the last one followed, when the chain is over); `last`: the
    branch whose evaluation made the last transition; `moves`: transitions made, `reveals` of them reveal steps; `commit`: the branch
    whose keys and values commit the block, -1 if none; `finished`: the canvas left behind by that commit; `fresh`: the last transition
    was that commit; `crossed`: a next block's first check was used; `guarded`: the guard ended the chain."""

    row: Row
    branch: Int[Tensor, " batch"]
    last: Int[Tensor, " batch"]
    moves: Int[Tensor, " batch"]
    reveals: Int[Tensor, " batch"]
    commit: Int[Tensor, " batch"]
    finished: Int[Tensor, "batch block"]
    fresh: Bool[Tensor, " batch"]
    crossed: Bool[Tensor, " batch"]
    guarded: Bool[Tensor, " batch"]
    running: Bool[Tensor, " batch"]


def accept(
    row: Row,
    branches: Branches,
    folded: Bool[Tensor, "batch branch"],
    seen: Distributions,
    model: ModelConfig,
    decode: DecodeConfig,
    fold: FoldConfig | None,
) -> Chain:
    """Exact acceptance: make the vanilla transition, look for the branch that equals its result, go on with that branch's evaluation.

    A check writes one block to the cache, so a chain ends before a second commit. A folded branch is used only where the guard allows.
    """
    others = branches.valid & (torch.arange(branches.valid.shape[1]) > 0)
    zeros, never = torch.zeros_like(row.start), torch.zeros_like(row.stopped)
    chain = Chain(row, zeros, zeros, zeros, zeros, zeros - 1, row.canvas, never, never, never, row.phase != DONE)
    while torch.any(chain.running):
        row, committing = chain.row, chain.row.phase == COMMIT
        ranked = seen.at(chain.branch, row.step)
        decision = reveal.decide(row.canvas, ranked, row.step, model, decode)
        unsafe = never
        if fold is not None:
            guard = float(np.asarray(fold.guard))
            trusted = ~committing & (decision.margin >= guard) & (guard < np.inf)
            unsafe = of_branch(folded, chain.branch) & ~trusted
        go = chain.running & ~unsafe & ~(committing & (chain.commit >= 0))
        denoised = revealed(row, decision.reveal, ranked.tokens[..., 0], model, decode)
        moved = where_row(committing, committed(row, seen.following(chain.branch), model, decode), denoised)
        after = where_row(go, moved, row)

        equal = others & torch.all(branches.tokens == after.canvas[:, None], dim=2) & (branches.starts() == after.start[:, None])
        if branches.context is not None:  # a continuation is evaluated behind one canvas only: the one that was committed
            equal &= (branches.context < 0) | (branches.context == chain.branch[:, None])
        found = go & torch.any(equal, dim=1) & (after.phase != DONE)
        if model.commit == "causal":  # its branches are denoised with other attention than a commit needs
            found &= after.phase != COMMIT
        match = torch.argmax(equal.int(), dim=1)
        commits = go & committing
        chain = Chain(
            row=after,
            branch=torch.where(found, match, chain.branch),
            last=torch.where(go, chain.branch, chain.last),
            moves=chain.moves + go.long(),
            reveals=chain.reveals + (go & ~committing).long(),
            commit=torch.where(commits, chain.branch, chain.commit),
            finished=torch.where(commits[:, None], row.canvas, chain.finished),
            fresh=torch.where(go, committing, chain.fresh),
            crossed=chain.crossed | (go & chain.fresh),
            guarded=chain.guarded | (chain.running & unsafe),
            running=found,
        )
    return chain
