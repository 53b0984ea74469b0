"""Tile sizes. How an axis is split follows from the weight's shape alone, never from the number of rows: a row's sums keep one order."""

from math import gcd
from typing import NamedTuple

ROWS = 64
"""Rows of one warpgroup's matrix instruction."""
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

    `warpgroups` take turns at the blocks or, with `apart`, one multiplies with the gate's columns and one with up's. Results leave in
    `chunk`s of columns. The programs of a `cluster`, neighbours along the columns, load their rows of x together.
    """

    blocks: int
    warpgroups: int
    columns: int
    chunk: int
    stages: int
    splits: int = 1
    cluster: int = 1
    apart: bool = False

    @property
    def slots(self) -> int:
        """Chunks of a warpgroup's results under way: two, so that one is written as the other leaves, or one that is all columns."""
        return 1 if self.chunk == self.columns else 2

    def stage_rows(self, parts: int) -> int:
        """Rows of x and of the weight's `parts` in all stages; where fewer blocks are computed they make more stages."""
        return self.stages * (self.blocks * ROWS + parts * self.columns)

    def shared_bytes(self, parts: int, itemsize: int) -> int:
        """Of the stages, and of results of so many bytes each."""
        return self.stage_rows(parts) * DEPTH * 2 + self.warpgroups * self.slots * ROWS * self.chunk * itemsize


def product_tile(columns: int, depth: int, rows: int) -> Tile:
    """For x [rows, depth] @ weight [columns, depth].T: as many programs as multiprocessors, as nearly as the splits allow.

    Up to 320 rows a program has all of them, and reads its weight once; above, tiles of 256 rows at most by 128 columns.
    """
    blocks = -(-rows // ROWS)
    width = _storable(min(columns, 64), columns, 4)
    tiles, steps = -(-columns // width), depth // DEPTH
    splits = max((n for n in range(1, min(steps, 8) + 1) if steps % n == 0 and n * tiles <= MULTIPROCESSORS), default=1)
    if blocks > 5:
        blocks, width = _evenly(blocks, 4), _storable(min(columns, 128), columns, 4)
    chunk = 32 if blocks > 1 and width % 32 == 0 else width
    return _fitted(Tile(blocks, min(blocks, 2), width, chunk, 8, splits, 1 if blocks == 1 else 2), 1, 4)


def pair_tile(hidden: int, rows: int) -> Tile:
    """For the gated pair, each of whose programs multiplies with two tiles of the weight: whole waves of programs where it can be.

    Registers hold 256 rows x 2 x 96 columns of sums, or 320 x 2 x 72 with gate and up apart.
    """
    blocks = -(-rows // ROWS)
    waves = -(-hidden // (MULTIPROCESSORS * 72))
    width = min(-(-hidden // (MULTIPROCESSORS * waves * 8)) * 8, 72)
    if blocks > 5:
        blocks, width = _evenly(blocks, 4), min(88, -(-hidden // 8) * 8)
    width = _storable(width, hidden, 2)
    return _fitted(Tile(blocks, min(blocks, 2), width, width, 8, 1, 1 if blocks == 1 else 2, blocks == 5), 2, 2)


def _evenly(blocks: int, most: int) -> int:
    """Blocks of a tile of `most` at most, so that all have about as many."""
    return -(-blocks // -(-blocks // most))


def _storable(width: int, columns: int, itemsize: int) -> int:
    """The widest tile, `width` at most, whose rows' swizzle, the largest power of two up to 128 bytes, divides the rows of the result."""
    return next(n for n in range(width, 0, -8) if columns % (gcd(n * itemsize, 128) // itemsize) == 0)


def _fitted(tile: Tile, parts: int, itemsize: int) -> Tile:
    """With as many stages, the tile's at most, as shared memory holds beside the results."""
    return next(
        fitted
        for stages in range(MOST_STAGES, 0, -1)
        if (fitted := tile._replace(stages=stages)).shared_bytes(parts, itemsize) <= SHARED_BYTES - BARRIER_BYTES
    )
