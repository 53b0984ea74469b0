"""Tile sizes. They follow from widths and dtype alone, never from the number of rows: a row's sums keep one order in every call."""

from typing import Any, NamedTuple

import torch
import triton


class Tile(NamedTuple):
    """One program's share of a product: `rows` x `columns` of the output, `depth` of the summed axis at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def product_tile(columns: int, dtype: torch.dtype) -> Tile:
    """For a product with that many output columns. Narrow outputs get narrow tiles, so that enough programs share the weight's bytes."""
    if dtype == torch.float32:
        return Tile(rows=32, columns=64, depth=32, warps=4, stages=3)
    if columns < 8192:
        return Tile(rows=64, columns=32, depth=128, warps=4, stages=4)
    return Tile(rows=64, columns=128, depth=64, warps=4, stages=4)


def constants(**named: Any) -> dict[str, Any]:
    """What a launch fixes: a kernel's `tl.constexpr` arguments, given as plain numbers, and Triton's options, which no signature names."""
    return named


def padded(size: int, least: int = 16) -> int:
    """The power of two that holds `size`; at least what the matrix units need."""
    return max(triton.next_power_of_2(size), least)
