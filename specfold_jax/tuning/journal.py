"""The results of a tune run on disk. An interrupted run continues from them. Another run in the same folder is refused."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specfold_jax.files import read_json, write_json, write_text
from specfold_jax.values import same_names

PLAN, RESULTS, LOCK = "tune.json", "results.jsonl", ".lock"


class Journal:
    """The folder of a run. `tune.json` holds its plan. `results.jsonl` takes a line for each measurement as it is made."""

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        """Begins a run in the folder, or continues one of the same plan. Raises ValueError naming what differs, or a damaged file."""
        self.path = folder / RESULTS
        plan = json.loads(json.dumps(plan))
        if not (folder / PLAN).is_file():
            write_json(folder / PLAN, plan)
        elif differ := _differences(_plan(folder / PLAN), plan):
            raise ValueError(f"{folder} holds a run with {', '.join(differ)}; use another folder, or the same settings to continue it")
        found = self.path.read_bytes() if self.path.is_file() else b""
        lines = found[: found.rfind(b"\n") + 1]
        self.entries: dict[str, Any] = dict(_entry(self.path, *numbered) for numbered in enumerate(lines.splitlines(), start=1))
        if lines != found:  # an interruption cut the last one short
            write_text(self.path, lines.decode())

    def once[T](self, key: str, make: Callable[[], Any], read: Callable[[Any], T]) -> T:
        """`read` of the value of `key`. If there is none yet, `make` makes it, and it is written down."""
        if key not in self.entries:
            value = json.loads(json.dumps(make()))
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "value": value}) + "\n")
            self.entries[key] = value
        try:
            return read(self.entries[key])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            why = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{self.path}: the value of {key!r} is damaged: {why}; delete its line, and it is measured again") from error


@contextmanager
def open_journal(folder: Path, plan: dict[str, Any]) -> Iterator[Journal]:
    """The journal of a run. No other run can use the folder until the block ends.

    Raises ValueError for a folder that is in use or holds anything else, and as `Journal` does.
    """
    if folder.exists() and not (folder / PLAN).is_file() and not _is_fresh(folder):
        raise ValueError(f"{folder} exists already and holds no tune run; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)  # the process holds it, not the file: a file that is left over locks nothing
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(f"{folder} is in use by another tune run; wait for its end, or name another folder") from None
    try:
        yield Journal(folder, plan)
    finally:
        lock.release()


def _is_fresh(folder: Path) -> bool:
    """Whether a folder is empty, but for leftovers of a run that ended before it had a plan."""
    return folder.is_dir() and all(entry.name == LOCK or entry.match(f".{PLAN}.*.partial") for entry in folder.iterdir())


def _plan(path: Path) -> dict[str, Any]:
    try:
        plan = read_json(path, "the plan of a tune run")
        if not isinstance(plan, dict):
            raise ValueError(f"{path}: must be the plan of a tune run, an object, not {plan!r}")
    except ValueError as error:
        raise ValueError(f"{error}; name another folder, or delete this one to start anew") from error
    return plan


def _entry(path: Path, number: int, line: bytes) -> tuple[str, Any]:
    """Key and value of a line."""
    try:
        entry = json.loads(line)
        same_names("the line", entry, ["key", "value"])
        if not isinstance(entry["key"], str):
            raise ValueError(f"key={entry['key']!r} must be text")
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: {error}; delete the line, and what it held is measured again") from error
    return entry["key"], entry["value"]


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The entries in which two plans differ."""
    found = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differences(old, new)
        elif old != new:
            found.append(f"{name}={old!r} (now {new!r})")
    return found
