"""Vanilla decoding recorded step by step: its states, what the step before knew about each, and the states that followed."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specfold_jax.calibration.rank_nodes import NodeChain
from specfold_jax.config import DecodeConfig, ModelConfig
from specfold_jax.diffusion.decoding import Decoding
from specfold_jax.diffusion.draft import Known, distances, every_draft, propose, rank_positions
from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.diffusion.row import DENOISE
from specfold_jax.diffusion.validate import validate
from specfold_jax.models.transformer import Params
from specfold_jax.running.memory import explained
from specfold_jax.running.stepping import states


class Records(NamedTuple):
    """States of vanilla decoding about which something was known, on the host.

    `known`: a `Known` of arrays on the host. `after[r, l]`: the canvas l + 1 vanilla steps later. The first `steps[r]` of them count; they
    end with the block, or after `levels`.
    """

    canvas: Int[np.ndarray, "records block"]
    known: Any
    after: Int[np.ndarray, "records levels block"]
    steps: Int[np.ndarray, " records"]


def record_vanilla(
    params: Params,
    prompts: Int[Array, "batch capacity"],
    lengths: Int[Array, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    levels: int = 8,
    token_ranks: int = 4,
    reach: int = 2,
    progress: Callable[[int], None] | None = None,
) -> Records:
    """Runs vanilla decoding and records its states.

    `levels`: steps ahead that are recorded. `token_ranks`: best tokens kept for each position. `reach`: sub-blocks about which something
    is known. `progress` is called with the number of forward passes made. Raises ValueError for bad prompts, or if nothing is recorded.
    """
    validate(params, prompts, lengths, model, decode)
    graph = DraftGraph.empty(width=levels, token_ranks=min(token_ranks, model.vocab), reach=reach)
    prompts, lengths = jnp.asarray(prompts, jnp.int32), jnp.asarray(lengths, jnp.int32)
    runs: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]] = {}
    how = Decoding(model, decode, graph)
    with explained(params, how, prompts.shape):
        looks = (jax.device_get((state.row, state.known)) for state in states(params, prompts, lengths, how))
        for forwards, ((row, known), (later, _)) in enumerate(pairwise(looks), start=1):
            for b in np.flatnonzero(row.phase == DENOISE).tolist():
                runs.setdefault((b, int(row.start[b])), []).append((row.canvas[b], known.tokens[b], known.odds[b], later.canvas[b]))
            if progress:
                progress(forwards)
    canvas, tokens, odds, after, steps = [], [], [], [], []
    for _, run in sorted(runs.items()):
        for i, (before, ranks, scores, _) in enumerate(run):
            if np.isfinite(scores).any():
                ahead = [later for _, _, _, later in run[i : i + levels]]
                canvas.append(before)
                tokens.append(ranks)
                odds.append(scores)
                after.append(np.stack(ahead + [ahead[-1]] * (levels - len(ahead))))
                steps.append(len(ahead))
    if not canvas:
        raise ValueError(
            "no step of these runs came after another in its block, so there is nothing to learn drafts from; use more prompts"
        )
    known: Any = (np.stack(tokens), np.stack(odds))
    return Records(np.stack(canvas), Known(*known), np.stack(after), np.array(steps))


def positions_by_rank(
    canvas: Int[np.ndarray, "records block"], odds: Float[np.ndarray, "records block"], mask_id: int, sub_block: int, run_on: bool
) -> Int[np.ndarray, "records block"]:
    """The position rank of every position as a graph's rank nodes count it; `block` for a position without one."""
    known = Known(jnp.zeros((len(canvas), 0, canvas.shape[1], 1), jnp.int32), jnp.asarray(odds))
    return np.asarray(rank_positions(distances(jnp.asarray(canvas), known, mask_id, sub_block), known, run_on))


def chains(
    records: Records, mask_id: int, sub_block: int, position_ranks: int = 8, token_ranks: int = 4, run_on: bool = False
) -> list[NodeChain]:
    """For each record the sets of (position rank, token rank) that were revealed within its next 1, 2, ... steps (Spiffy, arXiv
    2509.18085). A chain ends before a step that reveals something outside the ranks."""
    ranks = positions_by_rank(records.canvas, records.known.odds, mask_id, sub_block, run_on)
    found = []
    for r in range(len(records.canvas)):
        chain, pairs, before = [], set(), records.canvas[r]
        for level in range(int(records.steps[r])):
            after = records.after[r, level]
            best = records.known.tokens[r, min(level, records.known.tokens.shape[1] - 1)]  # [block, token rank]
            for position in np.flatnonzero((before == mask_id) & (after != mask_id)).tolist():
                token_rank = np.flatnonzero(best[position] == after[position])
                if ranks[r, position] >= position_ranks or not token_rank.size or token_rank[0] >= token_ranks:
                    break
                pairs.add((int(ranks[r, position]), int(token_rank[0])))
            else:
                chain.append(frozenset(pairs))
                before = after
                continue
            break
        found.append(tuple(chain))
    return found


def hits(records: Records, graph: DraftGraph, mask_id: int, sub_block: int, merge: bool = True) -> np.ndarray:
    """bool [records, drafts, levels]: whether a draft of the graph is the state that many steps later. `merge`: the drafts as a check lays
    them out, distinct and pruned; otherwise one for each node, in the graph's order."""

    @jax.jit
    def one(canvas: Array, known: Known, after: Array, steps: Array) -> Array:
        drafts = (propose if merge else every_draft)(canvas, known, graph, mask_id, sub_block)
        equal = jnp.all(drafts.tokens[:, :, None] == after[:, None], axis=-1)
        return equal & drafts.valid[..., None] & (jnp.arange(after.shape[1]) < steps[:, None])[:, None]

    chunk = 2048
    parts = [jax.tree.map(lambda x, i=i: x[i : i + chunk], records) for i in range(0, len(records.canvas), chunk)]
    return np.concatenate([np.asarray(one(*part)) for part in parts])


def accepted_depth(records: Records, graph: DraftGraph, mask_id: int, sub_block: int) -> float:
    """Drafts that a check would have accepted on average: the graph's drafts, pruned as a check prunes them, against the states that
    followed."""
    covered = hits(records, graph, mask_id, sub_block).any(axis=1)
    return float(np.cumprod(covered, axis=1).sum(axis=1).mean())
