"""A table of measured times: milliseconds of one iteration of the decode loop, by setting.

One iteration is one forward pass of the whole batch, a check or a commit, with the drafting, folding and accepting around it; a decode's
prefill is spread over its iterations. A saved table takes the clock's place, so that choices made from it can be repeated.
"""

import os
from dataclasses import asdict, dataclass

import jax
import numpy as np

from specfold_jax import values
from specfold_jax.files import read_json, write_json
from specfold_jax.values import Size, conform, show


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

    def save(self, path: str | os.PathLike) -> None:
        """Writes the table as JSON; the file is whole or not there."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: str | os.PathLike, model: str, batch: int) -> "TimingTable":
        """Reads a table. Raises ValueError naming the file if it is none, or one of another model or batch."""
        data = read_json(path, "a timing table, such as specfold tune writes,")
        try:
            values.same_names("the timing table", data, list(cls.__dataclass_fields__))
            found = cls(**data)
            if differ := [f"{k}={data[k]!r} (here {v!r})" for k, v in (("model", model), ("batch", batch)) if data[k] != v]:
                raise ValueError(f"was measured with {', '.join(differ)}; leave --timing out, or name a table of this model and batch")
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        return found


def require_times(name: str, samples: list[float]) -> None:
    """Raises ValueError unless there is a sample, and all are above 0."""
    if not samples or min(samples) <= 0:
        raise ValueError(f"{name}={show(samples)} must hold at least one number, all above 0")


def device_name() -> str:
    """The first device, and the processor count where it is a CPU."""
    device = jax.devices()[0]
    return f"{device.device_kind} ({os.cpu_count()} cores)" if device.platform == "cpu" else device.device_kind


def median(samples: list[float]) -> float:
    """The median, which a few disturbed samples do not move."""
    return float(np.median(samples))
