"""A picture of a draft graph."""

import math
import os
from collections import defaultdict
from itertools import pairwise
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path

from specfold_jax.diffusion.graph import DraftGraph, Node
from specfold_jax.palette import EDGE, INK

LETTER, LINE, FONT = 0.068, 0.155, 8  # inches, inches, points
MARGIN, BETWEEN, GAP, HEAD, TITLE, FOOT = 0.35, 0.95, 0.16, 0.8, 0.4, 0.6  # inches
ROOT = -1  # the canvas, among the nodes
ROOT_SIZE = (0.95, 0.5)  # inches
SWEEPS = 8

Column = tuple[str, list[int]]


class Box(NamedTuple):
    """A node's place in inches, its middle and its size; y counts downwards."""

    x: float
    y: float
    width: float
    height: float


def draw_graph(graph: DraftGraph, path: str | os.PathLike) -> None:
    """Writes a PNG: rank nodes above and confidence nodes below, both from left to right.

    A node's box has its pairs and its expected use, and is darker the more it is used. Edges lead from a column to the next one only. So
    none passes behind a box.
    """
    labels = [_label(node) for node in graph.sets]
    labels += [_odds_label(*pair) for pair in zip(np.asarray(graph.theta), np.asarray(graph.hop), strict=True)]
    weight = np.concatenate([np.asarray(graph.weight), np.asarray(graph.theta_weight)])
    edges, lanes = _edges(graph), _lanes(graph)
    boxes, titles, bottom = _lay_out(lanes, labels)
    width, height = max(max(box.x + box.width / 2 for box in boxes.values()) + MARGIN, 8.2), bottom + FOOT
    figure = Figure(figsize=(width, height), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")

    shades, scale = colormaps["YlGnBu"], Normalize(0, max(float(weight.max(initial=0)), 1e-6))
    starts, ends = _ports(edges, boxes, 0), _ports(edges, boxes, 1)
    for edge in edges:
        _curve(axes, starts[edge], ends[edge], 0.7 + 1.8 * float(scale(weight[edge[1]])))
    for n, label in enumerate(labels):
        box, colour = boxes[n], shades(0.08 + 0.75 * float(scale(weight[n])))
        ink = "white" if np.dot(colour[:3], (0.3, 0.59, 0.11)) < 0.55 else INK
        _box(axes, box, colour)
        axes.text(box.x, box.y - LINE / 2, label, fontsize=FONT, fontweight="bold", color=ink, ha="center", va="center")
        use = box.y + box.height / 2 - LINE
        axes.text(box.x, use, f"{weight[n]:.3f}", fontsize=FONT - 0.5, color=ink, ha="center", va="center")
    root = boxes[ROOT]
    _box(axes, root, INK)
    axes.text(root.x, root.y, "current\ncanvas", fontsize=FONT, fontweight="bold", color="white", ha="center", va="center")

    for title, x, y in titles:
        axes.text(x, y, title, fontsize=FONT, color=EDGE, ha="center", va="center")
    drafts = f"{graph.nodes} nodes, at most {graph.max_drafts} drafts a check" if graph.nodes else "empty (vanilla decoding)"
    axes.text(MARGIN, 0.3, f"Draft graph: {drafts}", fontsize=12, fontweight="bold", color=INK, va="center")
    axes.text(MARGIN, 0.6, _origin(graph), fontsize=8.5, color=INK, va="center")
    note = (
        "(i,j): the position of confidence rank i takes its token of rank j.  > x: positions with log-odds above x.  Number: expected use."
    )
    axes.text(MARGIN, height - 0.25, note, fontsize=FONT, color=INK, va="center")
    figure.savefig(path, format="png")


def _edges(graph: DraftGraph) -> list[tuple[int, int]]:
    """Pairs (parent, node)."""
    hop, first = np.asarray(graph.hop), len(graph.sets)
    parents = [np.flatnonzero(row).tolist() for row in np.asarray(graph.parent)]
    # A confidence node contains those of the hop before it. Within a hop it contains the one above it.
    parents += [[first + int(np.flatnonzero(hop < h)[-1])] if (hop < h).any() else [] for h in hop]
    return [(parent, n) for n, found in enumerate(parents) for parent in found or [ROOT]]


def _lanes(graph: DraftGraph) -> list[list[Column]]:
    """The columns of each kind of nodes: rank nodes by level, confidence nodes by hop. A kind without nodes is left out."""
    hop = np.asarray(graph.hop)
    ranks = [(f"level {step}", column) for step, column in enumerate(_uncrossed(graph), start=1)]
    odds = [(f"confidence, hop {h}", (len(graph.sets) + np.flatnonzero(hop == h)).tolist()) for h in sorted(set(hop.tolist()))]
    return [lane for lane in (ranks, odds) if lane]


def _uncrossed(graph: DraftGraph) -> list[list[int]]:
    """Rank nodes by level, in an order in which few edges cross. Sweeps sort each level by the mean place of its nodes' parents, and of
    their children, in turns."""
    level, parent = np.asarray(graph.level), np.asarray(graph.parent)
    columns = [np.flatnonzero(level == step).tolist() for step in range(1, int(level.max(initial=0)) + 1)]
    best, fewest = columns, _crossings(columns, parent)
    for sweep in range(SWEEPS):
        links = parent if sweep % 2 == 0 else parent.T
        place = np.zeros(len(level))
        ordered = []
        for column in columns if sweep % 2 == 0 else columns[::-1]:
            wanted = [place[links[n]].mean() if links[n].any() else 0.5 for n in column]
            ordered.append([column[k] for k in np.argsort(wanted, kind="stable")])
            place[ordered[-1]] = (np.arange(len(column)) + 0.5) / len(column)
        columns = ordered if sweep % 2 == 0 else ordered[::-1]
        if (count := _crossings(columns, parent)) < fewest:
            best, fewest = columns, count
    return best


def _crossings(columns: list[list[int]], parent: np.ndarray) -> int:
    """Pairs of edges that cross."""
    total = 0
    for before, after in pairwise(columns):
        ends = np.argwhere(parent[np.ix_(after, before)])
        above = ends[:, None] < ends
        total += int((above[..., 0] & above[..., 1].T).sum())
    return total


def _lay_out(lanes: list[list[Column]], labels: list[str]) -> tuple[dict[int, Box], list[tuple[str, float, float]], float]:
    """Boxes by node, the columns' titles with their middles, and where the last lane ends. Boxes of a column are equally wide."""
    heights = [LINE * (label.count("\n") + 2) + 0.16 for label in labels]
    boxes, titles, top = {}, [], HEAD
    for lane in lanes:
        middle, left = top + TITLE + max(sum(heights[n] + GAP for n in column) for _, column in lane) / 2, MARGIN + ROOT_SIZE[0] + BETWEEN
        for title, column in lane:
            wide = max(max(0.55, LETTER * max(map(len, labels[n].split("\n"))) + 0.2) for n in column)
            titles.append((title, left + wide / 2, top + TITLE / 2))
            y = middle - sum(heights[n] + GAP for n in column) / 2
            for n in column:
                boxes[n] = Box(left + wide / 2, y + (heights[n] + GAP) / 2, wide, heights[n])
                y += heights[n] + GAP
            left += wide + BETWEEN
        top = 2 * middle - top - TITLE
    bottom = top if lanes else HEAD + ROOT_SIZE[1] + TITLE
    boxes[ROOT] = Box(MARGIN + ROOT_SIZE[0] / 2, (HEAD + TITLE + bottom) / 2, *ROOT_SIZE)
    return boxes, titles, bottom


def _ports(edges: list[tuple[int, int]], boxes: dict[int, Box], side: int) -> dict[tuple[int, int], tuple[float, float]]:
    """Where edges leave (side 0) or reach (side 1) their boxes. They spread over the box's side in the order of their other ends."""
    mine, found = defaultdict(list), {}
    for edge in edges:
        mine[edge[side]].append(edge)
    for n, some in mine.items():
        box = boxes[n]
        some.sort(key=lambda edge: boxes[edge[1 - side]].y)
        for k, edge in enumerate(some):
            found[edge] = (box.x + box.width * (0.5 - side), box.y + box.height * 0.7 * ((k + 0.5) / len(some) - 0.5))
    return found


def _label(node: Node) -> str:
    """The pairs in lines of at most four, about equally long."""
    words = [f"({i},{j})" for i, j in sorted(node)]
    each = math.ceil(len(words) / math.ceil(len(words) / 4))
    return "\n".join(" ".join(words[n : n + each]) for n in range(0, len(words), each))


def _odds_label(theta: float, hop: int) -> str:
    """A confidence node's complete sub-blocks, and the positions that it reveals in the next one."""
    complete = f"{hop} sub-block{'s' if hop > 1 else ''} +\n" if hop else ""
    return complete + ("all" if theta == -math.inf else f"> {theta:g}")


def _box(axes: Any, box: Box, colour: Any) -> None:
    corner = (box.x - box.width / 2, box.y - box.height / 2)
    axes.add_patch(FancyBboxPatch(corner, box.width, box.height, "round,pad=0,rounding_size=0.08", fc=colour, ec=INK, lw=0.8, zorder=2))


def _curve(axes: Any, start: tuple[float, float], end: tuple[float, float], width: float) -> None:
    half = (end[0] - start[0]) / 2
    curve = Path([start, (start[0] + half, start[1]), (end[0] - half, end[1]), end], [Path.MOVETO] + 3 * [Path.CURVE4])
    axes.add_patch(PathPatch(curve, fill=False, ec=EDGE, lw=width, alpha=0.8, zorder=1))


def _origin(graph: DraftGraph) -> str:
    made = graph.made_for
    if made is None:
        return "no record of a calibration"
    return (
        f"made for {shorten(made.model, 40, placeholder='...')}: vocabulary {made.vocab}, block {made.block}, "
        f"sub-block {made.sub_block}, threshold {made.threshold:g}, temperature {made.temperature:g}"
    )
