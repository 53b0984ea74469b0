"""The decode loop: vanilla, Spiffy and SpecFold are one loop, which differs by its draft graph and its fold.

One iteration evaluates, for every row of the batch, the canvas and its drafts in a single forward pass, follows the vanilla reveal
rule through the branches as long as a branch equals the state it leads to, and commits finished blocks. Rows are independent: each has
its own block, phase, length and stop.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.diffusion.validate import validate
from specfold_torch_ref.diffusion.accept import Chain, accept
from specfold_torch_ref.diffusion.arrays import of_branch, where_row, write
from specfold_torch_ref.diffusion.distribution import Distributions
from specfold_torch_ref.diffusion.draft import nothing_known
from specfold_torch_ref.diffusion.layout import lay_out
from specfold_torch_ref.diffusion.row import COMMIT, DENOISE, DONE, Row, ends
from specfold_torch_ref.diffusion.state import Decoded, DecodeState, Stats
from specfold_torch_ref.models.check import Branches, Checked, check
from specfold_torch_ref.models.convert import require_fitting
from specfold_torch_ref.models.ops import Implementation, head
from specfold_torch_ref.models.transformer import Cache, Params, head_weight, prefill


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
    if model.draws_first_token:
        last = of_branch(hidden, (start - 1).clamp(min=0))
        seed, position, step = (x.int().to(last.device) for x in (row.seed, start, zeros))
        temperature = float(np.asarray(decode.temperature))
        ranked = head(last, head_weight(params), seed, position, step, temperature, model.mask_id, 1, impl=impl)
        drawn = ranked.tokens[:, 0]
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
    stop = generated & torch.isin(tokens, torch.tensor(decode.stop_tokens(model), dtype=torch.long))
    lengths = torch.where(torch.any(stop, dim=1), torch.argmax(stop.int(), dim=1) + 1, row.limit)
    return Decoded(torch.where(position < lengths[:, None], tokens, model.pad_id).int(), lengths.int(), state.stats)


def decode_step(
    state: DecodeState,
    params: Params,
    model: ModelConfig,
    decode: DecodeConfig,
    graph: DraftGraph,
    fold: FoldConfig | None = None,
    *,
    impl: Implementation = "torch",
) -> DecodeState:
    """One iteration: one forward pass for all rows, with whatever it allows each of them to reveal, accept and commit.

    The state's cache is written in place, past the entries that count for it; all else is new.
    """
    row = state.row
    branches = lay_out(state, graph, model, decode)
    checked = check(params, branches, state.cache, row.start, model, fold, decode.pack, impl=impl)
    seen = Distributions.of(params, branches, checked, row, model, decode, graph, impl=impl)
    chain = accept(row, branches, checked.folded.cpu(), seen, model, decode, fold)

    commit(state.cache, checked, chain.commit, row.start)
    left_behind = torch.where(chain.commit[:, None] >= 0, chain.finished, chain.row.canvas)
    known, following = state.known, state.following
    if graph.width:
        nothing = nothing_known(row.canvas.shape[0], row.canvas.shape[1], graph)
        known = where_row(chain.just_committed, nothing, seen.known(chain.last, chain.row.step, graph.width))
        following = seen.following(chain.last)
    return DecodeState(
        row=chain.row,
        tokens=write(state.tokens, left_behind, row.start),
        cache=state.cache,
        known=known,
        following=following,
        stats=_count(state.stats, row, branches, checked, chain),
    )


def commit(cache: Cache, checked: Checked, branch: Int[Tensor, " batch"], start: Int[Tensor, " batch"]) -> None:
    """Writes the keys and values of each row's committing branch (-1: none) into the cache."""
    rows = torch.nonzero(branch >= 0).flatten()
    if not len(rows):
        return
    device, block = checked.hidden.device, checked.hidden.shape[2]
    position = (start[rows, None] + torch.arange(block)).to(device)
    row, kept = rows.to(device), branch[rows].to(device)
    for old_pair, new_pair in zip(cache, checked.kv, strict=True):
        for old, new in zip(old_pair, new_pair, strict=True):
            old[row[:, None], position] = new[row, kept]


def _count(stats: Stats, row: Row, branches: Branches, checked: Checked, chain: Chain) -> Stats:
    """The statistics after one check."""
    drafted = torch.sum(branches.drafts(), dim=1)
    new = {
        "nfe": row.phase != DONE,
        "checks": row.phase == DENOISE,
        "commits": row.phase == COMMIT,
        "steps": chain.reveals,
        "drafting": drafted > 0,
        "drafted": drafted,
        "accepted": (chain.moves - 1).clamp(min=0),
        "saved_commits": chain.commit > 0,
        "shared": chain.crossed,
        "guard_stops": chain.guarded,
        "computed_rows": checked.computed_rows.cpu(),
        "total_rows": drafted * row.canvas.shape[1],
    }
    return stats._replace(**{name: getattr(stats, name) + value.long() for name, value in new.items()})


@torch.no_grad()
def _decode(
    params: Params,
    prompts: Int[Tensor, "batch capacity"],
    lengths: Int[Tensor, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    graph: DraftGraph,
    fold: FoldConfig | None,
    impl: Implementation,
) -> Decoded:
    prompts, lengths = torch.as_tensor(prompts).cpu(), torch.as_tensor(lengths).cpu()
    arrays: tuple[Any, Any] = prompts.numpy(), lengths.numpy()  # to be read, which NumPy's arrays are as well as JAX's
    validate(params, *arrays, model, decode, graph, fold)
    if decode.impl != "auto":
        raise ValueError(f"DecodeConfig(impl={decode.impl!r}) is for JAX; here impl is an argument of the decode functions: {impl!r}")
    require_fitting(params, model)
    state = begin(params, prompts, lengths, model, decode, graph, impl=impl)
    while unfinished(state):
        state = decode_step(state, params, model, decode, graph, fold, impl=impl)
    return finish(state, model, decode)


def vanilla_decode(
    params: Params,
    prompts: Int[Tensor, "batch capacity"],
    lengths: Int[Tensor, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    *,
    impl: Implementation = "torch",
) -> Decoded:
    """Block-diffusion decoding, one state a forward pass: the loop with an empty graph.

    `prompts` [batch, capacity] right-padded, `lengths` [batch], whole numbers (tensors or NumPy arrays). Runs on the parameters'
    device, returns on the host. Raises ValueError for bad values, and with `impl="triton"` NotImplementedError for what the kernels lack.
    """
    return _decode(params, prompts, lengths, model, decode, DraftGraph.empty(), None, impl)


def spiffy_decode(
    params: Params,
    prompts: Int[Tensor, "batch capacity"],
    lengths: Int[Tensor, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    graph: DraftGraph,
    *,
    impl: Implementation = "torch",
) -> Decoded:
    """Lossless speculation with a draft graph (Spiffy, arXiv 2509.18085): the tokens of `vanilla_decode`, in fewer forward passes."""
    return _decode(params, prompts, lengths, model, decode, graph, None, impl)


def specfold_decode(
    params: Params,
    prompts: Int[Tensor, "batch capacity"],
    lengths: Int[Tensor, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    graph: DraftGraph,
    fold: FoldConfig,
    *,
    impl: Implementation = "torch",
) -> Decoded:
    """Speculation whose branches are folded onto the work they share (SpecFold, arXiv 2610.04875).

    Lossless when `fold.guard` is infinite; otherwise `fold.tau` and `fold.guard` set how closely it follows vanilla decoding.
    """
    return _decode(params, prompts, lengths, model, decode, graph, fold, impl)
