r"""Time of one check by its rows, with and without folding, by implementation, beside the floor.

    python -m benchmarks.speed.checks --shapes 1.5b,7b --cases 1x0,1x1,1x3,1x8,1x15,2x15,8x0,8x8 --out benchmarks/results/checks-h200.json
    python -m benchmarks.speed.checks --shapes tiny --impls xla --cases 1x3 --dtype float32 --prefix 64 --repetitions 2 \
        --out /tmp/checks.json

A case "BATCHxDRAFTS" is a check of so many sequences, each with so many drafts, all of them valid: batch x (drafts + 1) x 32 rows.
Canvases hold real text (packaged problems) behind a prefix of text: of the main branch the first token is known, of every draft some more
than of the one before it, up to the whole block. The model is the packaged tiny one, embedded in the shape (`benchmarks.common.shapes`).
How many rows a gate folds is a trained model's, what a pass costs is the shape's.

Spiffy evaluates all rows; SpecFold, for each of --taus, those that the gates name. Times are of the forward pass without the head, taken
in loops on the device (`benchmarks.speed.timing_jax`); of kernels by CUPTI, over one pass. Floors are for an H200, as measured: 4.3e12
bytes/s and 770e12 bfloat16 operations/s; a folded check's counts the rows computed. Results are written after each case; the same command
goes on where it was interrupted. Commands for other cases and implementations may fill the same file side by side, as those of
`benchmarks.speed.decode`.
"""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jaxtyping import Array, Int
from rich.console import Console
from rich.table import Table

from benchmarks.common.command import as_usage, refuse_without_hopper, some_of, start
from benchmarks.common.environment import environment
from benchmarks.common.results_file import ResultsFile
from benchmarks.common.shapes import SHAPES
from benchmarks.speed.decode import DTYPES, floors, in_shape
from benchmarks.speed.ratios import EMBEDDED
from benchmarks.speed.timing import grouped, spread
from benchmarks.speed.timing_jax import check_loop, empty_turn, kernel_times, turn_seconds
from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.diffusion.decoding import Decoding
from specfold_jax.diffusion.draft import descent
from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.models.check import Branches, Checked
from specfold_jax.models.checkpoint import resolve_folder
from specfold_jax.models.transformer import Cache, Params, prefill
from specfold_jax.text.problems import packaged_problems
from specfold_jax.text.tokens import encode, load_tokenizer

IMPLS = ("xla", "pallas")

FLAGS = flags.FlagValues()
flags.DEFINE_string("out", None, "Results file (JSON).", required=True, flag_values=FLAGS)
flags.DEFINE_list("shapes", ["1.5b", "7b"], f"Shapes, separated by commas: {', '.join(SHAPES)}.", flag_values=FLAGS)
flags.DEFINE_list("impls", list(IMPLS), "xla, pallas (Hopper); separated by commas.", flag_values=FLAGS)
flags.DEFINE_list("cases", ["1x0", "1x1", "1x3", "1x8", "1x15", "2x15", "8x0", "8x8"], "BATCHxDRAFTS, by commas.", flag_values=FLAGS)
flags.DEFINE_list("taus", ["0", "0.1", "0.3"], "SpecFold's gate thresholds, separated by commas; none: no folding.", flag_values=FLAGS)
flags.DEFINE_integer("prefix", 512, "Cache entries that every branch sees, in whole blocks.", lower_bound=0, flag_values=FLAGS)
flags.DEFINE_enum("dtype", "bfloat16", list(DTYPES), "Type of weights and activations.", flag_values=FLAGS)
flags.DEFINE_integer("repetitions", 50, "Repetitions of a check.", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_string("commit", None, "Commit to record where there is no checkout to ask.", flag_values=FLAGS)

Setting = dict[str, Any]
Given = tuple[Params, Branches, Cache, Int[Array, " batch"]]


def text(number: int, length: int) -> Int[np.ndarray, "number length"]:
    """So many different stretches of the packaged problems' text."""
    ids = encode(load_tokenizer(resolve_folder("tiny")), [f"{p.question}\n{p.answer_text}" for p in packaged_problems()])
    stream = np.fromiter(itertools.chain.from_iterable(ids), np.int32)
    return np.resize(stream, number * length).reshape(number, length)


def inputs(params: Params, model: ModelConfig, batch: int, drafts: int, prefix: int) -> tuple[Branches, Cache, Int[Array, " batch"]]:
    """Branches, the cache behind which they stand, and the number of its entries."""
    block = model.block_size
    tokens = jnp.asarray(text(batch, prefix + block))
    known = 1 + np.arange(drafts + 1) * (block - 1) // max(drafts, 1)
    seen = jnp.arange(block) < known[:, None]
    canvases = jnp.where(seen, tokens[:, None, prefix:], model.mask_id)
    valid, starts = jnp.ones(canvases.shape[:2], bool), jnp.full(batch, prefix, jnp.int32)
    branches = Branches(canvases, valid, descent(canvases, valid, model.mask_id), starts, jnp.zeros(batch, bool))
    cache = prefill(params, tokens, model, "block", block)[1]  # the block's own entries are there, and not seen
    return branches, cache, starts


def run(model: ModelConfig, decode: DecodeConfig, given: Given, fold: FoldConfig | None, turns: Array) -> Checked:
    """So many checks, each after the one before."""
    return check_loop(*given, Decoding(model, decode, DraftGraph.empty(), fold), turns)


def settings(shape: str, impl: str, batch: int, drafts: int) -> list[Setting]:
    """Spiffy (vanilla without drafts), and SpecFold with each tau."""
    fixed = {"shape": shape, "impl": impl, "batch": batch, "drafts": drafts, "prefix": FLAGS.prefix, "dtype": FLAGS.dtype}
    return [fixed | {"tau": tau} for tau in (None, *dict.fromkeys(float(tau) for tau in FLAGS.taus if drafts))]


def measure(setting: Setting, given: Given, fold: FoldConfig | None, program: Any) -> dict[str, Any]:
    """What a row of the results says."""
    params, branches = given[:2]
    off = empty_turn()
    seconds = turn_seconds(lambda turns: jax.block_until_ready(program(given, fold, turns)), FLAGS.repetitions)
    found: dict[str, Any] = spread([each - off for each in seconds])
    rows = branches.tokens.size
    drafted = int(np.asarray(branches.drafts()).sum()) * branches.tokens.shape[2]
    computed = np.asarray(program(given, fold, np.int32(1)).computed_rows).sum(axis=0).mean(axis=0) if drafted else None
    ratio = [float(n) / drafted for n in computed] if fold and computed is not None else None
    least = rows if ratio is None else rows - drafted * (1 - sum(ratio) / 2)
    try:
        kernels = grouped(kernel_times(program, given, fold, np.int32(1)), setting["impl"])
    except Exception as error:  # times are worth having without them
        kernels = {"error": f"{type(error).__name__}: {error}"[:300]}
    return found | {"rows": rows, "recompute": ratio, "kernels": kernels} | floors(params, least, head=False)


def compile_all(ways: Mapping[str, tuple[DecodeConfig, Given, FoldConfig | None]], model: ModelConfig) -> dict[str, Any]:
    """Programs side by side. Taus share one."""

    def build(way: tuple[DecodeConfig, Given, FoldConfig | None]) -> Any:
        return jax.jit(partial(run, model, way[0])).lower(*way[1:], np.int32(1)).compile()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(ways, pool.map(build, ways.values()), strict=True))


def cases() -> Iterator[tuple[int, int]]:
    """Batch and drafts. Raises UsageError for flags that name nothing."""
    some_of("shapes", FLAGS.shapes, SHAPES)
    some_of("impls", FLAGS.impls, IMPLS)
    if not FLAGS.cases:
        raise app.UsageError("--cases is empty, must be BATCHxDRAFTS, separated by commas")
    for case in dict.fromkeys(FLAGS.cases):
        batch, by, drafts = case.partition("x")
        if not (by and batch.isdecimal() and drafts.isdecimal() and int(batch) > 0 and int(drafts) < 32):
            raise app.UsageError(f"--cases has {case!r}, must be BATCHxDRAFTS with a batch of at least 1 and at most 31 drafts")
        yield int(batch), int(drafts)
    for tau in FLAGS.taus:
        with as_usage(f"--taus has {tau!r}: "):
            FoldConfig(float(tau))
    if "pallas" in FLAGS.impls:
        refuse_without_hopper("--impls=pallas")


def table(results: Sequence[dict[str, Any]]) -> Table:
    """All results, each over vanilla's check and over XLA's of the same case, in the same run."""
    columns = ("shape", "batch", "drafts", "tau", "impl", "rows", "recompute", "ms", "H200's floors ms: bytes / arithmetic")
    out = Table(*columns, "over vanilla", "over xla", caption=EMBEDDED)
    times = {str(r["setting"]): r["measured"]["median_ms"] for r in results}
    for r in results:
        s, m = r["setting"], r["measured"]
        bases = times.get(str(s | {"drafts": 0, "tau": None})), times.get(str(s | {"impl": "xla"}))
        over = (f"{m['median_ms'] / base:.2f}" if base else "-" for base in bases)
        ratio = f"{sum(m['recompute']) / 2:.2f}" if m["recompute"] else "-"
        which = (
            s["shape"],
            str(s["batch"]),
            str(s["drafts"]),
            "-" if s["tau"] is None else f"{s['tau']:g}",
            s["impl"],
            str(m["rows"]),
            ratio,
        )
        time = f"{m['median_ms']:.3f} ({m['low_ms']:.3f} to {m['high_ms']:.3f})"
        out.add_row(*which, time, f"{m['bytes_floor_ms']:.2f} / {m['arithmetic_floor_ms']:.2f}", *over)
    return out


def main() -> int:
    """Measures what the flags say; 1 if a case failed."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # read when JAX first looks for devices, which nothing has done yet
    wanted, console, failed = list(cases()), Console(width=170), 0
    file = ResultsFile.named(FLAGS.out, "checks", environment(FLAGS.commit))

    def done() -> list[Setting]:
        return [result["setting"] for result in file.results]

    for shape in FLAGS.shapes:
        before = done()
        pending = [s for impl in FLAGS.impls for case in wanted for s in settings(shape, impl, *case) if s not in before]
        if not pending:
            continue
        given: dict[str, Given] = {}
        with file.preparing():
            model, params = in_shape(shape, FLAGS.dtype)
            if FLAGS.prefix % model.block_size:
                raise app.UsageError(f"--prefix={FLAGS.prefix} must be a multiple of the block of {model.block_size}")
            for batch, drafts in wanted:
                given[f"{batch}x{drafts}"] = params, *inputs(params, model, batch, drafts, FLAGS.prefix)

        def parts(s: Setting, given: dict[str, Given] = given) -> tuple[DecodeConfig, Given, FoldConfig | None]:
            return DecodeConfig(impl=s["impl"]), given[f"{s['batch']}x{s['drafts']}"], None if s["tau"] is None else FoldConfig(s["tau"])

        def name(s: Setting) -> str:
            return str(s | {"tau": s["tau"] is not None})

        console.print(f"{shape}: compiling for {len(pending)} measurements", highlight=False)
        with file.preparing():
            programs = compile_all({name(s): parts(s) for s in pending}, model)
        for s in pending:
            try:
                with file.alone():
                    if s not in done():  # others may have added it
                        file.add({"setting": s, "measured": measure(s, *parts(s)[1:], programs[name(s)])})
            except Exception as error:  # the machine's time is for the others
                failed += 1
                console.print(f"failed: {s}: {type(error).__name__}: {error}", markup=False)
    console.print(table(file.results))
    return int(failed > 0)


if __name__ == "__main__":
    start(main, FLAGS)
