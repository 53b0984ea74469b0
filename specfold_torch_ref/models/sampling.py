"""A token for every position: ranks, log-odds, and the noise that sampling adds."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specfold_torch_ref.models.noise import gumbel


class Ranked(NamedTuple):
    """The token distribution of some rows of hidden states.

    Attributes:
        tokens [*rows, ranks]: the best tokens, best first. MASK is never among them.
        odds [*rows]: log-odds of the best token against all other entries of the vocabulary.
        gap [*rows]: the best token's score minus the second's.
    """

    tokens: Int[Tensor, "*rows ranks"]
    odds: Float[Tensor, "*rows"]
    gap: Float[Tensor, "*rows"]


def rank(
    logits: Float[Tensor, "*rows vocab"],
    seed: Int[Tensor, "*rows"],
    position: Int[Tensor, "*rows"],
    step: Int[Tensor, "*rows"],
    temperature: float,
    mask_id: int,
    ranks: int,
) -> Ranked:
    """Ranks tokens by logit, or by logit / T + Gumbel noise at T > 0. Ties go to the lowest id.

    Log-odds are those of softmax(logits / T), or of softmax(logits) at T = 0: the top logit minus the log-sum-exp of the rest. They do
    not saturate as probabilities do.
    """
    scores = logits
    if temperature > 0:
        logits = logits / temperature
        scores = logits + gumbel(seed, position, step, logits.shape[-1])
    left, tokens, best = scores.clone(), [], []
    left[..., mask_id] = -torch.inf
    for _ in range(max(ranks, 2)):  # argmax returns the first of equals, which topk does not promise
        token = torch.argmax(left, dim=-1, keepdim=True)
        tokens.append(token)
        best.append(torch.gather(left, -1, token))
        left = left.scatter(-1, token, -torch.inf)
    others = torch.logsumexp(logits.scatter(-1, tokens[0], -torch.inf), dim=-1)
    odds = torch.gather(logits, -1, tokens[0])[..., 0] - others
    return Ranked(torch.cat(tokens[:ranks], dim=-1).int(), odds, (best[0] - best[1])[..., 0])
