"""Draft canvases from a graph: the drafts of its rank nodes and confidence nodes, without duplicates, and the heaviest of them.

Rank nodes are Spiffy's (arXiv 2509.18085). Confidence nodes, pruning by expected use and drafts across sub-blocks are this project's.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specfold_jax.diffusion.graph import DraftGraph
from specfold_torch_ref.diffusion.reveal import active_window, confidence_rank


class Known(NamedTuple):
    """The distribution that the last check left for the state just before the current canvas.

    `specfold_jax.diffusion.draft.Known` explains the fields, with an example.
    """

    tokens: Int[Tensor, "batch width block ranks"]
    odds: Float[Tensor, "batch block"]


class Drafts(NamedTuple):
    """Draft canvases of a graph's nodes.

    `specfold_jax.diffusion.draft.Drafts` explains the fields, with an example.
    """

    tokens: Int[Tensor, "batch drafts block"]
    valid: Bool[Tensor, "batch drafts"]
    weight: Float[Tensor, "batch drafts"]

    def take(self, index: Int[Tensor, "batch kept"]) -> "Drafts":
        """Each row's drafts of these numbers."""
        row = torch.arange(index.shape[0])[:, None]
        return Drafts(*(x[row, index] for x in self))


def nothing_known(batch: int, block: int, graph: DraftGraph) -> Known:
    """The distribution before a block's first check: nothing is known, so nothing is drafted."""
    tokens = torch.zeros((batch, graph.width, block, graph.token_ranks), dtype=torch.long)
    return Known(tokens, torch.full((batch, block), -torch.inf))


def leaf(graph: DraftGraph, name: str) -> Tensor:
    """One of the graph's arrays as a tensor. Integers become int64."""
    x = torch.from_numpy(np.array(getattr(graph, name)))
    return x.long() if x.dtype == torch.int32 else x


def draw_steps(graph: DraftGraph) -> Int[Tensor, "ranked width"]:
    """How many steps from now vanilla would draw each pair of a rank node.

    That is the lowest level of a contained node that holds the pair, minus one. `specfold_jax.diffusion.draft.draw_steps` has examples.
    """
    pairs, level = leaf(graph, "pairs"), leaf(graph, "level")
    used = pairs[..., 0] >= 0  # [node, pair]; the rest is padding
    equal = torch.all(pairs[:, :, None, None] == pairs[None, None], dim=-1)
    same = equal & used[:, :, None, None] & used[None, None]  # [node, pair, other, pair of other]
    holds = torch.any(same, dim=3)  # [node, pair, other]: the other node holds this pair
    contained = torch.all(torch.any(same, dim=1) | ~used[None], dim=2)  # [node, other]: all pairs of the other node are in this node
    lowest = torch.where(holds & contained[:, None], level, graph.width).amin(dim=2)  # [node, pair]
    return torch.clamp(lowest - 1, 0, graph.width - 1)


def distances(canvas: Int[Tensor, "batch block"], known: Known, mask_id: int, sub_block: int) -> Int[Tensor, "batch block"]:
    """How many sub-blocks after the active one each masked position with a known distribution is. Other positions have `block`."""
    position = torch.arange(canvas.shape[1])
    ahead = (position - active_window(canvas, mask_id, sub_block)[:, None]) // sub_block
    return torch.where((canvas == mask_id) & (known.odds > -torch.inf), ahead, canvas.shape[1])


def rank_positions(distance: Int[Tensor, "batch block"], known: Known, run_on: bool) -> Int[Tensor, "batch block"]:
    """Position ranks by log-odds in the active sub-block. With `run_on` they go on in the next ones. Others have `block`."""
    block = distance.shape[1]
    ranks, before = torch.full_like(distance, block), torch.zeros_like(distance[:, :1])
    for ahead in range(block if run_on else 1):
        here = distance == ahead
        if torch.any(here):
            ranks = torch.where(here, before + confidence_rank(known.odds, here), ranks)
            before = before + torch.sum(here, dim=1, keepdim=True)
    return ranks


def rank_drafts(canvas: Int[Tensor, "batch block"], known: Known, graph: DraftGraph, mask_id: int, sub_block: int) -> Drafts:
    """The rank nodes on a canvas. A node is valid if all its ranks exist."""
    ranks = rank_positions(distances(canvas, known, mask_id, sub_block), known, graph.run_on)  # [batch, block]
    position_rank, token_rank = leaf(graph, "pairs").unbind(-1)  # [ranked, width]
    used = position_rank >= 0
    # A rank beyond the block is lowered, because positions without a rank have `block` and must not match.
    sought = torch.where(used, position_rank.clamp(max=canvas.shape[1] - 1), -1)
    at = ranks[:, None, None, :] == sought[None, :, :, None]  # [batch, ranked, width, block]: where each pair is revealed
    feasible = torch.all(torch.any(at, dim=3) | ~used, dim=2) & torch.any(used, dim=1)
    # Step and token rank are neighbours here, so the two index tensors put [ranked, width] in their place.
    by_step_and_rank = known.tokens.movedim(3, 2)  # [batch, step, token rank, block]
    drawn = by_step_and_rank[:, draw_steps(graph), token_rank.clamp(min=0)]  # [batch, ranked, width, block]
    # A position has at most one pair of a node. The maximum over the pairs is its token, or -1 if it has none.
    token = torch.where(at, drawn, -1).amax(dim=2)  # [batch, ranked, block]
    return Drafts(torch.where(token >= 0, token, canvas[:, None]), feasible, leaf(graph, "weight").expand(feasible.shape))


def confidence_drafts(canvas: Int[Tensor, "batch block"], known: Known, graph: DraftGraph, mask_id: int, sub_block: int) -> Drafts:
    """The confidence nodes on a canvas: nested sets of positions, which may run on into the next sub-blocks."""
    distance = distances(canvas, known, mask_id, sub_block)
    here = distance == 0
    best = confidence_rank(known.odds, here) == 0
    theta, hop = leaf(graph, "theta")[:, None], leaf(graph, "hop")[:, None]
    at_hop = (distance[:, None] == hop) & ((known.odds[:, None] > theta) | best[:, None])  # [batch, thetas, block]
    reveal = (distance[:, None] < hop) | at_hop
    grows = torch.any(reveal[:, 1:] != reveal[:, :-1], dim=-1)
    level = torch.cat([torch.zeros_like(reveal[:, :1, 0], dtype=torch.long), torch.cumsum(grows, dim=1)], dim=1)  # equal sets share a level
    # A token is drawn at the step of the first, smallest set that holds its position.
    first = torch.where(reveal, level[..., None], graph.width).amin(dim=1)
    step = first.clamp(max=graph.width - 1)
    token = torch.gather(known.tokens[..., 0], 1, step[:, None])  # [batch, 1, block]
    feasible = torch.any(here, dim=1, keepdim=True) & torch.any(at_hop, dim=-1)
    return Drafts(torch.where(reveal, token, canvas[:, None]), feasible, leaf(graph, "theta_weight").expand(feasible.shape))


def distinct(drafts: Drafts) -> Drafts:
    """Invalidates drafts that equal an earlier one. The first of equals takes over their largest weight."""
    same = torch.all(drafts.tokens[:, :, None] == drafts.tokens[:, None], dim=-1) & drafts.valid[:, None] & drafts.valid[..., None]
    index = torch.arange(same.shape[-1])
    repeated = torch.any(same & (index < index[:, None]), dim=-1)
    weight = torch.where(same, drafts.weight[:, None], drafts.weight[..., None]).amax(dim=-1)
    return drafts._replace(valid=drafts.valid & ~repeated, weight=weight)


def every_draft(canvas: Int[Tensor, "batch block"], known: Known, graph: DraftGraph, mask_id: int, sub_block: int) -> Drafts:
    """The drafts of all nodes: rank nodes, then confidence nodes."""
    sources = []
    if graph.pairs.shape[0]:
        sources.append(rank_drafts(canvas, known, graph, mask_id, sub_block))
    if graph.theta.shape[0]:
        sources.append(confidence_drafts(canvas, known, graph, mask_id, sub_block))
    return Drafts(*(torch.cat(parts, dim=1) for parts in zip(*sources, strict=True)))


def propose(canvas: Int[Tensor, "batch block"], known: Known, graph: DraftGraph, mask_id: int, sub_block: int) -> Drafts:
    """The `max_drafts` heaviest of the different drafts that the graph's nodes make on a canvas, heaviest first."""
    every = distinct(every_draft(canvas, known, graph, mask_id, sub_block))
    heaviest = torch.sort(torch.where(every.valid, every.weight, -1), dim=1, descending=True, stable=True).indices
    return every.take(heaviest[:, : graph.max_drafts])


def descent(tokens: Int[Tensor, "batch branch block"], valid: Bool[Tensor, "batch branch"], mask_id: int) -> Int[Tensor, "batch branch"]:
    """Each branch's parent: the earlier valid branch that it properly contains and that reveals most, the first of equals."""
    child, other = tokens[:, :, None], tokens[:, None]
    subset = torch.all((other == mask_id) | (other == child), dim=-1) & torch.any(other != child, dim=-1)
    index = torch.arange(tokens.shape[1])
    count = torch.sum(tokens != mask_id, dim=-1)
    size = torch.where(subset & valid[:, None] & (index < index[:, None]), count[:, None], -1)
    return torch.argmax(size, dim=-1)
