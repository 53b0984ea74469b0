"""The loop's state: what it holds, how it begins from prompts, when a row ends, and what comes out."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int

from specfold_jax import reveal
from specfold_jax.config import DecodeConfig, ModelConfig
from specfold_jax.draft import Known, nothing_known
from specfold_jax.graph import DraftGraph
from specfold_jax.model import Cache, Params, logits, prefill

DENOISE, COMMIT, DONE = 0, 1, 2
"""A row's phase: its canvas has masks to reveal, is to be committed, or the row has ended."""


@struct.dataclass
class Stats:
    """Counts per row, int32 [batch] unless said.

    `nfe` = `checks` (forwards that denoise) + `commits` (forwards that only commit); `prefills` apart. `steps`: vanilla reveal steps
    made. `drafting`: checks that had a draft; `drafted`, `accepted`: draft branches evaluated, and those whose result was used (each saved a forward);
    `saved_commits`: commits taken from an accepted branch. `guard_stops`: chains ended by the guard. `computed_rows` [batch, layers, 2]: rows of draft branches
    computed before attention and before the feed-forward network, of `total_rows`. `status`: 0, or why a row was not decoded
    (`validate.STATUS`).
    """

    nfe: Array
    prefills: Array
    checks: Array
    commits: Array
    steps: Array
    drafting: Array
    drafted: Array
    accepted: Array
    saved_commits: Array
    guard_stops: Array
    computed_rows: Array
    total_rows: Array
    status: Array


@struct.dataclass
class DecodeState:
    """The loop's state. `start` is both the canvas' first position and the number of cache entries that count.

    `tokens` [batch, span] prompt and finished blocks; `cache` keys and values of capacity span; `step` vanilla steps made in this
    block; `limit` the position a row may not pass; `lengths` the prompts'; `stopped`: a stop token was revealed (the row still
    commits); `known`: the distribution drafts are made from.
    """

    tokens: Int[Array, "batch span"]
    cache: Cache
    start: Int[Array, " batch"]
    canvas: Int[Array, "batch block"]
    step: Int[Array, " batch"]
    phase: Int[Array, " batch"]
    stopped: Bool[Array, " batch"]
    known: Known
    lengths: Int[Array, " batch"]
    limit: Int[Array, " batch"]
    seed: Int[Array, " batch"]
    stats: Stats


class Decoded(NamedTuple):
    """`tokens` int32 [batch, capacity + max_new_tokens] prompt then generation, padded; `lengths` int32 [batch]; `stats`."""

    tokens: Int[Array, "batch total"]
    lengths: Int[Array, " batch"]
    stats: Stats


def write(buffer: Array, values: Array, start: Int[Array, " batch"]) -> Array:
    """Writes values [batch, n, ...] into buffer [batch, m, ...] at each row's start."""
    return jax.vmap(lambda b, v, s: lax.dynamic_update_slice_in_dim(b, v, s, axis=0))(buffer, values, start)


def pick(x: Array, branch: Int[Array, " batch"]) -> Array:
    """x[b, branch[b]]."""
    return jnp.take_along_axis(x, branch.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)[:, 0]


def where_row(condition: Bool[Array, " batch"], new: Any, old: Any) -> Any:
    """Row-wise select over pytrees with a leading batch axis."""
    return jax.tree.map(lambda a, b: jnp.where(condition.reshape(-1, *(1,) * (a.ndim - 1)), a, b), new, old)


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
    within = jnp.arange(block, dtype=jnp.int32)
    sane = jnp.clip(lengths, 1, capacity)
    start = sane if model.block_origin == "prompt" else sane // block * block
    span = capacity + decode.max_new_tokens + block
    position = jnp.arange(capacity, dtype=jnp.int32)
    inside = jnp.where(position < sane[:, None], jnp.clip(prompts, 0, model.vocab - 1), model.mask_id).astype(jnp.int32)
    hidden, cache = prefill(params, inside, model, "causal" if model.commit == "causal" else "block", block)
    tokens = jnp.pad(inside, ((0, 0), (0, span - capacity)), constant_values=model.mask_id)
    cache = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, span - capacity), (0, 0), (0, 0))), cache)
    canvas = jnp.take_along_axis(tokens, start[:, None] + within, axis=1)
    seed = jnp.broadcast_to(jnp.asarray(decode.seed, jnp.int32), (batch,))
    if model.seed:
        last = jnp.take_along_axis(hidden, jnp.maximum(start - 1, 0)[:, None, None], axis=1)[:, 0]
        drawn = reveal.rank(logits(params, last), seed, start, jnp.zeros_like(start), decode.temperature, model.mask_id, 1).tokens[:, 0]
        canvas = canvas.at[:, 0].set(jnp.where(start == sane, drawn, canvas[:, 0]))
    zeros = jnp.zeros(batch, jnp.int32)
    rows = jnp.zeros((batch, model.layers, 2), jnp.int32)
    stats = Stats(zeros, (start > 0).astype(jnp.int32), *[zeros] * 8, computed_rows=rows, total_rows=zeros, status=status)
    state = DecodeState(
        tokens=tokens,
        cache=cache,
        start=start,
        canvas=canvas,
        step=zeros,
        phase=jnp.full(batch, DENOISE, jnp.int32),
        stopped=jnp.zeros(batch, bool),
        known=nothing_known(batch, block, graph),
        lengths=sane,
        limit=sane + decode.max_new_tokens,
        seed=seed,
        stats=stats,
    )
    over = (status != 0) | (ends(state, canvas, model, decode) if model.stop_rule == "reveal" else False)
    return state.replace(phase=jnp.where(over, DONE, state.phase))


def ends(state: DecodeState, canvas: Int[Array, "batch block"], model: ModelConfig, decode: DecodeConfig) -> Bool[Array, " batch"]:
    """Whether a row is over with this canvas: a stop token with no MASK before it, or no MASK left before its limit."""
    position = state.start[:, None] + jnp.arange(canvas.shape[1], dtype=jnp.int32)
    open_before_limit = jnp.any((canvas == model.mask_id) & (position < state.limit[:, None]), axis=1)
    reached = state.limit <= state.start + canvas.shape[1]
    return (reached & ~open_before_limit) | stopped_by(state, canvas, model, decode)


def stopped_by(state: DecodeState, canvas: Int[Array, "batch block"], model: ModelConfig, decode: DecodeConfig) -> Bool[Array, " batch"]:
    """The stop test on a canvas: generated positions only."""
    position = state.start[:, None] + jnp.arange(canvas.shape[1], dtype=jnp.int32)
    return reveal.stops(canvas, position >= state.lengths[:, None], decode.stops(model), model.mask_id)


def unfinished(state: DecodeState) -> Bool[Array, ""]:
    """Whether any row goes on: the loop's condition."""
    return jnp.any(state.phase != DONE)


def finish(state: DecodeState, model: ModelConfig, decode: DecodeConfig, capacity: int) -> Decoded:
    """Cuts each row after its first stop token and at its limit, and pads."""
    total = capacity + decode.max_new_tokens
    tokens = write(state.tokens, state.canvas, state.start)[:, :total]
    position = jnp.arange(total, dtype=jnp.int32)
    generated = (position >= state.lengths[:, None]) & (position < state.limit[:, None])
    lengths = jnp.minimum(state.limit, total)
    if decode.stops(model):
        stop = generated & jnp.isin(tokens, jnp.asarray(decode.stops(model), jnp.int32))
        lengths = jnp.where(jnp.any(stop, axis=1), jnp.argmax(stop, axis=1).astype(jnp.int32) + 1, lengths)
    lengths = jnp.where(state.stats.status == 0, lengths, state.lengths)
    return Decoded(jnp.where(position < lengths[:, None], tokens, model.pad_id), lengths, state.stats)
