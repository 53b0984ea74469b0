"""The bars that the project set itself for one H200, beside what was measured: 1.5B shape, bfloat16, prefix 512, the Pallas kernels."""

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.speed.ratios import folding_ms
from benchmarks.tables.markdown import Result, Results, table, where

SHAPE = {"shape": "1.5b", "dtype": "bfloat16", "prefix": 512}
MOST_RECOMPUTED = 0.3
"""Bars of SpecFold are for checks that compute no more of their drafts' rows."""


class Bar(NamedTuple):
    """A figure, the most it may be, and what was measured; None where it was not."""

    figure: str
    most: float
    measured: float | None
    unit: str = "x"

    def text(self, value: float | None) -> str:
        """A value with its unit."""
        if value is None:
            return "-"
        return f"{value:.0%}" if self.unit == "%" else f"{value:.2f}{self.unit}"

    @property
    def verdict(self) -> str:
        """Whether the bar is met."""
        return "not measured" if self.measured is None else "met" if self.measured <= self.most else "missed"


def _ms(rows: Results) -> float | None:
    return rows[0]["measured"]["median_ms"] if rows else None


def _over(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value / base


def _recomputed(row: Result) -> float:
    ratio = row["measured"]["recompute"]
    return sum(ratio) / 2 if ratio else 1.0


def _step(decodes: Results, method: str) -> Result | None:
    """One iteration of batch 1."""
    found = where(decodes, **SHAPE, impl="pallas", batch=1, method=method, tau=(None, 0.1))
    return found[0]["measured"]["one"] if found else None


def _folding(folded: Results, spiffy: Results) -> float | None:
    """Share of a folded check that folding takes."""
    if not folded or not spiffy:
        return None
    extra = folding_ms(*({"check": rows[0]["measured"]} for rows in (folded, spiffy)))
    return _over(extra, folded[0]["measured"]["median_ms"])


def _bars(decodes: Results, checks: Results) -> Iterator[Bar]:
    vanilla, mine = _step(decodes, "vanilla"), where(checks, **SHAPE, impl="pallas")
    step = vanilla["step"]["median_ms"] if vanilla else None
    yield Bar("vanilla step, 32 rows", 1.55, step, " ms")
    spiffy = where(mine, batch=1, drafts=8, tau=None)
    yield Bar("Spiffy check, D = 8 (288 rows), over the vanilla step", 1.7, _over(_ms(spiffy), step))
    for batch in (1, 8):
        off = where(mine, batch=batch, drafts=8, tau=None)
        folded = [row for row in where(mine, batch=batch, drafts=8) if row["setting"]["tau"] and _recomputed(row) <= MOST_RECOMPUTED]
        for found in [[row] for row in sorted(folded, key=lambda row: row["setting"]["tau"])] or [[]]:
            which = [f"tau {row['setting']['tau']:g} (recompute {_recomputed(row):.2f})" for row in found]
            what = f"SpecFold check, D = 8, {which[0] if which else f'recompute at most {MOST_RECOMPUTED}'}"
            if batch == 1:
                yield Bar(f"{what}, over the vanilla step", 1.25, _over(_ms(found), step))
                yield Bar(f"{what}: folding itself, less the row kernels it replaces", 0.1, _folding(found, off), "%")
            else:
                yield Bar(f"{what}, batch {batch}, over the Spiffy check", 0.55, _over(_ms(found), _ms(off)))
    for name, method in (("vanilla", "vanilla"), ("SpecFold", "specfold")):
        one = _step(decodes, method)
        yield Bar(f"{name} step, all but the model's forward", 0.1, one["overhead_ms"] / one["step"]["median_ms"] if one else None, "%")
    xla = {str(row["setting"] | {"impl": "xla"}): _ms([row]) for row in where(checks, **SHAPE, impl="xla", tau=None)}
    for low, high, most in ((0, 288, 1.0), (288, 1024, 1.15)):
        within = [row for row in where(mine, tau=None) if low < row["measured"]["rows"] <= high]
        found = [_over(_ms([row]), xla.get(str(row["setting"] | {"impl": "xla"}))) for row in within]
        worst = max((ratio for ratio in found if ratio is not None), default=None)
        yield Bar(f"whole check of {low + 1} to {high} rows, over XLA's, at worst", most, worst)


def bars(decodes: Results, checks: Results) -> str:
    """A line a bar. Spiffy's and SpecFold's checks are of the run of checks, the vanilla step and overheads of the run of decodes."""
    found: Results = [{"bar": bar} for bar in _bars(decodes, checks)]
    return table(
        found,
        ("figure", lambda row: row["bar"].figure),
        ("bar", lambda row: row["bar"].text(row["bar"].most)),
        ("measured", lambda row: row["bar"].text(row["bar"].measured)),
        ("verdict", lambda row: row["bar"].verdict),
        samples=False,
    )
