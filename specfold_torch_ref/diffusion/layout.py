"""The branches of a check: the main canvas, its drafts, and the next block's first canvas behind a complete one."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specfold_jax.config import DecodeConfig, ModelConfig
from specfold_jax.diffusion.graph import DraftGraph
from specfold_torch_ref.diffusion.draft import Drafts, descent, propose
from specfold_torch_ref.diffusion.row import COMMIT, DENOISE, DONE, Row, first_canvas, stops
from specfold_torch_ref.diffusion.state import DecodeState
from specfold_torch_ref.models.check import Branches


class Continuation(NamedTuple):
    """The next block's first canvas, evaluated in the same check as a complete canvas of this block.

    Attributes:
        wanted [batch]: whether the row has a continuation.
        behind [batch]: the draft that it stands behind, or -1 for the main canvas. Of no meaning if the row has none.
    """

    wanted: Bool[Tensor, " batch"]
    behind: Int[Tensor, " batch"]


def lay_out(state: DecodeState, graph: DraftGraph, model: ModelConfig, decode: DecodeConfig) -> Branches:
    """The branches of a check: the main branch, then drafts by the number of tokens they reveal, then at most one continuation.

    `specfold_jax.diffusion.layout.lay_out` has a picture and the rules.
    """
    row = state.row
    batch, block = row.canvas.shape
    causal = (row.phase == COMMIT) & (model.commit == "causal")
    active = (row.phase != DONE)[:, None]
    if not graph.max_drafts:
        return Branches(row.canvas[:, None], active, torch.zeros((batch, 1), dtype=torch.long), row.start, causal)
    drafts = propose(row.canvas, state.known, graph, model.mask_id, decode.window(model))
    drafts = drafts._replace(valid=drafts.valid & (row.phase == DENOISE)[:, None])
    continuation = None
    if decode.share and model.commit == "block":
        continuation = plan_continuation(drafts, row, model, decode)
        drafts = make_room(drafts, continuation)
    order = by_count(drafts, model.mask_id)
    drafts = drafts.take(order)
    tokens = torch.cat([row.canvas[:, None], drafts.tokens], dim=1)
    valid = torch.cat([active, drafts.valid], dim=1)
    branches = Branches(tokens, valid, descent(tokens, valid, model.mask_id), row.start, causal)
    if continuation is None:
        return branches
    return with_continuation(branches, continuation, order, first_canvas(state.following, block, model))


def plan_continuation(drafts: Drafts, row: Row, model: ModelConfig, decode: DecodeConfig) -> Continuation:
    """Which rows have a continuation, and what it stands behind. Drafts are heaviest first."""
    count = drafts.valid.shape[1]  # the draft and its continuation do not fit into one place
    complete = drafts.valid & torch.all(drafts.tokens != model.mask_id, dim=-1) & (count > 1)
    heaviest = torch.argmax(complete.int(), dim=1)
    committing = row.phase == COMMIT
    has_next_block = row.start + row.canvas.shape[1] < row.limit
    wanted = has_next_block & (committing | torch.any(complete, dim=1))
    if model.stop_rule == "commit":  # a block that stops its row has no next one
        wanted &= ~(committing & stops(row, model, decode))
    return Continuation(wanted, torch.where(committing, -1, heaviest))


def make_room(drafts: Drafts, continuation: Continuation) -> Drafts:
    """Drops one draft if a continuation is wanted and all places are taken.

    Drafts are heaviest first, so the last one is dropped, or the one before it if the continuation stands behind the last.
    """
    count = drafts.valid.shape[1]
    dropped = torch.where(continuation.behind == count - 1, count - 2, count - 1)
    full = continuation.wanted & torch.all(drafts.valid, dim=1)
    drop = full[:, None] & (torch.arange(count) == dropped[:, None])
    return drafts._replace(valid=drafts.valid & ~drop)


def by_count(drafts: Drafts, mask_id: int) -> Int[Tensor, "batch drafts"]:
    """The drafts' numbers, ordered by how many tokens are revealed. Those that are not valid come last.

    A draft that properly contains another one has more tokens, so parents come before children.
    """
    count = torch.sum(drafts.tokens != mask_id, dim=-1)
    return torch.argsort(torch.where(drafts.valid, count, drafts.tokens.shape[2] + 1), dim=1, stable=True)


def with_continuation(
    branches: Branches, continuation: Continuation, order: Int[Tensor, "batch drafts"], canvas: Int[Tensor, "batch block"]
) -> Branches:
    """Puts each row's continuation, `canvas`, in the last place. `order[b, k]`: the draft that became branch k + 1 of row b."""
    wanted, behind = continuation
    tokens, valid, parent = branches.tokens.clone(), branches.valid.clone(), branches.parent.clone()
    last, contexts = valid.shape[1] - 1, torch.full(valid.shape, -1)
    for b in torch.nonzero(wanted).flatten().tolist():
        context = 0 if behind[b] < 0 else 1 + order[b].tolist().index(int(behind[b]))
        tokens[b, last], valid[b, last] = canvas[b], True
        parent[b, last], parent[b, context] = last, context
        contexts[b, last] = context
    return branches._replace(tokens=tokens, valid=valid, parent=parent, context=contexts)
