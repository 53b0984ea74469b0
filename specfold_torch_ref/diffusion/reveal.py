"""Vanilla's rule on one canvas: which tokens are revealed, how safe these decisions are, and the stop test.

Speculation is lossless because it calls these same functions on its branches.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specfold_jax.config import DecodeConfig, ModelConfig
from specfold_torch_ref.models.sampling import Ranked


def active_window(canvas: Int[Tensor, "*rows block"], mask_id: int, sub_block: int) -> Int[Tensor, "*rows"]:
    """First position of the sub-block that holds the first MASK (0 on a complete canvas)."""
    return torch.argmax((canvas == mask_id).int(), dim=-1) // sub_block * sub_block


def candidates(canvas: Int[Tensor, "*rows block"], mask_id: int, sub_block: int) -> Bool[Tensor, "*rows block"]:
    """The masked positions of the active sub-block."""
    position = torch.arange(canvas.shape[-1])
    start = active_window(canvas, mask_id, sub_block)[..., None]
    return (canvas == mask_id) & (position >= start) & (position < start + sub_block)


def confidence_rank(odds: Float[Tensor, "*rows block"], candidate: Bool[Tensor, "*rows block"]) -> Int[Tensor, "*rows block"]:
    """Rank of each candidate by log-odds, 0 the most confident. Ties go to the lowest position. Others have rank `block`."""
    position = torch.arange(odds.shape[-1])
    mine, other = odds[..., :, None], odds[..., None, :]
    ahead = candidate[..., None, :] & ((other > mine) | ((other == mine) & (position < position[:, None])))
    return torch.where(candidate, torch.sum(ahead, dim=-1), odds.shape[-1])


class Decision(NamedTuple):
    """What vanilla decides on a canvas.

    Attributes:
        reveal [*rows, block]: the positions to reveal.
        margin [*rows]: the smallest log-odds margin of all decisions made.
    """

    reveal: Bool[Tensor, "*rows block"]
    margin: Float[Tensor, "*rows"]


def at_least(step: Int[Tensor, "*rows"], steps: int | None, block: int) -> Int[Tensor, "*rows"]:
    """How many tokens a step reveals in any case: 1, or with `steps` block // steps, and one more in the first block % steps steps."""
    if steps is None:
        return torch.ones_like(step)
    return block // steps + (step < block % steps).to(step.dtype)


def decide(
    canvas: Int[Tensor, "*rows block"], ranked: Ranked, step: Int[Tensor, "*rows"], model: ModelConfig, decode: DecodeConfig
) -> Decision:
    """Reveals every candidate that passes the threshold, and always the best k.

    Three kinds of decisions have a margin:

    - whether a candidate passes the threshold, except for the best k, which are revealed anyway;
    - which token a revealed position takes, the best or the second;
    - which position is the k-th, if fewer than k pass.
    """
    candidate = candidates(canvas, model.mask_id, decode.window(model))
    bar = torch.logit(torch.tensor(float(np.asarray(decode.threshold)), dtype=torch.float32))  # 0 -> -inf, 1 -> +inf
    passes = candidate & (ranked.odds > bar if model.strict else ranked.odds >= bar) & (bar < torch.inf)
    least = at_least(step, decode.steps, canvas.shape[-1])[..., None]
    by_odds = confidence_rank(ranked.odds, candidate)
    order = by_odds if decode.order == "confidence" else confidence_rank(torch.zeros_like(ranked.odds), candidate)
    reveal = passes | (candidate & (order < least))

    to_bar = torch.where(candidate & (order >= least) & torch.isfinite(bar), torch.abs(ranked.odds - bar), torch.inf)
    to_second = torch.where(reveal, ranked.gap, torch.inf)
    margin = torch.amin(torch.minimum(to_bar, to_second), dim=-1)
    if decode.order == "confidence":
        kth = torch.sum(torch.where(by_odds == least - 1, ranked.odds, 0), dim=-1)
        after = candidate & (by_odds == least)  # where `least` is the whole block, others have that rank too
        following = torch.sum(torch.where(after, ranked.odds, 0), dim=-1)
        contested = (torch.sum(passes, dim=-1) < least[..., 0]) & torch.any(after, dim=-1)
        margin = torch.where(contested, torch.minimum(margin, kth - following), margin)
    return Decision(reveal, margin)


def shows_stop(
    canvas: Int[Tensor, "batch block"], generated: Bool[Tensor, "batch block"], stop_ids: tuple[int, ...], mask_id: int
) -> Bool[Tensor, " batch"]:
    """Whether a generated stop token stands with no MASK before it."""
    is_stop = torch.isin(canvas, torch.tensor(stop_ids, dtype=canvas.dtype)) & generated
    no_mask_before = torch.cumsum(canvas == mask_id, dim=-1) == 0
    return torch.any(is_stop & no_mask_before, dim=-1)
