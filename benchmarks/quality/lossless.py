r"""Token equality with vanilla decoding, draft source by draft source, on held-out problems of the tiny model.

    python -m benchmarks.quality.lossless --samples 500 --impl xla --out benchmarks/results/lossless-h200.json
    python -m benchmarks.quality.lossless --samples 1000 --impl pallas --dtype bfloat16 --batch 64 --temperature 0 --source confidence \
        --out benchmarks/results/lossless-pallas-h200.json

In float32 every difference is a fault, and in bfloat16 with the Pallas kernels, whose rows do not depend on each other; bfloat16 with a
GPU library's matrix products is counted beside it, not expected to be exact.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from benchmarks.common.command import as_usage, refuse_without_hopper, start
from benchmarks.common.environment import environment
from benchmarks.common.results_file import ResultsFile
from specfold_jax.calibration.calibrate import choose_graph
from specfold_jax.calibration.records import record_vanilla
from specfold_jax.config import IMPLEMENTATIONS, DecodeConfig, FoldConfig
from specfold_jax.diffusion.decoding import Decoding
from specfold_jax.evaluation.agreement import differences
from specfold_jax.models.checkpoint import load
from specfold_jax.running.batch import pad, run_all
from specfold_jax.running.summary import Run, same_tokens
from specfold_jax.text.problems import packaged_problems
from specfold_jax.text.tokens import encode, load_tokenizer

LOSSLESS_FOLD = "specfold, guard inf"

FLAGS = flags.FlagValues()
flags.DEFINE_integer("samples", 500, "held-out problems, from the front", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("calibration", 64, "problems to calibrate on, from the end", lower_bound=8, flag_values=FLAGS)
flags.DEFINE_integer("drafts", 8, "drafts a check", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_multi_integer("batch", [8, 1], "batch sizes", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_multi_float("temperature", [0.0, 1.0], "temperatures", flag_values=FLAGS)
flags.DEFINE_multi_enum("source", ["confidence", "ranks", "union"], ["ranks", "confidence", "union"], "draft sources", flag_values=FLAGS)
flags.DEFINE_multi_enum("dtype", ["float32", "bfloat16"], ["float32", "bfloat16"], "bfloat16: first batch size only", flag_values=FLAGS)
flags.DEFINE_enum("impl", "auto", list(IMPLEMENTATIONS), "implementation; pallas has no float32", flag_values=FLAGS)
flags.DEFINE_string("commit", None, "the commit, where there is no checkout to ask", flag_values=FLAGS)
flags.DEFINE_string("out", None, "results, JSON", required=True, flag_values=FLAGS)


def compare(setting: dict[str, Any], run: Run, vanilla: Run) -> dict[str, Any]:
    """One line of the result: how many samples have vanilla's tokens, and what each run took."""
    equal = same_tokens(run, vanilla)
    first = [d._asdict() for d in differences(run, vanilla)[:5]]
    return setting | {
        "impl": run.summary.impl,
        "samples": len(equal),
        "equal": sum(equal),
        "first_differences": first,
        "nfe": run.summary.nfe,
        "vanilla_nfe": vanilla.summary.nfe,
        "shared": run.summary.shared,
        "saved_commits": run.summary.saved_commits,
    }


def main() -> None:
    """Compares what the file does not have yet."""
    if FLAGS.impl == "pallas" and "float32" in FLAGS.dtype:
        raise app.UsageError("--impl=pallas has no float32; name --dtype=bfloat16")
    for temperature in FLAGS.temperature:
        with as_usage("--temperature: "):
            DecodeConfig(temperature=temperature)
    if FLAGS.impl == "pallas":
        refuse_without_hopper("--impl=pallas")
    if FLAGS.samples > (there := len(packaged_problems())):
        raise app.UsageError(f"--samples={FLAGS.samples} must be at most {there}, the packaged problems")
    sizes = {name: FLAGS[name].value for name in ("samples", "calibration", "drafts")}
    file = ResultsFile.named(FLAGS.out, "lossless", environment(FLAGS.commit), impl=FLAGS.impl, **sizes)
    jax.config.update("jax_default_matmul_precision", "highest")
    tokenizer, problems = load_tokenizer("tiny"), packaged_problems()
    ids = encode(tokenizer, [problem.question for problem in problems])
    asked, watched = ids[: FLAGS.samples], pad(ids[-FLAGS.calibration :])
    before, begun = file.results, time.monotonic()

    def missing(setting: dict[str, Any]) -> bool:
        return not any(setting.items() <= result.items() for result in before)

    def missing_of(dtype: str) -> Iterator[tuple[int, float, list[dict[str, Any]]]]:
        """Batch, temperature, and the methods to compare with one vanilla run."""
        for batch, temperature in itertools.product(FLAGS.batch if dtype == "float32" else FLAGS.batch[:1], FLAGS.temperature):
            setting = {"dtype": dtype, "batch": batch, "temperature": temperature}
            methods = [setting | {"method": "spiffy", "source": source} for source in FLAGS.source]
            if batch == FLAGS.batch[0]:
                methods.append(setting | {"method": LOSSLESS_FOLD, "source": FLAGS.source[0]})
            if methods := [line for line in methods if missing(line)]:
                yield batch, temperature, methods

    todo, graphs = {dtype: found for dtype in FLAGS.dtype if (found := list(missing_of(dtype)))}, {}
    if not todo:
        print(f"{file.path} has all of that already")
    for dtype, groups in todo.items():
        model, params = load("tiny", dtype=dtype)
        base = DecodeConfig(impl=FLAGS.impl)
        if not graphs:
            reach = base.block(model) // base.window(model)
            prompts, lengths = map(jnp.asarray, watched)
            records = record_vanilla(params, prompts, lengths, model, dataclasses.replace(base, impl="xla"), reach=reach)
            graphs = {source: choose_graph(records, model, base, FLAGS.drafts, source, reach=reach, name="tiny") for source in FLAGS.source}
        for batch, temperature, methods in groups:
            decode = dataclasses.replace(base, temperature=temperature)
            vanilla = run_all(params, asked, Decoding.of("vanilla", model, decode), batch)
            for line in methods:
                fold = FoldConfig(guard=float("inf")) if line["method"] == LOSSLESS_FOLD else None
                run = run_all(params, asked, Decoding(model, decode, graphs[line["source"]], fold), batch)
                file.add(found := compare(line, run, vanilla))
                where = ", ".join(f"{name}={value}" for name, value in found.items() if name != "first_differences")
                print(f"{time.monotonic() - begun:6.0f} s  {where}", flush=True)


if __name__ == "__main__":
    start(main, FLAGS)
