"""What a run did: counts and times, summed over rows, and each row's answer."""

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from specfold_jax.diffusion.state import Decoded
from specfold_jax.diffusion.validate import STATUS


@dataclass(frozen=True)
class Summary:
    """What a run did. Counts are sums over `rows` decoded rows; `tokens`: tokens generated, stop tokens included.

    `seconds`: wall time of the decodes without `compile_seconds`. `nfe` = `checks` + `commits`, `prefills` apart. `recompute`: per
    layer, the shares of draft rows computed before attention and before the feed-forward network; None without drafts.
    `refused`: index and reason of each row that was not decoded. `impl`: the implementation it ran on, where that is known.
    """

    method: str
    rows: int
    tokens: int
    seconds: float
    compile_seconds: float
    nfe: int
    checks: int
    commits: int
    prefills: int
    steps: int
    drafting: int
    drafted: int
    accepted: int
    saved_commits: int
    shared: int
    guard_stops: int
    recompute: tuple[tuple[float, float], ...] | None = None
    refused: tuple[tuple[int, str], ...] = field(default=())
    impl: str | None = None

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second of decoding."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def nfe_per_token(self) -> float:
        """Forwards a generated token."""
        return self.nfe / self.tokens if self.tokens else 0.0

    @property
    def accepted_depth(self) -> float | None:
        """Mean accepted drafts a check that had drafts."""
        return self.accepted / self.drafting if self.drafting else None

    @property
    def recompute_ratio(self) -> float | None:
        """Computed rows over all rows of the draft branches, mean over layers and both gates."""
        return float(np.mean(self.recompute)) if self.recompute is not None else None

    def record(self) -> dict[str, Any]:
        """All fields and derived figures, for JSON."""
        derived = {name: getattr(self, name) for name in ("tokens_per_second", "nfe_per_token", "accepted_depth", "recompute_ratio")}
        return asdict(self) | derived


def summarise(
    decoded: Decoded,
    prompt_lengths: Int[np.ndarray, " batch"],
    seconds: float,
    method: str = "",
    compile_seconds: float = 0.0,
    impl: str | None = None,
) -> Summary:
    """The summary of a decode; `seconds` is its wall time."""
    lengths, stats = jax.device_get((decoded.lengths, decoded.stats))
    ok = stats.status == 0
    counts = ("nfe", "checks", "commits", "prefills", "steps", "drafting", "drafted", "accepted", "saved_commits", "shared", "guard_stops")
    total = int(stats.total_rows[ok].sum())
    computed = stats.computed_rows[ok].sum(axis=0) / total if total else None
    return Summary(
        method=method,
        rows=int(ok.sum()),
        tokens=int((lengths - prompt_lengths)[ok].sum()),
        seconds=seconds,
        compile_seconds=compile_seconds,
        **{name: int(getattr(stats, name)[ok].sum()) for name in counts},
        recompute=None if computed is None else tuple((float(a), float(f)) for a, f in computed),
        refused=tuple((int(row), STATUS[int(stats.status[row])]) for row in np.flatnonzero(~ok)),
        impl=impl,
    )


class Run(NamedTuple):
    """A run over any number of prompts: `decoded` on the host, the prompts' lengths, the summary."""

    decoded: Decoded
    prompt_lengths: Int[np.ndarray, " batch"]
    summary: Summary

    def generated(self, row: int) -> list[int]:
        """The row's new tokens."""
        return self.decoded.tokens[row, self.prompt_lengths[row] : self.decoded.lengths[row]].tolist()

    def only(self, row: int) -> Summary:
        """The row's own counts; times are not known row by row and stand at 0."""
        one = jax.tree.map(lambda x: x[row : row + 1], self.decoded)
        return summarise(one, self.prompt_lengths[row : row + 1], 0.0, self.summary.method, impl=self.summary.impl)


def same_tokens(a: Run, b: Run) -> list[bool]:
    """Row by row, whether two runs on the same prompts generated the same tokens."""
    rows = range(len(a.prompt_lengths))
    return [a.generated(row) == b.generated(row) for row in rows]
