"""The decode loop: vanilla, Spiffy and SpecFold are one loop, which differs by its draft graph and its fold.

One iteration evaluates, for every row of the batch, the canvas and its drafts in a single forward pass, follows the vanilla reveal
rule through the branches as long as a branch equals the state it leads to, and commits finished blocks. Rows are independent: each has
its own block, phase, length and stop. The whole loop is one `lax.while_loop` on the device.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from specfold_jax.accept import accept
from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.distribution import Distributions
from specfold_jax.draft import nothing_known, propose
from specfold_jax.graph import DraftGraph
from specfold_jax.model import Branches, Params, check
from specfold_jax.state import (
    COMMIT,
    DENOISE,
    DONE,
    Decoded,
    DecodeState,
    begin,
    ends,
    finish,
    pick,
    stopped_by,
    unfinished,
    where_row,
    write,
)
from specfold_jax.validate import row_status, validate


def decode_step(
    state: DecodeState, params: Params, model: ModelConfig, decode: DecodeConfig, graph: DraftGraph, fold: FoldConfig | None = None
) -> DecodeState:
    """One iteration: one forward pass for all rows, with whatever it allows each of them to reveal, accept and commit."""
    block = state.canvas.shape[1]
    denoising, active = state.phase == DENOISE, state.phase != DONE
    drafts = propose(state.canvas, state.known, graph, model.mask_id, decode.window(model))
    drafted = drafts.valid & denoising[:, None]
    branches = Branches(
        tokens=jnp.concatenate([state.canvas[:, None], drafts.tokens], axis=1),
        valid=jnp.concatenate([active[:, None], drafted], axis=1),
        parent=jnp.concatenate([jnp.zeros_like(state.start)[:, None], drafts.parent], axis=1),
        start=state.start,
        causal=(state.phase == COMMIT) & (model.commit == "causal"),
    )
    checked = check(params, branches, state.cache, state.start, model, fold, decode.pack)
    seen = Distributions(params, branches, checked, state, model, decode, graph.token_ranks)
    chain = accept(state, branches, checked.folded, seen, model, decode, fold)

    commit = jnp.where(state.phase == COMMIT, 0, chain.commit)
    kept = jnp.maximum(commit, 0)
    # Entries from `start` on do not count until the block is committed, so writing them early needs no condition.
    cache = jax.tree.map(lambda old, new: write(old, pick(new, kept), state.start), state.cache, checked.kv)
    source = chain.branch if fold is not None and fold.draft_from == "own" else chain.trusted
    step = state.step + chain.steps
    count = jnp.sum(drafted, axis=1, dtype=jnp.int32)
    stats = state.stats
    stats = stats.replace(
        nfe=stats.nfe + active.astype(jnp.int32),
        checks=stats.checks + denoising.astype(jnp.int32),
        commits=stats.commits + (state.phase == COMMIT).astype(jnp.int32),
        steps=stats.steps + chain.steps,
        drafting=stats.drafting + (count > 0).astype(jnp.int32),
        drafted=stats.drafted + count,
        accepted=stats.accepted + jnp.maximum(chain.steps - 1, 0) + (chain.commit > 0).astype(jnp.int32),
        saved_commits=stats.saved_commits + (chain.commit > 0).astype(jnp.int32),
        guard_stops=stats.guard_stops + chain.guarded.astype(jnp.int32),
        computed_rows=stats.computed_rows + checked.computed_rows,
        total_rows=stats.total_rows + count * block,
    )
    state = state.replace(
        cache=cache,
        tokens=write(state.tokens, chain.state, state.start),
        canvas=chain.state,
        step=step,
        known=seen.known(source, step, graph.width) if graph.width else state.known,
        stats=stats,
    )
    return _next_phase(state, denoising, commit, seen.following(kept) if model.seed else None, model, decode, graph)


def _next_phase(
    state: DecodeState,
    denoising: Bool[Array, " batch"],
    commit: Int[Array, " batch"],
    following: Int[Array, " batch"] | None,
    model: ModelConfig,
    decode: DecodeConfig,
    graph: DraftGraph,
) -> DecodeState:
    """Ends rows, sends finished blocks to their commit, and moves committed rows (`commit` >= 0) to their next block."""
    batch, block = state.canvas.shape
    stopped, over = state.stopped, jnp.zeros(batch, bool)
    stop = stopped_by(state, state.canvas, model, decode)
    match model.stop_rule:
        case "reveal":
            over = denoising & ends(state, state.canvas, model, decode)
        case "reveal_commit":
            stopped = stopped | (denoising & stop)
        case "commit":
            stopped = stopped | ((commit >= 0) & stop)
    full = jnp.all(state.canvas != model.mask_id, axis=1)
    phase = jnp.where(denoising & (full | stopped), COMMIT, state.phase)
    committed = (commit >= 0) & ~over
    goes_on = committed & ~stopped & (state.start + block < state.limit)
    phase = jnp.where(goes_on, DENOISE, jnp.where(over | committed, DONE, phase))
    fresh = jnp.full((batch, block), model.mask_id, jnp.int32)
    if following is not None:
        fresh = fresh.at[:, 0].set(following)
    moved = state.replace(
        phase=phase,
        stopped=stopped,
        start=jnp.where(goes_on, state.start + block, state.start),
        canvas=where_row(goes_on, fresh, state.canvas),
        step=jnp.where(goes_on, 0, state.step),
        known=where_row(goes_on, nothing_known(batch, block, graph), state.known),
    )
    if model.stop_rule == "reveal":  # the first token of a block can end the row before any forward is spent on it
        moved = moved.replace(phase=jnp.where(goes_on & ends(moved, moved.canvas, model, decode), DONE, moved.phase))
    return moved


def _decode(
    params: Params,
    prompts: Int[Array, "batch capacity"],
    lengths: Int[Array, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    graph: DraftGraph,
    fold: FoldConfig | None,
) -> Decoded:
    validate(params, prompts, lengths, model, decode, graph, fold)
    prompts, lengths = jnp.asarray(prompts, jnp.int32), jnp.asarray(lengths, jnp.int32)
    state = begin(params, prompts, lengths, model, decode, graph, row_status(prompts, lengths, model, decode, fold))
    state = lax.while_loop(unfinished, lambda state: decode_step(state, params, model, decode, graph, fold), state)
    return finish(state, model, decode, prompts.shape[1])


def vanilla_decode(
    params: Params, prompts: Int[Array, "batch capacity"], lengths: Int[Array, " batch"], model: ModelConfig, decode: DecodeConfig
) -> Decoded:
    """Block-diffusion decoding, one state a forward pass: the loop with an empty graph.

    `prompts` int32 [batch, capacity] right-padded, `lengths` int32 [batch]. Raises ValueError for bad values when nothing is traced;
    under `jit` a row with bad values is not decoded and `stats.status` says why.
    """
    return _decode(params, prompts, lengths, model, decode, DraftGraph.empty(width=0, token_ranks=1), None)


def spiffy_decode(
    params: Params,
    prompts: Int[Array, "batch capacity"],
    lengths: Int[Array, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    graph: DraftGraph,
) -> Decoded:
    """Lossless speculation with a draft graph (Spiffy, arXiv 2509.18085): the tokens of `vanilla_decode`, in fewer forward passes."""
    return _decode(params, prompts, lengths, model, decode, graph, None)


def specfold_decode(
    params: Params,
    prompts: Int[Array, "batch capacity"],
    lengths: Int[Array, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    graph: DraftGraph,
    fold: FoldConfig,
) -> Decoded:
    """Speculation whose branches are folded onto the work they share (SpecFold, arXiv 2610.04875).

    Lossless when `fold.guard` is infinite; otherwise `fold.tau` and `fold.guard` set how closely it follows vanilla decoding.
    """
    return _decode(params, prompts, lengths, model, decode, graph, fold)
