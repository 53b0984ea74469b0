"""Tables in Markdown, from the results of a benchmark."""

import math
from collections.abc import Callable
from typing import Any

NOT_YET = "Not measured yet.\n"

Result = dict[str, Any]
Results = list[Result]
Column = tuple[str, Callable[[Result], str]]


def number(name: str, digits: int = 2) -> Callable[[Result], str]:
    """A measured number; "-" for None."""

    def text(row: Result) -> str:
        value = row["measured"][name]
        return "-" if value is None else f"{value:,.{digits}f}"

    return text


def proportion(name: str) -> Callable[[Result], str]:
    """A share in percent with its 95 % interval."""

    def text(row: Result) -> str:
        m = row["measured"]
        low, high = m[f"{name}_interval"]
        # Rounded away from the share, so that an interval never looks tighter than it is.
        return f"{m[name] / m['samples']:.1%} ({math.floor(low * 1000) / 10:.1f} to {math.ceil(high * 1000) / 10:.1f})"

    return text


def where(rows: Results, **want: Any) -> Results:
    """The results with these settings; a tuple names several values."""

    def fits(setting: dict[str, Any]) -> bool:
        return all(setting[name] in value if isinstance(value, tuple) else setting[name] == value for name, value in want.items())

    return [row for row in rows if fits(row["setting"])]


def table(rows: Results, *columns: Column, samples: bool = True) -> str:
    """A line a result; below it, if asked for, how many `samples` were decoded. `NOT_YET` without results."""
    if not rows:
        return NOT_YET
    lines = ["| " + " | ".join(name for name, _ in columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    lines += ["| " + " | ".join(text(row) for _, text in columns) + " |" for row in rows]
    note = ""
    if samples:
        counts = sorted({row["setting"]["samples"] for row in rows})
        note = f"\n{' and '.join(map(str, counts))} samples; in brackets 95 % intervals, in percent.\n"
    return "\n".join(lines) + "\n" + note
