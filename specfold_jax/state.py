"""The loop's state: what it holds, how it begins from prompts, and what comes out."""

from typing import NamedTuple

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
from specfold_jax.row import DENOISE, DONE, Row, ends


class Stats(struct.PyTreeNode):
    """Counts per row, int32 [batch] unless said.

    `nfe` = `checks` (forwards whose canvas had masks) + `commits` (forwards on a finished canvas); `prefills` apart. `steps`: vanilla
    reveal steps made. `drafting`: checks that had a draft; `drafted`: draft branches evaluated; `accepted`: branches whose evaluation
    was used, each of which saved a forward; `saved_commits`: those that served as a commit; `shared`: those that were a next block's
    first check. `guard_stops`: chains ended at a folded branch (a narrow decision, or a commit). `computed_rows` [batch, layers, 2]:
    rows of draft branches computed before attention and before the feed-forward network, of `total_rows`. `status`: 0, or why a row
    was not decoded (`validate.STATUS`).
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
    shared: Array
    guard_stops: Array
    computed_rows: Array
    total_rows: Array
    status: Array


COUNTED = tuple(name for name in Stats.__dataclass_fields__ if name != "computed_rows")
"""The statistics that are one number a row."""


class DecodeState(struct.PyTreeNode):
    """`row`: where each row stands; its `start` is also the number of cache entries that count. `tokens` [batch, span]: prompt and
    finished blocks; `cache`: keys and values of capacity span; `known`: the distribution drafts are made from; `following`: the token
    that distribution draws for the next block's start; `counts`: `COUNTED`, in one array so that one operation adds to all."""

    row: Row
    tokens: Int[Array, "batch span"]
    cache: Cache
    known: Known
    following: Int[Array, " batch"]
    counts: Int[Array, "batch counted"]
    computed_rows: Int[Array, "batch layers 2"]

    @property
    def stats(self) -> Stats:
        """What was counted so far."""
        return Stats(**dict(zip(COUNTED, self.counts.T, strict=True)), computed_rows=self.computed_rows)


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
        lengths=sane,
        limit=sane + decode.max_new_tokens,
        seed=jnp.broadcast_to(jnp.asarray(decode.seed, jnp.int32), (batch,)),
    )
    if model.seed:
        last = jnp.take_along_axis(hidden, jnp.maximum(start - 1, 0)[:, None, None], axis=1)[:, 0]
        drawn = reveal.rank(logits(params, last), row.seed, start, zeros, decode.heat, model.mask_id, 1).tokens[:, 0]
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
    """Cuts each row after its first stop token and at its limit, and pads."""
    row, total = state.row, state.tokens.shape[1] - state.row.canvas.shape[1]
    tokens = write(state.tokens, row.canvas, row.start)[:, :total]
    position = jnp.arange(total, dtype=jnp.int32)
    generated = (position >= row.lengths[:, None]) & (position < row.limit[:, None])
    lengths = row.limit
    if decode.stops(model):
        stop = generated & jnp.isin(tokens, jnp.asarray(decode.stops(model), jnp.int32))
        lengths = jnp.where(jnp.any(stop, axis=1), jnp.argmax(stop, axis=1).astype(jnp.int32) + 1, lengths)
    lengths = jnp.where(state.stats.status == 0, lengths, row.lengths)
    return Decoded(jnp.where(position < lengths[:, None], tokens, model.pad_id), lengths, state.stats)
