"""What one check evaluates: the main canvas, its drafts, and the first canvas of the next block behind a finished one."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specfold_jax.config import DecodeConfig, ModelConfig
from specfold_jax.diffusion.draft import Drafts, descent, propose
from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.diffusion.row import COMMIT, DENOISE, DONE, Row, first_canvas, stops
from specfold_jax.diffusion.state import DecodeState
from specfold_jax.models.check import Branches


def lay_out(state: DecodeState, graph: DraftGraph, model: ModelConfig, decode: DecodeConfig) -> Branches:
    """The branches of a check: the main branch, then drafts by the number of tokens they reveal, then at most one continuation.

    A continuation is the next block's first canvas with the token it is expected to start with, evaluated behind a complete canvas:
    the main one, or the heaviest complete draft. It takes one of the `max_drafts` places. Families that commit with other attention
    than they denoise with have none. Keys and values for the cache must be a branch's own, so the draft before a continuation is
    computed in full: it is a root, as the main branch is.
    """
    row = state.row
    batch, block = row.canvas.shape
    causal = (row.phase == COMMIT) & (model.commit == "causal")
    active = (row.phase != DONE)[:, None]
    main = jnp.zeros((batch, 1), jnp.int32)
    if not graph.max_drafts:
        return Branches(row.canvas[:, None], active, main, row.start, causal)
    drafts = propose(row.canvas, state.known, graph, model.mask_id, decode.window(model))
    drafts = drafts._replace(valid=drafts.valid & (row.phase == DENOISE)[:, None])
    context = None
    if decode.share and model.commit == "block":
        drafts, wanted, behind = _make_room(drafts, row, model, decode)
    known = jnp.sum(drafts.tokens != model.mask_id, axis=-1, dtype=jnp.int32)
    order = jnp.argsort(jnp.where(drafts.valid, known, block + 1), axis=1, stable=True)  # the places left over come last
    drafts = drafts.take(order)
    tokens = jnp.concatenate([row.canvas[:, None], drafts.tokens], axis=1)
    valid = jnp.concatenate([active, drafts.valid], axis=1)
    parent = descent(tokens, valid, model.mask_id)
    if decode.share and model.commit == "block":
        last = graph.max_drafts
        branch = jnp.where(behind < 0, 0, 1 + jnp.argmax(order == behind[:, None], axis=1).astype(jnp.int32))
        first = first_canvas(state.following, block, model)
        tokens = tokens.at[:, last].set(jnp.where(wanted[:, None], first, tokens[:, last]))
        valid = valid.at[:, last].set(valid[:, last] | wanted)
        index = jnp.arange(valid.shape[1], dtype=jnp.int32)
        roots = wanted[:, None] & ((index == last) | (index == branch[:, None]))
        parent = jnp.where(roots, index, parent)
        context = jnp.full(valid.shape, -1, jnp.int32).at[:, last].set(jnp.where(wanted, branch, -1))
    return Branches(tokens, valid, parent, row.start, causal, context)


def _make_room(
    drafts: Drafts, row: Row, model: ModelConfig, decode: DecodeConfig
) -> tuple[Drafts, Bool[Array, " batch"], Int[Array, " batch"]]:
    """Frees a place for a continuation where one is wanted; and the draft it stands behind (-1: the main canvas).

    Drafts are heaviest first: of a full set the lightest gives way, or the one before it if the lightest is the context itself.
    """
    count = drafts.valid.shape[1]
    complete = drafts.valid & jnp.all(drafts.tokens != model.mask_id, axis=-1)
    if count == 1:
        complete = jnp.zeros_like(complete)
    heaviest = jnp.argmax(complete, axis=1).astype(jnp.int32)
    main = row.phase == COMMIT
    goes_on = row.start + row.canvas.shape[1] < row.limit
    wanted = goes_on & (main | jnp.any(complete, axis=1))
    if model.stop_rule == "commit":  # a block that stops its row has no next one
        wanted &= ~(main & stops(row, model, decode))
    behind = jnp.where(main, -1, heaviest)
    victim = jnp.where(behind == count - 1, count - 2, count - 1)
    full = wanted & jnp.all(drafts.valid, axis=1)
    gives_way = full[:, None] & (jnp.arange(count, dtype=jnp.int32) == victim[:, None])
    return drafts._replace(valid=drafts.valid & ~gives_way), wanted, behind
