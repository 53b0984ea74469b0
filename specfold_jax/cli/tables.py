"""Tables that several commands print: statistics, and the nodes of a graph."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from specfold_jax.diffusion.graph import DraftGraph, show
from specfold_jax.running.summary import Summary


def plain_table(title: str, *columns: str) -> Table:
    """A table without lines. The first column is to the left, and the others to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for n, name in enumerate(columns):
        table.add_column(name, justify="left" if n == 0 else "right", header_style="bold", style="cyan" if n == 0 else "")
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _drafted(text: Callable[[Summary], str]) -> Callable[[Summary], str]:
    return lambda s: text(s) if s.drafted else "-"


_ROWS: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("implementation", lambda s: s.impl or "-"),
    ("tokens generated", lambda s: f"{s.tokens:,}"),
    ("tokens/s", lambda s: f"{s.tokens_per_second:,.1f}" if s.seconds else "-"),
    ("wall s, after compilation", lambda s: f"{s.seconds:.2f}" if s.seconds else "-"),
    ("compilation s", lambda s: f"{s.compile_seconds:.1f}" if s.seconds else "-"),
    ("NFE = checks + commits", lambda s: f"{s.nfe:,} = {s.checks:,} + {s.commits:,}"),
    ("prefills", lambda s: f"{s.prefills:,}"),
    ("forwards per generated token", lambda s: f"{s.nfe_per_token:.3f}"),
    ("drafted", _drafted(lambda s: f"{s.drafted:,}")),
    ("accepted", _drafted(lambda s: f"{s.accepted:,}")),
    ("mean accepted depth per drafting check", lambda s: _share(s.accepted_depth)),
    ("saved commits", _drafted(lambda s: f"{s.saved_commits:,}")),
    ("shared commits", _drafted(lambda s: f"{s.shared:,}")),
    ("recompute ratio", lambda s: _share(s.recompute_ratio) if s.method == "specfold" else "-"),  # the others never fold
    ("guard stops", lambda s: f"{s.guard_stops:,}" if s.method == "specfold" else "-"),
)


def statistics(summaries: Sequence[Summary], extra: Sequence[tuple[str, Sequence[str]]] = (), title: str = "Statistics") -> Table:
    """A table with a column for each run. `extra`: rows to put first, each a name and a value for each run."""
    table = plain_table(title, "", *(s.method for s in summaries))
    for name, values in extra:
        table.add_row(name, *(Text.from_markup(value) for value in values))
    for name, text in _ROWS:
        if len(summaries) > 1 or text(summaries[0]) != "-":
            table.add_row(name, *(text(s) for s in summaries))
    return table


def refusals(summary: Summary) -> list[str]:
    """A line for each row that was not decoded."""
    return [f"{summary.method}: prompt {row} was not decoded: {reason}" for row, reason in summary.refused]


def graph_nodes(graph: DraftGraph) -> Table:
    """A graph's nodes, in its order: the rank nodes with their parents, then the confidence nodes."""
    table = plain_table("Draft nodes", "node", "level", "expected use", "parents")
    table.add_column("reveals (position rank, token rank)", header_style="bold")
    parent = np.asarray(graph.parent)
    for n, (node, level, weight) in enumerate(zip(graph.sets, np.asarray(graph.level), np.asarray(graph.weight), strict=True)):
        parents = " ".join(map(str, np.flatnonzero(parent[n]))) or "canvas"
        table.add_row(str(n), str(level), f"{weight:.3f}", parents, show(node))
    thetas: Any = zip(np.asarray(graph.theta), np.asarray(graph.hop), np.asarray(graph.theta_weight), strict=True)
    for n, (theta, hop, weight) in enumerate(thetas, start=len(graph.sets)):
        complete = f"{hop} sub-block{'s' if hop > 1 else ''} and, in the next, " if hop else ""
        table.add_row(str(n), "-", f"{weight:.3f}", "-", f"{complete}log-odds above {theta:g}")
    return table


def graph_origin(graph: DraftGraph) -> str:
    """A graph's size and what it was made for, in a line."""
    made = graph.made_for
    origin = "no record of a calibration"
    if made:
        origin = f"made for {made.model or '(unnamed)'}: vocabulary {made.vocab}, block {made.block}, sub-block {made.sub_block}, "
        origin += f"threshold {made.threshold:g}, temperature {made.temperature:g}"
    ahead = ", ranks run on into the next sub-block" if graph.run_on else ""
    return f"{graph.nodes} nodes, at most {graph.max_drafts} drafts a check, {graph.token_ranks} token ranks{ahead}; {origin}"
