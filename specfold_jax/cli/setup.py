"""What a run needs, made from parsed flags: model, tokenizer, prompts, configurations, graph."""

import argparse
import os
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specfold_jax.cli.flags import UsageError, from_flags
from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.diffusion.decoding import Decoding
from specfold_jax.diffusion.graph import DraftGraph, require_made_for
from specfold_jax.methods import METHODS, MethodName
from specfold_jax.models.checkpoint import load, resolve_folder
from specfold_jax.models.transformer import Params
from specfold_jax.running.memory import OutOfDeviceMemory, is_full, readable
from specfold_jax.text.prompts import read_prompts
from specfold_jax.text.tokens import decode_text, encode, load_tokenizer, parse_ids
from specfold_jax.tuning.profile import Profile

EVERY = 20.0
"""Seconds between lines of progress if there is no terminal."""


@dataclass(frozen=True)
class Setup:
    """A loaded model and how to decode with it. `tokenizer`: None if prompts are token ids. `raw`: no chat template."""

    folder: Path
    model: ModelConfig
    params: Params
    tokenizer: Any
    decode: DecodeConfig
    raw: bool

    @property
    def name(self) -> str:
        """The model's name, as graphs record it."""
        return self.folder.resolve().name

    def encode(self, prompts: list[str]) -> list[list[int]]:
        """Token ids of the prompts. Without a tokenizer the prompts are ids already."""
        found = parse_ids(prompts) if self.tokenizer is None else encode(self.tokenizer, prompts, self.raw)
        if empty := [index for index, row in enumerate(found) if not row]:
            raise ValueError(f"prompt {empty[0]} is empty")
        return found

    def text(self, ids: list[int]) -> str:
        """The text of generated ids."""
        return decode_text(self.tokenizer, ids)

    def show(self, token: int) -> str:
        """One token, for the live view."""
        return f"{token} " if self.tokenizer is None else str(self.tokenizer.decode([token]))


def decode_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The decoding flags that were given, as fields of DecodeConfig."""
    names = (entry.name for entry in fields(DecodeConfig) if entry.name not in ("stop_ids", "pack"))
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def configs(args: argparse.Namespace, methods: Sequence[MethodName] = ()) -> tuple[DecodeConfig, FoldConfig | None]:
    """The flags' DecodeConfig, and their FoldConfig if a method folds. Raises UsageError for a wrong value, before any file is read."""
    decode = from_flags(DecodeConfig, **decode_flags(args))
    if not any(METHODS[name].folds for name in methods):
        return decode, None
    given = {name: getattr(args, name) for name in ("tau", "guard", "gates") if getattr(args, name) is not None}
    return decode, from_flags(FoldConfig, **given)


def load_setup(args: argparse.Namespace, decode: DecodeConfig) -> Setup:
    """Loads the model and its tokenizer (none with --token_ids)."""
    folder = resolve_folder(args.model)
    tokenizer = None if args.token_ids else load_tokenizer(folder)
    try:
        model, params = load(folder, args.dtype, args.mask_id, args.stop_ids)
    except jax.errors.JaxRuntimeError as error:
        if not is_full(error):
            raise
        stored = readable(sum(file.stat().st_size for file in folder.glob("*.safetensors")))
        narrow = "" if args.dtype == "bfloat16" else "; --dtype bfloat16 takes the least"
        raise OutOfDeviceMemory(f"{folder}: the parameters, {stored} in files, do not fit the device{narrow}") from error
    if params["embed"].dtype == jnp.float32:  # a GPU would multiply in TF32 by default
        jax.config.update("jax_default_matmul_precision", "highest")
    decode.window(model)
    return Setup(folder, model, params, tokenizer, decode, args.raw)


def load_graph(args: argparse.Namespace, setup: Setup) -> DraftGraph:
    """The draft graph of --graph or of the model's folder, pruned to --drafts. Raises ValueError if it was made for something else."""
    path = Path(args.graph) if args.graph else setup.folder / "graph.json"
    if not path.is_file():
        advice = f"make one: specfold calibrate --model {args.model} --out {path}"
        raise ValueError(f"{path}: no such draft graph; " + ("name another" if args.graph else f"pass --graph FILE, or {advice}"))
    graph = DraftGraph.load(path)
    require_made_for(graph, setup.name, setup.model.vocab, setup.decode.block(setup.model), setup.decode.window(setup.model))
    if args.drafts is None:
        return graph
    if args.drafts > graph.nodes:
        raise ValueError(f"--drafts {args.drafts} must lie in 1..{graph.nodes}, the nodes of {path}")
    return replace(graph, max_drafts=args.drafts)


def load_decoding(args: argparse.Namespace, setup: Setup, methods: Sequence[MethodName], fold: FoldConfig | None) -> tuple[Setup, Decoding]:
    """The decoding of --profile, or of the last of `methods` with its flags, and the setup with that decoding's configuration.

    Raises ValueError if a graph or profile was made for something else.
    """
    if not args.profile:
        method = METHODS[methods[-1]]
        graph = load_graph(args, setup) if method.drafts else None
        return setup, Decoding.of(method.name, setup.model, setup.decode, graph, fold)
    if not Path(args.profile).is_file():
        raise ValueError(f"{args.profile}: no such profile; specfold tune --out FOLDER writes FOLDER/profile.json")
    try:
        found = Profile.load(args.profile)
    except ValueError as error:
        raise ValueError(f"{error}; a profile is what specfold tune writes") from error
    try:
        found.require_made_for(setup.name, setup.model, args.block_size, args.sub_block)
    except ValueError as error:
        raise ValueError(f"{args.profile}: {error}") from error
    setup = replace(setup, decode=replace(found.decode, **decode_flags(args)))
    return setup, Decoding(setup.model, setup.decode, found.graph, found.fold)


def prompts_from(args: argparse.Namespace) -> list[str] | None:
    """The prompts of the positional argument, of --file, or of standard input if it is piped or "-". None if there are none."""
    words = getattr(args, "prompt", None)
    if words is not None and args.file:
        raise UsageError("a prompt and --file do not go together")
    if args.file:
        return read_prompts(Path(args.file))
    if words not in (None, "-"):
        return [words]
    if words == "-" or (hasattr(args, "prompt") and _piped()):
        found = [line for line in sys.stdin.read().splitlines() if line.strip()]
        if words == "-" and not found:
            raise ValueError("standard input holds no prompt; it must hold one a line")
        return found or None
    return None


def _piped() -> bool:
    """Whether standard input is a pipe or a file. A terminal or /dev/null is neither."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed or replaced
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


@contextmanager
def progress_bar(console: Console, text: str, total: int | None) -> Iterator[Any]:
    """Shows a bar until the block ends. Yields a function that takes the number of things completed.

    Without a terminal it prints a line now and then (`EVERY`) instead.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    begun = said = time.monotonic()

    def line(done: int) -> None:
        nonlocal said
        if (now := time.monotonic()) - said >= EVERY:
            said = now
            console.print(f"{text} {done}{f' of {total}' if total else ''} ({now - begun:.0f} s)", highlight=False, markup=False)

    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=total)
        yield (lambda done: progress.update(task, completed=done)) if console.is_terminal else line
