"""How a program of this folder runs: its flags are its own until then, so that modules can be imported side by side."""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from absl import app, flags, logging


def start(main: Callable[[], int | None], own: flags.FlagValues) -> None:
    """Calls `main()` with the flags of `own` parsed from the command line; exit status 2 for a command line that is wrong.

    `--help` prints what the program's module says of itself, and its flags.
    """
    program = sys.modules["__main__"]
    name = program.__spec__.name if program.__spec__ else sys.argv[0]
    if {"-h", "-help", "--help"} & set(sys.argv[1:]):
        print(program.__doc__, own.get_help(include_special_flags=False), sep="\n")
        return

    def guarded(argv: Sequence[str]) -> int | None:
        try:
            if argv[1:]:
                raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
            return main()
        except app.UsageError as error:
            print(f"{name}: {error}\n--help lists the flags", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"{name}: interrupted; results written so far are whole, and the same command goes on from there", file=sys.stderr)
            return 130

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            left = flags.FLAGS(list(argv))
        except flags.Error as error:
            print(f"{name}: {error}\n--help lists the flags", file=sys.stderr)
            sys.exit(2)
        if flags.FLAGS["verbosity"].using_default_value:
            logging.set_verbosity(logging.WARNING)  # jax announces the backends it looked for at level info
        return left

    flags.FLAGS.append_flag_values(own)
    own.mark_as_parsed()
    app.run(guarded, flags_parser=parse)


def some_of(name: str, values: Sequence[str], known: Collection[str]) -> None:
    """Raises UsageError unless the flag's values are some of those known."""
    if unknown := [value for value in values if value not in known]:
        raise app.UsageError(f"--{name} has {', '.join(unknown)}, knows {', '.join(known)}")
    if not values:
        raise app.UsageError(f"--{name} is empty, knows {', '.join(known)}")


@contextmanager
def as_usage(what: str = "") -> Iterator[None]:
    """For what flags and files named by them say: ValueError and OSError inside become UsageError, behind `what`."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise app.UsageError(f"{what}{error}") from error


def refuse_without_hopper(what: str) -> None:
    """Raises UsageError where the Pallas kernels cannot run; `what` asks for them."""
    from kernels_pallas.launch import no_hopper  # asks JAX for devices; programs set the environment before that

    if reason := no_hopper():
        raise app.UsageError(f"{what}: {reason}")
