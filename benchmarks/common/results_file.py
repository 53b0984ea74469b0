"""A file of results: whole at every moment, and taken up again only by what measured it."""

import fcntl
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import app

from benchmarks.common.environment import today
from specfold_jax.files import read_json, write_json

Result = dict[str, Any]


def read(path: Path, benchmark: str | None = None) -> dict[str, Any]:
    """The record in a file, of the benchmark if one is named. Raises ValueError if it is none, OSError if it cannot be read."""
    what = f"results of {benchmark or 'a benchmark'}"
    record, kinds = read_json(path, what), {"benchmark": str, "environment": dict, "date": str, "results": list}
    if not isinstance(record, dict) or not all(isinstance(record.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(f"{path}: must be {what}: an object with {', '.join(kinds)}")
    if record["benchmark"] != (benchmark or record["benchmark"]):
        raise ValueError(f"{path}: must be {what}, is of {record['benchmark']}")
    if not all(isinstance(result, dict) for result in record["results"]):
        raise ValueError(f"{path}: must be {what}: every result an object")
    return record


def commits(record: Mapping[str, Any]) -> str:
    """The commits whose code measured a record's results."""
    return " and ".join([record["environment"]["commit"], *record.get("later_commits", [])])


@dataclass(frozen=True)
class ResultsFile:
    """Results beside what they were measured with: `header` has "benchmark", "environment", and whatever else decides on figures."""

    path: Path
    header: Mapping[str, Any]

    @classmethod
    def named(cls, out: str | os.PathLike, benchmark: str, environment: Mapping[str, Any], **more: Any) -> "ResultsFile":
        """The file that --out names. Raises UsageError if it cannot be written, before anything is measured."""
        path = Path(out)
        if path.is_dir():
            raise app.UsageError(f"--out={path} is a folder, must be a file")
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise app.UsageError(f"--out={path}: {path.parent} must be a folder that can be written to")
        file = cls(path, {"benchmark": benchmark, "environment": environment} | more)
        try:
            file.record()
        except ValueError as error:
            raise app.UsageError(f"--out={error}; move it away to start anew") from error
        return file

    def record(self) -> dict[str, Any]:
        """The header and the date of the first result, and the results so far. Raises ValueError if something else measured them.

        Another commit is not something else if the measured packages' code is the same; `later_commits` names those that added results.
        """
        if not self.path.exists():
            return {**self.header, "date": today(), "results": []}
        before = read(self.path, self.header["benchmark"])
        if differ := list(_differences(before, _but_commit(self.header, before))):
            raise ValueError(f"{self.path} was measured with {', '.join(differ)}")
        return before

    @property
    def results(self) -> list[Result]:
        """The results so far."""
        return self.record()["results"]

    def change(self, function: Callable[[list[Result]], Sequence[Result]], **more: Any) -> list[Result]:
        """Writes what the function makes of the results so far, and `more` beside them; returns the results."""
        record = self.record() | more
        record["results"] = list(function(record["results"]))
        commits = record.get("later_commits", [])
        if (mine := self.header["environment"].get("commit")) not in (record["environment"].get("commit"), *commits):
            record["later_commits"] = [*commits, mine]
        write_json(self.path, record)
        return record["results"]

    def add(self, *results: Result) -> list[Result]:
        """Writes results behind those so far; returns all."""
        return self.change(lambda before: [*before, *results])

    def preparing(self) -> AbstractContextManager[None]:
        """No other program that writes to the same folder measures meanwhile: to load and to compile uses the GPU too."""
        return self._holding(fcntl.LOCK_SH)

    def alone(self) -> AbstractContextManager[None]:
        """No other program that writes to the same folder measures or prepares meanwhile."""
        return self._holding(fcntl.LOCK_EX)

    @contextmanager
    def _holding(self, how: int) -> Iterator[None]:
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            try:
                fcntl.flock(folder, how | fcntl.LOCK_NB)  # closing the folder gives it up
            except BlockingIOError:
                print(f"waiting for other programs that write to {self.path.parent}", file=sys.stderr, flush=True)
                fcntl.flock(folder, how)
            yield
        finally:
            os.close(folder)


def _but_commit(now: Mapping[str, Any], then: Mapping[str, Any]) -> Mapping[str, Any]:
    """The header without its commit, where the code that is measured is the same: to commit results is a commit too."""
    environment, code = now["environment"], then["environment"].get("code")
    if code is None or code != environment.get("code"):
        return now
    return {**now, "environment": {name: value for name, value in environment.items() if name != "commit"}}


def _differences(then: Mapping[str, Any], now: Mapping[str, Any], inside: str = "") -> Iterator[str]:
    """What was otherwise, named with the objects it is in."""
    for name, value in now.items():
        old = then.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            yield from _differences(old, value, f"{inside}{name}.")
        elif old != value:
            yield f"{inside}{name}={old!r} (here {value!r})"
