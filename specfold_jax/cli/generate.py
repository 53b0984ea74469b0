"""Answer prompts: with one method, with all three side by side (--compare), or watched forward by forward (--live).

Prompts come from the command line, from --file, or one a line from standard input. If there are none, a sample question is asked."""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specfold_jax.cli import flags
from specfold_jax.cli.flags import UsageError
from specfold_jax.methods import METHODS, MethodName

if TYPE_CHECKING:
    from rich.console import Console

    from specfold_jax.cli.setup import Setup
    from specfold_jax.diffusion.decoding import Decoding
    from specfold_jax.running.summary import Run

USAGE = "[flags] [PROMPT]"
EXAMPLES = """examples:
  specfold generate --compare
  specfold generate --live --pause 0.3
  specfold generate --file questions.txt --method spiffy --batch 16 --json > answers.jsonl
  specfold generate --model checkpoints/Fast_dLLM_v2_1.5B --graph graph.json "Why is the sky blue?"
  specfold generate --profile tuned/profile.json --file questions.txt
  specfold generate --model folder --token_ids --method vanilla "17 4 250 9"
"""
SAMPLE = (
    "Maria is required to submit a 24-page report. She already finished writing 3/4 of the report. "
    "How many pages does she have left to write?"
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help='the prompt; "-" reads prompts from standard input, one a line')
    group = parser.add_argument_group("output")
    group.add_argument("--compare", action="store_true", help="run vanilla, Spiffy and SpecFold on the same prompts")
    group.add_argument("--live", action="store_true", help="watch the canvas fill up, one prompt at a time")
    group.add_argument("--pause", type=float, default=0.15, metavar="S", help="with --live: seconds a frame stays at least (0.15)")
    group.add_argument("--json", action="store_true", help="one JSON object a prompt on standard output, everything else on stderr")
    flags.add_prompts(parser, samples=None)
    flags.add_method(parser)
    flags.add_decode(parser)
    flags.add_model(parser)


def run(args: argparse.Namespace) -> int:
    if args.profile:
        flags.require_profile(args)
    args.method = args.method or "specfold"  # a profile's comes later, when it has been read
    methods: Sequence[MethodName] = tuple(METHODS) if args.compare else (args.method,)
    flags.require_method(args, methods)
    for other in ("compare", "json"):
        if args.live and getattr(args, other):
            raise UsageError(f"--live and --{other} do not go together")
    if not 0 <= args.pause < math.inf:
        raise UsageError(f"--pause {args.pause:g} must be a number of at least 0")
    from rich.console import Console

    from specfold_jax.cli.setup import configs, load_decoding, load_setup, progress_bar, prompts_from
    from specfold_jax.running.batch import run_all

    note = Console(stderr=True)
    decode, fold = configs(args, methods)
    prompts = prompts_from(args)
    if prompts is None:
        if args.token_ids:
            raise UsageError("--token_ids needs a prompt of token ids")
        note.print("no prompt given: asking a sample question")
        prompts = [SAMPLE]
    setup = load_setup(args, decode)
    ids = setup.encode(prompts)
    setup, how = load_decoding(args, setup, methods, fold)
    if args.profile:  # --compare runs the profile's method and those that it builds on
        names = list(METHODS)
        methods = names[: names.index(how.method.name) + 1] if args.compare else (how.method.name,)
    if args.live:
        return _live(args, setup, ids, how)
    runs: dict[str, Run] = {}
    for method in methods:
        with progress_bar(note, method, len(prompts)) as done:
            runs[method] = run_all(setup.params, ids, how.reduced(method), args.batch, warm_up=args.compare, progress=done)
    report(args, setup, prompts, runs, note)
    return 1 if any(r.summary.refused for r in runs.values()) else 0


def report(args: argparse.Namespace, setup: "Setup", prompts: list[str], runs: "Mapping[str, Run]", note: "Console") -> None:
    """Prints answers and statistics. With --json it prints the answers as objects, and the statistics on stderr."""
    from rich.console import Console

    from specfold_jax.cli import tables
    from specfold_jax.running.summary import same_tokens

    same = {method: same_tokens(r, runs["vanilla"]) for method, r in runs.items()} if args.compare else {}
    out = note if args.json else Console()
    for row, prompt in enumerate(prompts):
        if args.json:
            print(json.dumps(_record(setup, row, prompt, runs, same), ensure_ascii=False))
        else:
            _answer(out, setup, row, prompt, runs, len(prompts))
    sys.stdout.flush()
    extra = []
    if same:
        marks = [f"[green]all {len(s)}[/]" if all(s) else f"[yellow]{sum(s)} of {len(s)}[/]" for s in same.values()]
        extra = [("answers with vanilla's tokens", ["-", *marks[1:]])]
    out.print(tables.statistics([r.summary for r in runs.values()], extra))
    for run in runs.values():
        for line in tables.refusals(run.summary):
            note.print(line, style="red")


def _record(setup: "Setup", row: int, prompt: str, runs: "Mapping[str, Run]", same: Mapping[str, list[bool]]) -> dict[str, Any]:
    """A prompt's answers as a JSON object. Statistics are the row's, except those that only the run has."""
    of_run = ("rows", "tokens", "seconds", "compile_seconds", "tokens_per_second", "impl")
    results = {}
    for method, run in runs.items():
        summary = run.only(row).record()
        status = dict(run.summary.refused).get(row, "decoded")
        stats = {name: value for name, value in summary.items() if name not in (*of_run, "method", "refused")} | {"status": status}
        total = {name: run.summary.record()[name] for name in of_run}
        results[method] = {"text": setup.text(run.generated(row)), "tokens": run.generated(row), "stats": stats, "run": total}
        if same:
            results[method]["identical"] = same[method][row]
    head = {"index": row, "prompt": prompt}
    return head | ({"methods": results} if same else {"method": next(iter(results)), **next(iter(results.values()))})


def _answer(out: "Console", setup: "Setup", row: int, prompt: str, runs: "Mapping[str, Run]", count: int) -> None:
    """Prints the prompt and its answers. Equal answers are printed once."""
    from rich.text import Text

    out.print(Text(f"[{row + 1}/{count}] " if count > 1 else "").append(prompt, style="dim"))
    groups: dict[tuple[int, ...], list[str]] = {}
    for method, run in runs.items():
        groups.setdefault(tuple(run.generated(row)), []).append(method)
    for tokens, methods in groups.items():
        out.print(Text(f"{', '.join(methods)}:", style="bold cyan"))
        out.print(Text(setup.text(list(tokens)) or "(nothing)"))
    out.print()


def _live(args: argparse.Namespace, setup: "Setup", ids: list[list[int]], how: "Decoding") -> int:
    import numpy as np
    from rich.console import Console

    from specfold_jax.cli import tables
    from specfold_jax.running.live import frames, play
    from specfold_jax.running.memory import implementation
    from specfold_jax.running.summary import summarise

    out = Console()
    impl, method = implementation(setup.params, how), how.method.name
    for index, row in enumerate(ids):
        title = method + (f", prompt {index + 1} of {len(ids)}" if len(ids) > 1 else "")
        views = frames(setup.params, row, how)
        decoded = play(views, setup.show, out, title, how.graph.max_drafts, args.pause)
        out.print()
        out.print(tables.statistics([summarise(decoded, np.array([len(row)], np.int32), 0.0, method, impl=impl)]))
    return 0
