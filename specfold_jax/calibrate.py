"""Calibration: vanilla decoding is watched step by step, and the draft graph that would have saved most of its forwards is chosen.

The recorded chains follow Spiffy (arXiv 2509.18085); the default objective, expected accepted depth, is this project's.
"""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specfold_jax import reveal, select
from specfold_jax.config import DecodeConfig, ModelConfig
from specfold_jax.decode import decode_step
from specfold_jax.graph import DraftGraph, MadeFor
from specfold_jax.model import Params
from specfold_jax.row import DENOISE
from specfold_jax.select import Chain
from specfold_jax.state import begin, unfinished
from specfold_jax.validate import row_status, validate


class Moment(NamedTuple):
    """A state of vanilla decoding, on the host: one row's canvas, its block, and what was known about it before its own check."""

    row: int
    start: int
    canvas: np.ndarray
    tokens: np.ndarray
    odds: np.ndarray
    after: np.ndarray


def moments(
    params: Params,
    prompts: Int[Array, "batch capacity"],
    lengths: Int[Array, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    width: int,
    token_ranks: int,
) -> Iterator[list[Moment]]:
    """Runs vanilla decoding and yields, forward by forward, the state of every row that denoises."""
    validate(params, prompts, lengths, model, decode)
    graph = DraftGraph.empty(width=width, token_ranks=min(token_ranks, model.vocab))
    prompts, lengths = jnp.asarray(prompts, jnp.int32), jnp.asarray(lengths, jnp.int32)
    state = jax.jit(begin)(params, prompts, lengths, model, decode, graph, row_status(prompts, lengths, model, decode, None))
    step = jax.jit(decode_step)
    while unfinished(state):
        after = step(state, params, model, decode, graph)
        row = state.row
        host = jax.device_get((row.phase, row.start, row.canvas, state.known, after.row.canvas))
        phase, start, canvas, known, canvas_after = host
        yield [
            Moment(row, int(start[row]), canvas[row], known.tokens[row], known.odds[row], canvas_after[row])
            for row in np.flatnonzero(phase == DENOISE).tolist()
        ]
        state = after


def _chain(run: list[Moment], mask_id: int, ranks: np.ndarray, position_ranks: int, token_ranks: int, levels: int) -> Chain:
    """The chain of the first moment of `run` (consecutive moments of one block), with its positions' confidence ranks."""
    first, chain, pairs = run[0], [], set()
    canvas = first.canvas
    for level, moment in enumerate(run[:levels]):
        for position in np.flatnonzero((canvas == mask_id) & (moment.after != mask_id)).tolist():
            order = first.tokens[min(level, len(first.tokens) - 1), position]
            found = np.flatnonzero(order == moment.after[position])
            if ranks[position] >= position_ranks or not found.size or found[0] >= token_ranks:
                return tuple(chain)
            pairs.add((int(ranks[position]), int(found[0])))
        chain.append(frozenset(pairs))
        canvas = moment.after
    return tuple(chain)


def record_chains(
    params: Params,
    prompts: Int[Array, "batch capacity"],
    lengths: Int[Array, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    position_ranks: int = 8,
    token_ranks: int = 4,
    levels: int = 8,
    progress: Callable[[int], None] | None = None,
) -> list[Chain]:
    """For each state of vanilla decoding with a known distribution: the sets of (position rank, token rank) revealed within its next
    1, 2, .. `levels` steps, up to the first that lies outside the ranks. `progress` is called with the forwards made so far."""
    runs: dict[tuple[int, int], list[Moment]] = {}
    for forwards, batch in enumerate(moments(params, prompts, lengths, model, decode, levels, token_ranks), start=1):
        for moment in batch:
            runs.setdefault((moment.row, moment.start), []).append(moment)
        if progress:
            progress(forwards)
    starts = [(run, i) for _, run in sorted(runs.items()) for i in range(len(run)) if np.isfinite(run[i].odds).any()]
    if not starts:
        return []
    canvas, odds = (np.stack([getattr(run[i], name) for run, i in starts]) for name in ("canvas", "odds"))
    candidate = reveal.candidates(jnp.asarray(canvas), model.mask_id, decode.window(model)) & (odds > -np.inf)
    ranks = np.asarray(reveal.confidence_rank(jnp.asarray(odds), candidate))
    return [_chain(run[i:], model.mask_id, ranks[n], position_ranks, token_ranks, levels) for n, (run, i) in enumerate(starts)]


def calibrate(
    params: Params,
    prompts: Int[Array, "batch capacity"],
    lengths: Int[Array, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    drafts: int = 8,
    objective: Literal["depth", "paper"] = "depth",
    max_drafts: int | None = None,
    position_ranks: int = 8,
    token_ranks: int = 4,
    candidates: int = 60,
    name: str = "",
    progress: Callable[[int], None] | None = None,
) -> DraftGraph:
    """Chooses a draft graph of `drafts` nodes from vanilla runs on `prompts` (tens of them suffice).

    `objective`: "depth" maximises the expected accepted depth, "paper" Spiffy's count of nodes and parents; both are solved exactly as
    a small integer program. `max_drafts` keeps only so many nodes a check (the rest compete by weight). `name` is recorded as the model
    the graph was made for. Raises ValueError for bad prompts, or when nothing revealed ranks within the limits.
    """
    chains = record_chains(params, prompts, lengths, model, decode, position_ranks, token_ranks, progress=progress)
    chosen = select.select(chains, drafts, objective, candidates)
    made_for = MadeFor(
        model=name,
        vocab=model.vocab,
        block=decode.block(model),
        sub_block=decode.window(model),
        threshold=decode.threshold,
        temperature=decode.temperature,
    )
    kept = min(max_drafts, len(chosen.sets)) if max_drafts is not None else None
    return DraftGraph.from_sets(chosen.sets, chosen.levels, chosen.weights, kept, token_ranks, made_for)
