"""Draft branches: a graph's ranks turned into canvases, pruned, deduplicated, and ordered by descent (Spiffy, arXiv 2509.18085)."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specfold_jax.graph import DraftGraph
from specfold_jax.reveal import candidates, confidence_rank


class Known(NamedTuple):
    """The distribution known for the state just before the current canvas, from the last check.

    `tokens` int32 [batch, width, block, ranks]: token ranks as they would be drawn 0, 1, .. width - 1 steps from now (all alike at
    T = 0). `odds` float32 [batch, block]: log-odds of the best token, -inf where nothing is known.
    """

    tokens: Int[Array, "batch width block ranks"]
    odds: Float[Array, "batch block"]


class Drafts(NamedTuple):
    """Draft branches; branch d here is branch d + 1 of the check. `parent` indexes the check's branches (0: the main branch)."""

    tokens: Int[Array, "batch drafts block"]
    valid: Bool[Array, "batch drafts"]
    parent: Int[Array, "batch drafts"]


def nothing_known(batch: int, block: int, graph: DraftGraph) -> Known:
    """Known at a block's first check: nothing."""
    tokens = jnp.zeros((batch, graph.width, block, graph.token_ranks), jnp.int32)
    return Known(tokens, jnp.full((batch, block), -jnp.inf, jnp.float32))


def draw_steps(graph: DraftGraph) -> Int[Array, "nodes width"]:
    """Steps from now at which each pair of a node would be drawn: the lowest level of a contained node that holds it, minus one."""
    pairs = jnp.asarray(graph.pairs)
    used = pairs[..., 0] >= 0
    same = jnp.all(pairs[:, :, None, None] == pairs, axis=-1) & used[:, :, None, None] & used  # [node, pair, node, pair]
    held = jnp.any(same, axis=3)  # [node, pair, other]: other holds this pair
    contained = jnp.all(jnp.any(same, axis=1) | ~used, axis=-1)  # [node, other]: other is a subset of node
    level = jnp.asarray(graph.level)
    first = jnp.min(jnp.where(held & contained[:, None], level, graph.width), axis=-1)
    return jnp.clip(first - 1, 0, graph.width - 1)


def propose(canvas: Int[Array, "batch block"], known: Known, graph: DraftGraph, mask_id: int, sub_block: int) -> Drafts:
    """The graph's drafts on a canvas.

    Position ranks count the masked positions of the active sub-block by log-odds; a node is valid when all its ranks exist there and
    its canvas is not another valid node's. Of the graph's nodes the `max_drafts` heaviest valid ones are kept, in graph order, which
    puts fewer reveals first; each descends from its largest kept proper subset.
    """
    if not graph.max_drafts:
        none = jnp.zeros((canvas.shape[0], 0), jnp.int32)
        return Drafts(jnp.zeros((canvas.shape[0], 0, canvas.shape[1]), jnp.int32), none > 0, none)
    candidate = candidates(canvas, mask_id, sub_block) & (known.odds > -jnp.inf)
    by_odds = confidence_rank(known.odds, candidate)
    position_rank, token_rank = jnp.asarray(graph.pairs)[..., 0], jnp.asarray(graph.pairs)[..., 1]  # [nodes, width]
    used = position_rank >= 0
    here = by_odds[:, None, None] == jnp.where(used, position_rank, -1)[..., None]  # [batch, nodes, width, block]
    feasible = jnp.all(jnp.any(here, axis=-1) | ~used, axis=-1) & jnp.any(used, axis=-1)
    known_tokens = known.tokens[:, draw_steps(graph), :, jnp.maximum(token_rank, 0)]  # [nodes, width, batch, block]
    token = jnp.max(jnp.where(here, jnp.moveaxis(known_tokens, 2, 0), -1), axis=2)  # [batch, nodes, block]
    tokens = jnp.where(token >= 0, token, canvas[:, None])
    node = jnp.arange(graph.nodes, dtype=jnp.int32)
    same = jnp.all(tokens[:, :, None] == tokens[:, None], axis=-1)
    feasible = feasible & ~jnp.any(same & feasible[:, None] & (node < node[:, None]), axis=-1)
    if graph.max_drafts < graph.nodes:
        weight = jnp.where(feasible, jnp.asarray(graph.weight), -1)
        kept = jnp.sort(lax.top_k(weight, graph.max_drafts)[1], axis=-1)
        tokens = jnp.take_along_axis(tokens, kept[..., None], axis=1)
        feasible = jnp.take_along_axis(feasible, kept, axis=1)
    return Drafts(tokens, feasible, _descent(tokens, feasible, mask_id))


def _descent(tokens: Int[Array, "batch drafts block"], valid: Bool[Array, "batch drafts"], mask_id: int) -> Int[Array, "batch drafts"]:
    """Each draft's largest valid proper subset (the first of equals) as a branch of the check, else the main branch."""
    child, other = tokens[:, :, None], tokens[:, None]
    subset = jnp.all((other == mask_id) | (other == child), axis=-1) & jnp.any(other != child, axis=-1)
    known = jnp.sum(tokens != mask_id, axis=-1, dtype=jnp.int32)
    size = jnp.where(subset & valid[:, None] & valid[..., None], known[:, None], -1)
    # argmax over an empty axis is undefined, so the main branch stands first.
    size = jnp.concatenate([jnp.zeros_like(size[..., :1]), size], axis=-1)
    return jnp.argmax(size, axis=-1).astype(jnp.int32)
