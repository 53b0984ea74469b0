"""Language-model head fused with what the reveal rule and the draft graph need of its logits: best tokens, log-odds, gap.

The first kernel turns every share of a tile of logits into its best candidates and a sum over the rest; the second merges them. Sums
never hold the best entry and are never subtracted from, so that log-odds do not saturate. At temperatures above 0 the noise is drawn in
the kernel; a greedy decode's kernel has no code for that.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.arguments import pad, require, require_main
from kernels_pallas.launch import launch
from kernels_pallas.layouts import SWIZZLED
from kernels_pallas.noise import draw
from kernels_pallas.partition import Partition
from kernels_pallas.tiles import LANES, ROWS

_INFINITY = float("inf")


class HeadTile(NamedTuple):
    """Of the product: `columns` tokens by `depth` elements of dim in each of `stages` buffers; the best are sought `share` columns at once.

    The default takes 96 KiB of shared memory and nearly all registers that half a multiprocessor has: two programs to a multiprocessor,
    one of which loads and multiplies while the other seeks. Sought all at once, 192 columns would take more registers than there are.
    """

    columns: int = 192
    depth: int = 64
    stages: int = 3
    share: int = 96


TILE = HeadTile()


def rank_wanted(
    hidden: Float[Array, "rows dim"],
    weight: Float[Array, "vocab dim"],
    seed: Int[Array, " rows"],
    position: Int[Array, " rows"],
    step: Int[Array, " rows"],
    wanted: Bool[Array, " rows"],
    temperature: Float[Array, ""] | None,
    mask_id: int,
    ranks: int,
) -> tuple[Int[Array, "rows ranks"], Float[Array, " rows"], Float[Array, " rows"]]:
    """`head` of the wanted rows; what is not wanted is unspecified, and costs nothing beyond the tile it shares."""
    if hidden.shape[0] <= ROWS:  # one tile either way
        return head(hidden, weight, seed, position, step, temperature, mask_id, ranks)
    partition = Partition.of(wanted)
    hidden, seed, position, step = (partition.apply(x) for x in (hidden, seed, position, step))
    found = head(hidden, weight, seed, position, step, temperature, mask_id, ranks, partition.count)
    tokens, odds, gap = (partition.invert(x) for x in found)
    return tokens, odds, gap


@partial(jax.jit, static_argnames=("mask_id", "ranks", "tile"))
def head(
    hidden: Float[Array, "rows dim"],
    weight: Float[Array, "vocab dim"],
    seed: Int[Array, " rows"],
    position: Int[Array, " rows"],
    step: Int[Array, " rows"],
    temperature: Float[Array, ""] | None,
    mask_id: int,
    ranks: int,
    count: Int[Array, "1"] | None = None,
    tile: HeadTile = TILE,
) -> tuple[Int[Array, "rows ranks"], Float[Array, " rows"], Float[Array, " rows"]]:
    """`tokens` int32 [rows, ranks] best first, `odds` and `gap` fp32 [rows], of scores hidden @ weight.T, over T and with noise if T > 0.

    MASK is never a candidate, but counts in the log-odds; ties go to the lowest id. `seed`, `position`, `step` int32 name the noise.
    A temperature of None is 0, known when the kernel is made. Rows from `count` on (None: none) are unspecified.
    bf16 or fp16; a vocabulary that is no multiple of 8 or a dim that is no multiple of the tile's depth costs a copy of the weight.
    """
    count = jnp.full((1,), hidden.shape[0], jnp.int32) if count is None else count
    require("count", count, (1,), jnp.int32)
    _require(hidden, weight, (seed, position, step), mask_id, ranks, tile)
    rows, vocab, kept = hidden.shape[0], weight.shape[0], max(ranks, 2)
    hidden, weight = pad(pad(hidden, 0, ROWS), 1, tile.depth), pad(pad(weight, 0, 8), 1, tile.depth)
    noise = () if temperature is None else (*(pad(x, 0, ROWS) for x in (seed, position, step)), jnp.reshape(temperature, 1))
    shares = pl.cdiv(vocab, tile.columns) * (tile.columns // tile.share)
    width = pl.cdiv(shares, LANES) * LANES
    score, token, rest = _logits(hidden, weight, noise, count, vocab, mask_id, kept, tile, width)
    return _merge(score, token, rest, count, rows, vocab, mask_id, ranks, tile.share, shares)


def _require(hidden: Array, weight: Array, key: tuple[Array, Array, Array], mask_id: int, ranks: int, tile: HeadTile) -> None:
    require_main("hidden", hidden, "rows dim")
    require_main("weight", weight, "vocab dim")
    (rows, dim), vocab = hidden.shape, weight.shape[0]
    require("weight", weight, (vocab, dim), hidden.dtype)
    for name, x in zip(("seed", "position", "step"), key, strict=True):
        require(name, x, (rows,), jnp.int32)
    if tile.columns % tile.share or tile.share % 8 or tile.depth % 64 or tile.stages < 2:
        raise ValueError(f"{tile=} must have columns a multiple of share, share of 8, depth of 64, and at least 2 stages")
    if not 0 <= mask_id < vocab:
        raise ValueError(f"{mask_id=} must lie inside the vocabulary of {vocab}")
    if not 1 <= ranks < vocab:
        raise ValueError(f"{ranks=} must be at least 1 and below the vocabulary of {vocab}")


def _logits(
    hidden: Float[Array, "rows depth"],
    weight: Float[Array, "padded_vocab depth"],
    noise: tuple[Array, ...],
    count: Int[Array, "1"],
    vocab: int,
    mask_id: int,
    kept: int,
    tile: HeadTile,
    width: int,
) -> tuple[Float[Array, "rows kept_width"], Int[Array, "rows kept_width"], Float[Array, "rows three_width"]]:
    """Score and token: the best of every share, rank by rank. Rest: the best candidate's logit, then maximum and sum over the others.

    Each field takes `width` columns, one a share; padding past the last share is not written. `noise`: seed, position, step and
    temperature, or nothing.
    """
    rows, dim = hidden.shape
    steps, shares = dim // tile.depth, tile.columns // tile.share
    by_row = plgpu.Layout.WGMMA.reduce(1)

    def body(hidden: Any, weight: Any, count: Any, *refs: Any) -> None:
        *noise, score_out, token_out, rest_out = refs
        column, row = lax.axis_index("column"), lax.axis_index("row")
        tile_rows = pl.ds(row * ROWS, ROWS)

        def spread(x: Float[Array, " rows"]) -> Float[Array, "rows share"]:
            return lax.broadcast_in_dim(x, (ROWS, tile.share), (0,))

        def extract(
            scores: Float[Array, "rows share"], logits: Float[Array, "rows share"], ids: Int[Array, "rows share"], at: Array
        ) -> None:
            """Of one share, whose results go to column `at` of every field. `scores` and `logits` may be one array."""

            def store(out: Any, field: int, value: Array) -> None:
                out[tile_rows, field * width + at] = value

            exists = ids < vocab
            logits = jnp.where(exists, logits, -_INFINITY)
            scores = jnp.where(exists & (ids != mask_id), scores, -_INFINITY)
            for rank in range(kept):
                best = jnp.max(scores, axis=1)
                token = jnp.min(jnp.where(scores == spread(best), ids, vocab), axis=1)  # the lowest id among equals
                chosen = ids == spread(token)
                if rank == 0:
                    rest = jnp.where(chosen, -_INFINITY, logits)
                    highest = jnp.max(rest, axis=1)
                    shift = jnp.where(highest == -_INFINITY, 0.0, highest)
                    store(rest_out, 0, jnp.sum(jnp.where(chosen, logits, 0.0), axis=1))
                    store(rest_out, 1, highest)
                    store(rest_out, 2, jnp.sum(jnp.exp(rest - spread(shift)), axis=1))
                scores = jnp.where(chosen, -_INFINITY, scores)
                store(score_out, rank, best)
                store(token_out, rank, token)

        def epilogue(logits: Float[Array, "rows columns"], share: int) -> None:
            """Of one share, behind a condition of its own: else the compiler mixes shares, which takes more registers than there are.

            With noise the condition is the temperature. Without, there is nothing to decide, and the condition on the rows is repeated.
            """
            at = column * shares + share
            ids = at * tile.share + plgpu.broadcasted_iota(jnp.int32, (ROWS, tile.share), 1, layout=plgpu.Layout.WGMMA)
            logits = logits[:, share * tile.share : (share + 1) * tile.share]

            if not noise:
                pl.when(row * ROWS < count[0])(partial(extract, logits, logits, ids, at))
                return
            seed, position, step, temperature = noise

            @pl.when(temperature[0] > 0)
            def _() -> None:
                seeds, positions, steps = (
                    spread(plgpu.load(x.at[tile_rows], layout=by_row, optimized=False)) for x in (seed, position, step)
                )
                scaled = logits / temperature[0]
                extract(scaled + draw(seeds, positions, steps, ids), scaled, ids, at)

            @pl.when(temperature[0] <= 0)
            def _() -> None:
                extract(logits, logits, ids, at)

        def product(acc: Any) -> Float[Array, "rows columns"]:
            def advance(_: Any, a: Any, b: Any) -> None:
                plgpu.wgmma(acc, a, b.transpose((1, 0)))
                plgpu.wgmma_wait(1)

            a, b = (
                plgpu.BlockSpec((n, tile.depth), lambda k, i=i: (i, k), transforms=SWIZZLED, delay_release=1)
                for n, i in ((ROWS, row), (tile.columns, column))
            )
            stages = min(tile.stages, max(steps, 2))
            plgpu.emit_pipeline(advance, grid=(steps,), in_specs=[a, b], max_concurrent_steps=stages)(hidden, weight)
            return acc[...]

        @pl.when(row * ROWS < count[0])
        def _() -> None:
            logits = pl.run_scoped(product, plgpu.ACC((ROWS, tile.columns), jnp.float32))
            for share in range(shares):
                epilogue(logits, share)

    out = [jax.ShapeDtypeStruct((rows, n * width), dtype) for n, dtype in ((kept, jnp.float32), (kept, jnp.int32), (3, jnp.float32))]
    grid = {"column": pl.cdiv(vocab, tile.columns), "row": rows // ROWS}  # tiles that share columns of the weight run together
    return launch("head", body, out, grid, hidden, weight, count, *noise)


def _merge(
    score: Float[Array, "padded_rows kept_width"],
    token: Int[Array, "padded_rows kept_width"],
    rest: Float[Array, "padded_rows three_width"],
    count: Int[Array, "1"],
    rows: int,
    vocab: int,
    mask_id: int,
    ranks: int,
    share: int,
    shares: int,
) -> tuple[Int[Array, "rows ranks"], Float[Array, " rows"], Float[Array, " rows"]]:
    """One program: all shares of one row. Every share's best but the winner goes back among the rest."""
    width = rest.shape[1] // 3
    kept = score.shape[1] // width

    def load(ref: Any, row: Array, first: int, fields: int, other: float) -> tuple[Array, Int[Array, " entries"]]:
        """`fields` vectors of `width` as one, padding replaced by `other`, and each element's share."""
        layout = plgpu.Layout.WG_STRIDED((fields * width,), 1)
        index = lax.rem(plgpu.broadcasted_iota(jnp.int32, (fields * width,), 0, layout=layout), width)
        return jnp.where(index < shares, plgpu.load(ref.at[row, pl.ds(first * width, fields * width)], layout=layout), other), index

    def body(score: Any, token: Any, rest: Any, count: Any, tokens: Any, odds: Any, gap: Any) -> None:
        row = lax.axis_index("row")

        @pl.when(row < count[0])
        def _() -> None:
            scores, _ = load(score, row, 0, kept, -_INFINITY)
            ids, _ = load(token, row, 0, kept, vocab)
            best, found = [], []
            for _ in range(kept):
                best.append(jnp.max(scores))
                lowest = jnp.min(jnp.where(scores == best[-1], ids, vocab))
                # A row of NaN has no best: any token but MASK, which would be revealed again and again.
                found.append(jnp.where((lowest == vocab) | (lowest == mask_id), int(mask_id == 0), lowest))
                scores = jnp.where(ids == found[-1], -_INFINITY, scores)
            for rank in range(ranks):
                tokens[row, rank] = found[rank]
            gap[row] = best[0] - best[1]
            chosen, index = load(rest, row, 0, 1, -_INFINITY)
            highest, _ = load(rest, row, 1, 1, -_INFINITY)
            total, _ = load(rest, row, 2, 1, 0.0)
            won = index == lax.div(found[0], share)
            others = jnp.where(won, -_INFINITY, chosen)
            top = jnp.max(jnp.maximum(highest, others))
            top = jnp.where(top == -_INFINITY, 0.0, top)
            total = jnp.sum(total * jnp.exp(highest - top) + jnp.exp(others - top))
            odds[row] = jnp.sum(jnp.where(won, chosen, 0.0)) - (top + jnp.log(total))

    out = jax.ShapeDtypeStruct((rows, ranks), jnp.int32), *[jax.ShapeDtypeStruct((rows,), jnp.float32)] * 2
    return tuple(launch("merge", body, out, {"row": rows}, score, token, rest, count))
