"""Decodes held-out problems of the tiny model with JAX and with PyTorch, and shows every difference in tokens to be a tie.

    python -m parity_tests.reports.decodes --samples 200 --out benchmarks/results/decode-parity-h200.json

Both sides decode freely and are compared prompt by prompt: tokens, forwards, accepted drafts, computed rows. Batches that hold a prompt
that differs in any of them are then decoded once more in lock-step (`lockstep.follow`): the gates' decisions and the drafts are held to
the JAX side's, so that a difference is found where it arises, with its margin. Before they are held, they are compared: every gate of
every row, and the drafts that either side's numbers lead to. The exit status is 1 if any difference is left unexplained.

A prompt is explained when it differs in lock-step and everything on which it does is a tie (`flip.is_tie`, `explain.account`); other
tokens without a fold need a decision at which it parts, as drafts do not change them.
float32 (exact products on both sides): gates within 1e-4 tau of tau, decisions and drafts within 1e-4 log-odds of the other outcome.
bfloat16: the rounding margin is measured, on all decisions of the replays before their rows part: of |log-odds on one side - log-odds on
the other| at every position that could be revealed the 99.9th percentile. Decisions are explained when their margin is at most that.
Drafts have a margin of their own, as the closest of many numbers decides them: the same percentile of the largest such difference of
every forward, over all masked positions that both sides know. Neither margin is more than 0.5 log-odds (`explain.MOST_ODDS`). A gate is
explained when tau lies between the two sides' relative residuals as measured and within a fixed reach of rounding.
In bfloat16 the JAX side's steps, compiled one by one, could round otherwise than its whole loop: `jax_repeated` of the replayed prompts
are the same in both. A prompt without a difference in lock-step (`by_compilation` of them) is explained when the PyTorch side's free
decode is the JAX side's decode step by step.

Results are written after each method; the same command goes on where it was interrupted, and commands for other methods and types may
fill the same file side by side. JAX and PyTorch share the GPU: XLA is told not to take all of its memory unless
XLA_PYTHON_CLIENT_PREALLOCATE says otherwise.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from absl import app, flags
from rich.console import Console
from rich.table import Table

import specfold_jax as sf
from benchmarks.common.command import as_usage, some_of, start
from benchmarks.common.environment import environment
from benchmarks.common.results_file import ResultsFile
from parity_tests.harness.checkpoints import Checkpoint
from parity_tests.harness.devices import DEVICE
from parity_tests.lockstep.explain import account, counts, rounding_of
from parity_tests.lockstep.follow import follow
from specfold_jax.diffusion.decoding import Decoding
from specfold_jax.methods import METHODS
from specfold_jax.models.checkpoint import read_model, resolve_folder
from specfold_jax.running.batch import batches, run_all
from specfold_jax.running.summary import Run, same_tokens
from specfold_jax.text.problems import packaged_problems
from specfold_jax.text.tokens import encode
from specfold_torch_ref.diffusion.loop import specfold_decode, spiffy_decode, vanilla_decode
from specfold_torch_ref.models.checkpoint import load
from specfold_torch_ref.models.transformer import Params

FLAGS = flags.FlagValues()
_SAMPLES = flags.DEFINE_integer("samples", 200, "Held-out problems to decode, from the front.", lower_bound=1, flag_values=FLAGS)
_BATCH = flags.DEFINE_integer("batch", 50, "Prompts a batch, on both sides.", lower_bound=1, flag_values=FLAGS)
_METHODS = flags.DEFINE_list("methods", list(METHODS), f"Methods, separated by commas: {', '.join(METHODS)}.", flag_values=FLAGS)
_DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], "Types, separated by commas: float32, bfloat16.", flag_values=FLAGS)
_IMPL = flags.DEFINE_enum("impl", "triton", ["torch", "triton"], "PyTorch side; triton without a GPU: the interpreter.", flag_values=FLAGS)
_TOKENS = flags.DEFINE_integer("max_new_tokens", 256, "Most new tokens a prompt.", lower_bound=1, upper_bound=1 << 20, flag_values=FLAGS)
_THRESHOLD = flags.DEFINE_float("threshold", 0.9, "Reveal threshold.", 0, 1, flag_values=FLAGS)
_SUB_BLOCK = flags.DEFINE_integer("sub_block", 8, "Positions a sub-block.", lower_bound=1, flag_values=FLAGS)
_TAU = flags.DEFINE_float("tau", 0.1, "SpecFold's gate threshold.", lower_bound=0, flag_values=FLAGS)
_GUARD = flags.DEFINE_float("guard", 0.5, "SpecFold's guard.", lower_bound=0, flag_values=FLAGS)
_REPLAYS = flags.DEFINE_integer("replays", 1000, "Most batches to replay a method and type.", lower_bound=0, flag_values=FLAGS)
_COMMIT = flags.DEFINE_string("commit", None, "Commit to record where there is no checkout to ask.", flag_values=FLAGS)
_OUT = flags.DEFINE_string("out", None, "File to write (JSON).", required=True, flag_values=FLAGS)


COUNTS = ("nfe", "accepted", "computed_rows")
COMPARED = ("gates", "drafts", "decisions")


class Setting(NamedTuple):
    """What both sides decode with."""

    method: str
    dtype: str
    decode: sf.DecodeConfig
    graph: sf.DraftGraph
    fold: sf.FoldConfig | None


class Both(NamedTuple):
    """The model on both sides, and the prompts."""

    checkpoint: Checkpoint
    params: Params
    ids: Sequence[Sequence[int]]

    def parts(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The prompts in batches; rows that only fill up the last one are left out."""
        return [(prompts[lengths > 0], lengths[lengths > 0]) for prompts, lengths in batches(self.ids, _BATCH.value)]


def torch_run(both: Both, setting: Setting) -> dict[str, np.ndarray]:
    """Tokens, lengths and counts of every prompt on the PyTorch side."""
    decoded, model = [], both.checkpoint.model
    for prompts, lengths in both.parts():
        given = (both.params, prompts, lengths, model, replace(setting.decode, impl="auto"))
        match setting.method:
            case "vanilla":
                decoded.append(vanilla_decode(*given, impl=_IMPL.value))
            case "spiffy":
                decoded.append(spiffy_decode(*given, setting.graph, impl=_IMPL.value))
            case "specfold":
                decoded.append(specfold_decode(*given, setting.graph, setting.fold, impl=_IMPL.value))
    get: dict[str, Callable[[Any], torch.Tensor]] = {
        "tokens": lambda out: out.tokens,
        "lengths": lambda out: out.lengths,
        "nfe": lambda out: out.stats.nfe,
        "accepted": lambda out: out.stats.accepted,
        "computed_rows": lambda out: out.stats.computed_rows,
    }
    return {name: torch.cat([of(out) for out in decoded]).numpy() for name, of in get.items()}


def equal_rows(run: Run, other: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Prompt by prompt, whether both sides have the same tokens and counts."""
    stats = run.decoded.stats
    pairs = {name: (np.asarray(getattr(stats, name)), other[name]) for name in COUNTS}
    same = {name: (a == b).reshape(len(a), -1).all(axis=1) for name, (a, b) in pairs.items()}
    decoded = run.decoded._replace(tokens=other["tokens"], lengths=other["lengths"])
    return {"tokens": np.array(same_tokens(run, run._replace(decoded=decoded)))} | same


def all_equal(equal: dict[str, np.ndarray]) -> np.ndarray:
    """Prompt by prompt, whether nothing that is compared differs."""
    return np.all(list(equal.values()), axis=0)


def replay(both: Both, setting: Setting, run: Run, other: dict[str, np.ndarray]) -> dict[str, Any]:
    """Decodes the batches that hold prompts that differ in lock-step, and explains those prompts."""
    equal, size, followed, lines, repeated = equal_rows(run, other), min(_BATCH.value, len(both.ids)), {}, [], 0
    differ = np.flatnonzero(~all_equal(equal)).tolist()
    for number in sorted({prompt // size for prompt in differ})[: _REPLAYS.value]:
        rows = [prompt % size for prompt in differ if prompt // size == number]
        options = {"impl": _IMPL.value, "tie": float("inf"), "hold_drafts": True, "only": rows, "quick": False}
        given = (*both.parts()[number], setting.decode, setting.graph, setting.fold)
        followed[number] = follow(both.checkpoint, both.params, *given, **options)
    rounding = rounding_of(list(followed.values()), 0.0 if setting.fold is None else float(np.asarray(setting.fold.tau)))
    within = None if setting.dtype == "float32" else rounding
    for number, each in followed.items():
        here = slice(number * size, (number + 1) * size)
        again = Run(jax.tree.map(np.asarray, each.jax), run.prompt_lengths[here], run.summary)
        free = {name: x[here] for name, x in other.items()}
        stepwise, own = all_equal(equal_rows(again, free)), all_equal(equal_rows(again, decoded_of(run, here)))
        for prompt in (prompt for prompt in differ if prompt // size == number):
            row, parts = prompt % size, not equal["tokens"][prompt] and setting.fold is None
            line = {"prompt": prompt, "differs": [name for name, same in equal.items() if not same[prompt]]}
            lines.append(line | account(each, row, within, parts, bool(stepwise[row])))
            repeated += bool(own[row])
    compared = counts(list(followed.values()), within)
    gates = torch.cat([torch.zeros(1), *(each.gate_differences for each in followed.values())]).numpy()
    return {
        "rounding_margin": rounding.odds,
        "draft_margin": rounding.drafts,
        "gate_rounding_seen": float(np.quantile(gates, 0.999)),
        **compared,
        "replayed": len(lines),
        "not_replayed": len(differ) - len(lines),
        "jax_repeated": repeated,
        "by_compilation": sum(line["by_compilation"] for line in lines),
        "unexplained_prompts": sum(not line["explained"] for line in lines) + len(differ) - len(lines),
        "differences": lines,
    }


def decoded_of(run: Run, here: slice) -> dict[str, np.ndarray]:
    """Some prompts of a run of the JAX side, named as the Torch side's are."""
    decoded = run.decoded
    counted = {name: getattr(decoded.stats, name) for name in COUNTS}
    return {name: np.asarray(x)[here] for name, x in ({"tokens": decoded.tokens, "lengths": decoded.lengths} | counted).items()}


def compare(both: Both, setting: Setting) -> dict[str, Any]:
    """One line of the report."""
    model, params = both.checkpoint.model, both.checkpoint.params
    run = run_all(params, both.ids, Decoding(model, setting.decode, setting.graph, setting.fold), _BATCH.value)
    begun = time.monotonic()
    other = torch_run(both, setting)
    ran = time.monotonic()
    found = replay(both, setting, run, other)
    line = {"method": setting.method, "dtype": setting.dtype, "prompts": len(both.ids)}
    line |= {f"equal_{name}": int(same.sum()) for name, same in equal_rows(run, other).items()}
    line["unexplained"] = found["unexplained_prompts"] + sum(found[what]["unexplained"] for what in COMPARED)
    seconds = {
        "jax": run.summary.seconds,
        "jax_compile": run.summary.compile_seconds,
        "torch": ran - begun,
        "replay": time.monotonic() - ran,
    }
    return line | found | {"seconds": {name: round(x, 1) for name, x in seconds.items()}}


def print_results(lines: list[dict[str, Any]]) -> None:
    """A table of the counts, and the prompts that nothing explains."""
    columns = (
        "method",
        "dtype",
        "prompts",
        *(f"equal_{name}" for name in ("tokens", *COUNTS)),
        "replayed",
        "jax_repeated",
        "by_compilation",
    )
    judged = (*(f"{what} differ" for what in COMPARED), "margin", "draft margin", "unexplained")
    table = Table(*columns, *judged, title="Prompts equal on both sides")
    for line in lines:
        differ = (f"{line[what]['differ']} of {line[what]['compared']}" for what in COMPARED)
        margins = (f"{line[name]:.2g}" for name in ("rounding_margin", "draft_margin"))
        table.add_row(*(str(line[name]) for name in columns), *differ, *margins, str(line["unexplained"]))
    console = Console(width=200)
    console.print(table)
    for line in lines:
        for each in line["differences"]:
            if not each["explained"]:
                console.print(line["method"], line["dtype"], each)


def main() -> int:
    for name, values, known in (("methods", _METHODS.value, METHODS), ("dtypes", _DTYPES.value, ("float32", "bfloat16"))):
        some_of(name, values, known)
    jax.config.update("jax_default_matmul_precision", "highest")
    torch.set_float32_matmul_precision("highest")
    problems, tokenizer = packaged_problems(), sf.load_tokenizer("tiny")
    if _SAMPLES.value > len(problems):
        raise app.UsageError(f"--samples={_SAMPLES.value} must be at most {len(problems)}")
    ids = encode(tokenizer, [problem.question for problem in problems[: _SAMPLES.value]])
    shipped = sf.load_graph("tiny")
    with as_usage():
        decode = sf.DecodeConfig(max_new_tokens=_TOKENS.value, threshold=_THRESHOLD.value, sub_block=_SUB_BLOCK.value, impl="xla")
        decode.window(read_model(resolve_folder("tiny")))
        fold = sf.FoldConfig(tau=_TAU.value, guard=_GUARD.value)
    given = {flag.name: flag.value for flag in (_IMPL, _SAMPLES, _BATCH, _TOKENS, _THRESHOLD, _SUB_BLOCK, _TAU, _GUARD, _REPLAYS)}
    file = ResultsFile.named(str(_OUT.value), "decode_parity", environment(_COMMIT.value, with_torch=True), flags=given)
    for dtype in _DTYPES.value:
        model, params = sf.load("tiny", dtype=dtype)
        both = Both(Checkpoint("tiny", model, params), load("tiny", dtype, device=DEVICE)[1], ids)
        for method in _METHODS.value:
            if any((line["method"], line["dtype"]) == (method, dtype) for line in file.results):
                continue
            how = Decoding.of(method, model, decode, shipped, fold)
            line = compare(both, Setting(method, dtype, decode, how.graph, how.fold))
            with file.alone():
                file.add(line)
            print({name: x for name, x in line.items() if name != "differences"}, flush=True)
    print_results(file.results)
    return int(any(line["unexplained"] for line in file.results))


if __name__ == "__main__":
    start(main, FLAGS)
