"""The loop's state: what it holds, how it begins from prompts, and what comes out. All but the cache is kept on the host."""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from specfold_jax.config import DecodeConfig, ModelConfig
from specfold_jax.graph import DraftGraph
from specfold_torch_ref.draft import Known, nothing_known
from specfold_torch_ref.model import Cache, Params, head_weight, prefill
from specfold_torch_ref.ops import Implementation, head
from specfold_torch_ref.row import DENOISE, DONE, Row, ends


class Stats(NamedTuple):
    """Counts per row, [batch] unless said; `specfold_jax.state.Stats` says what each one is.

    There is no `status`: a row that cannot be decoded raises a ValueError, as nothing is traced here.
    """

    nfe: Tensor
    prefills: Tensor
    checks: Tensor
    commits: Tensor
    steps: Tensor
    drafting: Tensor
    drafted: Tensor
    accepted: Tensor
    saved_commits: Tensor
    shared: Tensor
    guard_stops: Tensor
    computed_rows: Tensor
    total_rows: Tensor


class DecodeState(NamedTuple):
    """`row`: where each row stands; its `start` is also the number of cache entries that count. `tokens` [batch, span]: prompt and
    finished blocks; `cache`: keys and values of capacity span, on the parameters' device, written in place; `known`: the distribution
    drafts are made from; `following`: the token that distribution draws for the next block's start."""

    row: Row
    tokens: Int[Tensor, "batch span"]
    cache: Cache
    known: Known
    following: Int[Tensor, " batch"]
    stats: Stats


class Decoded(NamedTuple):
    """`tokens` int32 [batch, capacity + max_new_tokens] prompt then generation, padded; `lengths` int32 [batch]; `stats`."""

    tokens: Int[Tensor, "batch total"]
    lengths: Int[Tensor, " batch"]
    stats: Stats


def write(buffer: Tensor, values: Tensor, start: Int[Tensor, " batch"]) -> Tensor:
    """Buffer [batch, m, ...] with values [batch, n, ...] at each row's start."""
    row, position = torch.arange(values.shape[0])[:, None], start[:, None] + torch.arange(values.shape[1])
    return buffer.index_put((row, position), values)


def pick(x: Tensor, branch: Int[Tensor, " batch"]) -> Tensor:
    """x[b, branch[b]]."""
    return x[torch.arange(x.shape[0], device=x.device), branch.to(x.device)]


def begin(
    params: Params,
    prompts: Int[Tensor, "batch capacity"],
    lengths: Int[Tensor, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    graph: DraftGraph,
    *,
    impl: Implementation = "torch",
) -> DecodeState:
    """Prefills the prompts' finished blocks and lays out the first canvases."""
    batch, capacity = prompts.shape
    block = decode.block(model)
    prompts, lengths = prompts.long(), lengths.long()
    start = lengths if model.block_origin == "prompt" else lengths // block * block
    span = capacity + decode.max_new_tokens + block
    inside = torch.where(torch.arange(capacity) < lengths[:, None], prompts, model.mask_id)
    hidden, cache = prefill(params, inside, model, "causal" if model.commit == "causal" else "block", block)
    tokens = F.pad(inside, (0, span - capacity), value=model.mask_id)
    cache = tuple((F.pad(k, (0, 0, 0, 0, 0, span - capacity)), F.pad(v, (0, 0, 0, 0, 0, span - capacity))) for k, v in cache)
    zeros = torch.zeros(batch, dtype=torch.long)
    row = Row(
        start=start,
        canvas=torch.gather(tokens, 1, start[:, None] + torch.arange(block)),
        step=zeros,
        phase=torch.full((batch,), DENOISE),
        stopped=torch.zeros(batch, dtype=torch.bool),
        lengths=lengths,
        limit=lengths + decode.max_new_tokens,
        seed=torch.from_numpy(np.array(decode.seed)).long().expand(batch),
    )
    if model.seed:
        last = pick(hidden, (start - 1).clamp(min=0))
        drawn = head(
            last,
            head_weight(params),
            *(x.int().to(last.device) for x in (row.seed, start, zeros)),
            float(np.asarray(decode.temperature)),
            model.mask_id,
            1,
            impl=impl,
        ).tokens[:, 0]
        row.canvas[:, 0] = torch.where(start == lengths, drawn.long().cpu(), row.canvas[:, 0])
    over = ends(row, model, decode) if model.stop_rule == "reveal" else torch.zeros(batch, dtype=torch.bool)
    counts = dict.fromkeys(Stats._fields, zeros) | {
        "prefills": (start > 0).long(),
        "computed_rows": torch.zeros((batch, model.layers, 2), dtype=torch.long),
    }
    return DecodeState(
        row=row._replace(phase=torch.where(over, DONE, row.phase)),
        tokens=tokens,
        cache=cache,
        known=nothing_known(batch, block, graph),
        following=zeros,
        stats=Stats(**counts),
    )


def unfinished(state: DecodeState) -> bool:
    """Whether any row goes on: the loop's condition."""
    return bool(torch.any(state.row.phase != DONE))


def finish(state: DecodeState, model: ModelConfig, decode: DecodeConfig) -> Decoded:
    """Cuts each row after its first stop token and at its limit, and pads."""
    row, total = state.row, state.tokens.shape[1] - state.row.canvas.shape[1]
    tokens = write(state.tokens, row.canvas, row.start)[:, :total]
    position = torch.arange(total)
    generated = (position >= row.lengths[:, None]) & (position < row.limit[:, None])
    stop = generated & torch.isin(tokens, torch.tensor(decode.stops(model), dtype=torch.long))
    lengths = torch.where(torch.any(stop, dim=1), torch.argmax(stop.int(), dim=1) + 1, row.limit)
    return Decoded(torch.where(position < lengths[:, None], tokens, model.pad_id).int(), lengths.int(), state.stats)
