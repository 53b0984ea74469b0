"""Tile sizes. How an axis is split follows from the weight's shape alone, never from the number of rows: a row's sums keep one order."""

from typing import NamedTuple

ROWS = 64
"""Rows of one warpgroup's matrix instruction."""
DEPTH = 64
"""Summed entries a pipeline stage holds: one 128-byte swizzle of 16-bit numbers."""
MULTIPROCESSORS = 132
"""Of an H100 and an H200."""
SHARED_BYTES = 227 * 1024
BARRIER_BYTES = 4096
"""Kept free for barriers and alignment."""


class Tile(NamedTuple):
    """One program's share of a product: `warpgroups` x 64 rows by `columns`, `stages` loads in flight, one of `splits` of the sum."""

    warpgroups: int
    columns: int
    stages: int
    splits: int = 1


def product_tile(columns: int, depth: int, rows: int) -> Tile:
    """For x [rows, depth] @ weight [columns, depth].T: as many programs as multiprocessors, as nearly as the splits allow."""
    width = 64 if columns >= 64 else -(-columns // 8) * 8
    tiles, steps = -(-columns // width), depth // DEPTH
    splits = [n for n in range(1, min(steps, 8) + 1) if steps % n == 0 and n * tiles <= MULTIPROCESSORS]
    return _fitted(rows, width, max(splits, default=1), products=1)


def pair_tile(hidden: int, rows: int) -> Tile:
    """For the gated pair, each of whose programs multiplies with two tiles of the weight: one wave of programs where it can be."""
    width = min(max(-(-hidden // MULTIPROCESSORS // 8) * 8, 8), 128)
    return _fitted(rows, width, splits=1, products=2)


def _fitted(rows: int, columns: int, splits: int, products: int) -> Tile:
    """As many stages, eight at most, as shared memory holds beside the results."""
    warpgroups = 1 if rows <= ROWS else 2
    results = warpgroups * ROWS * columns * 4
    stage = (warpgroups * ROWS + products * columns) * DEPTH * 2
    return Tile(warpgroups, columns, min(8, (SHARED_BYTES - BARRIER_BYTES - results) // stage), splits)
