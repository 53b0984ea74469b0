"""Pictures of results: what operations and checks cost against the number of rows, and where folding pays.

    python -m benchmarks.tables.plots --out pictures

Writes, for every shape there are results of, and prints the files' names:

  ops-SHAPE.png       each operation against rows, by implementation, with the floor (`benchmarks.operations.run`)
  checks-SHAPE.png    a check that computes all its rows against their number, by implementation, with the floor (`benchmarks.speed.checks`)
  check-parts-SHAPE.png    what the kernels of each of these checks do
  check-regimes-SHAPE.png  a SpecFold check over Spiffy's and over vanilla's, by batch and drafts, for each implementation and tau
  regimes-SHAPE.png   the same of whole iterations, as decodes have them (`benchmarks.speed.decode`), but for PyTorch,
                      whose parts wait for the host

Results that are at none of the usual places, and not named, are left out.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.common.command import as_usage, start
from benchmarks.common.environment import RESULTS
from benchmarks.common.results_file import commits, read
from benchmarks.operations.cases import OP_SHAPES, OPS, Case, floor
from benchmarks.speed.ratios import ON_DEVICE, ratios, ratios_of_checks
from specfold_jax.files import atomic_write
from specfold_jax.palette import EDGE, GREY, INK, SERIES

IMPLEMENTATIONS = {"xla": SERIES[0], "pallas": SERIES[1], "triton": SERIES[2], "torch": SERIES[3]}
COLUMNS = 4

FLAGS = flags.FlagValues()
flags.DEFINE_string("ops", str(RESULTS / "ops-h200.json"), "Results of benchmarks.operations.run.", flag_values=FLAGS)
flags.DEFINE_string("checks", str(RESULTS / "checks-h200.json"), "Results of benchmarks.speed.checks.", flag_values=FLAGS)
flags.DEFINE_string("decode", str(RESULTS / "decode-h200.json"), "Results of benchmarks.speed.decode.", flag_values=FLAGS)
flags.DEFINE_string("out", None, "Folder to write to.", required=True, flag_values=FLAGS)


def draw_ops(record: dict[str, Any], folder: Path) -> list[Path]:
    """Writes a picture for every shape that has times; returns their files."""
    timed = [result for result in record["results"] if "median_us" in result["measured"]]
    files = []
    for shape, mine in _by_shape(timed):
        files.append(_save(_ops(shape, mine, record), folder / f"ops-{shape}.png"))
    return files


def draw_checks(record: dict[str, Any], folder: Path) -> list[Path]:
    """Writes for every shape time by rows, kernels of each check, and where folding pays, as far as measured; returns their files."""
    files = []
    for shape, mine in _by_shape(record["results"]):
        files.append(_save(_checks(shape, mine, record), folder / f"checks-{shape}.png"))
        if parts := [result for result in mine if (result["measured"]["kernels"] or {}).get("groups")]:
            files.append(_save(_parts(shape, parts, record), folder / f"check-parts-{shape}.png"))
        if found := list(ratios_of_checks(mine)):
            title = f"SpecFold checks of the {shape} shape"
            files.append(_save(_regimes(title, found, record), folder / f"check-regimes-{shape}.png"))
    return files


def draw_decodes(record: dict[str, Any], folder: Path) -> list[Path]:
    """Writes a picture for every shape of which SpecFold was measured; returns their files."""
    files = []
    for shape, mine in _by_shape(record["results"]):
        if found := [each for each in ratios(mine) if each["impl"] in ON_DEVICE]:
            title = f"SpecFold iterations of the {shape} shape"
            files.append(_save(_regimes(title, found, record), folder / f"regimes-{shape}.png"))
    return files


def _by_shape(results: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for shape in dict.fromkeys(result["setting"]["shape"] for result in results):
        yield shape, [result for result in results if result["setting"]["shape"] == shape]


def _save(figure: Figure, path: Path) -> Path:
    with atomic_write(path) as partial:
        figure.savefig(partial, format="png")
    return path


def _new(title: str, record: dict[str, Any], size: tuple[float, float]) -> Figure:
    figure = Figure(figsize=size, dpi=160, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    heading = f"{title} on {record['environment']['device']}, commit {commits(record)}"
    figure.suptitle(heading, x=0.02, ha="left", fontsize=11, fontweight="bold", color=INK)
    return figure


def _plain(axes: Any) -> None:
    axes.tick_params(colors=INK, labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(EDGE)


def _checks(shape: str, results: Sequence[dict[str, Any]], record: dict[str, Any]) -> Figure:
    """Checks without folding, both axes logarithmic; bars are quartiles. Of one batch each line; more than one is hollow."""
    figure = _new(f"A check of the {shape} shape", record, (6.4, 4.2))
    axes, floors = figure.subplots(), {}
    for impl, colour in IMPLEMENTATIONS.items():
        for single in (True, False):
            some = [r for r in results if r["setting"]["impl"] == impl and (r["setting"]["batch"] == 1) == single]
            mine = sorted((r["measured"] for r in some if r["setting"]["tau"] is None), key=lambda m: m["rows"])
            if mine:
                rows, middle = [m["rows"] for m in mine], [m["median_ms"] for m in mine]
                spread = [[m["median_ms"] - m["low_ms"] for m in mine], [m["high_ms"] - m["median_ms"] for m in mine]]
                style: dict[str, Any] = (
                    {"label": impl, "lw": 1.4} if single else {"label": f"{impl}, several sequences", "ls": "none", "mfc": "white"}
                )
                axes.errorbar(rows, middle, yerr=spread, color=colour, marker="o", ms=4, capsize=2, elinewidth=1, **style)
            floors |= {m["rows"]: max(m["bytes_floor_ms"], m["arithmetic_floor_ms"]) for m in mine}
    axes.plot(sorted(floors), [floors[rows] for rows in sorted(floors)], color=GREY, lw=1.2, ls="--", label="floor")
    axes.set(xscale="log", yscale="log", xlabel="rows computed", ylabel="milliseconds")
    axes.set_xticks(ticks := _apart(sorted(floors)), [str(rows) for rows in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color=EDGE, alpha=0.25, lw=0.6)
    axes.legend(fontsize=8, frameon=False)
    _plain(axes)
    return figure


def _apart(numbers: Sequence[int]) -> list[int]:
    """Those of rising numbers whose names do not run into each other on a logarithmic axis."""
    kept: list[int] = []
    for number in numbers:
        if not kept or number > 1.15 * kept[-1]:
            kept.append(number)
    return kept


def _parts(shape: str, results: Sequence[dict[str, Any]], record: dict[str, Any]) -> Figure:
    """A bar a check, by setting, of what its kernels do; what is left of the time between them; the floor as a tick."""
    order = ("impl", "batch", "drafts")
    results = sorted(results, key=lambda r: (*(r["setting"][name] for name in order), r["setting"]["tau"] or -1))
    figure = _new(f"Parts of a check of the {shape} shape", record, (7.4, 1.4 + 0.32 * len(results)))
    axes, groups = figure.subplots(), list(dict.fromkeys(name for r in results for name in r["measured"]["kernels"]["groups"]))
    names, left = [_named(result["setting"], result["measured"]) for result in results], np.zeros(len(results))
    shown = {group: [r["measured"]["kernels"]["groups"].get(group, 0.0) for r in results] for group in groups}
    shown["between kernels"] = [max(r["measured"]["median_ms"] - r["measured"]["kernels"]["all"], 0.0) for r in results]
    places = range(len(results))
    for (group, wide), colour in zip(((g, w) for g, w in shown.items() if any(w)), (*SERIES, GREY), strict=False):
        axes.barh(places, wide, left=left, label=group, color="#dde3ea" if group == "between kernels" else colour, height=0.65)
        left += wide
    floors = [max(r["measured"]["bytes_floor_ms"], r["measured"]["arithmetic_floor_ms"]) for r in results]
    axes.plot(floors, places, color=INK, marker="|", ms=11, mew=1.6, ls="none", label="floor")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds", fontsize=8)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=7, frameon=False)
    _plain(axes)
    return figure


def _named(setting: dict[str, Any], measured: dict[str, Any]) -> str:
    s, rows = setting, measured["rows"]
    if s["tau"] is None:
        what = f"Spiffy, D = {s['drafts']}, {rows} rows" if s["drafts"] else f"vanilla, {rows} rows"
    else:
        what = f"SpecFold, D = {s['drafts']}, tau {s['tau']:g}, recompute {sum(measured['recompute']) / 2:.2f}"
    return f"{s['impl']}, batch {s['batch']}: {what}"


def _regimes(title: str, found: Sequence[dict[str, Any]], record: dict[str, Any]) -> Figure:
    """A row of maps for each implementation and tau. Below 1, folding pays."""
    kinds = sorted({(r["impl"], r["tau"]) for r in found})
    batches, drafts = (sorted({r[name] for r in found}) for name in ("batch", "drafts"))
    figure = _new(title, record, (7.4, 0.6 + 2.2 * len(kinds)))
    for row, (impl, tau) in zip(figure.subplots(len(kinds), 2, squeeze=False), kinds, strict=True):
        for axes, rival in zip(row, ("spiffy", "vanilla"), strict=True):
            cells = np.full((len(drafts), len(batches)), np.nan)
            for r in found:
                if (r["impl"], r["tau"]) == (impl, tau):
                    cells[drafts.index(r["drafts"]), batches.index(r["batch"])] = r[f"specfold_over_{rival}"]
            scale = TwoSlopeNorm(1, 0.25, 4)
            axes.imshow(cells, cmap="RdBu_r", norm=scale, origin="lower", aspect="auto")
            for (y, x), value in np.ndenumerate(cells):
                there = not np.isnan(value)
                colour = GREY if not there else "white" if abs(float(scale(value)) - 0.5) > 0.3 else INK
                axes.text(x, y, f"{value:.2f}" if there else "not measured", ha="center", va="center", fontsize=8, color=colour)
            axes.set_xticks(range(len(batches)), [str(n) for n in batches])
            axes.set_yticks(range(len(drafts)), [str(n) for n in drafts])
            axes.set(xlabel="batch", ylabel="drafts a check")
            axes.set_title(f"{impl}, tau {tau:g}: over {'Spiffy' if rival == 'spiffy' else rival}", fontsize=9, color=INK)
            _plain(axes)
    return figure


def _ops(shape: str, results: Sequence[dict[str, Any]], record: dict[str, Any]) -> Figure:
    """A panel an operation, both axes logarithmic; bars are quartiles. Hollow marks: that many rows in a call with room for more."""
    names = [op for op in OPS if any(result["setting"]["op"] == op for result in results)]
    rows = sorted({result["setting"]["rows"] for result in results})
    height, width = -(-len(names) // COLUMNS), min(COLUMNS, len(names))
    figure = _new(f"Operations of the {shape} shape", record, (3.1 * width + 0.4, 2.5 * height + 0.7))
    panels = figure.subplots(height, width, sharex=True, squeeze=False).ravel()
    for axes, op in zip(panels, names, strict=False):
        mine = [result for result in results if result["setting"]["op"] == op]
        for impl, colour in IMPLEMENTATIONS.items():
            for full in (True, False):
                some = [r for r in mine if r["setting"]["impl"] == impl and (r["setting"]["count"] == r["setting"]["rows"]) == full]
                some.sort(key=lambda result: result["setting"]["count"])
                if some:
                    found = [result["measured"] for result in some]
                    middle = [m["median_us"] for m in found]
                    bars = [[m["median_us"] - m["low_us"] for m in found], [m["high_us"] - m["median_us"] for m in found]]
                    style: dict[str, Any] = {"color": colour, "marker": "o", "ms": 4, "lw": 1.4, "capsize": 2, "elinewidth": 1}
                    style |= {"label": impl} if full else {"ls": "none", "mfc": "white"}
                    axes.errorbar([result["setting"]["count"] for result in some], middle, yerr=bars, **style)
        prefix = mine[0]["setting"]["prefix"]
        least = [1e6 * floor(Case(op, OP_SHAPES[shape], n, n, prefix)) for n in rows]
        axes.plot(rows, least, color=GREY, lw=1.2, ls="--", label="floor")
        axes.set_title(op, fontsize=9, color=INK)
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(rows, [str(n) for n in rows])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(axis="y", color=EDGE, alpha=0.25, lw=0.6)
        _plain(axes)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside upper right", ncols=len(handles), fontsize=8, frameon=False)
    figure.supxlabel("rows", fontsize=9)
    figure.supylabel("microseconds an operation", fontsize=9)
    return figure


PICTURES = {"ops": draw_ops, "checks": draw_checks, "decode": draw_decodes}
"""By the name of the benchmark, and of the flag for its results."""


def main() -> None:
    """Draws what there is. Raises UsageError where there is nothing."""
    named = {name: Path(str(FLAGS[name].value)) for name in PICTURES}
    with as_usage():
        records = {name: read(path, name) for name, path in named.items() if path.exists() or not FLAGS[name].using_default_value}
    folder = Path(FLAGS.out)
    with as_usage("--out: "):
        folder.mkdir(parents=True, exist_ok=True)
    drawn = [path for name, record in records.items() for path in PICTURES[name](record, folder)]
    if not drawn:
        raise app.UsageError(
            f"nothing to draw in {FLAGS.ops}, {FLAGS.checks}, {FLAGS.decode}; benchmarks.operations.run, .checks and .decode measure it"
        )
    print(*drawn, sep="\n")


if __name__ == "__main__":
    start(main, FLAGS)
