"""Acceptance: makes vanilla's transitions from the branches of a check, as long as a branch equals the state that is reached."""

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
    """Vanilla's transitions from one check, row by row.

    Attributes:
        row: the state reached.
        branch [batch]: the branch that equals the state reached, if the chain is still running. Else the last branch followed.
        last [batch]: the branch whose evaluation made the last transition.
        moves [batch]: transitions made.
        reveals [batch]: how many of them are reveal steps.
        commit [batch]: the branch whose keys and values commit the block, or -1 if the block was not committed.
        finished [batch, block]: the canvas that was committed, if any.
        just_committed [batch]: whether the last transition was the commit.
        crossed [batch]: whether a transition was made from a continuation, after the commit.
        guarded [batch]: whether the guard ended the chain.
        running [batch]: whether the chain goes on. It ends if no branch equals the state reached, if that state is done, if a second
            commit would follow, or by the guard.

    The canvas 7 _ _ _ and the draft 7 8 _ _ were evaluated, and both branches reveal the leftmost mask of 7 8 9 10. Branch 0 leads to
    7 8 _ _, which is branch 1. Branch 1 leads to 7 8 9 _, which no branch equals, so the chain ends there:

    >>> from types import SimpleNamespace
    >>> from specfold_jax.models.sampling import Ranked
    >>> _ = 99  # MASK
    >>> zero = jnp.zeros(1, jnp.int32)
    >>> row = Row(zero, jnp.array([[7, _, _, _]]), zero, zero, zero > 0, zero, zero + 4, zero)
    >>> tokens = jnp.array([[[7, _, _, _], [7, 8, _, _]]])
    >>> branches = Branches(tokens, jnp.array([[True, True]]), jnp.array([[0, 0]]), zero, zero > 0)
    >>> ranked = Ranked(jnp.array([[[7], [8], [9], [10]]]), odds=jnp.array([[0.0, 3.0, 2.0, 1.0]]), gap=jnp.ones((1, 4)))
    >>> seen = SimpleNamespace(at=lambda branch, step: ranked, following=lambda branch: zero)
    >>> rules = dict(mask_id=_, block_size=4, sub_block=4, strict=True, stop_rule="reveal", commit="block", draws_first_token=False)
    >>> decode = DecodeConfig(threshold=1, stop_ids=())  # one token a step
    >>> chain = accept(row, branches, jnp.array([[False, False]]), seen, SimpleNamespace(**rules), decode, None)
    >>> chain.row.canvas.tolist(), chain.last.tolist(), chain.moves.tolist(), chain.commit.tolist()
    ([[7, 8, 9, 99]], [1], [2], [-1])
    """

    row: Row
    branch: Int[Array, " batch"]
    last: Int[Array, " batch"]
    moves: Int[Array, " batch"]
    reveals: Int[Array, " batch"]
    commit: Int[Array, " batch"]
    finished: Int[Array, "batch block"]
    just_committed: Bool[Array, " batch"]
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
    """Exact acceptance: makes vanilla's transition, looks for the branch that equals its result, and goes on with that branch.

    Each transition looks at up to four branches. `chain.branch` equals the present state, and its evaluation decides the transition. It
    becomes `chain.last`, and if the transition is the commit also `chain.commit`. `match` equals the state that is reached, and it is the
    next `chain.branch`.

    A check writes one block to the cache, so a chain ends before a second commit. The guard decides whether a folded branch is used.
    """
    others = branches.valid & (jnp.arange(branches.valid.shape[1]) > 0)

    def transition(chain: Chain) -> Chain:
        row, committing = chain.row, chain.row.phase == COMMIT
        ranked = seen.at(chain.branch, row.step)
        decision = reveal.decide(row.canvas, ranked, row.step, model, decode)
        refused = jnp.zeros_like(committing)
        if fold is not None:
            guard = jnp.asarray(fold.guard, jnp.float32)
            trusted = ~committing & (decision.margin >= guard) & (guard < jnp.inf)
            refused = of_branch(folded, chain.branch) & ~trusted
        moves = chain.running & ~refused & ~(committing & (chain.commit >= 0))
        commits = moves & committing
        denoised = revealed(row, decision.reveal, ranked.tokens[..., 0], model, decode)
        moved = where_row(committing, committed(row, seen.following(chain.branch), model, decode), denoised)
        after = where_row(moves, moved, row)

        equal = others & jnp.all(branches.tokens == after.canvas[:, None], axis=2) & (branches.starts() == after.start[:, None])
        if branches.context is not None:  # a continuation was evaluated behind one canvas, which must be the committed one
            equal &= (branches.context < 0) | (branches.context == chain.branch[:, None])
        accepted = moves & jnp.any(equal, axis=1) & (after.phase != DONE)
        if model.commit == "causal":  # a commit needs other attention than a draft was evaluated with
            accepted &= after.phase != COMMIT
        match = jnp.argmax(equal, axis=1).astype(jnp.int32)
        return Chain(
            row=after,
            branch=jnp.where(accepted, match, chain.branch),
            last=jnp.where(moves, chain.branch, chain.last),
            moves=chain.moves + moves.astype(jnp.int32),
            reveals=chain.reveals + (moves & ~committing).astype(jnp.int32),
            commit=jnp.where(commits, chain.branch, chain.commit),
            finished=jnp.where(commits[:, None], row.canvas, chain.finished),
            just_committed=jnp.where(moves, committing, chain.just_committed),
            crossed=chain.crossed | (moves & chain.just_committed),
            guarded=chain.guarded | (chain.running & refused),
            running=accepted,
        )

    zeros = jnp.zeros_like(row.start)
    never = jnp.zeros(zeros.shape, bool)
    start = Chain(row, zeros, zeros, zeros, zeros, zeros - 1, row.canvas, never, never, never, row.phase != DONE)
    if branches.valid.shape[1] == 1:  # without drafts no second transition can follow
        return transition(start)
    packed, unpack = ravel_rows(start)
    packed = lax.while_loop(lambda x: jnp.any(unpack(x).running), lambda x: ravel_rows(transition(unpack(x)))[0], packed)
    return unpack(packed)
