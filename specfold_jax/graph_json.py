"""JSON files of named arrays and values, strictly checked: how draft graphs are stored."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def save(path: str | os.PathLike, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> None:
    """Writes arrays (matrices one row a line; -infinity is null) and plain values; the file is whole or not there."""
    text: dict[str, str] = {}
    for name, array in arrays.items():
        # A float32's own digits, so that 0.9 is not written as 0.8999999762.
        rows = [float(str(v)) for v in array] if array.dtype.kind == "f" else array.astype(np.int32).tolist()
        rows = [json.dumps(None if row == -np.inf else row) for row in rows]
        text[name] = "[" + (",".join(f"\n    {row}" for row in rows) + "\n  " if array.ndim > 1 else ", ".join(rows)) + "]"
    text |= {name: json.dumps(value) for name, value in values.items()}
    body = ",\n".join(f'  "{name}": {content}' for name, content in text.items())
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(f"{{\n{body}\n}}\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: str | os.PathLike, what: str, arrays: Mapping[str, type], values: Sequence[str], unbounded: str) -> dict[str, Any]:
    """Reads a file with exactly these fields, arrays in these dtypes; null is -infinity in the array `unbounded`.

    Raises ValueError naming the file's fault and the field.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # covers text that is not UTF-8
        raise ValueError(f"must be {what} in JSON: {error}") from error
    same_names("the file", data, [*arrays, *values])
    return data | {name: _array(name, data[name], dtype, name == unbounded) for name, dtype in arrays.items()}


def same_names(where: str, data: Any, names: list[str]) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"{where} must be an object with the fields {names}, not a {type(data).__name__}")
    if missing := [name for name in names if name not in data]:
        raise ValueError(f"{where} lacks {missing}; the fields must be {names}")
    if unknown := [name for name in data if name not in names]:
        raise ValueError(f"{where} has unknown fields {unknown}; the fields must be {names}")


def _array(name: str, value: Any, dtype: type, unbounded: bool) -> np.ndarray:
    """A field of a file as an array; numbers that the dtype cannot hold are errors, not casts. An empty list may stand for any shape."""
    kinds, low, high = {"i": ("iu", -(2**31), 2**31 - 1), "b": ("biu", 0, 1), "f": ("iuf", -np.inf, 3.4e38)}[np.dtype(dtype).kind]
    if isinstance(value, list) and unbounded:
        value = [-np.inf if v is None else v for v in value]
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(f"{name} must be a list of equally long rows") from None
    if array.size and (array.dtype.kind not in kinds or array.min() < low or array.max() > high):
        raise ValueError(f"{name} must hold {np.dtype(dtype)} numbers, got {array.dtype} in {str(value)[:80]}")
    return array.astype(dtype)
