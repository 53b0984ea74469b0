"""Acceptance: makes vanilla's transitions from the branches of a check, as long as a branch equals the state that is reached."""

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
    """Vanilla's transitions from one check, row by row.

    `specfold_jax.diffusion.accept.Chain` explains the fields, with an example.
    """

    row: Row
    branch: Int[Tensor, " batch"]
    last: Int[Tensor, " batch"]
    moves: Int[Tensor, " batch"]
    reveals: Int[Tensor, " batch"]
    commit: Int[Tensor, " batch"]
    finished: Int[Tensor, "batch block"]
    just_committed: Bool[Tensor, " batch"]
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
    """Exact acceptance: makes vanilla's transition, looks for the branch that equals its result, and goes on with that branch.

    Each transition looks at up to four branches. `chain.branch` equals the present state, and its evaluation decides the transition. It
    becomes `chain.last`, and if the transition is the commit also `chain.commit`. `match` equals the state that is reached, and it is the
    next `chain.branch`.

    A check writes one block to the cache, so a chain ends before a second commit. The guard decides whether a folded branch is used.
    """
    others = branches.valid & (torch.arange(branches.valid.shape[1]) > 0)
    zeros, never = torch.zeros_like(row.start), torch.zeros_like(row.stopped)
    chain = Chain(row, zeros, zeros, zeros, zeros, zeros - 1, row.canvas, never, never, never, row.phase != DONE)
    while torch.any(chain.running):
        row, committing = chain.row, chain.row.phase == COMMIT
        ranked = seen.at(chain.branch, row.step)
        decision = reveal.decide(row.canvas, ranked, row.step, model, decode)
        refused = never
        if fold is not None:
            guard = float(np.asarray(fold.guard))
            trusted = ~committing & (decision.margin >= guard) & (guard < np.inf)
            refused = of_branch(folded, chain.branch) & ~trusted
        moves = chain.running & ~refused & ~(committing & (chain.commit >= 0))
        commits = moves & committing
        denoised = revealed(row, decision.reveal, ranked.tokens[..., 0], model, decode)
        moved = where_row(committing, committed(row, seen.following(chain.branch), model, decode), denoised)
        after = where_row(moves, moved, row)

        equal = others & torch.all(branches.tokens == after.canvas[:, None], dim=2) & (branches.starts() == after.start[:, None])
        if branches.context is not None:  # a continuation was evaluated behind one canvas, which must be the committed one
            equal &= (branches.context < 0) | (branches.context == chain.branch[:, None])
        accepted = moves & torch.any(equal, dim=1) & (after.phase != DONE)
        if model.commit == "causal":  # a commit needs other attention than a draft was evaluated with
            accepted &= after.phase != COMMIT
        match = torch.argmax(equal.int(), dim=1)
        chain = Chain(
            row=after,
            branch=torch.where(accepted, match, chain.branch),
            last=torch.where(moves, chain.branch, chain.last),
            moves=chain.moves + moves.long(),
            reveals=chain.reveals + (moves & ~committing).long(),
            commit=torch.where(commits, chain.branch, chain.commit),
            finished=torch.where(commits[:, None], row.canvas, chain.finished),
            just_committed=torch.where(moves, committing, chain.just_committed),
            crossed=chain.crossed | (moves & chain.just_committed),
            guarded=chain.guarded | (chain.running & refused),
            running=accepted,
        )
    return chain
