"""Writes how far every implementation is from the fp32 reference, case by case: `python -m parity_tests.report`.

The table goes to benchmarks/results/parity-<device>.json with device, versions and commit; the worst cases are printed. Most of the time
goes into compiling, which --jobs processes do side by side.
"""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the tests' modules name each other without the package, as pytest runs them

import jax
import torch
from absl import app, flags
from rich.console import Console
from rich.table import Table

from benchmarks.command import start
from benchmarks.environment import RESULTS
from cases import CASES
from close import EXACT, TOLERANCE, errors
from devices import DEVICE, about
from implementations import IMPLEMENTATIONS, reference, run, takes
from specfold_jax.files import write_json

FLAGS = flags.FlagValues()
_OUT = flags.DEFINE_string("out", None, "File to write; by default benchmarks/results/parity-<device>.json.", flag_values=FLAGS)
_OP = flags.DEFINE_multi_string("op", None, "Operations to report; by default all.", flag_values=FLAGS)
_COMMIT = flags.DEFINE_string("commit", None, "Commit to record where there is no checkout to ask.", flag_values=FLAGS)
_JOBS = flags.DEFINE_integer("jobs", 1, "Processes, each with cases of its own.", lower_bound=1, flag_values=FLAGS)
_WORST = flags.DEFINE_integer("worst", 12, "Cases to print.", lower_bound=1, flag_values=FLAGS)


def configure() -> None:
    """What every process sets before its first case: the reference multiplies exactly."""
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_default_matmul_precision", "highest")


def rows_of(number: int, dtype: torch.dtype) -> list[dict]:
    """One row per implementation and named output of a case, which goes by its number: it would not travel to another process."""
    case = CASES[number]
    want, rows = reference(case, dtype), []
    for implementation in (i for i in IMPLEMENTATIONS if takes(i, case, dtype)):
        for name, error in errors(run(case.op, case.inputs(dtype, DEVICE), implementation), want).items():
            tolerance = TOLERANCE[case.op][dtype] if want[name].dtype.is_floating_point else EXACT
            labels = {"op": case.op, "case": case.name, "dtype": str(dtype).removeprefix("torch."), "implementation": implementation}
            rows.append(labels | {"output": name, "error": float(f"{error:.3g}"), "tolerance": tolerance, "passed": error <= tolerance})
    return rows


def print_worst(rows: list[dict], count: int) -> None:
    """The rows nearest to their tolerance, or beyond it."""
    table = Table(*rows[0], title=f"{len(rows)} comparisons, {sum(not row['passed'] for row in rows)} beyond tolerance; the worst:")
    for row in sorted(rows, key=lambda row: (row["passed"], -row["error"] / (row["tolerance"] or 1)))[:count]:
        table.add_row(*map(str, row.values()))
    Console(width=160).print(table)


def main() -> int:
    chosen = [(number, case) for number, case in enumerate(CASES) if not _OP.value or case.op in _OP.value]
    cells = [(number, dtype) for number, case in chosen for dtype in case.dtypes if case.runs(dtype, DEVICE)]
    if not cells:
        raise app.UsageError(f"no case of --op={_OP.value}")
    with ProcessPoolExecutor(_JOBS.value, multiprocessing.get_context("spawn"), initializer=configure) as pool:
        rows = [row for found in pool.map(rows_of, *zip(*cells, strict=True)) for row in found]
    record = about(_COMMIT.value)
    name = record["torch_device"].removeprefix("NVIDIA ").split(",")[0].lower().replace(" ", "-")
    path = Path(_OUT.value) if _OUT.value else RESULTS / f"parity-{name}.json"
    write_json(path, record | {"results": rows})
    print_worst(rows, _WORST.value)
    print(path)
    return int(not all(row["passed"] for row in rows))


if __name__ == "__main__":
    start(main, FLAGS)
