"""Calibration: choosing the draft graph that would have saved most of vanilla decoding's forwards.

Rank nodes and their "paper" objective are Spiffy's (arXiv 2509.18085); confidence nodes, their union with rank nodes under one budget,
and the expected accepted depth as objective are this project's.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxtyping import Array, Int

from specfold_jax.calibration import rank_nodes
from specfold_jax.calibration.cover import best_cover, expected_use, patterns
from specfold_jax.calibration.options import Objective, Source
from specfold_jax.calibration.records import Records, accepted_depth, chains, hits, record_vanilla
from specfold_jax.config import DecodeConfig, ModelConfig
from specfold_jax.diffusion.graph import DraftGraph, MadeFor
from specfold_jax.models.transformer import Params
from specfold_jax.values import Size, conforming

THETAS = (6.0, 4.5, 3.5, 2.8, 2.2, 1.7, 1.2, 0.8, 0.4, 0.0, -0.5, -1.0, -2.0, -math.inf)
"""Candidate log-odds, from well above the usual threshold of 2.2 (a probability of 0.9) down to "all of them"."""


def calibrate(
    params: Params,
    prompts: Int[Array, "batch capacity"],
    lengths: Int[Array, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    drafts: int = 8,
    source: Source = "union",
    objective: Objective = "depth",
    run_on: bool = True,
    reach: int | None = None,
    position_ranks: int = 8,
    token_ranks: int = 4,
    candidates: int = 60,
    name: str = "",
    progress: Callable[[int], None] | None = None,
) -> DraftGraph:
    """Chooses a draft graph from vanilla runs on `prompts` (tens of them suffice), for at most `drafts` drafts a check.

    `source`: rank nodes, confidence nodes, or both. `objective`: "depth" maximises the expected accepted depth; "paper" is Spiffy's
    count of nodes and parents (rank nodes only). `run_on`: position ranks continue in the next sub-blocks. `reach`: sub-blocks whose
    distributions a check keeps (None: all of the block; fewer cost less head, and drafts reach less far). `position_ranks`,
    `token_ranks`: rank nodes use ranks below these. `candidates`: rank nodes to choose from. `name`: the model's name to record.
    `progress` is called with the number of forward passes made. Raises ValueError for bad prompts, or if no revealed token could have
    been drafted.
    """
    reach = decode.block(model) // decode.window(model) if reach is None else reach
    records = record_vanilla(params, prompts, lengths, model, decode, token_ranks=token_ranks, reach=reach, progress=progress)
    limits = {"position_ranks": position_ranks, "token_ranks": token_ranks, "candidates": candidates}
    return choose_graph(records, model, decode, drafts, source, objective, run_on, reach, name=name, **limits)


def choose_graph(
    records: Records,
    model: ModelConfig,
    decode: DecodeConfig,
    drafts: int,
    source: Source = "union",
    objective: Objective = "depth",
    run_on: bool = True,
    reach: int = 2,
    position_ranks: int = 8,
    token_ranks: int = 4,
    candidates: int = 60,
    name: str = "",
) -> DraftGraph:
    """As `calibrate`, from records."""
    conforming("source", source, Source)
    conforming("drafts", drafts, Size)
    if objective == "paper" and source != "ranks":
        raise ValueError(f"objective='paper' counts rank nodes, so it needs source='ranks', not {source!r}")
    block, sub_block = decode.block(model), decode.window(model)
    made_for = MadeFor(name, model.vocab, block, sub_block, decode.threshold, decode.temperature)

    def graph(sets: Sequence, levels: Sequence, weights: Sequence | None, thetas: Sequence, theta_weights: Sequence | None) -> DraftGraph:
        kept = min(drafts, len(sets) + len(thetas))
        # A confidence node's tokens may be drawn some steps from now. At T > 0 each step draws anew.
        width = records.after.shape[1] if thetas and not decode.greedy else 1
        made = {"run_on": run_on, "width": width, "reach": reach}
        return DraftGraph.from_sets(sets, levels, weights, kept, token_ranks, made_for, thetas, theta_weights, **made)

    ranked = rank_nodes.Selection((), (), (), 0)
    if source != "confidence":
        found = chains(records, model.mask_id, sub_block, position_ranks, token_ranks, run_on)
        if source == "ranks":
            ranked = rank_nodes.select(found, drafts, objective, max(candidates, drafts))
            return graph(ranked.sets, ranked.levels, ranked.weights, (), None)
        if any(found):
            ranked = rank_nodes.most_visited(found, candidates)
    thetas = [(theta, hop) for hop in range(min(reach, block // sub_block)) for theta in THETAS]
    pool = graph(ranked.sets, ranked.levels, None, thetas, None)
    best = _best_graph(records, pool, model.mask_id, sub_block, drafts, graph)
    if best is None:
        raise ValueError("nothing that was revealed could have been drafted; calibrate on more prompts")
    return best


def _best_graph(
    records: Records, pool: DraftGraph, mask_id: int, sub_block: int, drafts: int, graph: Callable[..., DraftGraph]
) -> DraftGraph | None:
    """The graph of nodes of `pool` that accepts most; None if none accepts anything.

    Nodes often draft the same. So graphs of more than `drafts` nodes are tried too: a check keeps the heaviest `drafts` that differ.
    """
    sets, count = pool.sets, pool.nodes
    every = replace(pool, max_drafts=count)
    found = patterns(hits(records, every, mask_id, sub_block, merge=False))
    parents = [None if pool.level[n] == 1 else pool.parent[n].nonzero()[0].tolist() for n in range(len(sets))]
    best, best_depth = None, 0.0
    for size in sorted({drafts, min(drafts + 2, count), min(drafts + 4, count), min(2 * drafts, count)}):
        chosen = best_cover(found, count, size, [*parents, *[None] * len(pool.theta)])
        weight = expected_use(found, chosen, count)
        ranked = [n for n in sorted(chosen) if n < len(sets)]
        thetas = [n - len(sets) for n in sorted(chosen) if n >= len(sets)]
        candidate = graph(
            [sets[n] for n in ranked],
            [int(pool.level[n]) for n in ranked],
            weight[ranked],
            [(float(pool.theta[k]), int(pool.hop[k])) for k in thetas],
            weight[[k + len(sets) for k in thetas]],
        )
        reached = accepted_depth(records, candidate, mask_id, sub_block)
        if reached > best_depth:
            best, best_depth = candidate, reached
    return best
