"""Prompts that commands take from files or from the package, and the files that several of them write."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from specfold_jax.cli import flags
from specfold_jax.cli.flags import UsageError

if TYPE_CHECKING:
    from specfold_jax.diffusion.graph import DraftGraph
    from specfold_jax.text.problems import Problem

SAMPLES = 48
"""Packaged problems that `specfold tune` takes."""


def calibration_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of --file, or the last of the packaged problems: `verify` takes the first ones."""
    from specfold_jax.text.prompts import read_prompts

    if args.file:
        return read_prompts(Path(args.file))
    problems = packaged_problems(args, "calibration needs prompts")
    return [problem.question for problem in problems[-(args.samples or 64) :]]


def packaged_problems(args: argparse.Namespace, lack: str) -> "list[Problem]":
    """All packaged problems. Raises UsageError, which begins with `lack`, if the model may need others and --samples is not given."""
    from specfold_jax.text import problems

    if args.token_ids or (args.samples is None and args.model != "tiny"):
        raise UsageError(f"{lack}: pass --file (or --samples N for a model of gsm_symbolic problems)")
    found = problems.packaged_problems()
    flags.require_samples(args, len(found))
    return found


def free_to_write(path: str | None, force: bool) -> None:
    """Raises ValueError if the file exists, unless forced, or cannot be made there."""
    if path is None:
        return
    if Path(path).is_dir() or not Path(path).resolve().parent.is_dir():
        raise ValueError(f"{path} must be a file in an existing folder")
    if Path(path).exists() and not force:
        raise ValueError(f"{path} exists already; --force overwrites it")


def save_picture(graph: "DraftGraph", path: Path, force: bool) -> None:
    """Draws the graph."""
    from specfold_jax.calibration.picture import draw_graph
    from specfold_jax.files import atomic_write

    free_to_write(str(path), force)
    with atomic_write(path) as partial:
        draw_graph(graph, partial)
