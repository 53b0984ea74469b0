"""Speed of whole decodes and of single checks: vanilla, Spiffy, SpecFold, and the controls, at real models' shapes.

    python -m benchmarks.decode --out benchmarks/results/decode-torch-h200.json
    python -m benchmarks.decode --shapes tiny --impls torch --batch 1 --samples 1 --max_new_tokens 8 --dtype float32 \
        --drafts 3 --graph specfold_jax/assets/tiny/graph.json --repetitions 2 --out /tmp/decode.json

The model is the packaged tiny one, embedded in each shape (`benchmarks.embed`): drafts are accepted and positions folded as a trained model
has it, while every pass costs what the shape costs. Problems come from the packaged held-out set. For each shape, implementation and
batch there are these settings, all with the same draft graph:

  vanilla           one canvas a pass
  spiffy            drafts, nothing folded. Its tokens must be vanilla's. With the same kernels it is SpecFold's control "folding off"
  specfold, tau 0   control "computed through the folding path": only exact copies of the parent's rows are folded
  specfold          each of --taus

Each row of the results has tokens a second; milliseconds an iteration (median, quartiles; prefills are apart); forwards; accepted drafts a
check; recompute ratios; samples with vanilla's tokens; and of the largest check of the first batch: wall time, and on a GPU kernel times
with gate, pack and correction apart. Floors are for an H200, as measured: 4.3e12 bytes/s and 770e12 bfloat16 operations/s.

The draft graph: --graph FILE is read if it is there, else chosen on other problems and kept in that file; by default one beside --out.
Results are written after each setting; the same command goes on where it was interrupted. JAX shares the GPU with PyTorch: XLA does not
take all of its memory unless XLA_PYTHON_CLIENT_PREALLOCATE says so.
"""

import gc
import json
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from absl import app, flags
from rich.console import Console
from rich.table import Table

from benchmarks.command import start
from benchmarks.embed import SHAPES, embed
from benchmarks.environment import environment, today
from benchmarks.timing import Subject, decode_all, spread, time_check
from specfold_jax.calibrate import choose
from specfold_jax.checkpoint import load, resolve_folder
from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.data import packaged_problems
from specfold_jax.files import write_json
from specfold_jax.generate import pad
from specfold_jax.graph import DraftGraph
from specfold_jax.records import watch
from specfold_jax.tokens import encode, load_tokenizer

BYTES_A_SECOND, OPERATIONS_A_SECOND = 4.3e12, 770e12
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}

FLAGS = flags.FlagValues()
_OUT = flags.DEFINE_string("out", None, "Results file (JSON).", required=True, flag_values=FLAGS)
_SHAPES = flags.DEFINE_list("shapes", ["tiny", "1.5b", "7b"], f"Shapes, separated by commas: {', '.join(SHAPES)}.", flag_values=FLAGS)
_IMPLS = flags.DEFINE_list("impls", ["torch", "triton"], "torch, triton (needs a CUDA device); separated by commas.", flag_values=FLAGS)
_BATCH = flags.DEFINE_list("batch", ["1", "8"], "Batch sizes, separated by commas.", flag_values=FLAGS)
_DRAFTS = flags.DEFINE_integer("drafts", 8, "Most drafts a check.", lower_bound=1, flag_values=FLAGS)
_TAUS = flags.DEFINE_list("taus", ["0.1"], "SpecFold's gate thresholds, separated by commas; 0, a control, is added.", flag_values=FLAGS)
_GUARD = flags.DEFINE_float("guard", 0.5, "SpecFold's guard.", lower_bound=0, flag_values=FLAGS)
_SAMPLES = flags.DEFINE_integer(
    "samples", 4, "Held-out problems, from the front; one full batch or more.", lower_bound=1, flag_values=FLAGS
)
_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Most new tokens a problem.", lower_bound=1, flag_values=FLAGS)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", list(DTYPES), "Type of weights and activations.", flag_values=FLAGS)
_GRAPH = flags.DEFINE_string("graph", None, "Draft graph; written if it is not there.", flag_values=FLAGS)
_CALIBRATION = flags.DEFINE_integer("calibration", 32, "Problems, from the end, to choose a graph on.", lower_bound=1, flag_values=FLAGS)
_REPETITIONS = flags.DEFINE_integer("repetitions", 20, "Repetitions of the single check.", lower_bound=1, flag_values=FLAGS)
_COMMIT = flags.DEFINE_string("commit", None, "Commit to record where there is no checkout to ask.", flag_values=FLAGS)

Setting = dict[str, Any]


def draft_graph(path: Path, ids: Sequence[Sequence[int]], decode: DecodeConfig, drafts: int) -> DraftGraph:
    """The graph in a file, or one of confidence nodes from a watched vanilla run of the tiny model, kept there."""
    if path.exists():
        graph = DraftGraph.load(path)
        if graph.max_drafts != drafts:
            raise ValueError(f"{path} is a graph of {graph.max_drafts} drafts a check, --drafts={drafts}; change one of them")
        return graph
    model, params = load("tiny", "float32")
    reach = decode.block(model) // decode.window(model)
    with jax.default_matmul_precision("highest"):
        prompts, lengths = map(jnp.asarray, pad(ids))
        records = watch(params, prompts, lengths, model, decode, reach=reach)
        graph = choose(records, model, decode, drafts, "confidence", reach=reach, name="tiny")
    graph.save(path)
    return graph


def in_shape(name: str, dtype: str, device: torch.device) -> tuple[ModelConfig, Any]:
    """The tiny model in a shape, on the PyTorch side. The arrays are shared, not copied, where JAX has them on the same device."""
    model, params = load("tiny", "float32")
    if (shape := SHAPES[name]) is None:
        params = jax.tree.map(lambda x: x.astype(DTYPES[dtype]), params)
    else:
        model, params = embed(params, model, shape, DTYPES[dtype])
    # Names are the same on both sides (specfold_torch_ref.convert); NumPy in between would copy a large model twice.
    return model, jax.tree.map(lambda x: torch.from_dlpack(x).to(device), jax.block_until_ready(params))


def settings(shape: str, impl: str, batch: int) -> list[Setting]:
    """Vanilla, Spiffy, and SpecFold with tau 0 and the given ones."""
    fixed = {"shape": shape, "impl": impl, "batch": batch, "dtype": _DTYPE.value, "max_new_tokens": _TOKENS.value}
    fixed |= {"samples": max(_SAMPLES.value, batch), "drafts": _DRAFTS.value}
    taus = list(dict.fromkeys([0.0, *map(float, _TAUS.value)]))
    found = [fixed | {"method": "vanilla", "tau": None, "guard": None}, fixed | {"method": "spiffy", "tau": None, "guard": None}]
    # Text, for JSON has no infinity.
    return found + [fixed | {"method": "specfold", "tau": tau, "guard": str(_GUARD.value)} for tau in taus]


def title(setting: Setting) -> str:
    """What a setting is, in words."""
    match setting["method"], setting["tau"]:
        case "vanilla", _:
            return "vanilla"
        case "spiffy", _:
            return "Spiffy (control: folding off)"
        case _, 0.0:
            return "SpecFold, tau 0 (control: folding path, only exact copies folded)"
        case _, tau:
            return f"SpecFold, tau {tau:g}"


def floors(params: Any, rows: float, *, head: bool) -> dict[str, float]:
    """Least milliseconds of a pass over `rows` rows: reading the weights, and multiplying with them; the head's weight if it is part."""
    weights = [x for layer in params["layers"] for x in layer.values()] + ([params.get("head", params["embed"])] if head else [])
    count = sum(x.numel() for x in weights)
    read = sum(x.numel() * x.element_size() for x in weights)
    return {"bytes_floor_ms": 1000 * read / BYTES_A_SECOND, "arithmetic_floor_ms": 1000 * 2 * count * rows / OPERATIONS_A_SECOND}


def measure(
    setting: Setting, params: Any, model: ModelConfig, graph: DraftGraph, ids: Sequence[Sequence[int]]
) -> tuple[dict[str, Any], list[list[int]]]:
    """What a row of the results says, and the generated tokens."""
    fold = FoldConfig(setting["tau"], float(setting["guard"])) if setting["method"] == "specfold" else None
    decode = DecodeConfig(setting["max_new_tokens"])
    used = DraftGraph.empty() if setting["method"] == "vanilla" else graph
    match setting["impl"]:
        case "torch" | "triton" as impl:
            it = Subject(params, model, decode, used, fold, impl)
            timed, state = decode_all(it, ids[: setting["samples"]], setting["batch"])
            one = time_check(it, state, _REPETITIONS.value)
        case impl:
            raise ValueError(f"--impls has {impl!r}, must be torch or triton")
    stats, block = timed.stats, decode.block(model)
    rows = (stats["nfe"] * block + stats["total_rows"]) / max(len(timed.step_seconds), 1)
    gates = 2 * model.layers * stats["total_rows"]
    return {
        "title": title(setting),
        "tokens": timed.tokens,
        "tokens_per_second": timed.tokens / timed.seconds,
        "seconds": timed.seconds,
        "prefill_seconds": sum(timed.prefill_seconds),
        "iteration": spread(timed.step_seconds) | {"mean_rows": rows} | floors(params, rows, head=True),
        "nfe": stats["nfe"],
        "accepted_depth": stats["accepted"] / stats["drafting"] if stats["drafting"] else None,
        "recompute_ratio": stats["computed_rows"] / gates if gates else None,
        "check": one | floors(params, one["rows"], head=False),
    }, timed.generated


def resume(path: Path, graph: Path) -> dict[str, Any]:
    """The results so far, or none. Raises ValueError if they were measured with anything else than what is here."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    here = environment(_COMMIT.value)
    here |= {"torch_device": device, "versions": here["versions"] | {name: version(name) for name in ("torch", "triton")}}
    record = {"benchmark": "decode", "environment": here, "graph": graph.name, "date": today(), "results": []}
    if not path.exists():
        return record
    before = json.loads(path.read_text(encoding="utf-8"))
    if differ := [name for name in ("benchmark", "environment", "graph") if before.get(name) != record[name]]:
        raise ValueError(f"{path}: was measured with another {' and '.join(differ)}; move it away to start anew")
    return before


def table(results: Sequence[dict[str, Any]]) -> Table:
    """All results; red where tokens differ that must not."""
    columns = ("shape", "impl", "batch", "method", "vanilla's tokens", "tokens/s", "ms an iteration", "forwards", "depth", "recompute")
    out = Table(*columns, "check ms (rows)", "kernels ms", "gate + pack", "block attention", "floors ms")

    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    for result in results:
        s, m = result["setting"], result["measured"]
        step, one, kernels = m["iteration"], m["check"], m["check"]["kernels_ms"] or {}
        same = f"{m['identical']} of {s['samples']}"
        out.add_row(
            *(s["shape"], s["impl"], str(s["batch"]), m["title"], f"[bold red]{same}[/]" if m["broken"] else same),
            *(number(m["tokens_per_second"], 1), f"{step['median_ms']:.2f} ({step['low_ms']:.2f} to {step['high_ms']:.2f})"),
            *(str(m["nfe"]), number(m["accepted_depth"]), number(m["recompute_ratio"]), f"{one['median_ms']:.2f} ({one['rows']})"),
            *(number(kernels.get("all")), number(kernels["gate"] + kernels["pack"] if "gate" in kernels else None, 3)),
            *(number(kernels.get("block_attention"), 3), f"{one['bytes_floor_ms']:.2f} / {one['arithmetic_floor_ms']:.2f}"),
        )
    return out


def main() -> None:
    """Measures what the flags say."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # read when JAX first looks for devices, which nothing has done yet
    device, console = torch.device("cuda" if torch.cuda.is_available() else "cpu"), Console(width=220)
    if unknown := [name for name in _SHAPES.value if name not in SHAPES]:
        raise app.UsageError(f"--shapes has {', '.join(unknown)}, knows {', '.join(SHAPES)}")
    if unknown := [name for name in _IMPLS.value if name not in ("torch", "triton")]:
        raise app.UsageError(f"--impls has {', '.join(unknown)}, knows torch, triton")
    if "triton" in _IMPLS.value and device.type == "cpu":
        raise app.UsageError("--impls=triton needs a CUDA device, and there is none; use --impls=torch")
    path = Path(_OUT.value)
    where = Path(_GRAPH.value) if _GRAPH.value else path.with_name(f"{path.stem}.graph{_DRAFTS.value}.json")
    record = resume(path, where)
    ids = encode(load_tokenizer(resolve_folder("tiny")), [problem.question for problem in packaged_problems()])
    graph = draft_graph(where, ids[-_CALIBRATION.value :], DecodeConfig(_TOKENS.value), _DRAFTS.value)

    done = [result["setting"] for result in record["results"]]
    for shape in _SHAPES.value:
        groups = [settings(shape, impl, int(batch)) for impl in _IMPLS.value for batch in _BATCH.value]
        if all(setting in done for group in groups for setting in group):
            continue
        model, params = in_shape(shape, _DTYPE.value, device)
        for group in groups:
            if all(setting in done for setting in group):
                continue
            vanilla: list[list[int]] = []
            for setting in group:
                if setting in done and setting["method"] != "vanilla":
                    continue
                measured, generated = measure(setting, params, model, graph, ids)
                vanilla = vanilla or generated
                same = sum(a == b for a, b in zip(generated, vanilla, strict=True))
                # Plain PyTorch's matrix products round by the number of rows, so only the kernels must keep Spiffy exact.
                broken = same < len(vanilla) and setting["method"] == "spiffy" and setting["impl"] == "triton"
                if setting not in done:
                    record["results"].append({"setting": setting, "measured": measured | {"identical": same, "broken": broken}})
                    write_json(path, record)
                    console.print(table(record["results"][-1:]))
        del params
        gc.collect()
        torch.cuda.empty_cache()
    console.print(table(record["results"]))


if __name__ == "__main__":
    start(main, FLAGS)
