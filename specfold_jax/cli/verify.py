"""Compare a method's tokens with vanilla decoding's on many prompts. Exit status 1 if any prompt differs, else 0.

Prompts come from --file, or are held-out problems of reasoning-gym's gsm_symbolic (--samples), whose answers are scored as well.
A difference is listed with the first generated position that differs, both tokens, and the margin. The margin says, in log-odds, how close
vanilla's decision was where the two runs part. If it is near 0, the decision is a tie, and rounding may break it either way."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from specfold_jax.cli import flags
from specfold_jax.cli.flags import UsageError
from specfold_jax.cli.prompts import packaged_problems

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from specfold_jax.cli.setup import Setup
    from specfold_jax.evaluation.agreement import Difference
    from specfold_jax.running.summary import Run
    from specfold_jax.text.problems import Problem

USAGE = "[flags]"
EXAMPLES = """examples:
  specfold verify --samples 200 --guard 0.5
  specfold verify --samples 200 --guard inf            (lossless: no difference in float32)
  specfold verify --samples 200 --profile tuned/profile.json
  specfold verify --model folder --file prompts.txt --method spiffy --dtype bfloat16 --json
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, everything else on stderr")
    parser.add_argument("--show", type=int, default=20, metavar="N", help="differences listed (default 20; --json has all)")
    flags.add_prompts(parser, samples="N held-out problems (default 100 for tiny)")
    flags.add_method(parser)
    flags.add_decode(parser)
    flags.add_model(parser)


def run(args: argparse.Namespace) -> int:
    if args.profile:
        flags.require_profile(args)
    args.method = args.method or "specfold"  # a profile's comes later, when it has been read
    if args.method == "vanilla":
        raise UsageError("--method vanilla is what the others are compared with: name spiffy or specfold")
    flags.require_one_source(args)
    flags.require_method(args, (args.method,))
    from rich.console import Console

    from specfold_jax.cli.setup import configs, load_decoding, load_setup, progress_bar
    from specfold_jax.evaluation.agreement import differences, with_margins
    from specfold_jax.running.batch import batches, run_all

    note = Console(stderr=True)
    decode, fold = configs(args, (args.method,))
    prompts, problems = _prompts(args)
    setup = load_setup(args, decode)
    ids = setup.encode(prompts)
    setup, how = load_decoding(args, setup, (args.method,), fold)
    args.method, runs = how.method.name, []
    for one in (how.reduced("vanilla"), how):
        with progress_bar(note, one.method.name, len(ids)) as done:
            runs.append(run_all(setup.params, ids, one, args.batch, progress=done))
    vanilla, other = runs
    found = differences(other, vanilla)
    if found:
        with note.status(f"replaying {len(found)} prompts that differ"):
            found = with_margins(found, setup.params, batches(ids, args.batch), how)
    _report(args, setup, runs, found, problems, note)
    return 1 if found or vanilla.summary.refused or other.summary.refused else 0


def _prompts(args: argparse.Namespace) -> "tuple[list[str], list[Problem] | None]":
    """The prompts, and their problems if the answers are known."""
    from specfold_jax.text.problems import read_problems
    from specfold_jax.text.prompts import read_prompts

    if args.file:
        path = Path(args.file)
        prompts = read_prompts(path)
        try:
            return prompts, read_problems(path) if path.suffix == ".jsonl" else None
        except ValueError:  # prompts without answers
            return prompts, None
    problems = packaged_problems(args, "no prompts")[: args.samples or 100]
    return [problem.question for problem in problems], problems


def _report(
    args: argparse.Namespace,
    setup: "Setup",
    runs: "list[Run]",
    found: "list[Difference]",
    problems: "list[Problem] | None",
    note: "Console",
) -> None:
    """Prints statistics, the differences and the verdict. With --json it prints them as one object, and the tables on stderr."""
    from rich.console import Console

    from specfold_jax.cli import tables
    from specfold_jax.evaluation.intervals import wilson

    count, summaries = len(runs[0].prompt_lengths), [r.summary for r in runs]
    equal = count - len(found)
    low, high = wilson(equal, count)
    right = _right(setup, runs, problems)
    if args.json:
        record = {"prompts": count, "equal": equal, "agreement": equal / count, "interval95": [low, high]}
        record["differences"] = [d._asdict() for d in found]
        for run, correct in zip(runs, right or [None, None], strict=True):
            record[run.summary.method] = run.summary.record() | {"nfe_per_sample": run.summary.nfe / max(run.summary.rows, 1)}
            record[run.summary.method]["accuracy"] = correct and correct / count
        print(json.dumps(record), flush=True)
    out = note if args.json else Console()
    extra = [("forwards per sample", [f"{s.nfe / max(s.rows, 1):.2f}" for s in summaries])]
    if right:
        extra.append(("accuracy", [f"{n / count:.3f} ({n} of {count})" for n in right]))
    out.print(tables.statistics(summaries, extra))
    for summary in summaries:
        for line in tables.refusals(summary):
            note.print(line, style="red")
    if found and args.show > 0:
        out.print()
        title = f"Differences ({min(args.show, len(found))} of {len(found)})"
        out.print(_differences(setup, found[: args.show], tables.plain_table(title, "prompt")))
    style = "green" if not found else "yellow"
    text = f"{args.method} gave vanilla's tokens on [bold {style}]{equal} of {count}[/] prompts: {equal / count:.2%}"
    out.print(f"\n{text} (95 % interval {low:.2%} to {high:.2%})", highlight=False)


def _right(setup: "Setup", runs: "list[Run]", problems: "list[Problem] | None") -> list[int] | None:
    """How many answers of each run are right; None if the right ones are not known."""
    from specfold_jax.text.problems import is_correct

    if problems is None:
        return None
    return [sum(is_correct(setup.text(run.generated(row)), problem) for row, problem in enumerate(problems)) for run in runs]


def _differences(setup: "Setup", found: "list[Difference]", table: "Table") -> "Table":
    from rich.text import Text

    for name in ("position", "vanilla", "here", "margin (log-odds)"):
        table.add_column(name, justify="left" if name in ("vanilla", "here") else "right", header_style="bold")

    def token(value: int | None) -> Text:
        return Text("(ended)" if value is None else f"{value}" if setup.tokenizer is None else f"{value} {setup.show(value)!r}")

    for d in found:
        margin = "-" if d.margin is None else f"{d.margin:.3g}"
        table.add_row(str(d.prompt), str(d.position), token(d.vanilla_token), token(d.token), margin)
    return table
