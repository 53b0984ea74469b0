"""Prompts to learn from, and files to write: what commands that make draft graphs have in common."""

import argparse
from pathlib import Path
from typing import Any

from specfold_jax.cli import flags
from specfold_jax.cli.flags import UsageError


def calibration_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of --file, or the last of the packaged problems."""
    from specfold_jax.text import problems as data
    from specfold_jax.text.prompts import read_prompts

    if args.file:
        return read_prompts(Path(args.file))
    if args.token_ids or (args.samples is None and args.model != "tiny"):
        raise UsageError("calibration needs prompts: pass --file (or --samples N for a model of gsm_symbolic problems)")
    problems = data.packaged_problems()
    flags.require_samples(args, len(problems))
    return [problem.question for problem in problems[-(args.samples or 64) :]]  # from the end: `verify` takes them from the front


def free_to_write(path: str | None, force: bool) -> None:
    """Raises ValueError if the file exists, unless forced, or cannot be made there."""
    if path is None:
        return
    if Path(path).is_dir() or not Path(path).resolve().parent.is_dir():
        raise ValueError(f"{path} must be a file in an existing folder")
    if Path(path).exists() and not force:
        raise ValueError(f"{path} exists already; --force overwrites it")


def save_picture(graph: Any, path: Path, force: bool) -> None:
    """Draws the graph; the file is whole or not there."""
    from specfold_jax.calibration.picture import draw_graph
    from specfold_jax.files import whole

    free_to_write(str(path), force)
    with whole(path) as partial:
        draw_graph(graph, partial)


SAMPLES = 48
