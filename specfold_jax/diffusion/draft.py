"""Draft canvases from a graph: rank nodes and confidence nodes, pruned to one budget, deduplicated, and ordered by descent.

Rank nodes are Spiffy's (arXiv 2509.18085); confidence nodes, pruning by expected use and drafts across sub-blocks are this project's.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.diffusion.reveal import active_window, confidence_rank


class Known(NamedTuple):
    """The distribution known for the state just before the current canvas, from the last check.

    `tokens` int32 [batch, width, block, ranks]: token ranks as they would be drawn 0, 1, .. width - 1 steps from now (all alike at
    T = 0). `odds` float32 [batch, block]: log-odds of the best token, -inf where nothing is known.
    """

    tokens: Int[Array, "batch width block ranks"]
    odds: Float[Array, "batch block"]


class Drafts(NamedTuple):
    """Draft canvases of a graph's nodes; `weight` is each one's expected use."""

    tokens: Int[Array, "batch drafts block"]
    valid: Bool[Array, "batch drafts"]
    weight: Float[Array, "batch drafts"]

    def take(self, index: Int[Array, "batch kept"]) -> "Drafts":
        """The drafts at these places."""
        tokens = jnp.take_along_axis(self.tokens, index[..., None], axis=1)
        return Drafts(tokens, *(jnp.take_along_axis(x, index, axis=1) for x in self[1:]))


def nothing_known(batch: int, block: int, graph: DraftGraph) -> Known:
    """Known at a block's first check: nothing."""
    tokens = jnp.zeros((batch, graph.width, block, graph.token_ranks), jnp.int32)
    return Known(tokens, jnp.full((batch, block), -jnp.inf, jnp.float32))


def draw_steps(graph: DraftGraph) -> Int[Array, "ranked width"]:
    """Steps from now at which each pair of a rank node would be drawn: the lowest level of a contained node that holds it, minus one."""
    pairs = jnp.asarray(graph.pairs)
    used = pairs[..., 0] >= 0
    same = jnp.all(pairs[:, :, None, None] == pairs, axis=-1) & used[:, :, None, None] & used  # [node, pair, node, pair]
    held = jnp.any(same, axis=3)  # [node, pair, other]: other holds this pair
    contained = jnp.all(jnp.any(same, axis=1) | ~used, axis=-1)  # [node, other]: other is a subset of node
    first = jnp.min(jnp.where(held & contained[:, None], jnp.asarray(graph.level), graph.width), axis=-1)
    return jnp.clip(first - 1, 0, graph.width - 1)


def distances(canvas: Int[Array, "batch block"], known: Known, mask_id: int, sub_block: int) -> Int[Array, "batch block"]:
    """Sub-blocks from the active one to each masked position with a known distribution; `block` for all other positions."""
    position = jnp.arange(canvas.shape[1], dtype=jnp.int32)
    ahead = (position - active_window(canvas, mask_id, sub_block)[:, None]) // sub_block
    return jnp.where((canvas == mask_id) & (known.odds > -jnp.inf), ahead, canvas.shape[1])


def rank_positions(distance: Int[Array, "batch block"], known: Known, run_on: bool) -> Int[Array, "batch block"]:
    """Position ranks by log-odds: the active sub-block's, then, if they run on, those of each next one; `block` where there is none."""
    ranks, before = jnp.full_like(distance, distance.shape[1]), jnp.zeros_like(distance[:, :1])
    for ahead in range(distance.shape[1] if run_on else 1):
        here = distance == ahead
        ranks = jnp.where(here, before + confidence_rank(known.odds, here), ranks)
        before = before + jnp.sum(here, axis=1, keepdims=True, dtype=jnp.int32)
    return ranks


def rank_drafts(canvas: Int[Array, "batch block"], known: Known, graph: DraftGraph, mask_id: int, sub_block: int) -> Drafts:
    """The rank nodes on a canvas; a node is valid when all its ranks exist."""
    by_odds = rank_positions(distances(canvas, known, mask_id, sub_block), known, graph.run_on)
    position_rank, token_rank = jnp.asarray(graph.pairs)[..., 0], jnp.asarray(graph.pairs)[..., 1]  # [ranked, width]
    used = position_rank >= 0
    at = by_odds[:, None, None] == jnp.where(used, jnp.minimum(position_rank, canvas.shape[1] - 1), -1)[..., None]
    feasible = jnp.all(jnp.any(at, axis=-1) | ~used, axis=-1) & jnp.any(used, axis=-1)
    drawn = known.tokens[:, draw_steps(graph), :, jnp.maximum(token_rank, 0)]  # [ranked, width, batch, block]
    token = jnp.max(jnp.where(at, jnp.moveaxis(drawn, 2, 0), -1), axis=2)  # [batch, ranked, block]
    weight = jnp.broadcast_to(jnp.asarray(graph.weight), feasible.shape)
    return Drafts(jnp.where(token >= 0, token, canvas[:, None]), feasible, weight)


def confidence_drafts(canvas: Int[Array, "batch block"], known: Known, graph: DraftGraph, mask_id: int, sub_block: int) -> Drafts:
    """The confidence nodes on a canvas: nested sets, from the most confident positions to all of the sub-block and beyond it."""
    distance = distances(canvas, known, mask_id, sub_block)
    here = distance == 0
    best = confidence_rank(known.odds, here) == 0
    theta, hop = jnp.asarray(graph.theta)[:, None], jnp.asarray(graph.hop)[:, None]
    at_hop = (distance[:, None] == hop) & ((known.odds[:, None] > theta) | best[:, None])  # [batch, thetas, block]
    reveal = (distance[:, None] < hop) | at_hop
    grows = jnp.any(reveal[:, 1:] != reveal[:, :-1], axis=-1)
    level = jnp.cumsum(jnp.pad(grows, ((0, 0), (1, 0))), axis=1, dtype=jnp.int32)  # equal sets share a level
    # A token is drawn at the step of the first, smallest set that holds its position.
    first = jnp.min(jnp.where(reveal, level[..., None], graph.width), axis=1)
    step = jnp.minimum(first, graph.width - 1)
    token = jnp.take_along_axis(known.tokens[..., 0], step[:, None], axis=1)  # [batch, 1, block]
    feasible = jnp.any(here, axis=1, keepdims=True) & jnp.any(at_hop, axis=-1)
    weight = jnp.broadcast_to(jnp.asarray(graph.theta_weight), feasible.shape)
    return Drafts(jnp.where(reveal, token, canvas[:, None]), feasible, weight)


def distinct(drafts: Drafts) -> Drafts:
    """Invalidates drafts that equal an earlier one; the first takes over the largest weight."""
    same = jnp.all(drafts.tokens[:, :, None] == drafts.tokens[:, None], axis=-1) & drafts.valid[:, None] & drafts.valid[..., None]
    index = jnp.arange(same.shape[-1], dtype=jnp.int32)
    repeated = jnp.any(same & (index < index[:, None]), axis=-1)
    return drafts._replace(
        valid=drafts.valid & ~repeated, weight=jnp.max(jnp.where(same, drafts.weight[:, None], drafts.weight[..., None]), axis=-1)
    )


def every_draft(canvas: Int[Array, "batch block"], known: Known, graph: DraftGraph, mask_id: int, sub_block: int) -> Drafts:
    """The drafts of all nodes: rank nodes, then confidence nodes."""
    sources = []
    if graph.pairs.shape[0]:
        sources.append(rank_drafts(canvas, known, graph, mask_id, sub_block))
    if graph.theta.shape[0]:
        sources.append(confidence_drafts(canvas, known, graph, mask_id, sub_block))
    return Drafts(*(jnp.concatenate(parts, axis=1) for parts in zip(*sources, strict=True)))


def propose(canvas: Int[Array, "batch block"], known: Known, graph: DraftGraph, mask_id: int, sub_block: int) -> Drafts:
    """The different drafts of the graph's nodes on a canvas, the `max_drafts` heaviest of them, heaviest first."""
    every = distinct(every_draft(canvas, known, graph, mask_id, sub_block))
    return every.take(lax.top_k(jnp.where(every.valid, every.weight, -1), graph.max_drafts)[1])


def descent(tokens: Int[Array, "batch branch block"], valid: Bool[Array, "batch branch"], mask_id: int) -> Int[Array, "batch branch"]:
    """Each branch's largest valid proper subset among the earlier branches (the first of equals); branch 0 is the main branch."""
    child, other = tokens[:, :, None], tokens[:, None]
    subset = jnp.all((other == mask_id) | (other == child), axis=-1) & jnp.any(other != child, axis=-1)
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    known = jnp.sum(tokens != mask_id, axis=-1, dtype=jnp.int32)
    size = jnp.where(subset & valid[:, None] & (index < index[:, None]), known[:, None], -1)
    return jnp.argmax(size, axis=-1).astype(jnp.int32)
