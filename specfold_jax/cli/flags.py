"""Flags that several commands share, and the rules between them. It imports no jax, so that `--help` is quick."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from specfold_jax.methods import METHODS


class UsageError(Exception):
    """A flag's value is out of range, or flags exclude each other: the command line is wrong, and no file matters. Exit status 2."""


def from_flags[T](make: Callable[..., T], **values: Any) -> T:
    """`make` of flags' values. A value that it refuses is wrong usage."""
    try:
        return make(**values)
    except ValueError as error:
        raise UsageError(str(error)) from error


def ids(text: str) -> tuple[int, ...]:
    """Token ids separated by commas, or "none"."""
    if text.strip() in ("", "none"):
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be token ids separated by commas, such as 2,11, or none") from None


def at_least_one(text: str) -> int:
    """A whole number of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def add_name(group: Any, what: str) -> None:
    """The name to record as the model's."""
    text = f"the model's name to record (default: its folder's); {what} is refused for a model whose folder has another name"
    group.add_argument("--name", help=text)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which checkpoint, and in what precision."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", default="tiny", metavar="NAME", help='checkpoint folder, or "tiny", the model in this package (default)')
    group.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="auto: float32 on a CPU, else bfloat16")
    group.add_argument("--mask_id", type=int, metavar="ID", help="mask token id, if the checkpoint's is not the family's")
    group.add_argument("--stop_ids", type=ids, metavar="ID,ID", help="ids that end an answer, or none (default: the checkpoint's)")


def add_prompts(parser: argparse.ArgumentParser, samples: str | None) -> None:
    """Where prompts come from. `samples`: the help of `--samples`, if the command has that flag."""
    group = parser.add_argument_group("prompts")
    group.add_argument("--file", metavar="FILE", help='.txt (one prompt a line) or .jsonl (objects with "prompt", "question" or "turns")')
    if samples:
        group.add_argument("--samples", type=at_least_one, metavar="N", help=samples)
    group.add_argument("--raw", action="store_true", help="prompts as they are, without the chat template")
    group.add_argument("--token_ids", action="store_true", help="prompts are token ids separated by spaces: for models without tokenizer")


def add_decode(parser: argparse.ArgumentParser) -> None:
    """The fields of DecodeConfig. Flags that are left out are None and mean its own values, or a profile's."""
    group = parser.add_argument_group("decoding")
    group.add_argument("--max_new_tokens", type=at_least_one, metavar="N", help="tokens an answer may have (default 256)")
    group.add_argument("--threshold", type=float, metavar="P", help="reveal tokens above this probability (default 0.9)")
    group.add_argument("--sub_block", type=at_least_one, metavar="N", help="positions finished before the next (default: the family's)")
    group.add_argument("--block_size", type=at_least_one, metavar="N", help="positions denoised together (default: the model's)")
    group.add_argument("--steps", type=at_least_one, metavar="N", help="reveal at least block_size / N tokens a step (default: one)")
    group.add_argument("--order", choices=("confidence", "left"), help="what to reveal if too few pass the threshold (confidence)")
    group.add_argument("--temperature", type=float, metavar="T", help="0: greedy (default); above: sampling, reproducible")
    group.add_argument("--seed", type=int, metavar="N", help="of the sampling noise (default 0)")
    group.add_argument("--share", action="store_true", default=None, help="a commit may be the next block's first check too (default)")
    group.add_argument("--no_share", dest="share", action="store_false", default=None, help="commits on their own")
    impl = "auto (default): pallas where all GPUs are Hopper and the kernels support model and options, else xla; or insist on one"
    group.add_argument("--impl", metavar="NAME", help=impl)


def add_method(parser: argparse.ArgumentParser) -> None:
    """The method, its draft graph and its fold, or a profile that sets them all. Flags that are left out are None, so that misplaced ones
    are noticed."""
    group = parser.add_argument_group("method")
    group.add_argument("--profile", metavar="FILE", help="method and settings as specfold tune chose them, in place of these flags")
    group.add_argument("--method", choices=tuple(METHODS), help="how to decode (default specfold)")
    group.add_argument("--graph", metavar="FILE", help="draft graph for spiffy and specfold (default: the model folder's graph.json)")
    group.add_argument("--drafts", type=at_least_one, metavar="N", help="evaluate at most N drafts a check, the heaviest (default: all)")
    group.add_argument("--tau", type=float, metavar="X", help="specfold: fold positions whose relative residual is at most X (0.1)")
    group.add_argument("--guard", type=float, metavar="X", help="specfold: log-odds margin a folded decision needs (0.5; inf: lossless)")
    group.add_argument("--gates", type=int, choices=(1, 2), help="specfold: gates a layer (2)")
    group.add_argument("--batch", type=at_least_one, default=8, metavar="N", help="prompts decoded together (default 8)")


_DRAFTING = tuple(name for name, method in METHODS.items() if method.drafts)
_FOLDING = tuple(name for name, method in METHODS.items() if method.folds)
_OWNERS = {"graph": _DRAFTING, "drafts": _DRAFTING, "tau": _FOLDING, "guard": _FOLDING, "gates": _FOLDING}


def require_method(args: argparse.Namespace, methods: Sequence[str]) -> None:
    """Raises UsageError for a flag that none of the methods reads."""
    for name, owners in _OWNERS.items():
        if getattr(args, name) is not None and not set(owners) & set(methods):
            raise UsageError(f"--{name} belongs to --method {' or '.join(owners)}, not to {' or '.join(methods)}")


def require_one_source(args: argparse.Namespace) -> None:
    """Raises UsageError for prompts from a file and from the package."""
    if args.file and args.samples:
        raise UsageError("--file and --samples do not go together")


def require_samples(args: argparse.Namespace, most: int) -> None:
    """Raises UsageError for more samples than the package has."""
    if (args.samples or 0) > most:
        raise UsageError(f"--samples {args.samples} must be at most {most}, the held-out problems in this package")


# A profile was measured with these, so it decides them. Others, such as --max_new_tokens and --seed, may be given beside it.
_DECIDED = ("method", *_OWNERS, "threshold", "steps", "order", "temperature", "share")


def require_profile(args: argparse.Namespace) -> None:
    """Raises UsageError for a flag whose value the profile decides."""
    if given := [name for name in _DECIDED if getattr(args, name) is not None]:
        raise UsageError(f"--profile sets {given[0]}; leave --{given[0]} out, or --profile")
