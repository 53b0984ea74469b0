"""Draft canvases from a graph: the drafts of its rank nodes and confidence nodes, without duplicates, and the heaviest of them.

Rank nodes are Spiffy's (arXiv 2509.18085). Confidence nodes, pruning by expected use and drafts across sub-blocks are this project's.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.diffusion.reveal import active_window, confidence_rank


class Known(NamedTuple):
    """The distribution that the last check left for the state just before the current canvas.

    Attributes:
        tokens [batch, width, block, ranks]: the best tokens of each position, as they would be drawn 0, 1, .. width - 1 steps from now.
            At temperature 0 all steps are alike.
        odds [batch, block]: log-odds of the best token, -inf where nothing is known.

    A block of 4 whose first position holds 7, with one token kept a position and two steps. Position 3 would draw 13 now, but 14 a step
    later. Position 2 is the most confident, so it has rank 0. The first position has no rank, which is written as 4, the block's size:

    >>> _ = 99  # MASK
    >>> tokens = jnp.array([[[[_], [11], [12], [13]], [[_], [11], [12], [14]]]])
    >>> known = Known(tokens, odds=jnp.array([[-jnp.inf, 1.0, 3.0, 2.0]]))
    >>> distance = distances(jnp.array([[7, _, _, _]]), known, mask_id=_, sub_block=4)
    >>> rank_positions(distance, known, run_on=False).tolist()
    [[4, 2, 0, 1]]
    """

    tokens: Int[Array, "batch width block ranks"]
    odds: Float[Array, "batch block"]


class Drafts(NamedTuple):
    """Draft canvases of a graph's nodes.

    Attributes:
        tokens [batch, drafts, block]: the canvases.
        valid [batch, drafts]: whether the draft is there.
        weight [batch, drafts]: expected use, which decides which drafts are kept.

    Two rank nodes on the canvas and the distribution of `Known`'s example. The second node reveals its second pair a step later than the
    first, so it takes the token drawn then:

    >>> _ = 99  # MASK
    >>> known = Known(jnp.array([[[[_], [11], [12], [13]], [[_], [11], [12], [14]]]]), jnp.array([[-jnp.inf, 1.0, 3.0, 2.0]]))
    >>> graph = DraftGraph.from_sets([frozenset({(0, 0)}), frozenset({(0, 0), (1, 0)})], levels=[1, 2], token_ranks=1)
    >>> drafts = propose(jnp.array([[7, _, _, _]]), known, graph, mask_id=_, sub_block=4)
    >>> drafts.tokens.tolist(), drafts.valid.tolist()
    ([[[7, 99, 12, 99], [7, 99, 12, 14]]], [[True, True]])
    """

    tokens: Int[Array, "batch drafts block"]
    valid: Bool[Array, "batch drafts"]
    weight: Float[Array, "batch drafts"]

    def take(self, index: Int[Array, "batch kept"]) -> "Drafts":
        """Each row's drafts of these numbers."""
        tokens = jnp.take_along_axis(self.tokens, index[..., None], axis=1)
        return Drafts(tokens, *(jnp.take_along_axis(x, index, axis=1) for x in self[1:]))


def nothing_known(batch: int, block: int, graph: DraftGraph) -> Known:
    """The distribution before a block's first check: nothing is known, so nothing is drafted."""
    tokens = jnp.zeros((batch, graph.width, block, graph.token_ranks), jnp.int32)
    return Known(tokens, jnp.full((batch, block), -jnp.inf, jnp.float32))


def draw_steps(graph: DraftGraph) -> Int[Array, "ranked width"]:
    """How many steps from now vanilla would draw each pair of a rank node.

    Above temperature 0 a token depends on the step at which it is drawn. Vanilla is expected to reach a node of level 3 in three steps,
    by way of nodes that it contains. A pair is drawn when the first of these reveals it: at the lowest level of a contained node that
    holds the pair, minus one, as the first step is number 0. A chain of three nodes, where padding has the last step:

    >>> sets = [{(0, 0)}, {(0, 0), (1, 0)}, {(0, 0), (1, 0), (2, 1)}]
    >>> draw_steps(DraftGraph.from_sets([frozenset(node) for node in sets], levels=[1, 2, 3])).tolist()
    [[0, 2, 2], [0, 1, 2], [0, 1, 2]]

    If {(1, 0)} is a node of level 1 too, vanilla may reveal that pair in its first step:

    >>> sets = [{(0, 0)}, {(1, 0)}, {(0, 0), (1, 0)}]
    >>> draw_steps(DraftGraph.from_sets([frozenset(node) for node in sets], levels=[1, 1, 2])).tolist()
    [[0, 1], [0, 1], [0, 0]]
    """
    pairs, level = jnp.asarray(graph.pairs), jnp.asarray(graph.level)
    used = pairs[..., 0] >= 0  # [node, pair]; the rest is padding
    equal = jnp.all(pairs[:, :, None, None] == pairs[None, None], axis=-1)
    same = equal & used[:, :, None, None] & used[None, None]  # [node, pair, other, pair of other]
    holds = jnp.any(same, axis=3)  # [node, pair, other]: the other node holds this pair
    contained = jnp.all(jnp.any(same, axis=1) | ~used[None], axis=2)  # [node, other]: all pairs of the other node are in this node
    lowest = jnp.min(jnp.where(holds & contained[:, None], level, graph.width), axis=2)  # [node, pair]
    return jnp.clip(lowest - 1, 0, graph.width - 1)


def distances(canvas: Int[Array, "batch block"], known: Known, mask_id: int, sub_block: int) -> Int[Array, "batch block"]:
    """How many sub-blocks after the active one each masked position with a known distribution is. Other positions have `block`."""
    position = jnp.arange(canvas.shape[1], dtype=jnp.int32)
    ahead = (position - active_window(canvas, mask_id, sub_block)[:, None]) // sub_block
    return jnp.where((canvas == mask_id) & (known.odds > -jnp.inf), ahead, canvas.shape[1])


def rank_positions(distance: Int[Array, "batch block"], known: Known, run_on: bool) -> Int[Array, "batch block"]:
    """Position ranks by log-odds in the active sub-block. With `run_on` they go on in the next ones. Others have `block`."""
    ranks, before = jnp.full_like(distance, distance.shape[1]), jnp.zeros_like(distance[:, :1])
    for ahead in range(distance.shape[1] if run_on else 1):
        here = distance == ahead
        ranks = jnp.where(here, before + confidence_rank(known.odds, here), ranks)
        before = before + jnp.sum(here, axis=1, keepdims=True, dtype=jnp.int32)
    return ranks


def rank_drafts(canvas: Int[Array, "batch block"], known: Known, graph: DraftGraph, mask_id: int, sub_block: int) -> Drafts:
    """The rank nodes on a canvas. A node is valid if all its ranks exist."""
    ranks = rank_positions(distances(canvas, known, mask_id, sub_block), known, graph.run_on)  # [batch, block]
    position_rank, token_rank = jnp.asarray(graph.pairs)[..., 0], jnp.asarray(graph.pairs)[..., 1]  # [ranked, width]
    used = position_rank >= 0
    # A rank beyond the block is lowered, because positions without a rank have `block` and must not match.
    sought = jnp.where(used, jnp.minimum(position_rank, canvas.shape[1] - 1), -1)
    at = ranks[:, None, None, :] == sought[None, :, :, None]  # [batch, ranked, width, block]: where each pair is revealed
    feasible = jnp.all(jnp.any(at, axis=3) | ~used, axis=2) & jnp.any(used, axis=1)
    # Step and token rank are neighbours here, so the two index arrays put [ranked, width] in their place.
    by_step_and_rank = jnp.moveaxis(known.tokens, 3, 2)  # [batch, step, token rank, block]
    drawn = by_step_and_rank[:, draw_steps(graph), jnp.maximum(token_rank, 0)]  # [batch, ranked, width, block]
    # A position has at most one pair of a node. The maximum over the pairs is its token, or -1 if it has none.
    token = jnp.max(jnp.where(at, drawn, -1), axis=2)  # [batch, ranked, block]
    weight = jnp.broadcast_to(jnp.asarray(graph.weight), feasible.shape)
    return Drafts(jnp.where(token >= 0, token, canvas[:, None]), feasible, weight)


def confidence_drafts(canvas: Int[Array, "batch block"], known: Known, graph: DraftGraph, mask_id: int, sub_block: int) -> Drafts:
    """The confidence nodes on a canvas: nested sets of positions, which may run on into the next sub-blocks."""
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
    """Invalidates drafts that equal an earlier one. The first of equals takes over their largest weight."""
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
    """The `max_drafts` heaviest of the different drafts that the graph's nodes make on a canvas, heaviest first."""
    every = distinct(every_draft(canvas, known, graph, mask_id, sub_block))
    return every.take(lax.top_k(jnp.where(every.valid, every.weight, -1), graph.max_drafts)[1])


def descent(tokens: Int[Array, "batch branch block"], valid: Bool[Array, "batch branch"], mask_id: int) -> Int[Array, "batch branch"]:
    """Each branch's parent: the earlier valid branch that it properly contains and that reveals most, the first of equals."""
    child, other = tokens[:, :, None], tokens[:, None]
    subset = jnp.all((other == mask_id) | (other == child), axis=-1) & jnp.any(other != child, axis=-1)
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    count = jnp.sum(tokens != mask_id, axis=-1, dtype=jnp.int32)
    size = jnp.where(subset & valid[:, None] & (index < index[:, None]), count[:, None], -1)
    return jnp.argmax(size, axis=-1).astype(jnp.int32)
