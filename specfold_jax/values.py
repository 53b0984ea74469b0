"""Values from outside, checked against the annotation of the field they are meant for. Messages read `field=value must be rule`."""

import re
import reprlib
import sys
from collections.abc import Collection, Sequence
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

# An annotation carries limits: the least and the largest value, both allowed.
Size = Annotated[int, 1, 2**31 - 1]
Natural = Annotated[int, 0, 2**31 - 1]

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
    truth value is no number, text is neither, and numbers are finite. Raises ValueError naming the field, the value and what it must be.
    """
    kind, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if kind in (Union, UnionType):
        return None if value is None else conforming(name, value, parts[0])
    if isinstance(value, np.generic):  # a float32's own digits: 0.9, not 0.8999999762
        return conforming(name, float(str(value)) if value.dtype.kind == "f" else value.item(), hint)
    base, *limits = parts if kind is Annotated else (kind or hint,)
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
        return number and low <= value <= high, f"a number in [{low:g}, {high:g}]" if limits else "a finite number"
    if base is str:
        return isinstance(value, str) and not _LONE_SURROGATE.search(value), "Unicode text without lone surrogates"
    if base in (tuple, list):
        return isinstance(value, (tuple, list)), "a list"
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
