"""What one check evaluates: the main canvas, its drafts, and the first canvas of the next block behind a finished one."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specfold_jax.config import DecodeConfig, ModelConfig
from specfold_jax.diffusion.graph import DraftGraph
from specfold_torch_ref.diffusion.draft import Drafts, descent, propose
from specfold_torch_ref.diffusion.row import COMMIT, DENOISE, DONE, Row, first_canvas, stops
from specfold_torch_ref.diffusion.state import DecodeState
from specfold_torch_ref.models.check import Branches


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
    if not graph.max_drafts:
        return Branches(row.canvas[:, None], active, torch.zeros((batch, 1), dtype=torch.long), row.start, causal)
    drafts = propose(row.canvas, state.known, graph, model.mask_id, decode.window(model))
    drafts = drafts._replace(valid=drafts.valid & (row.phase == DENOISE)[:, None])
    shares = decode.share and model.commit == "block"
    wanted, behind = torch.zeros(batch, dtype=torch.bool), torch.full((batch,), -1)
    if shares:
        drafts, wanted, behind = _make_room(drafts, row, model, decode)
    known = torch.sum(drafts.tokens != model.mask_id, dim=-1)
    order = torch.argsort(torch.where(drafts.valid, known, block + 1), dim=1, stable=True)  # the places left over come last
    drafts = drafts.take(order)
    tokens = torch.cat([row.canvas[:, None], drafts.tokens], dim=1)
    valid = torch.cat([active, drafts.valid], dim=1)
    parent = descent(tokens, valid, model.mask_id)
    context = torch.full(valid.shape, -1) if shares else None
    if context is not None:
        last, first = graph.max_drafts, first_canvas(state.following, block, model)
        for b in torch.nonzero(wanted).flatten().tolist():
            branch = 0 if behind[b] < 0 else 1 + order[b].tolist().index(int(behind[b]))
            tokens[b, last], valid[b, last] = first[b], True
            parent[b, last], parent[b, branch] = last, branch
            context[b, last] = branch
    return Branches(tokens, valid, parent, row.start, causal, context)


def _make_room(
    drafts: Drafts, row: Row, model: ModelConfig, decode: DecodeConfig
) -> tuple[Drafts, Bool[Tensor, " batch"], Int[Tensor, " batch"]]:
    """Frees a place for a continuation where one is wanted; and the draft it stands behind (-1: the main canvas).

    Drafts are heaviest first: of a full set the lightest gives way, or the one before it if the lightest is the context itself.
    """
    count = drafts.valid.shape[1]
    complete = drafts.valid & torch.all(drafts.tokens != model.mask_id, dim=-1) & (count > 1)
    heaviest = torch.argmax(complete.int(), dim=1)
    main = row.phase == COMMIT
    goes_on = row.start + row.canvas.shape[1] < row.limit
    wanted = goes_on & (main | torch.any(complete, dim=1))
    if model.stop_rule == "commit":  # a block that stops its row has no next one
        wanted &= ~(main & stops(row, model, decode))
    behind = torch.where(main, -1, heaviest)
    victim = torch.where(behind == count - 1, count - 2, count - 1)
    full = wanted & torch.all(drafts.valid, dim=1)
    gives_way = full[:, None] & (torch.arange(count) == victim[:, None])
    return drafts._replace(valid=drafts.valid & ~gives_way), wanted, behind
