"""Pictures of results: what each operation costs against the number of rows, by implementation, with the floor.

    python -m benchmarks.plots --out pictures

Writes `ops-SHAPE.png` for every shape in the results of `benchmarks.ops`, and prints the files' names.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.command import start
from benchmarks.environment import RESULTS
from benchmarks.op_cases import OP_SHAPES, OPS, Case, floor
from specfold_jax.draw import EDGE, INK
from specfold_jax.files import read_json, whole
from specfold_jax.tune_plots import COLOURS, GREY

IMPLEMENTATIONS = {"xla": COLOURS[0], "pallas": COLOURS[1], "triton": COLOURS[2]}
COLUMNS = 4

FLAGS = flags.FlagValues()
flags.DEFINE_string("ops", str(RESULTS / "ops-h200.json"), "Results of benchmarks.ops.", flag_values=FLAGS)
flags.DEFINE_string("out", None, "Folder to write to.", required=True, flag_values=FLAGS)


def draw_ops(record: dict[str, Any], folder: Path) -> list[Path]:
    """Writes a picture for every shape that has times; returns their files."""
    timed = [result for result in record["results"] if "median_us" in result["measured"]]
    files = []
    for shape in dict.fromkeys(result["setting"]["shape"] for result in timed):
        files.append(folder / f"ops-{shape}.png")
        figure = _ops(shape, [result for result in timed if result["setting"]["shape"] == shape], record["environment"])
        with whole(files[-1]) as partial:
            figure.savefig(partial, format="png")
    return files


def _ops(shape: str, results: Sequence[dict[str, Any]], environment: dict[str, Any]) -> Figure:
    """A panel an operation, both axes logarithmic; bars are quartiles. Hollow marks: that many rows in a call with room for more."""
    names = [op for op in OPS if any(result["setting"]["op"] == op for result in results)]
    rows = sorted({result["setting"]["rows"] for result in results})
    height, width = -(-len(names) // COLUMNS), min(COLUMNS, len(names))
    figure = Figure(figsize=(3.1 * width + 0.4, 2.5 * height + 0.7), dpi=160, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
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
        axes.tick_params(colors=INK, labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(EDGE)
        axes.grid(axis="y", color=EDGE, alpha=0.25, lw=0.6)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside upper right", ncols=len(handles), fontsize=8, frameon=False)
    figure.supxlabel("rows", fontsize=9)
    figure.supylabel("microseconds an operation", fontsize=9)
    heading = f"Operations of the {shape} shape on {environment['device']}, commit {environment['commit']}"
    figure.suptitle(heading, x=0.02, ha="left", fontsize=11, fontweight="bold", color=INK)
    return figure


def main() -> None:
    """Draws what there is. Raises UsageError where there is nothing."""
    folder = Path(FLAGS.out)
    if not Path(FLAGS.ops).exists():
        raise app.UsageError(f"{FLAGS.ops} is not there; python -m benchmarks.ops --out {FLAGS.ops} measures it")
    record = read_json(FLAGS.ops, "results of benchmarks.ops")
    folder.mkdir(parents=True, exist_ok=True)
    for path in draw_ops(record, folder):
        print(path)


if __name__ == "__main__":
    start(main, FLAGS)
