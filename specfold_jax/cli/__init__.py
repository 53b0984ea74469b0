"""The command line `specfold`. It imports a command's module when it knows the command, and jax when the command runs."""

import argparse
import importlib
import os
import sys
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from absl import app, logging
from absl.flags import FLAGS, argparse_flags

from specfold_jax.cli.flags import UsageError

COMMANDS = {
    "generate": "answer prompts with vanilla, Spiffy or SpecFold decoding; compare the three; watch one live",
    "verify": "check a method's tokens against vanilla decoding on many prompts",
    "calibrate": "choose a draft graph for a model from a few vanilla runs",
    "tune": "measure settings on this device and choose the fastest that follow vanilla decoding",
    "inspect": "describe a checkpoint folder or a draft graph file",
    "train": "train the tiny block-diffusion model from scratch",
}
_EXAMPLES = """examples:
  specfold generate --compare          three decoders side by side on a sample question
  specfold generate --live "..."       watch the canvas fill up
  specfold verify --samples 100        how often do the tokens equal vanilla's?
  specfold COMMAND --help              all flags of a command, with an example
  specfold --version                   which version this is

exit status:
  0  fine
  1  failed: a file, a prompt, or a value that this model does not take; verify: differences found
  2  wrong usage: an unknown flag, a value out of range, flags that exclude each other
"""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Wraps descriptions paragraph by paragraph, and leaves examples as they are."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, **{"max_help_position": 36} | kwargs)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return super()._fill_text(text, width, indent)
        return "\n\n".join(textwrap.fill(part, width) for part in text.split("\n\n"))


class _Parser(argparse_flags.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from specfold_jax import __version__

        print(f"specfold {__version__}")
        parser.exit()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    about = "Block-diffusion language models in JAX, decoded plainly or with lossless and folded speculation."
    parser = _Parser(
        prog="specfold", usage="specfold COMMAND ...", description=about, epilog=_EXAMPLES, formatter_class=_Formatter, allow_abbrev=False
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND ...", title="commands", prog="specfold")
    named = next((word for word in argv[1:] if word in COMMANDS), None)
    for name, text in COMMANDS.items():
        module: Any = importlib.import_module(f"specfold_jax.cli.{name}") if name == named else None
        sub: Any = commands.add_parser(
            name,
            help=text,
            usage=module and f"specfold {name} {module.USAGE}",
            description=module and module.__doc__,
            epilog=module and module.EXAMPLES,
            formatter_class=_Formatter,
            add_help=False,
            allow_abbrev=False,
            inherited_absl_flags=None,
        )
        sub.add_argument("-h", "--help", action="help", help="show this help and exit")
        if module:
            module.add_flags(sub)
            sub.set_defaults(run=module.run)
    args, strays = parser.parse_known_args(argv[1:])
    if strays:
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(strays)}")
    if FLAGS["verbosity"].using_default_value:
        logging.set_verbosity(logging.WARNING)  # jax announces the backends it looked for at level info
    return args


def _run(args: argparse.Namespace) -> int:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns that torch is missing, and nothing here needs torch
    name = f"specfold {args.command}"
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: print(f"{name}: {message}", file=sys.stderr)  # without the line of code
            return args.run(args) or 0
    except UsageError as error:
        print(f"{name}: {error} (see {name} --help)", file=sys.stderr)
        return 2
    except (ValueError, OSError, ImportError, NotImplementedError, MemoryError) as error:
        logging.debug("where it came from", exc_info=True)  # specfold --verbosity=1 COMMAND ... shows it
        if isinstance(error, BrokenPipeError):  # the reader of standard output has closed it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        print(f"{name}: {_words(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


def _words(error: BaseException) -> str:
    """An error on one line."""
    if isinstance(error, OSError) and error.filename and error.strerror:  # without the number in front
        return f"{error.filename}: {error.strerror.lower()}"
    return " ".join(str(error).split())


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Parses the command line, runs the command and exits: 0 fine, 1 failed, 2 wrong usage (the command line alone)."""
    app.run(_run, argv=list(sys.argv if argv is None else argv), flags_parser=_parse)
    raise AssertionError("app.run exits")
