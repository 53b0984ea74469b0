r"""Speed of whole decodes and of single iterations: vanilla, Spiffy, SpecFold, and the controls, by every implementation, at real shapes.

    python -m benchmarks.speed.decode --out benchmarks/results/decode-h200.json
    python -m benchmarks.speed.decode --shapes tiny --impls xla,torch --batch 1 --samples 1 --max_new_tokens 8 --dtype float32 \
        --drafts 3 --graph specfold_jax/assets/tiny/graph.json --repetitions 2 --out /tmp/decode.json

The model is the packaged tiny one, embedded in each shape so that it stays the same function (`benchmarks.common.shapes`). Drafts are
accepted and positions folded as a trained model has it, while every pass costs what the shape costs. Problems come from the packaged held-
out set. For each shape, implementation and batch there are vanilla and, with the draft graph of each of --drafts, the others:

  vanilla           one canvas a pass
  spiffy            drafts, nothing folded. Its tokens must be vanilla's. With the same kernels it is SpecFold's control "folding off"
  specfold, tau 0   control "computed through the folding path": only exact copies of the parent's rows are folded
  specfold          each of --taus

Each row of the results has, of whole decodes: tokens a second; milliseconds an iteration, prefills taken off; forwards; accepted drafts a
check; recompute ratio; samples with vanilla's tokens; seconds to compile. And of one iteration, on the state before the largest check of
the first batch, moved to --prefix: milliseconds of the check (the branches' forward pass), of the head, of the whole, and what is left as
overhead; on a GPU also kernel times, with gate, pack and attention apart for pallas and triton. xla and pallas are timed in loops on the
device, torch and triton call by call (`timing_jax.py`, `timing_torch.py`). Methods that draft are timed on one state, Spiffy's.
Floors are for an H200, as measured: 4.3e12 bytes/s and 770e12 bfloat16 operations/s.

Draft graphs lie beside --out, or, of a single number of drafts, in --graph FILE: read if there, else chosen on other problems and kept.
Results are written after each setting; the same command goes on where it was interrupted. Commands for other shapes and implementations
may fill the same file side by side: what writes to one folder compiles at the same time, and measures one at a time when all that began
have compiled. A command for each shape, implementation and batch is fastest, as far as memory goes: each holds the model, and compilers try
kernels on arrays of their own. A GPU that others use is measured too slow. A setting that fails is reported at the end and tried again by
the next run. JAX shares the GPU with PyTorch: XLA does not take all of its memory unless XLA_PYTHON_CLIENT_PREALLOCATE says so.
JAX_COMPILATION_CACHE_DIR keeps what XLA compiled.
"""

import gc
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from absl import app, flags
from rich.console import Console

from benchmarks.common.command import as_usage, refuse_without_hopper, some_of, start
from benchmarks.common.environment import BYTES_A_SECOND, OPERATIONS_A_SECOND, environment
from benchmarks.common.results_file import ResultsFile
from benchmarks.common.shapes import SHAPES, embed
from benchmarks.speed.ratios import Result, Setting, kin, line, ratio_table, table, title
from benchmarks.speed.timing import Side, at_prefix, decode_all, largest, span, spread, time_parts
from benchmarks.speed.timing_jax import JaxSide, compile_programs
from benchmarks.speed.timing_torch import TorchSide
from specfold_jax.calibration.calibrate import choose_graph
from specfold_jax.calibration.records import record_vanilla
from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.diffusion.decoding import Decoding
from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.models.checkpoint import load, read_model, resolve_folder
from specfold_jax.running.batch import batches, pad
from specfold_jax.text.problems import packaged_problems
from specfold_jax.text.tokens import encode, load_tokenizer

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
SIDES = {"jax": ("xla", "pallas"), "torch": ("torch", "triton")}
IMPLS = tuple(itertools.chain(*SIDES.values()))
CODE = ("specfold_jax", "specfold_torch_ref", "kernels_pallas", "kernels_triton")
MODEL = "the packaged tiny model, embedded function-preservingly in each shape (benchmarks/embed.py)"

MOST_TOKENS = 1 << 20

FLAGS = flags.FlagValues()
_OUT = flags.DEFINE_string("out", None, "Results file (JSON).", required=True, flag_values=FLAGS)
_SHAPES = flags.DEFINE_list("shapes", ["tiny", "1.5b", "7b"], f"Shapes, separated by commas: {', '.join(SHAPES)}.", flag_values=FLAGS)
_IMPLS = flags.DEFINE_list("impls", list(IMPLS), "xla, torch; pallas (Hopper), triton (CUDA); separated by commas.", flag_values=FLAGS)
_BATCH = flags.DEFINE_list("batch", ["1", "8"], "Batch sizes, separated by commas.", flag_values=FLAGS)
_DRAFTS = flags.DEFINE_list("drafts", ["8"], "Most drafts a check, separated by commas.", flag_values=FLAGS)
_TAUS = flags.DEFINE_list("taus", ["0.1"], "SpecFold's gate thresholds, separated by commas; 0, a control, is added.", flag_values=FLAGS)
_GUARD = flags.DEFINE_float("guard", 0.5, "SpecFold's guard.", lower_bound=0, flag_values=FLAGS)
_PREFIX = flags.DEFINE_integer("prefix", 512, "Prefix of the single iteration; 0: as decoded.", lower_bound=0, flag_values=FLAGS)
_SAMPLES = flags.DEFINE_integer("samples", 4, "Held-out problems, from the front; a full batch or more.", lower_bound=1, flag_values=FLAGS)
_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Most new tokens a problem.", 1, MOST_TOKENS, flag_values=FLAGS)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", list(DTYPES), "Type of weights and activations.", flag_values=FLAGS)
_GRAPH = flags.DEFINE_string("graph", None, "Draft graph, for one number of drafts; written if not there.", flag_values=FLAGS)
_CALIBRATION = flags.DEFINE_integer("calibration", 32, "Problems, from the end, to choose a graph on.", lower_bound=1, flag_values=FLAGS)
_DECODES = flags.DEFINE_integer("decodes", 3, "Repetitions of the whole decodes.", lower_bound=1, flag_values=FLAGS)
_REPETITIONS = flags.DEFINE_integer("repetitions", 50, "Repetitions of the single iteration.", lower_bound=1, flag_values=FLAGS)
_COMMIT = flags.DEFINE_string("commit", None, "Commit to record where there is no checkout to ask.", flag_values=FLAGS)

Ids = Sequence[Sequence[int]]
Graphs = Mapping[int, DraftGraph]
"""By the most drafts a check."""


def draft_graph(path: Path, ids: Ids, decode: DecodeConfig, drafts: int) -> DraftGraph:
    """The graph in a file, or one of confidence nodes from a watched vanilla run of the tiny model, kept there."""
    if not path.parent.is_dir():
        raise app.UsageError(f"{path} is to be a draft graph: {path.parent} must be a folder")
    if path.exists():
        with as_usage():
            graph = DraftGraph.load(path)
        if graph.max_drafts != drafts:
            raise app.UsageError(f"{path} is a graph of {graph.max_drafts} drafts a check, --drafts={drafts}; change one of them")
        return graph
    model, params = load("tiny", "float32")
    reach = decode.block(model) // decode.window(model)
    with jax.default_matmul_precision("highest"):
        prompts, lengths = map(jnp.asarray, pad(ids))
        records = record_vanilla(params, prompts, lengths, model, decode, reach=reach)
        graph = choose_graph(records, model, decode, drafts, "confidence", reach=reach, name="tiny")
    graph.save(path)
    return graph


def digest(path: Path) -> str:
    """Of a graph's file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def in_shape(name: str, dtype: str) -> tuple[ModelConfig, Any]:
    """The tiny model in a shape, on JAX's device."""
    model, params = load("tiny", "float32")
    if (shape := SHAPES[name]) is None:
        return model, jax.tree.map(lambda x: x.astype(DTYPES[dtype]), params)
    return embed(params, model, shape, DTYPES[dtype])


def settings(shape: str, impl: str, batch: int) -> list[Setting]:
    """Vanilla; and for each number of drafts Spiffy, and SpecFold with tau 0 and the given ones."""
    fixed = {"shape": shape, "impl": impl, "batch": batch, "dtype": _DTYPE.value, "max_new_tokens": _TOKENS.value}
    fixed |= {"samples": max(_SAMPLES.value, batch), "prefix": _PREFIX.value}
    plain, guard = {"tau": None, "guard": None}, str(_GUARD.value)  # text, as JSON has no infinity
    found = [fixed | {"method": "vanilla", "drafts": None} | plain]
    for drafts in map(int, _DRAFTS.value):
        found.append(fixed | {"method": "spiffy", "drafts": drafts} | plain)
        taus = dict.fromkeys([0.0, *map(float, _TAUS.value)])
        found += [fixed | {"method": "specfold", "drafts": drafts, "tau": tau, "guard": guard} for tau in taus]
    return found


def floors(params: Any, rows: float, *, head: bool) -> dict[str, float]:
    """Least milliseconds of a pass over `rows` rows: reading the weights, and multiplying with them; the head's weight if it is part."""
    weights = [x for layer in params["layers"] for x in layer.values()] + ([params.get("head", params["embed"])] if head else [])
    count = sum(x.size for x in weights)
    read = sum(x.nbytes for x in weights)
    return {"bytes_floor_ms": 1000 * read / BYTES_A_SECOND, "arithmetic_floor_ms": 1000 * 2 * count * rows / OPERATIONS_A_SECOND}


def way(setting: Setting, model: ModelConfig, graphs: Graphs) -> Decoding:
    """How a setting decodes, on either side."""
    config = DecodeConfig(setting["max_new_tokens"], impl=setting["impl"] if setting["impl"] in SIDES["jax"] else "auto")
    fold = FoldConfig(setting["tau"], float(setting["guard"])) if setting["method"] == "specfold" else None
    return Decoding(model, config, graphs[setting["drafts"]] if setting["drafts"] else DraftGraph.empty(), fold)


def sides(group: Sequence[Setting], params: Any, model: ModelConfig, graphs: Graphs, ids: Ids) -> Iterator[tuple[Setting, Side]]:
    """Each setting of one shape, implementation and batch, ready to decode. On the JAX side all are compiled before the first."""
    ways = [way(setting, model, graphs) for setting in group]
    match group[0]["impl"]:
        case "torch" | "triton" as impl:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            # Names are the same on both sides (specfold_torch_ref.models.convert). Arrays are shared where JAX has them on the same device.
            there = jax.tree.map(lambda x: torch.from_dlpack(x).to(device), jax.block_until_ready(params))
            for setting, how in zip(group, ways, strict=True):
                yield setting, TorchSide(there, how, impl)
        case _:
            first = batches(ids[: group[0]["samples"]], group[0]["batch"])[0]
            entries = span(first[0].shape[1], ways[0], group[0]["prefix"])
            names = [f"{setting['method']} {setting['drafts']}" for setting in group]
            programs = compile_programs(params, *first, entries, dict(zip(names, ways, strict=True)))
            for name, setting, how in zip(names, group, ways, strict=True):
                yield setting, JaxSide(params, how, programs[name])


def measure(setting: Setting, side: Side, params: Any, ids: Ids, states: dict[int | None, Any]) -> dict[str, Any]:
    """What a row of the results says. `states` keeps the state of the single iteration for the settings after it, by number of drafts."""
    ids, block = ids[: setting["samples"]], side.how.decode.block(side.how.model)
    timed = decode_all(side, ids, setting["batch"], _DECODES.value)
    if (drafts := setting["drafts"]) not in states:
        prompts, lengths = batches(ids, setting["batch"])[0]
        entries = span(prompts.shape[1], side.how, setting["prefix"])
        states[drafts] = at_prefix(side, largest(side, prompts, lengths, entries), setting["prefix"])
    one = time_parts(side, states[drafts], setting["impl"], _REPETITIONS.value)
    stats, seconds = timed.stats, spread(timed.seconds)
    rows = (stats["nfe"] * block + stats["total_rows"]) / max(timed.iterations, 1)
    gates = 2 * side.how.model.layers * stats["total_rows"]
    return {
        "title": title(setting),
        "tokens": timed.tokens,
        "tokens_per_second": 1000 * timed.tokens / seconds["median_ms"],
        "decodes": seconds,
        "prefills": spread(timed.prefill_seconds),
        "iteration": spread(timed.iteration_seconds) | {"mean_rows": rows} | floors(params, rows, head=True),
        "iterations": timed.iterations,
        "stats": stats,
        "nfe": stats["nfe"],
        "accepted_depth": stats["accepted"] / stats["drafting"] if stats["drafting"] else None,
        "recompute_ratio": timed.gates / gates if gates else None,
        "compile_seconds": dict(side.compile_seconds) if side.compile_seconds is not None else None,
        "one": one | {"floors": floors(params, one["rows"], head=False)},
        "outputs": [hashlib.sha256(str(tokens).encode()).hexdigest()[:12] for tokens in timed.generated],
    }


def compare(result: Result, results: Sequence[Result]) -> None:
    """Adds how many samples have the tokens of vanilla by the same implementation, and whether that is wrong."""
    s, measured = result["setting"], result["measured"]
    alike = (one for one in [*results, result] if kin(one["setting"]) == kin(s) and one["setting"]["method"] == "vanilla")
    vanilla = next(alike)["measured"]["outputs"]
    measured["identical"] = sum(a == b for a, b in zip(measured["outputs"], vanilla, strict=True))
    # The matrix products of a library round by the number of rows, so only the kernels must keep Spiffy exact.
    measured["broken"] = measured["identical"] < len(vanilla) and s["method"] == "spiffy" and s["impl"] in ("pallas", "triton")


def require_sane_flags() -> None:
    """Raises UsageError for shapes and implementations that are unknown or cannot run here."""
    some_of("shapes", _SHAPES.value, SHAPES)
    some_of("impls", _IMPLS.value, IMPLS)
    for name, values in (("drafts", _DRAFTS.value), ("batch", _BATCH.value)):
        if wrong := [value for value in values if not (value.isdecimal() and int(value))]:
            raise app.UsageError(f"--{name} has {', '.join(wrong)}, must be whole numbers from 1 on")
    with as_usage("--guard: "):
        FoldConfig(guard=float(_GUARD.value))
    if (most := max(_SAMPLES.value, *map(int, _BATCH.value))) > (there := len(packaged_problems())):
        raise app.UsageError(f"--samples and --batch must be at most {there}, the packaged problems, not {most}")
    if _PREFIX.value % (block := read_model(resolve_folder("tiny")).block_size):
        raise app.UsageError(f"--prefix={_PREFIX.value} must be a multiple of the block of {block}")
    for tau in _TAUS.value:
        with as_usage(f"--taus has {tau!r}: "):
            FoldConfig(float(tau))
    if _GRAPH.value and len(_DRAFTS.value) > 1:
        raise app.UsageError("--graph is a graph of one number of drafts; leave it out, or name one in --drafts")
    if "triton" in _IMPLS.value and not torch.cuda.is_available():
        raise app.UsageError("--impls: triton needs a CUDA device, and there is none; name others")
    if "pallas" in _IMPLS.value:
        refuse_without_hopper("--impls=pallas")


def run(file: ResultsFile, ids: Ids, graphs: Graphs, say: Callable[[str], None]) -> list[str]:
    """Measures what is not in the file; what failed, in words.

    All of JAX comes before PyTorch, whose profiler does not let go of the GPU.
    """
    done, failed = [result["setting"] for result in file.results], []
    for names, shape in itertools.product(SIDES.values(), _SHAPES.value):
        groups = [settings(shape, impl, int(batch)) for impl in _IMPLS.value if impl in names for batch in _BATCH.value]
        if not (groups := [group for group in ([s for s in group if s not in done] for group in groups) if group]):
            continue
        say(f"{shape}: embedding")
        with file.preparing():
            model, params = in_shape(shape, _DTYPE.value)
        for group in groups:
            where = f"{shape} {group[0]['impl']} batch {group[0]['batch']}"
            try:
                say(f"{where}: {'compiling' if names == SIDES['jax'] else 'preparing'} {len(group)} settings")
                states: dict[int | None, Any] = {}
                with file.preparing():
                    ready = list(sides(group, params, model, graphs, ids))
                for setting, side in ready:
                    with file.alone():
                        say(f"{where}: {title(setting)}")
                        result = {"setting": setting, "measured": measure(setting, side, params, ids, states)}
                        compare(result, file.results)
                        file.add(result)
                        say(line(result))
            except Exception as error:  # the machine's time is for the others
                failed.append(f"{where}: {type(error).__name__}: {error}")
                say(failed[-1])
        del params
        gc.collect()
        torch.cuda.empty_cache()
    return failed


def main() -> int:
    """Measures what the flags say."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # read when JAX first looks for devices, which nothing has done yet
    require_sane_flags()
    console, begun = Console(width=240), time.monotonic()
    named = partial(ResultsFile.named, str(_OUT.value), "decode", environment(_COMMIT.value, with_torch=True), model=MODEL)
    out = named().path  # refused before a graph is chosen
    ids = encode(load_tokenizer(resolve_folder("tiny")), [problem.question for problem in packaged_problems()])
    graphs = {}
    for drafts in map(int, _DRAFTS.value):
        where = Path(_GRAPH.value or out.with_name(f"{out.stem}.graph{drafts}.json"))
        graphs[drafts] = draft_graph(where, ids[-_CALIBRATION.value :], DecodeConfig(_TOKENS.value), drafts)
    file = named(graph=_GRAPH.value and digest(Path(_GRAPH.value)))

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - begun:6.0f} s  {text}", highlight=False, markup=False)

    failed = run(file, ids, graphs, say)
    console.print(table(file.results), ratio_table(file.results))
    for text in failed:
        say(f"failed: {text}")
    return 1 if failed else 0


if __name__ == "__main__":
    start(main, FLAGS)
