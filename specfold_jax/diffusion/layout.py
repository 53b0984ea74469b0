"""The branches of a check: the main canvas, its drafts, and the next block's first canvas behind a complete one."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specfold_jax.config import DecodeConfig, ModelConfig
from specfold_jax.diffusion.draft import Drafts, descent, propose
from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.diffusion.row import COMMIT, DENOISE, DONE, Row, first_canvas, stops
from specfold_jax.diffusion.state import DecodeState
from specfold_jax.models.check import Branches


class Continuation(NamedTuple):
    """The next block's first canvas, evaluated in the same check as a complete canvas of this block.

    Attributes:
        wanted [batch]: whether the row has a continuation.
        behind [batch]: the draft that it stands behind, or -1 for the main canvas. Of no meaning if the row has none.
    """

    wanted: Bool[Array, " batch"]
    behind: Int[Array, " batch"]


def lay_out(state: DecodeState, graph: DraftGraph, model: ModelConfig, decode: DecodeConfig) -> Branches:
    """The branches of a check: the main branch, then drafts by the number of tokens they reveal, then at most one continuation.

    A row with `max_drafts` 4, blocks of 4, and `_` for MASK:

        branch 0   main           A _ _ _             parent 0, a root
        branch 1   draft          A B _ _             parent 0
        branch 2   draft          A B C D             parent 2, a root: it is the context of branch 4
        branch 3   (left over)
        branch 4   continuation             E _ _ _   parent 4, a root, context 2

    A continuation starts with the token that the last known distribution predicts for the next block. It stands behind a complete canvas:
    the main one, or the heaviest complete draft. It takes one of the `max_drafts` places, the last one. Families whose commits use other
    attention than their denoising have none.

    A root is computed in full. The draft before a continuation is one because keys and values in the cache must be a branch's own.
    """
    row = state.row
    batch, block = row.canvas.shape
    causal = (row.phase == COMMIT) & (model.commit == "causal")
    active = (row.phase != DONE)[:, None]
    if not graph.max_drafts:
        return Branches(row.canvas[:, None], active, jnp.zeros((batch, 1), jnp.int32), row.start, causal)
    drafts = propose(row.canvas, state.known, graph, model.mask_id, decode.window(model))
    drafts = drafts._replace(valid=drafts.valid & (row.phase == DENOISE)[:, None])
    continuation = None
    if decode.share and model.commit == "block":
        continuation = plan_continuation(drafts, row, model, decode)
        drafts = make_room(drafts, continuation)
    order = by_count(drafts, model.mask_id)
    drafts = drafts.take(order)
    tokens = jnp.concatenate([row.canvas[:, None], drafts.tokens], axis=1)
    valid = jnp.concatenate([active, drafts.valid], axis=1)
    branches = Branches(tokens, valid, descent(tokens, valid, model.mask_id), row.start, causal)
    if continuation is None:
        return branches
    return with_continuation(branches, continuation, order, first_canvas(state.following, block, model))


def plan_continuation(drafts: Drafts, row: Row, model: ModelConfig, decode: DecodeConfig) -> Continuation:
    """Which rows have a continuation, and what it stands behind. Drafts are heaviest first."""
    complete = drafts.valid & jnp.all(drafts.tokens != model.mask_id, axis=-1)
    if complete.shape[1] == 1:  # the draft and its continuation do not fit into one place
        complete = jnp.zeros_like(complete)
    heaviest = jnp.argmax(complete, axis=1).astype(jnp.int32)
    committing = row.phase == COMMIT
    has_next_block = row.start + row.canvas.shape[1] < row.limit
    wanted = has_next_block & (committing | jnp.any(complete, axis=1))
    if model.stop_rule == "commit":  # a block that stops its row has no next one
        wanted &= ~(committing & stops(row, model, decode))
    return Continuation(wanted, jnp.where(committing, -1, heaviest))


def make_room(drafts: Drafts, continuation: Continuation) -> Drafts:
    """Drops one draft if a continuation is wanted and all places are taken.

    Drafts are heaviest first, so the last one is dropped, or the one before it if the continuation stands behind the last.
    """
    count = drafts.valid.shape[1]
    dropped = jnp.where(continuation.behind == count - 1, count - 2, count - 1)
    full = continuation.wanted & jnp.all(drafts.valid, axis=1)
    drop = full[:, None] & (jnp.arange(count, dtype=jnp.int32) == dropped[:, None])
    return drafts._replace(valid=drafts.valid & ~drop)


def by_count(drafts: Drafts, mask_id: int) -> Int[Array, "batch drafts"]:
    """The drafts' numbers, ordered by how many tokens are revealed. Those that are not valid come last.

    A draft that properly contains another one has more tokens, so parents come before children.
    """
    count = jnp.sum(drafts.tokens != mask_id, axis=-1, dtype=jnp.int32)
    return jnp.argsort(jnp.where(drafts.valid, count, drafts.tokens.shape[2] + 1), axis=1, stable=True)


def with_continuation(
    branches: Branches, continuation: Continuation, order: Int[Array, "batch drafts"], canvas: Int[Array, "batch block"]
) -> Branches:
    """Puts each row's continuation, `canvas`, in the last place. `order[b, k]`: the draft that became branch k + 1 of row b."""
    wanted, behind = continuation
    became_branch = jnp.argmax(order == behind[:, None], axis=1).astype(jnp.int32) + 1
    context = jnp.where(behind < 0, 0, became_branch)
    tokens, valid, parent = branches.tokens, branches.valid, branches.parent
    last = valid.shape[1] - 1
    index = jnp.arange(valid.shape[1], dtype=jnp.int32)
    roots = wanted[:, None] & ((index == last) | (index == context[:, None]))
    return branches._replace(
        tokens=tokens.at[:, last].set(jnp.where(wanted[:, None], canvas, tokens[:, last])),
        valid=valid.at[:, last].set(valid[:, last] | wanted),
        parent=jnp.where(roots, index, parent),
        context=jnp.full(valid.shape, -1, jnp.int32).at[:, last].set(jnp.where(wanted, context, -1)),
    )
