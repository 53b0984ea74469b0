"""A table of measured times: milliseconds of one iteration of the decode loop, by setting.

An iteration is one forward pass of the batch, a check or a commit, and the drafting and accepting around it. A decode's prefill is spread
over its iterations. A saved table replaces the clock, so that a choice made from it can be repeated.
"""

import os
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from specfold_jax.files import read_json, write_json
from specfold_jax.values import Size, conform, of_record, show


@dataclass(frozen=True)
class TimingTable:
    """`milliseconds[key]`: one sample a timed batch. `model`, `batch`: what was timed; `device`: where."""

    model: str
    batch: Size
    device: str
    milliseconds: dict[str, list[float]]

    def __post_init__(self) -> None:
        conform(self)
        for key, samples in self.milliseconds.items():
            require_times(f"milliseconds[{key!r}]", samples)

    def record(self) -> dict[str, Any]:
        """The table as a JSON value."""
        return asdict(self)

    @classmethod
    def of(cls, record: Any) -> "TimingTable":
        """The table of `record`'s value. Raises ValueError naming the field."""
        return of_record(cls, "the timing table", record)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the table as JSON."""
        write_json(path, self.record())

    @classmethod
    def load(cls, path: str | os.PathLike, model: str, batch: int) -> "TimingTable":
        """Reads the table of a model and a batch size. Raises ValueError naming the file if it is none, or another's."""
        data = read_json(path, "a timing table, such as specfold tune writes,")
        try:
            found = cls.of(data)
            here = {"model": model, "batch": batch}
            if differ := [f"{k}={data[k]!r} (here {v!r})" for k, v in here.items() if data[k] != v]:
                raise ValueError(f"was measured with {', '.join(differ)}; leave --timing out, or name a table of this model and batch")
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        return found


def require_times(name: str, samples: list[float]) -> None:
    """Raises ValueError if there is no sample, or one that is not above 0."""
    if not samples or min(samples) <= 0:
        raise ValueError(f"{name}={show(samples)} must hold at least one number, all above 0")


def device_name() -> str:
    """The first device's kind; of a CPU also the number of its cores."""
    device = jax.devices()[0]
    return f"{device.device_kind} ({os.cpu_count()} cores)" if device.platform == "cpu" else device.device_kind


def median(samples: list[float]) -> float:
    """The median, because a few disturbed samples do not move it."""
    return float(np.median(samples))
