"""How a program of this folder runs: its flags are its own until then, so that modules can be imported side by side."""

from collections.abc import Callable, Sequence

from absl import app, flags


def start(main: Callable[[], int | None], own: flags.FlagValues) -> None:
    """Calls `main()` with the flags of `own` parsed from the command line; words that are no flags are refused."""

    def checked(argv: Sequence[str]) -> int | None:
        if argv[1:]:
            raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
        return main()

    flags.FLAGS.append_flag_values(own)
    own.mark_as_parsed()
    app.run(checked)
