"""Vanilla, Spiffy and SpecFold on the tiny model: accuracy, agreement, forward passes, accepted depth, recompute ratio, speed.

    python -m benchmarks.quality.methods --preset readme --out benchmarks/results/methods-h200.json
    python -m benchmarks.quality.methods --preset ablations --out ablations.json
    python -m benchmarks.quality.methods --preset quick --out /tmp/quick.json --samples 32 --taus 0.05,0.1

Every group of settings is compared with one vanilla run on the same held-out problems, and takes its draft graphs from one watched
vanilla run on other ones. Results are written after each setting; the same command goes on where it was interrupted.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks.common.command import as_usage, start
from benchmarks.common.environment import environment
from benchmarks.common.results_file import ResultsFile
from benchmarks.quality.grid import PRESETS, Group, Setting, Shared
from specfold_jax.calibration.calibrate import choose_graph
from specfold_jax.calibration.records import Records, record_vanilla
from specfold_jax.config import ModelConfig
from specfold_jax.diffusion.decoding import Decoding
from specfold_jax.diffusion.draft import distinct, every_draft
from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.evaluation.intervals import wilson
from specfold_jax.models.checkpoint import load, resolve_folder
from specfold_jax.running.batch import pad, run_all
from specfold_jax.running.summary import Run, same_tokens, summarise
from specfold_jax.text.problems import is_correct, packaged_problems

Score = Callable[[int, list[int]], bool]


@dataclass(frozen=True)
class Subject:
    """A loaded model with token ids of the problems to answer and of those to calibrate on. `right` scores a problem's new tokens."""

    name: str
    model: ModelConfig
    params: Any
    ids: Sequence[Sequence[int]]
    calibration: Sequence[Sequence[int]]
    right: Score


def subject(name: str, shared: Shared) -> Subject:
    """The model and the packaged problems: those to answer from the front, those to calibrate on from the end."""
    from specfold_jax.text.tokens import decode_text, encode, load_tokenizer

    folder, problems = resolve_folder(name), packaged_problems()
    if shared.samples + shared.calibration > len(problems):
        raise ValueError(f"samples={shared.samples} and calibration={shared.calibration} must be {len(problems)} problems at most together")
    model, params = load(folder, shared.dtype)
    tokenizer = load_tokenizer(folder)
    ids = encode(tokenizer, [problem.question for problem in problems])

    def right(row: int, tokens: list[int]) -> bool:
        return is_correct(decode_text(tokenizer, tokens), problems[row])

    return Subject(folder.resolve().name, model, params, ids[: shared.samples], ids[-shared.calibration :], right)


def distinct_share(records: Records, graph: DraftGraph, mask_id: int, sub_block: int) -> float:
    """Of the drafts that the graph's nodes make on the recorded canvases, the share that equal no earlier one."""

    @jax.jit
    def one(canvas: jax.Array, known: Any) -> tuple[jax.Array, jax.Array]:
        drafts = every_draft(canvas, known, graph, mask_id, sub_block)
        return jnp.sum(distinct(drafts).valid), jnp.sum(drafts.valid)

    counts = [one(records.canvas[i : i + 1024], jax.tree.map(lambda x, i=i: x[i : i + 1024], records.known)) for i in _chunks(records)]
    kept, every = np.sum(jax.device_get(counts), axis=0)
    return float(kept / max(every, 1))


def _chunks(records: Records) -> range:
    return range(0, len(records.canvas), 1024)


def counts(run: Run, rows: np.ndarray) -> dict[str, Any]:
    """Forwards and drafts of some rows of a run, a sample each unless said."""
    part = jax.tree.map(lambda x: x[rows], run.decoded)
    s, n = summarise(part, run.prompt_lengths[rows], 0.0), max(len(rows), 1)
    gates = (None, None) if s.recompute is None else np.mean(s.recompute, axis=0).tolist()
    return {
        "samples": len(rows),
        "tokens": s.tokens / n,
        "forwards": s.nfe / n,
        "checks": s.checks / n,
        "commits": s.commits / n,
        "forwards_per_token": s.nfe_per_token,
        "drafted_per_check": s.drafted / s.drafting if s.drafting else None,
        "accepted_depth": s.accepted_depth,
        "saved_commits": s.saved_commits / n,
        "shared": s.shared / n,
        "guard_stops": s.guard_stops / n,
        "recompute_attention": gates[0],
        "recompute_ffn": gates[1],
        "recompute_layers": s.recompute,
    }


def measure(run: Run, vanilla: Run, right: Score, short: int) -> dict[str, Any]:
    """What a table says about a run; `identical`: samples with vanilla's tokens. Raises ValueError if a row was not decoded."""
    if run.summary.refused:
        raise ValueError(f"row {run.summary.refused[0][0]} was not decoded: {run.summary.refused[0][1]}")
    rows, same = len(run.prompt_lengths), sum(same_tokens(run, vanilla))
    correct = sum(right(row, run.generated(row)) for row in range(rows))
    lengths = vanilla.decoded.lengths - vanilla.prompt_lengths
    whole, reference = counts(run, np.arange(rows)), vanilla.summary
    return whole | {
        "impl": run.summary.impl,
        "of_vanilla": run.summary.nfe / max(reference.nfe, 1),
        "identical": same,
        "identical_interval": wilson(same, rows),
        "correct": correct,
        "correct_interval": wilson(correct, rows),
        "seconds": run.summary.seconds,
        "compile_seconds": run.summary.compile_seconds,
        "tokens_per_second": run.summary.tokens_per_second,
        "short": counts(run, np.flatnonzero(lengths <= short)),
        "long": counts(run, np.flatnonzero(lengths > short)),
    }


def run_group(
    group: Group, load_subject: Callable[[], Subject], done: Iterable[Setting], report: Callable[[Setting, dict[str, Any]], None]
) -> None:
    """Measures the group's settings that are not `done`, and reports each as soon as it is known."""
    pending = [setting for setting in group.settings() if setting not in set(done)]
    if not pending:
        return
    it, decode = load_subject(), group.decode()
    sub_block = decode.window(it.model)
    reach = decode.block(it.model) // sub_block
    records, graphs = None, {}
    # float32 products are exact: a GPU's default would round their operands.
    with jax.default_matmul_precision("highest" if group.dtype == "float32" else "default"):
        vanilla = run_all(it.params, it.ids, Decoding.of("vanilla", it.model, decode), group.batch, warm_up=True)
        for setting in pending:
            if setting.method == "vanilla":
                report(setting, measure(vanilla, vanilla, it.right, group.short))
                continue
            if records is None:
                prompts, lengths = map(jnp.asarray, pad(it.calibration))
                records = record_vanilla(it.params, prompts, lengths, it.model, decode, reach=reach)
            source, drafts, name = setting.source or "union", setting.drafts or 1, it.name
            if (source, drafts) not in graphs:
                graphs[source, drafts] = choose_graph(records, it.model, decode, drafts, source, reach=reach, name=name)
            graph = graphs[source, drafts]
            how = Decoding.of(setting.method, it.model, group.decode(bool(setting.share)), graph, setting.fold())
            found = measure(run_all(it.params, it.ids, how, group.batch, warm_up=True), vanilla, it.right, group.short)
            nodes = {"rank_nodes": graph.pairs.shape[0], "confidence_nodes": graph.theta.shape[0]}
            report(setting, found | nodes | {"distinct_drafts": distinct_share(records, graph, it.model.mask_id, sub_block)})


def run_groups(groups: Sequence[Group], file: ResultsFile, load_subject: Callable[[Group], Subject]) -> None:
    """Measures all groups into a file."""
    wanted = list(dict.fromkeys(setting for group in groups for setting in group.settings()))
    done = {Setting(**result["setting"]) for result in file.results}
    number = itertools.count(1 + len(done & set(wanted)))

    def report(setting: Setting, measured: dict[str, Any]) -> None:
        file.add({"setting": asdict(setting), "measured": measured})
        done.add(setting)
        m = measured
        text = f"{m['forwards']:.2f} forwards a sample ({m['of_vanilla']:.3f} of vanilla's), {m['identical']} of {m['samples']} identical, "
        text += f"{m['correct']} correct, {m['tokens_per_second']:,.0f} tokens/s, compiled in {m['compile_seconds']:.0f} s"
        print(f"[{next(number)}/{len(wanted)}] {setting.title()}: {text}", flush=True)

    for group in groups:
        run_group(group, lambda group=group: load_subject(group), done, report)


_LISTS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "threshold": ("thresholds", float, "reveal thresholds; each makes groups of its own"),
    "sub_block": ("sub-blocks", int, "sub-block sizes; each makes groups of its own"),
    "dtype": ("types", str, "float32, bfloat16; each makes groups of its own"),
    "sources": ("draft sources", str, "draft sources for Spiffy: ranks, confidence, union"),
    "drafts": ("numbers", int, "drafts a check for Spiffy"),
    "share": ("off, on", {"off": False, "on": True}.__getitem__, "shared commits: off, on"),
    "fold_sources": ("draft sources", str, "draft sources for SpecFold"),
    "fold_drafts": ("numbers", int, "drafts a check for SpecFold"),
    "taus": ("numbers", float, "SpecFold's gate thresholds"),
    "guards": ("numbers", float, "SpecFold's guards; inf is lossless"),
}
_PLAIN = ("temperature", "max_new_tokens", "samples", "batch", "calibration", "short")


def define_flags(values: flags.FlagValues) -> None:
    """The command line. Flags that are given replace the preset's values in all of its groups."""
    flags.DEFINE_enum("preset", "quick", list(PRESETS), "groups of settings to start from", flag_values=values)
    flags.DEFINE_string("model", "tiny", "checkpoint folder, or tiny", flag_values=values)
    flags.DEFINE_string("out", None, "results file (JSON)", flag_values=values)
    flags.DEFINE_string("commit", None, "git commit to record where there is no checkout", flag_values=values)
    flags.DEFINE_boolean("pack", None, "evaluate only the rows that matter", flag_values=values)
    for name, (_, _, text) in _LISTS.items():
        flags.DEFINE_list(name, None, text, flag_values=values)
    for name in _PLAIN:
        define: Any = flags.DEFINE_float if name == "temperature" else flags.DEFINE_integer
        define(name, None, f"overrides the preset's {name}", flag_values=values)
    flags.mark_flag_as_required("out", flag_values=values)


def groups_from(values: flags.FlagValues) -> list[Group]:
    """The preset's groups with the given flags put in."""
    given: dict[str, Any] = {name: values[name].value for name in (*_PLAIN, *_LISTS, "pack") if values[name].value is not None}
    for name, (what, parse, _) in _LISTS.items():
        if name in given:
            try:
                given[name] = tuple(parse(word) for word in given[name])
            except (KeyError, ValueError):
                raise ValueError(f"--{name}={','.join(given[name])} must be {what} separated by commas") from None
    axes = {name: given.pop(name) for name in ("dtype", "threshold", "sub_block") if name in given}
    groups = []
    for group in PRESETS[str(values["preset"].value)]:
        for point in itertools.product(*axes.values()):
            groups.append(replace(group, **given, **dict(zip(axes, point, strict=True))))
    return list(dict.fromkeys(groups))


def main() -> None:
    """Runs what the flags say."""
    given: Any = {name: flags.FLAGS[name].value for name in ("model", "out", "commit")}
    file = ResultsFile.named(given["out"], "methods", environment(given["commit"]), model=given["model"])
    with as_usage():
        groups = groups_from(flags.FLAGS)
    run_groups(groups, file, partial(subject, given["model"]))


if __name__ == "__main__":
    own = flags.FlagValues()
    define_flags(own)
    start(main, own)
