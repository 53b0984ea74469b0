"""Vanilla's rule on one canvas: which tokens are revealed, how safe these decisions are, and the stop test.

Speculation is lossless because it calls these same functions on its branches.
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
    """Rank of each candidate by log-odds, 0 the most confident. Ties go to the lowest position. Others have rank `block`."""
    position = jnp.arange(odds.shape[-1])
    mine, other = odds[..., :, None], odds[..., None, :]
    ahead = candidate[..., None, :] & ((other > mine) | ((other == mine) & (position < position[:, None])))
    rank = jnp.sum(ahead, axis=-1, dtype=jnp.int32)
    return jnp.where(candidate, rank, odds.shape[-1])


class Decision(NamedTuple):
    """What vanilla decides on a canvas.

    Attributes:
        reveal [*rows, block]: the positions to reveal.
        margin [*rows]: the smallest log-odds margin of all decisions made.
    """

    reveal: Bool[Array, "*rows block"]
    margin: Float[Array, "*rows"]


def at_least(step: Int[Array, "*rows"], steps: int | None, block: int) -> Int[Array, "*rows"]:
    """How many tokens a step reveals in any case: 1, or with `steps` block // steps, and one more in the first block % steps steps."""
    if steps is None:
        return jnp.ones_like(step)
    return block // steps + (step < block % steps).astype(step.dtype)


def decide(
    canvas: Int[Array, "*rows block"], ranked: Ranked, step: Int[Array, "*rows"], model: ModelConfig, decode: DecodeConfig
) -> Decision:
    """Reveals every candidate that passes the threshold, and always the best k.

    Three kinds of decisions have a margin:

    - whether a candidate passes the threshold, except for the best k, which are revealed anyway;
    - which token a revealed position takes, the best or the second;
    - which position is the k-th, if fewer than k pass.
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
