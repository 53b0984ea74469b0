"""Whether the intervals that `specfold tune` gives hold on problems it has not seen.

    python -m benchmarks.quality.promises --tuned tuned --out benchmarks/results/promises-cpu.json

Tunes the tiny model with the command's own defaults into the folder (a finished run there is read, an interrupted one goes on), then
measures the best setting of each method on problems from the other end of the packaged ones. Exit status 1 if an interval promised
does not overlap the one measured.
"""

import time
from pathlib import Path
from typing import Any

from absl import app, flags

from benchmarks.common.command import start
from benchmarks.common.environment import environment
from benchmarks.common.results_file import ResultsFile
from specfold_jax.cli.prompts import SAMPLES
from specfold_jax.config import DecodeConfig
from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.models.checkpoint import load
from specfold_jax.text.problems import packaged_problems
from specfold_jax.text.tokens import encode, load_tokenizer
from specfold_jax.tuning.measure import Setting, Subject, measure
from specfold_jax.tuning.search import Search, Tuned, tune

FLAGS = flags.FlagValues()
flags.DEFINE_string("tuned", None, "folder of the tune run", required=True, flag_values=FLAGS)
flags.DEFINE_integer("samples", SAMPLES, "problems to measure on, from the front", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("tune_samples", SAMPLES, "problems to tune on, from the end", lower_bound=8, flag_values=FLAGS)
flags.DEFINE_integer("batch", 1, "prompts decoded together", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_string("commit", None, "the commit, where there is no checkout to ask", flag_values=FLAGS)
flags.DEFINE_string("out", None, "results, JSON", required=True, flag_values=FLAGS)
PROMISED = ("tokens_per_second_interval95", "agreement_interval95")


def overlap(a: list[float], b: list[float]) -> bool:
    """Whether two intervals [low, high] share a point."""
    return max(a[0], b[0]) <= min(a[1], b[1])


def hold(tuned: Tuned, subject: Subject, unseen: list[list[int]]) -> list[dict[str, Any]]:
    """For the best setting of each method: figures promised, figures measured on `unseen` prompts, and which intervals overlap."""
    graphs: dict[Any, DraftGraph] = {(c.source, c.drafts, c.reach): c.graph for c in tuned.candidates}
    settings = {o.setting.key: o.setting for o in tuned.outcomes}
    reference, found = None, []
    best = tuned.profile.measured["best_of_each_method"]  # vanilla, which the others are compared with, is the first
    for promised in best.values():
        setting: Setting = settings[promised["setting"]]
        graph = graphs.get((setting.source, setting.drafts, setting.reach))
        outcome, generated = measure(subject, unseen, setting, graph, reference)
        reference = generated if reference is None else reference
        measured = outcome.figures(subject.batch, tuned.seed)
        line = {"promised": promised, "measured": measured}
        found.append(line | {name.removesuffix("_interval95"): overlap(promised[name], measured[name]) for name in PROMISED})
    return found


def main() -> None:
    problems = packaged_problems()
    if FLAGS.samples + FLAGS.tune_samples > len(problems):
        raise app.UsageError(f"--samples and --tune_samples must be {len(problems)} problems at most together")
    sizes = {name: FLAGS[name].value for name in ("batch", "samples", "tune_samples")}
    file = ResultsFile.named(FLAGS.out, "promises", environment(FLAGS.commit), **sizes)
    ids = encode(load_tokenizer("tiny"), [problem.question for problem in problems])
    model, params = load("tiny")
    subject = Subject("tiny", params, model, DecodeConfig(), FLAGS.batch)
    begun = time.monotonic()
    tuned = tune(subject, ids[-FLAGS.tune_samples :], Search(), Path(FLAGS.tuned), note=lambda text: print(text, flush=True))
    seconds = time.monotonic() - begun
    lines = hold(tuned, subject, ids[: FLAGS.samples])
    file.change(lambda _: lines, tuning_seconds=seconds, chosen=tuned.profile.measured["chosen"]["setting"])
    for line in lines:
        print(line["promised"]["setting"])
        for name in PROMISED:
            ends = [f"{line[which][name][0]:.4g} to {line[which][name][1]:.4g}" for which in ("promised", "measured")]
            verdict = "overlap" if line[name.removesuffix("_interval95")] else "DO NOT OVERLAP"
            print(f"  {name.removesuffix('_interval95')}: promised {ends[0]}, measured {ends[1]}: {verdict}")
    if not all(line[name.removesuffix("_interval95")] for line in lines for name in PROMISED):
        raise SystemExit(1)


if __name__ == "__main__":
    start(main, FLAGS)
