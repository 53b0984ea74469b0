"""The vanilla reveal rule on one canvas: scores, which tokens are revealed, how safe those decisions are, and when a row ends.

Speculation calls these same functions on its branches; that is what makes it lossless.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specfold_jax.config import DecodeConfig, ModelConfig
from specfold_jax.models.sampling import Ranked


def active_window(canvas: Int[Array, "*rows block"], mask_id: int, sub_block: int) -> Int[Array, "*rows"]:
    """First position of the sub-block that holds the first MASK (0 on a complete canvas)."""
    return jnp.argmax(canvas == mask_id, axis=-1).astype(jnp.int32) // sub_block * sub_block


def candidates(canvas: Int[Array, "*rows block"], mask_id: int, sub_block: int) -> Bool[Array, "*rows block"]:
    """The masked positions of the active sub-block."""
    position = jnp.arange(canvas.shape[-1], dtype=jnp.int32)
    start = active_window(canvas, mask_id, sub_block)[..., None]
    return (canvas == mask_id) & (position >= start) & (position < start + sub_block)


def confidence_rank(odds: Float[Array, "*rows block"], candidate: Bool[Array, "*rows block"]) -> Int[Array, "*rows block"]:
    """Rank of each candidate by log-odds, 0 the most confident; ties go to the lowest position. Others come after all candidates."""
    position = jnp.arange(odds.shape[-1])
    mine, other = odds[..., :, None], odds[..., None, :]
    ahead = candidate[..., None, :] & ((other > mine) | ((other == mine) & (position < position[:, None])))
    rank = jnp.sum(ahead, axis=-1, dtype=jnp.int32)
    return jnp.where(candidate, rank, odds.shape[-1])


class Decision(NamedTuple):
    """`reveal` bool [*rows, block]: positions to reveal; `margin` [*rows]: the smallest log-odds margin among the decisions made."""

    reveal: Bool[Array, "*rows block"]
    margin: Float[Array, "*rows"]


def at_least(step: Int[Array, "*rows"], steps: int | None, block: int) -> Int[Array, "*rows"]:
    """Tokens a step reveals whatever their confidence: 1, or block // steps with the remainder spread over the first steps."""
    if steps is None:
        return jnp.ones_like(step)
    return block // steps + (step < block % steps).astype(step.dtype)


def decide(
    canvas: Int[Array, "*rows block"], ranked: Ranked, step: Int[Array, "*rows"], model: ModelConfig, decode: DecodeConfig
) -> Decision:
    """Reveals every candidate that passes the threshold, united with the best k (always at least one).

    The margin covers: each candidate's log-odds against the threshold (the always-revealed best k excepted), best against second token
    where a token is revealed, and the k-th against the next position where fewer than k pass.
    """
    block = canvas.shape[-1]
    candidate = candidates(canvas, model.mask_id, decode.window(model))
    threshold = jnp.asarray(decode.threshold, jnp.float32)
    bar = jnp.log(threshold) - jnp.log1p(-threshold)  # logit; 0 -> -inf, 1 -> +inf
    passes = candidate & (ranked.odds > bar if model.strict else ranked.odds >= bar) & (bar < jnp.inf)
    least = at_least(step, decode.steps, block)[..., None]
    by_odds = confidence_rank(ranked.odds, candidate)
    order = by_odds if decode.order == "confidence" else confidence_rank(jnp.zeros_like(ranked.odds), candidate)
    reveal = passes | (candidate & (order < least))

    infinity = jnp.full_like(ranked.odds, jnp.inf)
    to_bar = jnp.where(candidate & (order >= least) & jnp.isfinite(bar), jnp.abs(ranked.odds - bar), infinity)
    to_second = jnp.where(reveal, ranked.gap, infinity)
    margin = jnp.min(jnp.minimum(to_bar, to_second), axis=-1)
    if decode.order == "confidence":
        kth = jnp.sum(jnp.where(by_odds == least - 1, ranked.odds, 0), axis=-1)
        after = candidate & (by_odds == least)  # where `least` is the whole block, others have that rank too
        following = jnp.sum(jnp.where(after, ranked.odds, 0), axis=-1)
        contested = (jnp.sum(passes, axis=-1) < least[..., 0]) & jnp.any(after, axis=-1)
        margin = jnp.where(contested, jnp.minimum(margin, kth - following), margin)
    return Decision(reveal, margin)


def shows_stop(
    canvas: Int[Array, "batch block"], generated: Bool[Array, "batch block"], stop_ids: tuple[int, ...], mask_id: int
) -> Bool[Array, " batch"]:
    """Whether a generated stop token stands with no MASK before it."""
    if not stop_ids:
        return jnp.zeros(canvas.shape[0], bool)
    is_stop = jnp.isin(canvas, jnp.asarray(stop_ids, jnp.int32)) & generated
    no_mask_before = jnp.cumsum(canvas == mask_id, axis=-1) == 0
    return jnp.any(is_stop & no_mask_before, axis=-1)
