"""The decode loop: vanilla, Spiffy and SpecFold are one loop, which differs by its draft graph and its fold.

One iteration evaluates, for every row of the batch, the canvas and its drafts in a single forward pass, follows the vanilla reveal
rule through the branches as long as a branch equals the state it leads to, and commits finished blocks. Rows are independent: each has
its own block, phase, length and stop. The whole loop is one `lax.while_loop` on the device.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from specfold_jax.backends.choice import Backend, backend_of
from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.diffusion.accept import Chain, accept
from specfold_jax.diffusion.arrays import where_row, write
from specfold_jax.diffusion.distribution import Distributions
from specfold_jax.diffusion.draft import nothing_known
from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.diffusion.layout import lay_out
from specfold_jax.diffusion.row import COMMIT, DENOISE, DONE, Row, ends
from specfold_jax.diffusion.state import COUNTED, Decoded, DecodeState
from specfold_jax.diffusion.validate import row_status, validate
from specfold_jax.models import sampling
from specfold_jax.models.check import Branches
from specfold_jax.models.transformer import Cache, Params, logits, prefill


def begin(
    params: Params,
    prompts: Int[Array, "batch capacity"],
    lengths: Int[Array, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    graph: DraftGraph,
    status: Int[Array, " batch"],
) -> DecodeState:
    """Prefills the prompts' finished blocks and lays out the first canvases. Rows with a status other than 0 are done at once."""
    batch, capacity = prompts.shape
    block = decode.block(model)
    sane = jnp.clip(lengths, 1, capacity)
    start = sane if model.block_origin == "prompt" else sane // block * block
    span = capacity + decode.max_new_tokens + block
    position = jnp.arange(capacity, dtype=jnp.int32)
    inside = jnp.where(position < sane[:, None], jnp.clip(prompts, 0, model.vocab - 1), model.mask_id).astype(jnp.int32)
    hidden, cache = prefill(params, inside, model, "causal" if model.commit == "causal" else "block", block)
    tokens = jnp.pad(inside, ((0, 0), (0, span - capacity)), constant_values=model.mask_id)
    room = -(-span // 8) * 8 - capacity  # kernels copy eight keys at a time
    cache = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, room), (0, 0), (0, 0))), cache)
    zeros = jnp.zeros(batch, jnp.int32)
    row = Row(
        start=start,
        canvas=jnp.take_along_axis(tokens, start[:, None] + jnp.arange(block, dtype=jnp.int32), axis=1),
        step=zeros,
        phase=jnp.full(batch, DENOISE, jnp.int32),
        stopped=jnp.zeros(batch, bool),
        lengths=lengths,
        limit=jnp.where(status == 0, sane + decode.max_new_tokens, sane),
        seed=jnp.broadcast_to(jnp.asarray(decode.seed, jnp.int32), (batch,)),
    )
    if model.draws_first_token:
        last = jnp.take_along_axis(hidden, jnp.maximum(start - 1, 0)[:, None, None], axis=1)[:, 0]
        drawn = sampling.rank(logits(params, last), row.seed, start, zeros, decode.sampling_temperature, model.mask_id, 1).tokens[:, 0]
        row = row.replace(canvas=row.canvas.at[:, 0].set(jnp.where(start == sane, drawn, row.canvas[:, 0])))
    over = ends(row, model, decode) if model.stop_rule == "reveal" else jnp.zeros(batch, bool)
    counts = {"prefills": (start > 0).astype(jnp.int32), "status": status}
    return DecodeState(
        row=row.replace(phase=jnp.where(over | (status != 0), DONE, row.phase)),
        tokens=tokens,
        cache=cache,
        known=nothing_known(batch, block, graph),
        following=zeros,
        counts=jnp.stack([counts.get(name, zeros) for name in COUNTED], axis=1),
        computed_rows=jnp.zeros((batch, model.layers, 2), jnp.int32),
    )


def unfinished(state: DecodeState) -> Bool[Array, ""]:
    """Whether any row goes on: the loop's condition."""
    return jnp.any(state.row.phase != DONE)


def finish(state: DecodeState, model: ModelConfig, decode: DecodeConfig) -> Decoded:
    """Cuts each row after its first stop token and at its limit, and pads. A row that was not decoded keeps the length it came with."""
    row, total = state.row, state.tokens.shape[1] - state.row.canvas.shape[1]
    tokens = write(state.tokens, row.canvas, row.start)[:, :total]
    position = jnp.arange(total, dtype=jnp.int32)
    generated = (position >= row.lengths[:, None]) & (position < row.limit[:, None])
    end = row.limit
    if decode.stop_tokens(model):
        stop = generated & jnp.isin(tokens, jnp.asarray(decode.stop_tokens(model), jnp.int32))
        end = jnp.where(jnp.any(stop, axis=1), jnp.argmax(stop, axis=1).astype(jnp.int32) + 1, end)
    lengths = jnp.where(state.stats.status == 0, end, row.lengths)
    return Decoded(jnp.where(position < end[:, None], tokens, model.pad_id), lengths, state.stats)


def decode_step(
    state: DecodeState, params: Params, model: ModelConfig, decode: DecodeConfig, graph: DraftGraph, fold: FoldConfig | None = None
) -> DecodeState:
    """One iteration: one forward pass for all rows, with whatever it allows each of them to reveal, accept and commit."""
    return _step(backend_of(decode, params, model, fold, graph.token_ranks), state, params, model, decode, graph, fold)


def _step(
    backend: Backend,
    state: DecodeState,
    params: Params,
    model: ModelConfig,
    decode: DecodeConfig,
    graph: DraftGraph,
    fold: FoldConfig | None,
) -> DecodeState:
    row = state.row
    branches = lay_out(state, graph, model, decode)
    checked = backend.check(params, branches, state.cache, row.start, model, decode, fold)
    seen = Distributions.of(backend, params, branches, checked, row, model, decode, graph)
    chain = accept(row, branches, checked.folded, seen, model, decode, fold)

    kept = jnp.maximum(chain.commit, 0)
    # Entries from `start` on do not count until the block is committed, so writing them early needs no condition.
    new = Cache.of(jax.tree.map(lambda x: checked.block_of(x, kept), checked.kv))
    cache = jax.tree.map(lambda old, new: jax.vmap(write, (0, 0, None))(old, new, row.start), state.cache, new)
    left_behind = jnp.where(chain.commit[:, None] >= 0, chain.finished, chain.row.canvas)
    known, following = state.known, state.following
    if graph.width:
        nothing = nothing_known(row.canvas.shape[0], row.canvas.shape[1], graph)
        known = where_row(chain.just_committed, nothing, seen.known(chain.last, chain.row.step, graph.width))
        following = seen.following(chain.last)
    return DecodeState(
        row=chain.row,
        tokens=write(state.tokens, left_behind, row.start),
        cache=cache,
        known=known,
        following=following,
        counts=state.counts + _counts(row, branches, chain),
        computed_rows=state.computed_rows + checked.computed_rows,
    )


def _counts(row: Row, branches: Branches, chain: Chain) -> Int[Array, "batch counted"]:
    """What one check adds to the statistics."""
    block = row.canvas.shape[1]
    drafted = jnp.sum(branches.drafts(), axis=1, dtype=jnp.int32)
    counts = {
        "nfe": row.phase != DONE,
        "checks": row.phase == DENOISE,
        "commits": row.phase == COMMIT,
        "steps": chain.reveals,
        "drafting": drafted > 0,
        "drafted": drafted,
        "accepted": jnp.maximum(chain.moves - 1, 0),
        "saved_commits": chain.commit > 0,
        "shared": chain.crossed,
        "guard_stops": chain.guarded,
        "total_rows": drafted * block,
    }
    return jnp.stack([counts.get(name, jnp.zeros_like(drafted)).astype(jnp.int32) for name in COUNTED], axis=1)


def diffusion_decode(
    params: Params,
    prompts: Int[Array, "batch capacity"],
    lengths: Int[Array, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    graph: DraftGraph,
    fold: FoldConfig | None,
) -> Decoded:
    """The whole loop: vanilla with an empty graph, Spiffy with a graph, SpecFold with a fold. See the three functions below."""
    validate(params, prompts, lengths, model, decode, graph, fold)
    prompts, lengths = jnp.asarray(prompts, jnp.int32), jnp.asarray(lengths, jnp.int32)
    state = begin(params, prompts, lengths, model, decode, graph, row_status(prompts, lengths, model, decode, fold))
    backend = backend_of(decode, params, model, fold, graph.token_ranks)
    state = lax.while_loop(unfinished, lambda state: _step(backend, state, params, model, decode, graph, fold), state)
    return finish(state, model, decode)


def vanilla_decode(
    params: Params, prompts: Int[Array, "batch capacity"], lengths: Int[Array, " batch"], model: ModelConfig, decode: DecodeConfig
) -> Decoded:
    """Block-diffusion decoding, one state a forward pass: the loop with an empty graph.

    `prompts` int32 [batch, capacity] right-padded, `lengths` int32 [batch]. Raises ValueError for bad values when nothing is traced;
    under `jit` a row with bad values is not decoded and `stats.status` says why.
    """
    return diffusion_decode(params, prompts, lengths, model, decode, DraftGraph.empty(), None)


def spiffy_decode(
    params: Params,
    prompts: Int[Array, "batch capacity"],
    lengths: Int[Array, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    graph: DraftGraph,
) -> Decoded:
    """Lossless speculation with a draft graph (Spiffy, arXiv 2509.18085): the tokens of `vanilla_decode`, in fewer forward passes."""
    return diffusion_decode(params, prompts, lengths, model, decode, graph, None)


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
    return diffusion_decode(params, prompts, lengths, model, decode, graph, fold)
