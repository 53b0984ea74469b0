"""Measure decoding settings for a model, its prompts and this device, and choose the fastest that follow vanilla decoding.

The prompts are split: draft graphs are calibrated on one half, and settings are measured on the other. generate --profile takes
OUT/profile.json. Beside it are pictures, and timing.json, whose times --timing uses in place of the clock's. An interrupted run continues
if the same command is given again.

Without --file, prompts come from the end of the problems shipped beside the tiny model (verify takes them from the front)."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specfold_jax.calibration.options import SOURCES
from specfold_jax.cli import flags
from specfold_jax.cli.prompts import SAMPLES

if TYPE_CHECKING:
    from rich.table import Table

    from specfold_jax.tuning.search import Tuned

USAGE = "[flags] --out FOLDER"
EXAMPLES = """examples:
  specfold tune --out tuned
  specfold tune --model folder --file prompts.txt --batch 8 --agreement 0.99 --out tuned
  specfold tune --lossless --drafts 3,8 --timing tuned/timing.json --out tuned_again
"""


def _list(kind: type) -> Any:
    """Numbers separated by commas."""

    def parse(text: str) -> tuple[Any, ...]:
        try:
            found = tuple(kind(part) for part in text.split(","))
        except ValueError:
            found = (-1,)
        if any(math.isnan(value) or value < 0 for value in found):
            raise argparse.ArgumentTypeError(f"{text!r} must be numbers separated by commas")
        return found

    return parse


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, metavar="FOLDER", help="a new folder, or that of the same run interrupted")
    group = parser.add_argument_group("goal")
    group.add_argument(
        "--agreement", type=float, default=0.995, metavar="P", help="least share of answers identical to vanilla's (default 0.995)"
    )
    group.add_argument("--lossless", action="store_true", help="only settings that are exact by construction")
    group.add_argument("--batch", type=flags.at_least_one, default=1, metavar="N", help="prompts decoded together (default 1)")
    group = parser.add_argument_group("search")
    group.add_argument("--drafts", type=_list(int), metavar="N,N", help="drafts a check (default 3,5,8)")
    group.add_argument("--reach", type=_list(int), metavar="N,N", help="sub-blocks drafts may lie in (default: the whole block)")
    group.add_argument("--sources", type=lambda text: tuple(text.split(",")), metavar="S,S", help=f"{','.join(SOURCES)} (default: all)")
    group.add_argument("--taus", type=_list(float), metavar="X,X", help="specfold: fold thresholds (default 0.05,0.1,0.2)")
    group.add_argument("--guards", type=_list(float), metavar="X,X", help="specfold: guards, the usual one first (default 0.5,0)")
    group.add_argument("--timing", metavar="FILE", help="timing.json of another run: its times count, not the clock's")
    flags.add_name(group, "a profile")
    flags.add_prompts(parser, samples=f"use N packaged problems (default {SAMPLES} for tiny)")
    flags.add_decode(parser)
    flags.add_model(parser)


def run(args: argparse.Namespace) -> int:
    flags.require_one_source(args)
    from rich.console import Console

    from specfold_jax.cli.prompts import calibration_prompts
    from specfold_jax.cli.setup import configs, load_setup
    from specfold_jax.tuning.measure import Subject
    from specfold_jax.tuning.search import Search, tune
    from specfold_jax.tuning.timing_table import TimingTable

    note, out = Console(stderr=True), Console()
    args.samples = args.samples or (SAMPLES if args.model == "tiny" and not args.file else None)
    given = {"drafts": args.drafts, "reaches": args.reach, "sources": args.sources, "taus": args.taus, "guards": args.guards}
    goal = {"agreement": args.agreement, "lossless": args.lossless, "seed": args.seed or 0}
    search = flags.from_flags(Search, **{k: v for k, v in given.items() if v}, **goal)
    decode, _ = configs(args)
    prompts = calibration_prompts(args)
    setup = load_setup(args, decode)
    subject = Subject(setup.name if args.name is None else args.name, setup.params, setup.model, setup.decode, args.batch)
    timing = TimingTable.load(args.timing, subject.name, args.batch) if args.timing else None
    folder = Path(args.out)
    tuned = tune(
        subject, setup.encode(prompts), search, folder, timing, lambda text: note.print(text, highlight=False, style="dim", soft_wrap=True)
    )
    if tuned.outcomes:
        from specfold_jax.tuning.plots import draw_all

        draw_all(tuned, folder)
        out.print(_table(tuned))
        out.print()
    for line in tuned.profile.notes:
        out.print(line, highlight=False)
    out.print(f"\nprofile: [bold]{folder / 'profile.json'}[/] (specfold generate --profile)", highlight=False)
    return 0


def _table(tuned: "Tuned") -> "Table":
    """A row for each setting. The chosen one is marked."""
    from specfold_jax.cli.tables import plain_table

    held, several = len(tuned.outcomes[0].same), len({o.setting.reach for o in tuned.outcomes} - {None}) > 1
    names = ("method", "drafts from", "D", *(["reach"] if several else []), "tau", "guard", "tokens/s", "95 %", "same", "forwards", "rho")
    table = plain_table(
        f"{held} held-out prompts, batch {tuned.batch} (* chosen; same: answers; forwards: a prompt; rho: recomputed)", *names
    )
    table.padding = (0, 2, 0, 0)
    chosen = tuned.profile.measured["chosen"]["setting"]
    for o in tuned.outcomes:
        setting, (low, high) = o.setting, o.rate_interval(tuned.batch, tuned.seed)
        known = [setting.drafts, *([setting.reach] if several else []), setting.tau, setting.guard]
        table.add_row(
            ("*" if setting.key == chosen else "") + setting.method,
            setting.source or "-",
            *("-" if value is None else f"{value:g}" for value in known),
            f"{o.rate(tuned.batch):.1f}",
            f"{low:.0f}-{high:.0f}",
            f"{sum(o.same)}",
            f"{o.forwards_per_sample:.2f}",
            "-" if o.recompute_ratio is None or setting.method != "specfold" else f"{o.recompute_ratio:.2f}",
        )
    return table
