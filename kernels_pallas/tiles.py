"""Tile sizes. How an axis is split follows from the weight's shape alone, never from the number of rows: a row's sums keep one order."""

from math import gcd
from typing import NamedTuple

LANES = 128
"""Threads of a warpgroup; a row is a whole number of them."""
ROWS = 64
"""Rows of one warpgroup's matrix instruction."""
LOADED = 32
"""A stage holds a multiple of so many rows of x, no more than are there: half a block takes half the room."""
DEPTH = 64
"""Summed entries a pipeline stage holds: one 128-byte swizzle of 16-bit numbers."""
MULTIPROCESSORS = 132
"""Of an H100 and an H200."""
SHARED_BYTES = 227 * 1024
MOST_STAGES = 8
"""Loads in flight at most."""
BARRIER_BYTES = 2048
"""Kept free for barriers and alignment."""


class Tile(NamedTuple):
    """One program's share of a product: `blocks` x 64 rows by `columns`, room for `stages` loads in flight, one of `splits` of the sum.

    `warpgroups` take turns at the blocks. Of a pair, two of them share the last one of an odd number of blocks: one multiplies with the
    gate's columns, one with up's. The programs of a `cluster`, neighbours along the columns, load their rows of x together.
    """

    blocks: int
    warpgroups: int
    columns: int
    stages: int
    splits: int = 1
    cluster: int = 1

    def held(self, rows: int) -> int:
        """Rows of x in a stage, of a call with so many."""
        return -(-min(self.blocks * ROWS, rows) // LOADED) * LOADED

    def loads(self, rows: int) -> list[int]:
        """Numbers of rows of x that a stage is loaded with, by one copy: the least of them that holds what is computed."""
        held = self.held(rows)
        return [size for size in (LOADED, ROWS, ROWS + LOADED, *range(2 * ROWS, held, ROWS)) if size < held] + [held]

    def stage_rows(self, rows: int, parts: int) -> int:
        """Rows of x and of the weight's `parts` in all stages; where fewer are computed they make more stages."""
        return self.stages * (self.held(rows) + weight_rows(self.columns, parts))

    def shared_bytes(self, rows: int, parts: int, itemsize: int) -> int:
        """Of the stages or, in their place when all is summed up, of the sums, in so many bytes each."""
        return max(self.stage_rows(rows, parts) * DEPTH * 2, self.blocks * ROWS * parts * self.columns * itemsize)

    def shares_last(self, parts: int) -> bool:
        """Whether two warpgroups share the last block of a pair."""
        return parts == 2 and self.warpgroups == 2 and self.blocks % 2 == 1


def weight_rows(columns: int, parts: int) -> int:
    """Rows behind those of x in a stage: a block's matrix instruction reads on into them where half a block of x is there."""
    return max(parts * columns, ROWS - LOADED)


def product_tile(columns: int, depth: int, rows: int) -> Tile:
    """For x [rows, depth] @ weight [columns, depth].T: as many programs as multiprocessors, as nearly as the splits allow.

    Up to 320 rows a program has all of them, and reads its weight once, in one warpgroup, which is a little faster than two that share
    them; above, tiles of 256 rows at most by 128 columns.
    """
    blocks = -(-rows // ROWS)
    warpgroups = 1 if blocks <= 5 else 2
    width = _storable(min(columns, 64), columns, 4)
    tiles, steps = -(-columns // width), depth // DEPTH
    splits = max((n for n in range(1, min(steps, 8) + 1) if steps % n == 0 and n * tiles <= MULTIPROCESSORS), default=1)
    if blocks > 5:
        blocks, width = _evenly(blocks, 4), _storable(min(columns, 128), columns, 4)
    return _fitted(Tile(blocks, warpgroups, width, MOST_STAGES, splits, 1 if blocks == 1 else 2), rows, 1, 4)


def pair_tile(hidden: int, rows: int) -> Tile:
    """For the gated pair, each of whose programs multiplies with two tiles of the weight: whole waves of programs where it can be.

    A thread's registers hold sums of 2.5 blocks of 2 x 72 columns, or of 2 blocks of 2 x 88.
    """
    blocks = -(-rows // ROWS)
    waves = -(-hidden // (MULTIPROCESSORS * 72))
    width = min(-(-hidden // (MULTIPROCESSORS * waves * 8)) * 8, 72)
    if blocks > 5:
        blocks, width = _evenly(blocks, 4), min(88, -(-hidden // 8) * 8)
    width = _storable(width, hidden, 2)
    return _fitted(Tile(blocks, min(blocks, 2), width, MOST_STAGES, 1, 1 if blocks == 1 else 2), rows, 2, 2)


def _evenly(blocks: int, most: int) -> int:
    """Blocks of a tile of `most` at most, so that all have about as many."""
    return -(-blocks // -(-blocks // most))


def _storable(width: int, columns: int, itemsize: int) -> int:
    """The widest tile, `width` at most, whose rows' swizzle, the largest power of two up to 128 bytes, divides the rows of the result."""
    return next(n for n in range(width, 0, -8) if columns % (gcd(n * itemsize, 128) // itemsize) == 0)


def _fitted(tile: Tile, rows: int, parts: int, itemsize: int) -> Tile:
    """With as many stages, the tile's at most, as shared memory holds."""
    return next(
        fitted
        for stages in range(MOST_STAGES, 0, -1)
        if (fitted := tile._replace(stages=stages)).shared_bytes(rows, parts, itemsize) <= SHARED_BYTES - BARRIER_BYTES
    )
