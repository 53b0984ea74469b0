"""Whether what two decodes differ in comes from ties: the differences of rows followed in lock-step, judged and counted."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from parity_tests.lockstep.flip import Flip, Rounding, is_tie
from parity_tests.lockstep.follow import Followed

EPS = float(torch.finfo(torch.bfloat16).eps)
MOST_ODDS = 64 * EPS
"""What is measured between two sides is taken for rounding up to this many log-odds: a side that is wrong everywhere does not widen it."""
MOST_RESIDUAL = 2 * EPS
"""The same of relative residuals, norms of states that every layer rounds. The tiny model shows half of it."""


def rounding_of(followed: Sequence[Followed], tau: float) -> Rounding:
    """What rounding does in a narrow dtype: to log-odds and to what drafts are made from, the measured 99.9th percentiles of all
    differences and of every forward's largest, up to `MOST_ODDS`; to relative residuals, a fixed share.

    Drafts that log-odds decide never move further than their forward's largest difference, and of a thousand forwards the percentile is
    about the largest of all: it is `MOST_ODDS` that finds a side that is wrong.
    """

    def margin(parts: Iterable[torch.Tensor]) -> float:
        return min(float(np.quantile(torch.cat([torch.zeros(1), *parts]).numpy(), 0.999)), MOST_ODDS)

    odds, drafts = margin(each.differences for each in followed), margin(each.draft_differences for each in followed)
    return Rounding(odds, MOST_RESIDUAL / tau if tau else 0.0, drafts)


def explained(followed: Followed, row: int, rounding: Rounding | None = None, parts: bool = False) -> bool:
    """Whether a row differs for ties alone: there is one, and every one is a tie. `parts`: one of them must be where the row parts."""
    flips = followed.of(row)
    return bool(flips) and all(is_tie(flip, rounding) for flip in flips) and (row in followed.apart or not parts)


def count(flips: Sequence[Flip], compared: int, rounding: Rounding | None) -> dict[str, Any]:
    """Of so many comparisons: how many differ, how far the furthest of them was from the other outcome, how many are no ties."""
    furthest = max((flip.margin for flip in flips), default=0.0)
    return {
        "compared": compared,
        "differ": len(flips),
        "furthest": furthest if np.isfinite(furthest) else None,
        "unexplained": sum(not is_tie(flip, rounding) for flip in flips),
    }


def counts(followed: Sequence[Followed], rounding: Rounding | None) -> dict[str, dict[str, Any]]:
    """All that was compared in lock-step: gates (distances are shares of tau), drafts (of a forward), decisions (where rows part)."""

    def every(name: str) -> list[Flip]:
        return [flip for each in followed for flips in getattr(each, name).values() for flip in flips]

    partings = [flip for each in followed for flip in each.apart.values()]
    return {
        "gates": count(every("gates"), sum(each.free for each in followed), rounding),
        "drafts": count(every("drafts"), sum(each.forwards for each in followed), rounding),
        "decisions": count(partings, sum(len(each.differences) for each in followed), rounding),
    }


def shown(flip: Flip) -> dict[str, Any]:
    """For JSON, which has finite numbers only."""
    return {name: x if not isinstance(x, float) or np.isfinite(x) else None for name, x in flip._asdict().items()}


def account(followed: Followed, row: int, rounding: Rounding | None, parts: bool, repeated: bool) -> dict[str, Any]:
    """A row's first difference in lock-step, how many there are of each kind, and whether they explain it.

    `repeated`: there is none, and the Torch side's free decode is the JAX side's one step by step. The row then differs between two
    compilations of the same JAX function, whose rounding depends on how operations are fused: an explanation for narrow dtypes only.
    """
    flips = followed.of(row)
    kinds = {"gates": len(followed.gates.get(row, [])), "drafts": len(followed.drafts.get(row, [])), "parts": row in followed.apart}
    by_compilation = not flips and repeated and rounding is not None
    found = {"first": shown(flips[0]) if flips else None} | kinds | {"by_compilation": by_compilation}
    return found | {"explained": by_compilation or explained(followed, row, rounding, parts)}
