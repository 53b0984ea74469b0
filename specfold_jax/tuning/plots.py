"""Pictures of a tune run: speed and agreement against tau, forwards against drafts, recompute ratios, the draft graph."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specfold_jax.calibration.options import Source
from specfold_jax.calibration.picture import draw_graph
from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.files import atomic_write
from specfold_jax.palette import EDGE, GREY, INK, SERIES
from specfold_jax.tuning.gates import GateShares
from specfold_jax.tuning.measure import Outcome
from specfold_jax.tuning.search import Tuned

SOURCE_NAMES: dict[Source, str] = {"ranks": "rank graph", "confidence": "confidence", "union": "union"}


def draw_all(tuned: Tuned, folder: Path) -> list[Path]:
    """Writes the pictures for which the run has data into the folder, and returns their files."""
    folded = [o for o in tuned.outcomes if o.setting.method == "specfold"]
    wanted: dict[str, Callable[[Path], None]] = {}
    if folded:
        wanted |= {"speed.png": lambda path: speed(tuned, folded, path), "recompute.png": lambda path: recompute(folded, path)}
    if gates := tuned.gates:
        wanted["positions.png"] = lambda path: positions(gates, path)
    if tuned.candidates:
        wanted["forwards.png"] = lambda path: forwards(tuned, path)
        wanted["graph.png"] = lambda path: draw_graph(_graph(tuned), path)
    for name, draw in wanted.items():
        with atomic_write(folder / name) as partial:
            draw(partial)
    return [folder / name for name in wanted]


def speed(tuned: Tuned, folded: list[Outcome], path: Path) -> None:
    """Tokens/s above and agreement below, both against tau. Each graph and guard is a series; vanilla and the best Spiffy are bands."""
    figure, (above, below) = _figure(2, (7.6, 6.6), sharex=True, height_ratios=(3, 2))
    taus = sorted({_tau(o) for o in folded})
    index = {tau: n for n, tau in enumerate(taus)}
    series = sorted({(o.setting.drafts, o.setting.reach, o.setting.guard) for o in folded})
    for n, (drafts, reach, guard) in enumerate(series):
        mine = sorted((o for o in folded if (o.setting.drafts, o.setting.reach, o.setting.guard) == (drafts, reach, guard)), key=_tau)
        x = [index[_tau(o)] + 0.09 * (n - (len(series) - 1) / 2) for o in mine]
        style = {"color": SERIES[n % len(SERIES)], "marker": "o", "ms": 5, "lw": 1.4, "capsize": 3, "elinewidth": 1}
        rates = [o.rate(tuned.batch) for o in mine]
        _bars(
            above, x, rates, [o.rate_interval(tuned.batch, tuned.seed) for o in mine], f"SpecFold, {drafts} drafts, guard {guard:g}", style
        )
        _bars(below, x, [o.agreement for o in mine], [o.agreement_interval for o in mine], None, style)
    for method, colour in (("vanilla", GREY), ("spiffy", INK)):
        rivals = [o for o in tuned.outcomes if o.setting.method == method]
        if rivals:
            best = max(rivals, key=lambda o: o.rate_interval(tuned.batch, tuned.seed)[0])
            named = "vanilla" if method == "vanilla" else f"best Spiffy, {best.setting.drafts} drafts"
            above.axhspan(*best.rate_interval(tuned.batch, tuned.seed), color=colour, alpha=0.13, lw=0)
            above.axhline(best.rate(tuned.batch), color=colour, lw=1.2, ls="--", label=named)
    above.set_ylim(0, None)
    above.set_ylabel("tokens/s")
    above.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    below.axhline(tuned.target, color=GREY, lw=1, ls=":")
    below.text(1.01, tuned.target, f"target {tuned.target:.1%}", transform=below.get_yaxis_transform(), fontsize=8, color=GREY, va="center")
    below.set_ylabel("identical answers")
    below.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    below.set_xticks(range(len(taus)), [f"{tau:g}" for tau in taus])
    below.set_xlim(-0.5, len(taus) - 0.5)
    below.set_xlabel("tau (positions with a relative residual of at most tau are folded)")
    count = len(folded[0].same)
    _title(above, "Speed and agreement against tau", f"{count} held-out prompts, batch {tuned.batch}; bars and bands: 95 % intervals")
    figure.savefig(path, format="png")


def forwards(tuned: Tuned, path: Path) -> None:
    """Forwards a prompt against the number of drafts: a line for each source as records say, and points as measured."""
    figure, (axes,) = _figure(1, (7.6, 4.2))
    vanilla = next(o for o in tuned.outcomes if o.setting.method == "vanilla")
    base, reach = vanilla.forwards_per_sample, max(c.reach for c in tuned.candidates)
    for n, source in enumerate(SOURCE_NAMES):
        mine = sorted((c for c in tuned.candidates if (c.source, c.reach) == (source, reach)), key=lambda c: c.drafts)
        if mine:
            y = [base - c.saved for c in mine]
            # Confidence and union may coincide, so the line below is wider.
            width, size, dashes = {"ranks": (1.4, 4, "-"), "confidence": (2.8, 7, "-"), "union": (1.4, 4, "--")}[source]
            line: Any = {"color": SERIES[n], "marker": "o", "ms": size, "lw": width, "ls": dashes}
            axes.plot([c.drafts for c in mine], y, label=f"{SOURCE_NAMES[source]}, from records", **line)
    seen: set[str] = set()
    for method, marker in (("spiffy", "D"), ("specfold", "^")):
        for o in (o for o in tuned.outcomes if o.setting.method == method and o.setting.reach == reach):
            named = {"spiffy": "Spiffy, measured", "specfold": "SpecFold, measured"}[method]
            x = (o.setting.drafts or 0) + (0.0 if method == "spiffy" else 0.12)
            style = {"color": INK if method == "spiffy" else SERIES[3], "marker": marker, "s": 34, "zorder": 3}
            axes.scatter([x], [o.forwards_per_sample], label=None if named in seen else named, **style)
            seen.add(named)
    axes.axhline(base, color=GREY, lw=1.2, ls="--", label="vanilla, measured")
    axes.set_ylim(0, base * 1.08)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("drafts a check")
    axes.set_ylabel("forwards a prompt")
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _title(axes, "Forwards against drafts", "from records: calibration half, commits not shared; measured: held-out half")
    figure.savefig(path, format="png")


def recompute(folded: list[Outcome], path: Path) -> None:
    """Heat maps, layer by tau, of the computed shares of draft rows, for the graph with most settings."""
    graphs = [(o.setting.drafts, o.setting.guard) for o in folded if o.recompute is not None]
    drafts, guard = max(graphs, key=graphs.count)
    mine = sorted((o for o in folded if (o.setting.drafts, o.setting.guard) == (drafts, guard) and o.recompute is not None), key=_tau)
    shares = np.array([o.recompute for o in mine])  # [tau, layer, gate]
    figure = Figure(figsize=(7.6, 1.9 + 0.28 * shares.shape[1]), dpi=160, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    image: Any = None
    both = figure.subplots(1, 2, sharey=True)
    for gate, (axes, name) in enumerate(zip(both, ("before attention", "before the feed-forward network"), strict=True)):
        image = axes.imshow(shares[..., gate].T, vmin=0, vmax=1, cmap="YlGnBu", aspect="auto", origin="lower")
        for (tau, layer), value in np.ndenumerate(shares[..., gate]):
            axes.text(tau, layer, f"{value:.2f}", ha="center", va="center", fontsize=7.5, color="white" if value > 0.6 else INK)
        axes.set_xticks(range(len(mine)), [f"{o.setting.tau:g}" for o in mine])
        axes.set_yticks(range(shares.shape[1]))
        axes.set_xlabel("tau")
        axes.set_title(name, fontsize=9, color=INK)
        axes.tick_params(length=0, colors=INK, labelsize=8)
        for spine in axes.spines.values():
            spine.set_visible(False)
    both[0].set_ylabel("layer")
    bar = figure.colorbar(image, ax=both, shrink=0.9, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8, colors=INK)
    heading = f"Share of draft rows recomputed ({drafts} drafts, guard {guard:g})"
    figure.suptitle(heading, x=0.02, ha="left", fontsize=12, fontweight="bold", color=INK)
    figure.savefig(path, format="png")


def positions(gates: GateShares, path: Path) -> None:
    """Heat map, layer by position in the block, of the share of drafts computed there before attention."""
    share = np.array(gates.share)
    figure = Figure(figsize=(7.6, 1.7 + 0.22 * len(share)), dpi=160, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(share, vmin=0, vmax=1, cmap="YlGnBu", aspect="auto", origin="lower")
    axes.set_xlabel("position in the block")
    axes.set_ylabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(length=0, colors=INK, labelsize=8)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8, colors=INK)
    detail = f"{gates.setting}: {gates.drafts:,} drafts, {gates.collapsed:.1%} collapsed onto another"
    _title(axes, "Share of drafts recomputed before attention", detail)
    figure.savefig(path, format="png")


def _graph(tuned: Tuned) -> DraftGraph:
    """The chosen graph. If vanilla was chosen, the graph that saves most."""
    return tuned.profile.graph if tuned.profile.graph.nodes else max(tuned.candidates, key=lambda c: c.saved).graph


def _tau(outcome: Outcome) -> float:
    return outcome.setting.tau or 0.0


def _figure(rows: int, size: tuple[float, float], **kwargs: Any) -> tuple[Figure, tuple[Any, ...]]:
    figure = Figure(figsize=size, dpi=160, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = np.atleast_1d(figure.subplots(rows, 1, **kwargs))
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.spines[["left", "bottom"]].set_color(EDGE)
        each.tick_params(colors=INK, labelsize=8)
        each.grid(axis="y", color=EDGE, alpha=0.25, lw=0.6)
        each.xaxis.label.set_size(9)
        each.yaxis.label.set_size(9)
    return figure, tuple(axes)


def _title(axes: Any, text: str, detail: str) -> None:
    axes.set_title(f"{detail}", fontsize=8.5, color=GREY, loc="left")
    axes.figure.suptitle(text, x=0.02, ha="left", fontsize=12, fontweight="bold", color=INK)


def _bars(axes: Any, x: list[float], values: list[float], intervals: list[tuple[float, float]], label: str | None, style: Any) -> None:
    """A line with error bars."""
    low, high = (np.array(ends) for ends in zip(*intervals, strict=True))
    y = np.array(values)
    axes.errorbar(x, y, yerr=np.abs(np.stack([np.minimum(low, y), np.maximum(high, y)]) - y), label=label, **style)
