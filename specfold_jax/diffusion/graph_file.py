"""The JSON of draft graphs: named arrays and plain values, strictly checked."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specfold_jax.values import as_array, same_names


def text(arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> str:
    """Arrays (matrices one row a line; -infinity is null) and plain values as JSON."""
    found: dict[str, str] = {}
    for name, array in arrays.items():
        # A float32's own digits, so that 0.9 is not written as 0.8999999762.
        rows = [float(str(v)) for v in array] if array.dtype.kind == "f" else array.astype(np.int32).tolist()
        rows = [json.dumps(None if row == -np.inf else row) for row in rows]
        found[name] = "[" + (",".join(f"\n    {row}" for row in rows) + "\n  " if array.ndim > 1 else ", ".join(rows)) + "]"
    found |= {name: json.dumps(value) for name, value in values.items()}
    body = ",\n".join(f'  "{name}": {content}' for name, content in found.items())
    return f"{{\n{body}\n}}\n"


def parse(data: Any, where: str, arrays: Mapping[str, type], values: Sequence[str], unbounded: str) -> dict[str, Any]:
    """The fields of a JSON value with exactly these, arrays in these dtypes; null is -infinity in the array `unbounded`.

    Raises ValueError naming the field.
    """
    same_names(where, data, [*arrays, *values])
    fields = dict(data)
    if isinstance(fields[unbounded], list):
        fields[unbounded] = [-np.inf if value is None else value for value in fields[unbounded]]
    return fields | {name: as_array(name, fields[name], dtype) for name, dtype in arrays.items()}
