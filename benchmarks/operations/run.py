r"""Time of every operation of a layer and of the head, by implementation, beside its floor on an H200.

    python -m benchmarks.operations.run --shapes 1.5b,7b --rows 32,64,128,288,1024,288:80 --impls xla,pallas,triton \
        --out benchmarks/results/ops-h200.json
    python -m benchmarks.operations.run --shapes toy --rows 64 --impls xla --repetitions 2 --links 4 --out /tmp/ops.json

Rows are rows in all, in whole branches of 32; "288:80" is room for 288 of which 80 are computed, for the operations on packed rows. What
each implementation does is in `kernels.py`, how times are taken in `timing.METHOD`, and in the results.

An operation is timed only if its result is right: relative RMS error of every output against fp32 on the same inputs within
`cases.TOLERANCE`, whole numbers equal. Else the results say "refused", with the errors; if it raises, "failed". Either way the others
are measured and the exit status is 1. "unsupported": the implementation has no such kernel, or none for these sizes. Times below the
floor are marked: the operation then found in the cache what should have come from memory, or did less than it should.

Results are written after each operation; the same command goes on where it was interrupted, and runs again what failed.
"""

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from absl import app, flags
from rich.console import Console
from rich.table import Table

from benchmarks.common.command import refuse_without_hopper, some_of, start
from benchmarks.common.environment import environment
from benchmarks.common.results_file import ResultsFile
from benchmarks.operations.cases import BLOCK, OP_SHAPES, OPS, PACKED, Arrays, Case, allowed, errors, floor, inputs
from benchmarks.operations.kernels import IMPLEMENTATIONS, Function, reference, takes
from benchmarks.operations.timing import METHOD, graph_seconds, jax_seconds

COLD = ("weight", "k_prefix", "v_prefix")
"""Inputs that a real pass reads from the device's memory; all others were written or read just before, and are in the cache."""
SHARED = ("positions",)
"""Inputs that are the same in all layers: what depends on them alone is computed once."""

FLAGS = flags.FlagValues()
flags.DEFINE_string("out", None, "Results file (JSON).", required=True, flag_values=FLAGS)
flags.DEFINE_list("shapes", ["1.5b", "7b"], f"Shapes, separated by commas: {', '.join(OP_SHAPES)}.", flag_values=FLAGS)
flags.DEFINE_list("rows", ["32", "64", "128", "288", "1024", "288:80"], "Numbers of rows, or ROWS:COMPUTED.", flag_values=FLAGS)
flags.DEFINE_list("impls", list(IMPLEMENTATIONS), f"Implementations: {', '.join(IMPLEMENTATIONS)}.", flag_values=FLAGS)
flags.DEFINE_list("ops", list(OPS), f"Operations: {', '.join(OPS)}.", flag_values=FLAGS)
flags.DEFINE_integer("prefix", 512, "Cache entries that attention reads.", lower_bound=0, flag_values=FLAGS)
flags.DEFINE_integer("repetitions", 50, "Repetitions of the timed program.", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("links", 512, "Most operations of a timed program, if copies are no more.", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("rotate_mb", 300, "Megabytes of weight or cache to rotate over.", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("copies", 128, "Most copies of a weight or cache.", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_string("commit", None, "Commit to record where there is no checkout to ask.", flag_values=FLAGS)

Setting = dict[str, Any]


def cases() -> Iterator[tuple[str, Case]]:
    """Name of the shape, and case. Raises UsageError for flags that name none."""
    for name, values, known in (("shapes", FLAGS.shapes, OP_SHAPES), ("ops", FLAGS.ops, OPS), ("impls", FLAGS.impls, IMPLEMENTATIONS)):
        some_of(name, values, known)
    for shape in FLAGS.shapes:
        for given in FLAGS.rows:
            rows, part, count = given.partition(":")
            count = count if part else rows
            if not (rows.isdecimal() and count.isdecimal() and 0 < int(count) <= int(rows) and int(rows) % BLOCK == 0):
                raise app.UsageError(f"--rows has {given!r}, must be a multiple of {BLOCK}, or ROWS:COMPUTED with 0 < COMPUTED <= ROWS")
            for op in FLAGS.ops:
                if op in PACKED or not part:
                    yield shape, Case(op, OP_SHAPES[shape], int(rows), int(count), FLAGS.prefix)


def setting_of(shape: str, case: Case, impl: str) -> Setting:
    """A setting's name in the results."""
    return {"shape": shape, "op": case.op, "impl": impl, "rows": case.rows, "count": case.count, "prefix": case.prefix}


def plan(case: Case, arrays: Arrays, names: Sequence[str]) -> tuple[list[Arrays], int]:
    """Copies of the arrays that come from memory (of none, where there are none), and how often to go over them: a few milliseconds."""
    cold = {name: arrays[name] for name in names if name in COLD}
    size = sum(x.nbytes for x in cold.values())
    number = min(max(-(-FLAGS.rotate_mb * 10**6 // size), 2), FLAGS.copies) if cold else min(32, FLAGS.links)
    links = min(FLAGS.links, max(5e-3 / floor(case), 1))
    copies = [cold] + [{name: jnp.copy(x) for name, x in cold.items()} for _ in range(number - 1)]
    return copies, max(round(links / number), 1)


def to_torch(arrays: Arrays) -> Arrays:
    """The same memory, for PyTorch."""
    return {name: torch.from_dlpack(x) for name, x in jax.block_until_ready(arrays).items()}


def outputs(case: Case, impl: str, function: Function, arrays: Arrays) -> Arrays:
    """What an implementation gives, as JAX arrays."""
    given = {name: arrays[name] for name in takes(function)}
    if impl == "triton":
        return {name: jnp.from_dlpack(x.contiguous()) for name, x in function(case, **to_torch(given)).items()}
    return jax.jit(partial(function, case))(**given)


def measure(case: Case, impl: str, arrays: Arrays, want: Arrays) -> dict[str, Any]:
    """Microseconds of the operation, or why there are none."""
    function: Function | None = IMPLEMENTATIONS[impl].get(case.op)
    if function is None:
        return {"unsupported": f"{impl} has no kernel that does this and no more"}
    names, bound = takes(function), partial(function, case)
    try:
        found = errors(case, outputs(case, impl, function, arrays), want)
        most = {name: allowed(case.op, name, want[name]) for name in found}
        if any(not found[name] <= most[name] for name in found):
            return {"refused": found, "allowed": most}
        copies, loops = plan(case, arrays, names)
        hot = {name: arrays[name] for name in names if name not in COLD}
        if impl == "triton":
            timed = graph_seconds([partial(bound, **to_torch(hot | cold)) for cold in copies], loops, FLAGS.repetitions)
        else:
            first, shared = hot.pop(names[0]), {name: hot.pop(name) for name in SHARED if name in hot}
            args = first, hot, copies, loops, FLAGS.repetitions
            timed = jax_seconds(lambda first, hot, cold: bound(**{names[0]: first}, **hot, **cold, **shared), *args)
    except NotImplementedError as error:
        return {"unsupported": str(error)}
    except Exception as error:  # of whatever kind: a kernel that does not compile must not cost the others their turn on a lent GPU
        return {"failed": f"{type(error).__name__}: {error}"[:500]}
    low, middle, high = np.percentile(1e6 * np.asarray(timed.seconds), (25, 50, 75)).tolist()
    spread = {"median_us": middle, "low_us": low, "high_us": high, "repetitions": len(timed.seconds)}
    moved = sum(x.nbytes for cold in copies for x in cold.values())
    how = {"links": loops * len(copies), "copies": len(copies), "rotated_mb": moved / 1e6, "link_us": 1e6 * timed.link}
    how |= {"program_copies": timed.copies, "errors": found}
    return spread | {"floor_us": 1e6 * floor(case), "over_floor": middle / (1e6 * floor(case))} | how


def compared(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results with each one's time over XLA's in the same setting, where both have one."""
    times = {json.dumps(r["setting"]): r["measured"].get("median_us") for r in results}
    out = []
    for r in results:
        mine, base = r["measured"].get("median_us"), times.get(json.dumps(r["setting"] | {"impl": "xla"}))
        out.append(r | {"measured": r["measured"] | {"over_xla": mine / base}} if mine and base else r)
    return out


def table(results: Sequence[dict[str, Any]]) -> Table:
    """Results, in red what is wrong with them."""
    out = Table("shape", "operation", "rows", "impl", "us", "quartiles", "floor us", "over floor", "over xla", "note")
    for result in results:
        s, m = result["setting"], result["measured"]
        rows = f"{s['count']} of {s['rows']}" if s["count"] < s["rows"] else str(s["rows"])
        which = (s["shape"], s["op"], rows, s["impl"])
        if "median_us" in m:
            ratio = f"{m['over_xla']:.2f}" if m.get("over_xla") else "-"
            low = "[bold red]below the floor[/]" if m["over_floor"] < 1 else ""
            spread = f"{m['low_us']:.1f} to {m['high_us']:.1f}"
            out.add_row(*which, f"{m['median_us']:.1f}", spread, f"{m['floor_us']:.1f}", f"{m['over_floor']:.2f}", ratio, low)
        else:
            what, why = next(iter(m.items()))
            note = f"{what}: {why}".replace("[", r"\[")
            out.add_row(*which, *["-"] * 5, note if what == "unsupported" else f"[bold red]{note}[/]")
    return out


def require_device() -> None:
    """Raises UsageError for implementations that cannot run here."""
    if "pallas" in FLAGS.impls:
        refuse_without_hopper("--impls=pallas")
    if "triton" in FLAGS.impls and jax.default_backend() != "gpu":
        raise app.UsageError("--impls=triton needs a CUDA device, and there is none")


def main() -> int:
    """Measures what the flags say; 1 if an operation was refused or failed."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # read when JAX first looks for devices, which nothing has done yet
    wanted, console = list(cases()), Console(width=180)
    require_device()
    timing = {name: FLAGS[name].value for name in ("repetitions", "links", "rotate_mb", "copies")}
    file = ResultsFile.named(FLAGS.out, "ops", environment(FLAGS.commit, with_torch=True), timing=timing, method=METHOD)
    results = file.change(lambda found: [result for result in found if "failed" not in result["measured"]])
    done = [result["setting"] for result in results]
    for _, group in itertools.groupby(wanted, lambda each: (each[0], each[1].rows, each[1].count)):
        before = len(results)
        for shape, case in group:
            pending = [impl for impl in FLAGS.impls if setting_of(shape, case, impl) not in done]
            if pending:
                arrays = inputs(case)
                want = reference(case, arrays)
                for impl in pending:
                    result = {"setting": setting_of(shape, case, impl), "measured": measure(case, impl, arrays, want)}
                    results = file.change(lambda found, result=result: compared([*found, result]))
        if len(results) > before:
            console.print(table(results[before:]))
    console.print(table(results))
    return int(any("refused" in r["measured"] or "failed" in r["measured"] for r in results))


if __name__ == "__main__":
    start(main, FLAGS)
