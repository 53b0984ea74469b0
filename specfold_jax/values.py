"""Values from outside, checked against the annotation of the field they are meant for. Messages read `field=value must be rule`.

Also what they are in JSON: a class that goes into a file has `record()`, which returns a JSON value, and the class method `of(record)`,
which reads it back and raises ValueError naming the field. A class with a file of its own adds `save(path)` and `load(path)`.
"""

import dataclasses
import math
import re
import reprlib
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

# An annotation carries limits: the least and the largest value, both allowed. That of a list or tuple carries its least length.
Size = Annotated[int, 1, 2**31 - 1]
Natural = Annotated[int, 0, 2**31 - 1]
NotNegative = Annotated[float, 0, math.inf]

show = reprlib.repr  # a value in a message: at most some thirty characters
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # no tokenizer and no file takes one
_hints = cache(lambda kind: get_type_hints(kind, include_extras=True))


def conform(config: Any, skip: Collection[str] = ()) -> None:
    """Checks the fields of a frozen dataclass, except `skip`, and stores each in the type that its annotation names."""
    for name, hint in _hints(type(config)).items():
        if name not in skip:
            object.__setattr__(config, name, conforming(name, getattr(config, name), hint))


def conforming(name: str, value: Any, hint: Any) -> Any:
    """`value` in the type of an annotation; NumPy's scalars become Python's.

    Known are bool, str, classes, Any, Literal, int and float within limits, `tuple[T, ...]`, `list[T]`, `dict[str, T]` and `T | None`. A
    truth value is no number, text is neither, and numbers are finite unless a limit is infinite. Raises ValueError naming the field, the
    value and what it must be.
    """
    limits: Sequence[Any] = ()
    if get_origin(hint) is Annotated:
        hint, *limits = get_args(hint)
    kind, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if kind in (Union, UnionType):
        return None if value is None else conforming(name, value, parts[0])
    if isinstance(value, np.generic):  # a float32's own digits: 0.9, not 0.8999999762
        value = float(str(value)) if value.dtype.kind == "f" else value.item()
    base = kind or hint
    fits, rule = _judge(value, base, parts if base is Literal else limits)
    if not fits:
        raise ValueError(f"{name}={show(value)} must be {rule}")
    if base in (tuple, list):
        return base(conforming(f"{name}[{n}]", item, parts[0]) for n, item in enumerate(value))
    if base is dict:
        return {key: conforming(f"{name}[{key!r}]", item, parts[1]) for key, item in value.items()}
    return float(value) if base is float else value


def _judge(value: Any, base: Any, limits: Sequence[Any]) -> tuple[bool, str]:
    """Whether a value is of the type `base` and within its limits (one of its choices), and what it must be."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if base is Literal:
        return any(type(value) is type(choice) and value == choice for choice in limits), f"one of {limits}"
    if base is bool:
        return isinstance(value, bool), "true or false"
    if base is int:
        (low, high), whole = limits, number and isinstance(value, int)
        return whole and low <= value <= high, f"at most {high}" if whole and value > high else f"a whole number of at least {low}"
    if base is float:
        low, high = limits or (-sys.float_info.max, sys.float_info.max)
        within = f"a number of at least {low:g}" if high == math.inf else f"a number in [{low:g}, {high:g}]"
        return number and low <= value <= high, within if limits else "a finite number"
    if base is str:
        return isinstance(value, str) and not _LONE_SURROGATE.search(value), "Unicode text without lone surrogates"
    if base in (tuple, list):
        least = limits[0] if limits else 0
        return isinstance(value, (tuple, list)) and len(
            value
        ) >= least, f"a list of at least {least} value{'s' * (least > 1)}" if least else "a list"
    return isinstance(value, base), "an object of named values" if base is dict else f"a {base.__name__}"


def as_array(name: str, value: Any, dtype: type, flat: bool = False) -> np.ndarray:
    """`value` as an array; numbers that the dtype cannot hold are errors, not casts. An empty list may stand for any dtype."""
    kinds, low, high = {"i": ("iu", -(2**31), 2**31 - 1), "b": ("biu", 0, 1), "f": ("iuf", -np.inf, 3.4e38)}[np.dtype(dtype).kind]
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(f"{name} must be a list of equally long rows") from None
    if array.size and (array.dtype.kind not in kinds or array.min() < low or array.max() > high):
        raise ValueError(f"{name} must hold {np.dtype(dtype)} numbers, got {array.dtype} in {show(value)}")
    if flat and array.ndim != 1:
        raise ValueError(f"{name} must be a list of numbers, not of shape {array.shape}")
    return array.astype(dtype)


def same_names(where: str, data: Any, names: list[str]) -> None:
    """Raises ValueError unless `data` is an object with exactly these fields."""
    if not isinstance(data, dict):
        raise ValueError(f"{where} must be an object with the fields {names}, not a {type(data).__name__}")
    if missing := [name for name in names if name not in data]:
        raise ValueError(f"{where} lacks {missing}; the fields must be {names}")
    if unknown := [name for name in data if name not in names]:
        raise ValueError(f"{where} has unknown fields {unknown}; the fields must be {names}")


def to_json(value: Any) -> Any:
    """A value as JSON holds it: NumPy numbers and small arrays by their own digits, infinity as "inf", also inside lists and mappings."""
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    if hasattr(value, "dtype"):  # a float32's own digits: 0.9, not 0.8999999762
        value = value.tolist() if value.dtype.kind in "iu" or value.ndim else float(str(value))
    return "inf" if isinstance(value, float) and value == math.inf else value


def from_json(value: Any) -> Any:
    """`to_json`'s value with infinity as a number again."""
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return math.inf if value == "inf" else value


def of_record[T](cls: type[T], where: str, record: Any) -> T:
    """The dataclass of a JSON object with exactly its fields. `where` names the object in messages. Raises ValueError naming the field."""
    same_names(where, record, [field.name for field in dataclasses.fields(cls)])  # type: ignore[arg-type]  (cls is a dataclass)
    return cls(**from_json(record))
