"""Time of the products by tile: what `kernels_pallas/tiles.py` chooses beside what else fits.

    python -m benchmarks.operations.tiles --shapes 1.5b --rows 32,128,288:96,288 --jobs 12 --out benchmarks/results/tiles-h200.json

Rows are those of a call, "288:96" of which 96 are computed. Splits of the summed axis are the default's: with others a row has other bits.
A time is a kernel's own, as CUPTI has it, the median over a call's weights (copies beyond the cache, one after the other) and five calls;
a tile whose result is further than 5e-3 (relative RMS) from fp32 is "wrong", one that raises "failed". Processes compile side by side
and measure one at a time. Results are written as they come; the same command goes on where it was interrupted.
"""

import itertools
import json
import multiprocessing
import os
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from absl import app, flags
from rich.console import Console
from rich.table import Table

from benchmarks.common.command import refuse_without_hopper, start
from benchmarks.common.environment import environment
from benchmarks.common.results_file import ResultsFile
from benchmarks.common.shapes import SHAPES, Shape
from kernels_pallas.tiles import BARRIER_BYTES, DEPTH, MOST_STAGES, MULTIPROCESSORS, ROWS, SHARED_BYTES, Tile, pair_tile, product_tile

OPS = ("qkv", "o", "gate_up", "down")
SUMS = {1: 200, 2: 192, 3: 136}
"""Registers a thread has for sums, by the number of warpgroups that multiply."""
WRONG = 5e-3
CALLS = 5
ROTATED = 120e6
"""Bytes of weights in a call: more than the cache holds twice over."""

FLAGS = flags.FlagValues()
flags.DEFINE_string("out", None, "Results file (JSON).", required=True, flag_values=FLAGS)
flags.DEFINE_list(
    "shapes", ["1.5b"], f"Shapes, separated by commas: {', '.join(name for name, s in SHAPES.items() if s)}.", flag_values=FLAGS
)
flags.DEFINE_list("rows", ["32", "128", "288:96", "288"], "Numbers of rows, or ROWS:COMPUTED.", flag_values=FLAGS)
flags.DEFINE_list("ops", list(OPS), f"Products: {', '.join(OPS)}.", flag_values=FLAGS)
flags.DEFINE_integer("jobs", 4, "Processes that compile.", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("most", 12, "Most tiles a case, the default among them.", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_string("commit", None, "Commit to record where there is no checkout to ask.", flag_values=FLAGS)


@dataclass(frozen=True)
class Case:
    """A product of `rows` rows, the first `count` computed, with a weight [columns, depth]; gated pairs are `pair`."""

    shape: str
    op: str
    rows: int
    count: int
    columns: int
    depth: int

    @property
    def pair(self) -> bool:
        """Whether it is the gated pair."""
        return self.op == "gate_up"

    @property
    def usual(self) -> Tile:
        """The tile that the kernels would take."""
        return pair_tile(self.columns // 2, self.rows) if self.pair else product_tile(self.columns, self.depth, self.rows)


def sizes(s: Shape, op: str) -> tuple[int, int]:
    """Columns and depth of a product's weight."""
    wide = (s.heads + 2 * s.kv_heads) * s.head_dim
    return {"qkv": (wide, s.dim), "o": (s.dim, s.heads * s.head_dim), "gate_up": (2 * s.ffn_dim, s.dim), "down": (s.dim, s.ffn_dim)}[op]


def candidates(case: Case) -> list[Tile]:
    """The usual tile, then others that fit, the fastest by `predicted` first."""
    usual, parts, need = case.usual, 1 + case.pair, -(-case.rows // ROWS)
    heights = sorted({-(-need // -(-need // most)) for most in (1, 2, 3, 4, 5)})
    widths = (56, 64, 72, 88, 96, 128) if case.pair else (64, 128, 192)
    found = []
    for blocks, groups, columns, cluster in itertools.product(heights, SUMS, widths, (1, 2, 4)):
        if groups > blocks:
            continue
        tile = Tile(blocks, groups, columns, 0, usual.splits, cluster)
        shared = tile.shares_last(parts)
        sums = ((blocks // groups if shared else -(-blocks // groups)) * parts + shared) * columns
        fits = [
            n
            for n in range(3, MOST_STAGES + 1)
            if tile._replace(stages=n).shared_bytes(case.rows, parts, 4 // parts) <= SHARED_BYTES - BARRIER_BYTES
        ]
        if fits and sums // 2 <= SUMS[groups]:
            found.append(tile._replace(stages=fits[-1]))

    found.sort(key=lambda tile: (predicted(case, tile), -tile.stages))
    return list(dict.fromkeys([usual, *found]))


def predicted(case: Case, tile: Tile) -> float:
    """Nanoseconds if nothing waits: waves of programs, a stage of which arrives at 42 bytes or multiplies at 6000 operations each."""
    parts, blocks = 1 + case.pair, min(tile.blocks, -(-case.count // ROWS))
    programs = -(-case.count // (tile.blocks * ROWS)) * -(-case.columns // parts // tile.columns) * tile.splits
    arrive = 2 * DEPTH * (parts * tile.columns + blocks * ROWS / tile.cluster) / 42
    multiply = 2 * DEPTH * blocks * ROWS * parts * tile.columns / 6000
    return -(-programs // MULTIPROCESSORS) * case.depth // DEPTH // tile.splits * max(arrive, multiply)


def cases() -> Iterator[Case]:
    """What the flags ask for. Raises UsageError for flags that name nothing."""
    for name, values, known in (("shapes", FLAGS.shapes, [n for n, s in SHAPES.items() if s]), ("ops", FLAGS.ops, OPS)):
        if unknown := [value for value in values if value not in known]:
            raise app.UsageError(f"--{name} has {', '.join(unknown)}, knows {', '.join(known)}")
    for shape, given, op in itertools.product(FLAGS.shapes, FLAGS.rows, FLAGS.ops):
        rows, part, count = given.partition(":")
        count = count if part else rows
        if not (rows.isdecimal() and count.isdecimal() and 0 < int(count) <= int(rows) and int(rows) % 8 == 0):
            raise app.UsageError(f"--rows has {given!r}, must be a multiple of 8, or ROWS:COMPUTED with 0 < COMPUTED <= ROWS")
        size = SHAPES[shape]
        assert size is not None  # checked above
        yield Case(shape, op, int(rows), int(count), *sizes(size, op))


def measure(case: Case, tile: Tile, alone: Any) -> dict[str, Any]:
    """Microseconds of a tile, or why there are none. `alone`: a lock that is held while the GPU works."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental.mosaic.gpu.profiler import Cupti

    from kernels_pallas.linear import linear, silu_pair

    function = silu_pair if case.pair else linear
    copies = max(2, min(24, round(ROTATED / (2 * case.columns * case.depth))))

    def chain(x: jax.Array, weights: list[jax.Array], count: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = x
        for weight in weights:
            out = function(x, weight, count, tile=tile)
            x = x.at[0, 0].set(jnp.where(out.reshape(-1)[0] < -1e30, 0, x[0, 0]))  # waits for the one before
        return x, out

    try:
        like = jax.ShapeDtypeStruct((case.columns, case.depth), jnp.bfloat16)
        rows, number = jax.ShapeDtypeStruct((case.rows, case.depth), jnp.bfloat16), jax.ShapeDtypeStruct((1,), jnp.int32)
        program = jax.jit(chain).lower(rows, [like] * copies, number).compile()
        with alone:
            keys = jax.random.split(jax.random.key(0), copies + 1)
            weights = [jax.random.normal(key, like.shape, like.dtype) * case.depth**-0.5 for key in keys[1:]]
            given = jax.random.normal(keys[0], rows.shape, rows.dtype), weights, jnp.asarray([case.count], jnp.int32)
            out = jax.block_until_ready(program(*given))[1]
            found: list[Any] = [Cupti().measure(program, aggregate=False)(*given)[1] or [] for _ in range(CALLS)]
        times = 1000 * np.asarray([milliseconds for call in found for name, milliseconds in call if re.match("linear|silu_pair", name)])
        if not times.size:
            raise RuntimeError("the profiler saw no kernel")
    except Exception as error:  # one tile must not cost the others their turn
        return {"failed": f"{type(error).__name__}: {error}"[:300]}
    want = np.asarray(given[0], np.float32)[: case.count] @ np.asarray(weights[-1], np.float32).T
    got = np.asarray(out, np.float32)
    if case.pair:
        gate, up = np.split(want, 2, axis=1)
        want = gate / (1 + np.exp(-gate)) * up
    else:
        got = got.sum(axis=0)
    error = float(np.linalg.norm(got[: case.count] - want) / np.linalg.norm(want))
    if not error <= WRONG:
        return {"wrong": error}
    low, middle, high = np.percentile(times, (25, 50, 75)).tolist()
    return {"median_us": middle, "low_us": low, "high_us": high, "repetitions": len(times), "error": error}


def table(results: list[dict[str, Any]], each: int = 4) -> Table:
    """The fastest tiles of each case, and the default."""
    out = Table("shape", "product", "rows", "us", "quartiles", "tile", "", title="Fastest tiles")
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault(json.dumps(result["case"]), []).append(result)
    for group in groups.values():
        group.sort(key=lambda result: result["measured"].get("median_us", float("inf")))
        for place, result in enumerate(group):
            c, m = result["case"], result["measured"]
            if place < each or result["default"] or "median_us" not in m:
                rows = str(c["rows"]) if c["count"] == c["rows"] else f"{c['count']} of {c['rows']}"
                time = (f"{m['median_us']:.1f}", f"{m['low_us']:.1f} to {m['high_us']:.1f}") if "median_us" in m else ("-", str(m))
                out.add_row(c["shape"], c["op"], rows, *time, str(tuple(result["tile"])), "default" if result["default"] else "")
    return out


def main() -> int:
    """Measures what the flags say; 1 if a tile failed or was wrong."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # for this process and those it starts
    wanted = [(case, tile) for case in cases() for tile in candidates(case)[: FLAGS.most]]
    refuse_without_hopper("tiles are timed on the GPU they are for")
    file, context = ResultsFile.named(FLAGS.out, "tiles", environment(FLAGS.commit)), multiprocessing.get_context("spawn")
    results = file.change(lambda found: [result for result in found if "failed" not in result["measured"]])
    done = [(result["case"], result["tile"]) for result in results]
    wanted = [(case, tile) for case, tile in wanted if (vars(case), list(tile)) not in done]
    with context.Manager() as manager, ProcessPoolExecutor(FLAGS.jobs, context) as pool:
        alone = manager.Lock()
        futures = {pool.submit(measure, case, tile, alone): (case, tile) for case, tile in wanted}
        for future in as_completed(futures):
            case, tile = futures[future]
            results = file.add({"case": vars(case), "tile": list(tile), "default": tile == case.usual, "measured": future.result()})
    Console(width=160).print(table(results))
    return int(any("median_us" not in result["measured"] for result in results))


if __name__ == "__main__":
    start(main, FLAGS)
