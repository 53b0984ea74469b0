"""A decision on which two decodes in lock-step differ, and when it counts as a tie."""

from typing import NamedTuple

TIE = 1e-4
"""What counts as a tie in fp32: |relative residual - tau| below this share of tau, or a decision's margin below this many log-odds."""


class Flip(NamedTuple):
    """A decision on which the two sides differ. `what`: "gate", "reveal", "guard", "first token" (of the next block) or "drafts" (of the
    next forward), or what of a row's state differs where none of these did.

    `margin`: how far the Torch side was from the other decision, `difference`: how far apart the two sides' numbers are there; in
    log-odds, a gate's as shares of tau. `step`: the forward in which it was made, counted from 0; `place`: where in it, in words.
    """

    what: str
    margin: float
    difference: float
    step: int = 0
    place: str = ""


class Rounding(NamedTuple):
    """How far apart two sides of a narrow dtype may be: `odds` in log-odds, `gates` in relative residuals as shares of tau.

    `drafts`: in the log-odds that a forward's drafts are made from, of later sub-blocks too. Any of them may be the one that decides, so
    that it is measured on each forward's largest difference.
    """

    odds: float
    gates: float
    drafts: float


def is_tie(flip: Flip, rounding: Rounding | None = None) -> bool:
    """Whether a decision was so close that rounding explains it. Never true where no decision differed (its difference is not known).

    float32 (no `rounding`): its margin is within `TIE`. Narrow dtypes: its margin is within the rounding of log-odds, that of drafts
    within the rounding of what they are made from; a gate's tau lies between the two sides' relative residuals, and no further from the
    Torch side's than rounding reaches.
    """
    if flip.difference != flip.difference:
        return False
    if rounding is None:
        return flip.margin <= TIE
    match flip.what:
        case "gate":
            return flip.margin <= min(flip.difference, rounding.gates)
        case "drafts":
            return flip.margin <= rounding.drafts
        case _:
            return flip.margin <= rounding.odds
