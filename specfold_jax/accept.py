"""Acceptance: following the vanilla rule through the branches of a check, for as long as a branch equals the state reached."""

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int

from specfold_jax import reveal
from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.distribution import Distributions
from specfold_jax.model import Branches
from specfold_jax.state import DENOISE, DecodeState, ends, pick, stopped_by


@struct.dataclass
class Chain:
    """Following the vanilla rule through the branches of one check.

    `state`: the canvas reached; `branch`: the branch that equals it (or that led to it when the chain is over); `trusted`: the branch
    whose distribution made the last reveal; `commit`: branch whose keys and values finish the block, -1 if none.
    """

    state: Int[Array, "batch block"]
    branch: Int[Array, " batch"]
    trusted: Int[Array, " batch"]
    commit: Int[Array, " batch"]
    steps: Int[Array, " batch"]
    guarded: Bool[Array, " batch"]
    running: Bool[Array, " batch"]


def accept(
    state: DecodeState,
    branches: Branches,
    folded: Bool[Array, "batch branch"],
    seen: Distributions,
    model: ModelConfig,
    decode: DecodeConfig,
    fold: FoldConfig | None,
) -> Chain:
    """Exact acceptance: reveal, look for the branch that equals the result, go on with that branch's distribution."""
    drafts = branches.valid & (jnp.arange(branches.valid.shape[1]) > 0)

    def body(chain: Chain) -> Chain:
        step = state.step + chain.steps
        ranked = seen.at(chain.branch, step)
        decision = reveal.decide(chain.state, ranked, step, model, decode)
        unsafe = jnp.zeros_like(chain.running)
        if fold is not None:
            guard = jnp.asarray(fold.guard, jnp.float32)
            unsafe = pick(folded, chain.branch) & ~((decision.margin >= guard) & (guard < jnp.inf))
        go = chain.running & ~unsafe
        after = jnp.where(go[:, None] & decision.reveal, ranked.tokens[..., 0], chain.state)
        full = jnp.all(after != model.mask_id, axis=1)
        over = jnp.zeros_like(full)
        if model.stop_rule == "reveal":
            over = ends(state, after, model, decode)
        elif model.stop_rule == "reveal_commit":
            over = stopped_by(state, after, model, decode)
        equal = drafts & jnp.all(branches.tokens == after[:, None], axis=2)
        match = jnp.argmax(equal, axis=1).astype(jnp.int32)
        found = go & ~over & jnp.any(equal, axis=1)
        commits = found & full & (model.commit == "block")
        if fold is not None and not fold.fold_commit:
            commits = commits & ~pick(folded, match)
        advance = found & ~full
        return Chain(
            state=after,
            branch=jnp.where(advance, match, chain.branch),
            trusted=jnp.where(go, chain.branch, chain.trusted),
            commit=jnp.where(commits, match, chain.commit),
            steps=chain.steps + go.astype(jnp.int32),
            guarded=chain.guarded | (chain.running & unsafe),
            running=advance,
        )

    zeros = jnp.zeros_like(state.start)
    never = jnp.zeros(zeros.shape, bool)
    start = Chain(state.canvas, zeros, zeros, zeros - 1, zeros, never, state.phase == DENOISE)
    return lax.while_loop(lambda chain: jnp.any(chain.running), body, start)
