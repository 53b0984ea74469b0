"""The JSON of draft graphs: named arrays and plain values, strictly checked."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from specfold_jax.values import as_array, same_names


def numbers(array: np.ndarray) -> list[Any]:
    """An array as a JSON value: -infinity is null, truth values are 0 and 1."""
    if array.dtype.kind != "f":
        return array.astype(np.int32).tolist()
    # A float32's own digits, so that 0.9 is not written as 0.8999999762.
    return [None if value == -np.inf else float(str(value)) for value in array]


def text(record: Mapping[str, Any], matrices: Collection[str]) -> str:
    """A JSON object as text, a field a line, and the fields `matrices` one row a line."""
    found: dict[str, str] = {}
    for name, value in record.items():
        rows = "".join(f"\n    {json.dumps(row)}," for row in value).removesuffix(",") if name in matrices else ""
        found[name] = f"[{rows}\n  ]" if name in matrices else json.dumps(value)
    body = ",\n".join(f'  "{name}": {content}' for name, content in found.items())
    return f"{{\n{body}\n}}\n"


def fields_of(record: Any, where: str, arrays: Mapping[str, type], values: Sequence[str], unbounded: str) -> dict[str, Any]:
    """The fields of a JSON value that must hold exactly these, arrays in their dtypes. In the array `unbounded` null is -infinity.

    Raises ValueError naming the field.
    """
    same_names(where, record, [*arrays, *values])
    fields = dict(record)
    if isinstance(fields[unbounded], list):
        fields[unbounded] = [-np.inf if value is None else value for value in fields[unbounded]]
    return fields | {name: as_array(name, fields[name], dtype) for name, dtype in arrays.items()}
