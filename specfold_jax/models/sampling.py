"""A token for every position: ranks, log-odds, and the noise that sampling adds."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specfold_jax.models.noise import gumbel


class Ranked(NamedTuple):
    """The token distribution of some rows of hidden states.

    Attributes:
        tokens [*rows, ranks]: the best tokens, best first. MASK is never among them.
        odds [*rows]: log-odds of the best token against all other entries of the vocabulary.
        gap [*rows]: the best token's score minus the second's.
    """

    tokens: Int[Array, "*rows ranks"]
    odds: Float[Array, "*rows"]
    gap: Float[Array, "*rows"]


def drawn_or_greedy[T](temperature: Float[Array, ""] | None, drawn: Callable[[], T], greedy: Callable[[], T]) -> T:
    """`drawn()` at temperatures above 0, `greedy()` at 0. If the temperature is None, the decode is greedy and `drawn` is not traced."""
    return greedy() if temperature is None else lax.cond(temperature > 0, drawn, greedy)


def rank(
    logits: Float[Array, "*rows vocab"],
    seed: Int[Array, "*rows"],
    position: Int[Array, "*rows"],
    step: Int[Array, "*rows"],
    temperature: Float[Array, ""] | None,
    mask_id: int,
    ranks: int,
) -> Ranked:
    """Ranks tokens by logit, or by logit / T + Gumbel noise at T > 0 (None: T = 0). Ties go to the lowest id.

    Log-odds are those of softmax(logits / T), or of softmax(logits) at T = 0: the top logit minus the log-sum-exp of the rest. They do
    not saturate as probabilities do.
    """
    if temperature is not None:
        logits = logits / jnp.where(temperature > 0, temperature, 1)
    scores = drawn_or_greedy(temperature, lambda: logits + gumbel(seed, position, step, logits.shape[-1]), lambda: logits)
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    best, tokens = lax.top_k(jnp.where(ids == mask_id, -jnp.inf, scores), max(ranks, 2))
    chosen = ids == tokens[..., :1]
    others = jax.nn.logsumexp(jnp.where(chosen, -jnp.inf, logits), axis=-1)
    odds = jnp.sum(jnp.where(chosen, logits, 0), axis=-1) - others
    return Ranked(tokens[..., :ranks], odds, best[..., 0] - best[..., 1])
