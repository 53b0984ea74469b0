"""A picture of a draft graph."""

import math
import os
from textwrap import shorten
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path

from specfold_jax.graph import DraftGraph, Node

INK, EDGE = "#1b2a3a", "#8d99a6"
LETTER, LINE, FONT = 0.068, 0.155, 8  # inches, inches, points
MARGIN, BETWEEN, GAP, HEAD, FOOT = 0.35, 0.95, 0.16, 1.2, 0.5  # inches
ROOT_WIDTH, ROOT_HEIGHT = 0.95, 0.5


def draw_graph(graph: DraftGraph, path: str | os.PathLike) -> None:
    """Writes a PNG: levels from left to right, a box a node with its pairs and expected use, darker the more it is used."""
    ranked, hop = len(graph.sets), np.asarray(graph.hop)
    labels = [_label(node) for node in graph.sets] + [_odds_label(*pair) for pair in zip(np.asarray(graph.theta), hop, strict=True)]
    weight = np.concatenate([np.asarray(graph.weight), np.asarray(graph.theta_weight)])
    parents = [np.flatnonzero(row).tolist() for row in np.asarray(graph.parent)]
    # A confidence node holds all of the hop before it; within a hop each holds the one above it.
    parents += [[ranked + int(np.flatnonzero(hop < h)[-1])] if (hop < h).any() else [] for h in hop]
    widths = [max(0.55, LETTER * max(map(len, label.split("\n"))) + 0.2) for label in labels]
    heights = [LINE * (label.count("\n") + 2) + 0.16 for label in labels]
    levels = _columns(graph)
    steps = sorted(set(hop.tolist()))
    columns = levels + [(ranked + np.flatnonzero(hop == h)).tolist() for h in steps]
    titles = [f"level {step}" for step in range(1, len(levels) + 1)] + [f"confidence, hop {h}" for h in steps]
    tall = max([sum(heights[n] + GAP for n in column) for column in columns] + [0.9])
    middle, height = FOOT + tall / 2, FOOT + tall + HEAD
    left, centres, place = MARGIN + ROOT_WIDTH + BETWEEN, [], {}
    for column in columns:
        wide, y = max(widths[n] for n in column), middle + sum(heights[n] + GAP for n in column) / 2
        centres.append(left + wide / 2)
        for n in column:
            place[n] = (centres[-1], y - (heights[n] + GAP) / 2)
            y -= heights[n] + GAP
        left += wide + BETWEEN
    figure = Figure(figsize=(max(left - BETWEEN + MARGIN, 8.2), height), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, figure.get_figwidth()), ylim=(0, height))
    axes.axis("off")

    shades, scale = colormaps["YlGnBu"], Normalize(0, max(float(weight.max(initial=0)), 1e-6))
    for n, (x, y) in place.items():
        share = float(scale(weight[n]))
        for start in [(place[p][0] + widths[p] / 2, place[p][1]) for p in parents[n]] or [(MARGIN + ROOT_WIDTH, middle)]:
            _edge(axes, start, (x - widths[n] / 2, y), 0.7 + 1.8 * share)
        colour = shades(0.08 + 0.75 * share)
        ink = "white" if np.dot(colour[:3], (0.3, 0.59, 0.11)) < 0.55 else INK
        _box(axes, (x, y), (widths[n], heights[n]), colour)
        axes.text(x, y + LINE / 2, labels[n], fontsize=FONT, fontweight="bold", color=ink, ha="center", va="center", zorder=3)
        axes.text(x, y - heights[n] / 2 + 0.155, f"{weight[n]:.3f}", fontsize=FONT - 0.5, color=ink, ha="center", va="center", zorder=3)
    root = (MARGIN + ROOT_WIDTH / 2, middle)
    _box(axes, root, (ROOT_WIDTH, ROOT_HEIGHT), INK)
    axes.text(*root, "current\ncanvas", fontsize=FONT, fontweight="bold", color="white", ha="center", va="center", zorder=3)

    for title, x in zip(titles, centres, strict=True):
        axes.text(x, height - 1.02, title, fontsize=FONT, color=EDGE, ha="center", va="center")
    drafts = f"{graph.nodes} nodes, at most {graph.max_drafts} drafts a check" if graph.nodes else "empty (vanilla decoding)"
    axes.text(MARGIN, height - 0.3, f"Draft graph: {drafts}", fontsize=12, fontweight="bold", color=INK, va="center")
    axes.text(MARGIN, height - 0.6, _origin(graph), fontsize=8.5, color=INK, va="center")
    note = (
        "(i,j): the position of confidence rank i takes its token of rank j.  > x: positions with log-odds above x.  Number: expected use."
    )
    axes.text(MARGIN, 0.25, note, fontsize=FONT, color=INK, va="center")
    figure.savefig(path, format="png")


def _label(node: Node) -> str:
    """The pairs in lines of at most four, about equally long."""
    words = [f"({i},{j})" for i, j in sorted(node)]
    each = math.ceil(len(words) / math.ceil(len(words) / 4))
    return "\n".join(" ".join(words[n : n + each]) for n in range(0, len(words), each))


def _odds_label(theta: float, hop: int) -> str:
    """What a confidence node reveals: whole sub-blocks, and the positions above theta in the one after them."""
    whole = f"{hop} sub-block{'s' if hop > 1 else ''} +\n" if hop else ""
    return whole + ("all" if theta == -math.inf else f"> {theta:g}")


def _columns(graph: DraftGraph) -> list[list[int]]:
    """Nodes by level, each column ordered by the mean place of its parents so that few edges cross."""
    level, parent = np.asarray(graph.level), np.asarray(graph.parent)
    columns: list[list[int]] = []
    rank = np.zeros(len(level))
    for step in range(1, int(level.max(initial=0)) + 1):
        column = np.flatnonzero(level == step).tolist()
        columns.append(sorted(column, key=lambda n: (rank[parent[n]].mean() if parent[n].any() else 0.0, n)))
        rank[columns[-1]] = np.linspace(0, 1, len(column)) if len(column) > 1 else 0.5
    return columns


def _box(axes: Any, centre: tuple[float, float], size: tuple[float, float], colour: Any) -> None:
    corner = (centre[0] - size[0] / 2, centre[1] - size[1] / 2)
    axes.add_patch(FancyBboxPatch(corner, *size, "round,pad=0,rounding_size=0.08", fc=colour, ec=INK, lw=0.8, zorder=2))


def _edge(axes: Any, start: tuple[float, float], end: tuple[float, float], width: float) -> None:
    half = (end[0] - start[0]) / 2
    curve = Path([start, (start[0] + half, start[1]), (end[0] - half, end[1]), end], [Path.MOVETO] + 3 * [Path.CURVE4])
    axes.add_patch(PathPatch(curve, fill=False, ec=EDGE, lw=width, alpha=0.7, zorder=1))


def _origin(graph: DraftGraph) -> str:
    made = graph.made_for
    if made is None:
        return "no record of a calibration"
    return (
        f"made for {shorten(made.model, 40, placeholder='...')}: vocabulary {made.vocab}, block {made.block}, "
        f"sub-block {made.sub_block}, threshold {made.threshold:g}, temperature {made.temperature:g}"
    )
