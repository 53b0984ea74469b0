"""Acceptance: vanilla transitions replayed on the branches of a check, for as long as a branch is the state they lead to."""

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int

from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.diffusion import reveal
from specfold_jax.diffusion.arrays import of_branch, ravel_rows, where_row
from specfold_jax.diffusion.distribution import Distributions
from specfold_jax.diffusion.row import COMMIT, DONE, Row, committed, revealed
from specfold_jax.models.check import Branches


class Chain(struct.PyTreeNode):
    """`row`: the state reached; `branch`: the branch that evaluated it (the last one followed, when the chain is over); `last`: the
    branch whose evaluation made the last transition; `moves`: transitions made, `reveals` of them reveal steps; `commit`: the branch
    whose keys and values commit the block, -1 if none; `finished`: the canvas left behind by that commit; `fresh`: the last transition
    was that commit; `crossed`: a next block's first check was used; `guarded`: the guard ended the chain."""

    row: Row
    branch: Int[Array, " batch"]
    last: Int[Array, " batch"]
    moves: Int[Array, " batch"]
    reveals: Int[Array, " batch"]
    commit: Int[Array, " batch"]
    finished: Int[Array, "batch block"]
    fresh: Bool[Array, " batch"]
    crossed: Bool[Array, " batch"]
    guarded: Bool[Array, " batch"]
    running: Bool[Array, " batch"]


def accept(
    row: Row,
    branches: Branches,
    folded: Bool[Array, "batch branch"],
    seen: Distributions,
    model: ModelConfig,
    decode: DecodeConfig,
    fold: FoldConfig | None,
) -> Chain:
    """Exact acceptance: make the vanilla transition, look for the branch that equals its result, go on with that branch's evaluation.

    A check writes one block to the cache, so a chain ends before a second commit. A folded branch is used only where the guard allows.
    """
    others = branches.valid & (jnp.arange(branches.valid.shape[1]) > 0)

    def body(chain: Chain) -> Chain:
        row, committing = chain.row, chain.row.phase == COMMIT
        ranked = seen.at(chain.branch, row.step)
        decision = reveal.decide(row.canvas, ranked, row.step, model, decode)
        unsafe = jnp.zeros_like(committing)
        if fold is not None:
            guard = jnp.asarray(fold.guard, jnp.float32)
            trusted = ~committing & (decision.margin >= guard) & (guard < jnp.inf)
            unsafe = of_branch(folded, chain.branch) & ~trusted
        go = chain.running & ~unsafe & ~(committing & (chain.commit >= 0))
        denoised = revealed(row, decision.reveal, ranked.tokens[..., 0], model, decode)
        moved = where_row(committing, committed(row, seen.following(chain.branch), model, decode), denoised)
        after = where_row(go, moved, row)

        equal = others & jnp.all(branches.tokens == after.canvas[:, None], axis=2) & (branches.starts() == after.start[:, None])
        if branches.context is not None:  # a continuation is evaluated behind one canvas only: the one that was committed
            equal &= (branches.context < 0) | (branches.context == chain.branch[:, None])
        found = go & jnp.any(equal, axis=1) & (after.phase != DONE)
        if model.commit == "causal":  # its branches are denoised with other attention than a commit needs
            found &= after.phase != COMMIT
        match = jnp.argmax(equal, axis=1).astype(jnp.int32)
        commits = go & committing
        return Chain(
            row=after,
            branch=jnp.where(found, match, chain.branch),
            last=jnp.where(go, chain.branch, chain.last),
            moves=chain.moves + go.astype(jnp.int32),
            reveals=chain.reveals + (go & ~committing).astype(jnp.int32),
            commit=jnp.where(commits, chain.branch, chain.commit),
            finished=jnp.where(commits[:, None], row.canvas, chain.finished),
            fresh=jnp.where(go, committing, chain.fresh),
            crossed=chain.crossed | (go & chain.fresh),
            guarded=chain.guarded | (chain.running & unsafe),
            running=found,
        )

    zeros = jnp.zeros_like(row.start)
    never = jnp.zeros(zeros.shape, bool)
    start = Chain(row, zeros, zeros, zeros, zeros, zeros - 1, row.canvas, never, never, never, row.phase != DONE)
    if branches.valid.shape[1] == 1:  # nothing to go on with
        return body(start)
    numbers, back = ravel_rows(start)
    return back(lax.while_loop(lambda numbers: jnp.any(back(numbers).running), lambda numbers: ravel_rows(body(back(numbers)))[0], numbers))
