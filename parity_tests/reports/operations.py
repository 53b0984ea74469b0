"""Writes how far every implementation is from the fp32 reference, case by case: `python -m parity_tests.reports.operations`.

The table goes to benchmarks/results/parity-<device>.json with device, versions and commit; the worst cases are printed. Most of the time
goes into compiling, which --jobs processes do side by side. Results are written after each case, with how many of all remain; the same
command goes on where it was interrupted.
"""

import jax
import torch
from absl import app, flags
from rich.console import Console
from rich.table import Table

from benchmarks.common.command import start
from benchmarks.common.environment import RESULTS, environment
from benchmarks.common.results_file import ResultsFile
from parity_tests.harness.cases import CASES
from parity_tests.harness.close import EXACT, TOLERANCE, errors
from parity_tests.harness.devices import DEVICE, share_memory
from parity_tests.harness.implementations import IMPLEMENTATIONS, reference, run, takes
from parity_tests.harness.processes import each

FLAGS = flags.FlagValues()
_OUT = flags.DEFINE_string("out", None, "File to write; by default benchmarks/results/parity-<device>.json.", flag_values=FLAGS)
_OP = flags.DEFINE_multi_string("op", None, "Operations to report; by default all.", flag_values=FLAGS)
_COMMIT = flags.DEFINE_string("commit", None, "Commit to record where there is no checkout to ask.", flag_values=FLAGS)
_JOBS = flags.DEFINE_integer("jobs", 1, "Processes, each with cases of its own.", lower_bound=1, flag_values=FLAGS)
_WORST = flags.DEFINE_integer("worst", 12, "Cases to print.", lower_bound=1, flag_values=FLAGS)


def configure() -> None:
    """What every process sets before its first case: the reference multiplies exactly, and others have cases on the same device."""
    share_memory()
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


def order(row: dict) -> int:
    """Where a row stands in the report: by operation."""
    return list(TOLERANCE).index(row["op"])


def print_worst(rows: list[dict], count: int) -> None:
    """The rows nearest to their tolerance, or beyond it."""
    table = Table(*rows[0], title=f"{len(rows)} comparisons, {sum(not row['passed'] for row in rows)} beyond tolerance; the worst:")
    for row in sorted(rows, key=lambda row: (row["passed"], -row["error"] / (row["tolerance"] or 1)))[:count]:
        table.add_row(*map(str, row.values()))
    Console(width=160).print(table)


def main() -> int:
    """Reports the cases that the file does not have yet; 1 if any failed or is beyond tolerance."""
    here = environment(_COMMIT.value, with_torch=True)
    device = here["torch_device"].removeprefix("NVIDIA ").lower().replace(" ", "-")
    file = ResultsFile.named(_OUT.value or RESULTS / f"parity-{device}.json", "parity", here)
    every = [(number, dtype) for number, case in enumerate(CASES) for dtype in case.dtypes if case.runs(dtype, DEVICE)]
    done = {(row["op"], row["case"], row["dtype"]) for row in file.results}
    missing = [cell for cell in every if (CASES[cell[0]].op, CASES[cell[0]].name, str(cell[1]).removeprefix("torch.")) not in done]
    if _OP.value and not any(CASES[number].op in _OP.value for number, _ in every):
        raise app.UsageError(f"no case of --op={_OP.value}; operations are {', '.join(dict.fromkeys(case.op for case in CASES))}")
    cells = [cell for cell in missing if not _OP.value or CASES[cell[0]].op in _OP.value]
    cells.sort(key=lambda cell: not CASES[cell[0]].layer)  # the longest first
    failed, rows = [], file.results
    for number, (cell, future) in enumerate(each(rows_of, cells, _JOBS.value, configure), 1):
        if error := future.exception():  # the others are worth having
            failed.append(f"{CASES[cell[0]].name} {cell[1]}: {error}")
            found = []
        else:
            found = future.result()
        rows = file.change(lambda before, found=found: sorted([*before, *found], key=order), remaining=len(missing) - number + len(failed))
    print_worst(rows, _WORST.value)
    print(file.path, *failed, sep="\n")
    return int(bool(failed) or not all(row["passed"] for row in rows))


if __name__ == "__main__":
    start(main, FLAGS)
