"""The drafts of two decodes in lock-step: where the two sides' numbers lead to other branches, and how near they were to the same ones."""

from typing import NamedTuple

import torch

import specfold_jax as sf
from parity_tests.lockstep.flip import Flip
from specfold_torch_ref.diffusion.distribution import Distributions
from specfold_torch_ref.diffusion.draft import Known
from specfold_torch_ref.diffusion.layout import lay_out
from specfold_torch_ref.diffusion.row import DONE, Row
from specfold_torch_ref.diffusion.state import DecodeState
from specfold_torch_ref.models.check import Branches
from specfold_torch_ref.models.reference import logits

LEVELS, ROUNDS = 64, 3
"""The smallest move is looked for among so many, so many times, each time between two neighbours: it is found to 64**-3 of the largest."""


class Numbers(NamedTuple):
    """What drafts are made from: of a state, or of one side of it."""

    known: Known
    following: torch.Tensor

    def row(self, index: int, times: int) -> "Numbers":
        """One row's, so many times."""
        known = Known(*(x[index].expand(times, *x.shape[1:]) for x in self.known))
        return Numbers(known, self.following[index].expand(times))


class Gaps(NamedTuple):
    """By how much one row's numbers of the Torch side must move until they say what the JAX side's do: `odds` [block], `tokens`
    [block, ranks], `following` []; 0 where they say the same."""

    odds: torch.Tensor
    tokens: torch.Tensor
    following: torch.Tensor

    def largest(self) -> float:
        """The move that makes all of them the JAX side's."""
        return max(float(x.amax()) for x in self)


def same_branches(a: Branches, b: Branches) -> torch.Tensor:
    """Row by row, whether both have the same branches; what a place holds that is not valid does not matter."""
    same = (a.valid == b.valid).all(dim=1)
    same &= ((a.tokens == b.tokens).all(dim=2) | ~a.valid).all(dim=1)
    for mine, other in ((a.parent, b.parent), (a.context, b.context)):
        if mine is not None:
            same &= ((mine == other) | ~a.valid).all(dim=1)
    return same


def with_numbers(state: DecodeState, numbers: Numbers, row: int | None = None) -> DecodeState:
    """The state with these numbers; of one row only, once for each of them."""
    if row is not None:
        count = len(numbers.following)
        state = state._replace(row=Row(*(x[row].expand(count, *x.shape[1:]) for x in state.row)))
    return state._replace(known=numbers.known, following=numbers.following)


def leads(ours: Numbers, theirs: Numbers, row: int, seen: Distributions, branch: int) -> Gaps:
    """Of one row, how far apart the sides' log-odds are, and by how many logits the Torch side's tokens lead the JAX side's."""
    odds = (ours.known.odds[row] - theirs.known.odds[row]).abs()
    odds = torch.where(ours.known.odds[row] == theirs.known.odds[row], 0, odds).nan_to_num(nan=torch.inf, posinf=torch.inf)
    head, rows = seen.head, seen.rows.row[row, branch]
    scores = logits(head.hidden[row, branch][rows.to(head.hidden.device)], head.weight).cpu()  # [head row, vocab]
    tokens = torch.zeros(ours.known.tokens.shape[2:])
    first, width = int(seen.first[row, branch]), seen.width
    window = slice(first, first + width)
    mine, other = ours.known.tokens[row, 0, window], theirs.known.tokens[row, 0, window]
    tokens[window] = (scores[:width].gather(1, mine) - scores[:width].gather(1, other)).abs()
    following = (scores[-1, ours.following[row]] - scores[-1, theirs.following[row]]).abs()
    return Gaps(odds, tokens, following)


def moved(ours: Numbers, theirs: Numbers, gaps: Gaps, moves: torch.Tensor) -> Numbers:
    """One row's numbers on the Torch side, moved towards the JAX side's by at most so much: one row for each of `moves` [moves]."""
    by = moves[:, None]
    step = (theirs.known.odds - ours.known.odds).sign().nan_to_num() * by
    odds = torch.where(gaps.odds <= by, theirs.known.odds, ours.known.odds + step)
    tokens = torch.where((gaps.tokens <= by[..., None])[:, None], theirs.known.tokens, ours.known.tokens)
    return Numbers(Known(tokens, odds), torch.where(gaps.following <= moves, theirs.following, ours.following))


def smallest_move(state: DecodeState, ours: Numbers, theirs: Numbers, row: int, gaps: Gaps, want: Branches, lay) -> float:
    """The least that the Torch side's numbers of a row must move towards the JAX side's for the JAX side's branches."""
    mine, other = ours.row(row, LEVELS), theirs.row(row, LEVELS)
    want = Branches(*(None if x is None else x[row].expand(LEVELS, *x.shape[1:]) for x in want))
    low, high = 0.0, gaps.largest()
    for _ in range(ROUNDS if high < torch.inf else 0):
        moves = torch.linspace(low, high, LEVELS, dtype=torch.float64).float()
        moves[-1] = high
        enough = same_branches(want, lay(with_numbers(state, moved(mine, other, gaps, moves), row)))
        if not torch.any(enough):  # the numbers moved all the way are the JAX side's: not reached
            return torch.inf
        index = int(enough.int().argmax())
        low, high = float(moves[max(index - 1, 0)]), float(moves[index])
    return high


def largest_differences(ours: Numbers, theirs: Numbers, masked: torch.Tensor) -> torch.Tensor:
    """Of each row with `masked` [batch, block] positions that both sides know, the largest |log-odds of one side - the other's| there."""
    both = masked & torch.isfinite(ours.known.odds) & torch.isfinite(theirs.known.odds)
    apart = torch.where(both, (ours.known.odds - theirs.known.odds).abs(), 0)  # inf - inf is not taken
    return apart.amax(dim=1)[both.any(dim=1)]


def draft_flips(
    ours: DecodeState,
    theirs: Numbers,
    source: tuple[Distributions, torch.Tensor],
    model: sf.ModelConfig,
    decode: sf.DecodeConfig,
    graph: sf.DraftGraph,
    step: int,
) -> tuple[dict[int, Flip], int, torch.Tensor]:
    """Rows that go on whose next branches would differ between the two sides' numbers, how many rows go on, and of those with masked
    positions that both sides know the largest difference in log-odds there.

    `ours`: the state after a step, with the Torch side's own numbers; `source`: what they are from. At T = 0 only. The margin is the
    smallest move of the Torch side's numbers towards the JAX side's that leads to the JAX side's branches.
    """

    def lay(state: DecodeState) -> Branches:
        return lay_out(state, graph, model, decode)

    mine, going = Numbers(ours.known, ours.following), ours.row.phase != DONE
    want = lay(with_numbers(ours, theirs))
    found, masked = {}, ours.row.canvas == model.mask_id  # only these positions can be drafted
    for row in torch.nonzero(going & ~same_branches(want, lay(ours))).flatten().tolist():
        gaps = leads(mine, theirs, row, source[0], int(source[1][row]))
        odds, tokens = torch.where(masked[row], gaps.odds, 0), torch.where(masked[row, :, None], gaps.tokens, 0)
        gaps = gaps._replace(odds=odds, tokens=tokens)
        move = smallest_move(ours, mine, theirs, row, gaps, want, lay)
        found[row] = Flip("drafts", move, gaps.largest(), step, f"branch {int(source[1][row])}")
    return found, int(going.sum()), largest_differences(mine, theirs, masked & going[:, None])
