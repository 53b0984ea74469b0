"""What a kernel fetches for those after it: weights on their way into the L2 cache, by programs that are gone once they have asked.

A kernel that waits for few bytes leaves memory idle, and the product after it waits for memory alone: what it is meant to save is not
measured yet. Results do not depend on any of it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.launch import THREAD, interpreting, launch
from kernels_pallas.tiles import MULTIPROCESSORS

TILE = 64, 256
"""Rows and columns that are asked for at a time; the copy engine takes at most 256 of either."""


@partial(jax.tree_util.register_dataclass, data_fields=["weights"], meta_fields=["budget", "start"])
@dataclass(frozen=True)
class Ahead:
    """What to fetch: of all weights in a row `budget` bytes from byte `start` on, or what there is of them.

    Weights must be the very arrays that later kernels are given. Layers share a kernel where budget and start are the same.
    """

    weights: tuple[Float[Array, "out in"], ...] = ()
    budget: int = 0
    start: int = 0


NOTHING = Ahead()


def launch_and_fetch(
    name: str,
    body: Callable[..., None],
    out: Any,
    grid: Mapping[str, int],
    *inputs: jax.Array,
    ahead: Ahead,
    warpgroups: int = 1,
    **options: Any,
) -> Any:
    """`launch`, with programs behind those of the grid that fetch: where the grid leaves multiprocessors idle, or at its end."""
    weights = ahead.weights
    if not weights or not ahead.budget or interpreting():  # the interpreter has no cache, and takes its time for every program
        return launch(name, body, out, grid, *inputs, warpgroups=warpgroups, **options)
    (slowest, own), *others = grid.items()
    each = math.prod(size for _, size in others)
    more = pl.cdiv(MULTIPROCESSORS, each)

    def both(*refs: Any) -> None:
        first = lax.axis_index(slowest)

        @pl.when(first < own)
        def _() -> None:
            body(*refs[len(weights) :])

        @pl.when(first >= own)
        def _() -> None:
            number = first - own
            for axis, size in [*others, (THREAD, warpgroups)] if warpgroups > 1 else others:
                number = number * size + lax.axis_index(axis)
            fetch(refs[: len(weights)], ahead.start, ahead.start + ahead.budget, number, more * each * warpgroups)

    return launch(name, both, out, {**grid, slowest: own + more}, *weights, *inputs, warpgroups=warpgroups, **options)


def fetch(weights: Sequence[Any], start: int, end: int, number: Int[Array, ""], shares: int) -> None:
    """Asks for one of so many shares of the bytes from `start` to `end`, all weights in a row; inside a kernel.

    Of a weight, all rows of the first columns come first: the programs of its product then find alike much of it.
    """
    for weight in weights:
        tile = [min(size, most) for size, most in zip(weight.shape, TILE, strict=True)]
        down, across = (pl.cdiv(size, part) for size, part in zip(weight.shape, tile, strict=True))
        tile_bytes = math.prod(tile) * weight.dtype.itemsize
        first, last = (min(max(at, 0) // tile_bytes, down * across) for at in (start, end))
        start, end = (at - down * across * tile_bytes for at in (start, end))

        def ask(turn: Array, _: None, weight: Any, tile: Sequence[int], down: int, first: int) -> None:
            n = first + turn * shares + number
            corner = lax.rem(n, down), lax.div(n, down)
            plgpu.async_prefetch(weight.at[*(pl.ds(at * size, size) for at, size in zip(corner, tile, strict=True))])

        turns = lax.div(last - first - number + (shares - 1), shares)
        lax.fori_loop(0, turns, partial(ask, weight=weight, tile=tile, down=down, first=first), None)
