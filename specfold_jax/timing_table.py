"""A table of measured times: milliseconds of one iteration of the decode loop, by setting.

One iteration is one forward pass of the whole batch, a check or a commit, with the drafting, folding and accepting around it; a decode's
prefill is spread over its iterations. A saved table takes the clock's place, so that choices made from it can be repeated.
"""

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specfold_jax import graph_json


@dataclass(frozen=True)
class TimingTable:
    """`milliseconds[key]`: one sample a timed batch. `model`, `batch`: what was timed; `device`: where."""

    model: str
    batch: int
    device: str
    milliseconds: dict[str, list[float]]

    def save(self, path: str | os.PathLike) -> None:
        """Writes the table as JSON; the file is whole or not there."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: str | os.PathLike, model: str, batch: int) -> "TimingTable":
        """Reads a table. Raises ValueError naming the file if it is none, or one of another model or batch."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            graph_json.same_names("the timing table", data, list(cls.__dataclass_fields__))
            if differ := [f"{k}={data[k]!r} (here {v!r})" for k, v in (("model", model), ("batch", batch)) if data[k] != v]:
                raise ValueError(f"was measured with {', '.join(differ)}")
            for key, samples in data["milliseconds"].items():
                if not samples or not all(isinstance(t, (int, float)) and 0 < t < math.inf for t in samples):
                    raise ValueError(f"{key!r} must have samples above 0, not {samples!r}")
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path}: {error}") from error
        return cls(**data)


def device_name() -> str:
    """The first device, and the processor count where it is a CPU."""
    device = jax.devices()[0]
    return f"{device.device_kind} ({os.cpu_count()} cores)" if device.platform == "cpu" else device.device_kind


def median(samples: list[float]) -> float:
    """The median, which a few disturbed samples do not move."""
    return float(np.median(samples))


def write_json(path: str | os.PathLike, record: Any) -> None:
    """Writes JSON; the file is whole or not there."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
