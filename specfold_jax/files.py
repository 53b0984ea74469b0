"""Files that are complete or not there."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a path to write to. It takes the name `path` when the block ends without an error, and is deleted otherwise."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes text in UTF-8."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike, record: Any) -> None:
    """Writes a value as JSON, indented."""
    write_text(path, json.dumps(record, indent=1) + "\n")


def read_json(path: str | os.PathLike, what: str) -> Any:
    """Reads JSON. Raises OSError if the file cannot be read, and ValueError naming it if it is not JSON. `what`: what it must be."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise ValueError(f"{path}: must be {what} in JSON: {error}") from error
