"""Language-model head fused with what the reveal rule and the draft graph need of its logits: best tokens, log-odds, gap.

The first kernel turns each tile of logits into its best candidates and a sum over the rest; the second merges tiles. Sums never hold
the best entry and are never subtracted from, so that log-odds do not saturate. At temperatures above 0 the noise is drawn in the kernel.
"""

# Triton compiles kernels from their text: to a type checker, tl.static_range is no iterable and tl.max may give a tuple.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from kernels_triton.arguments import require, require_main
from kernels_triton.noise import gumbel
from kernels_triton.numerics import dot, load_weight
from kernels_triton.tiles import constants, padded, product_tile


def head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    step: torch.Tensor,
    temperature: float,
    mask_id: int,
    ranks: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`tokens` int32 [rows, ranks] best first, `odds` and `gap` fp32 [rows], of scores hidden @ weight.T, over T and with noise if T > 0.

    MASK is never a candidate, but counts in the log-odds; ties go to the lowest id. `hidden` [rows, dim], `weight` [vocab, dim];
    `seed`, `position`, `step` int32 [rows] name the noise (Threefry-2x32).
    """
    require_main("hidden", hidden, "rows dim")
    require_main("weight", weight, "vocab dim")
    (rows, dim), vocab, device = hidden.shape, weight.shape[0], hidden.device
    require("weight", weight, (vocab, dim), hidden.dtype, device)
    for name, tensor in (("seed", seed), ("position", position), ("step", step)):
        require(name, tensor, (rows,), torch.int32, device)
    if not 0 <= mask_id < vocab:
        raise ValueError(f"{mask_id=} must lie inside the vocabulary of {vocab}")
    if not 1 <= ranks < vocab:
        raise ValueError(f"{ranks=} must be at least 1 and below the vocabulary of {vocab}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"{temperature=} must be finite and at least 0")
    tile = product_tile(vocab, hidden.dtype)
    tiles, kept = triton.cdiv(vocab, tile.columns), max(ranks, 2)
    score, rest = (torch.empty(rows, n, tiles, dtype=torch.float32, device=device) for n in (kept, 3))
    token = torch.empty(rows, kept, tiles, dtype=torch.int32, device=device)
    _logits[triton.cdiv(rows, tile.rows), tiles](
        *(hidden, weight, seed, position, step, float(temperature), score, token, rest, rows, dim, vocab, mask_id),
        **constants(
            WARM=temperature > 0,
            KEPT=kept,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            num_warps=8,
            num_stages=tile.stages,
        ),
    )
    tokens = torch.empty(rows, ranks, dtype=torch.int32, device=device)
    odds, gap = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    _merge[(rows,)](
        *(score, token, rest, tokens, odds, gap, tiles, vocab),
        **constants(
            RANKS=ranks,
            KEPT=kept,
            COLUMNS=tile.columns,
            TILES=padded(tiles, 2),
            CANDIDATES=padded(kept * tiles),
            num_warps=8,
        ),
    )
    return tokens, odds, gap


@triton.jit
def _logits(
    hidden, weight, seed, position, step, temperature, score_out, token_out, rest_out, rows, dim, vocab, mask_id,
    WARM: tl.constexpr, KEPT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows by COLUMNS tokens. `rest_out`: the best candidate's logit, then maximum and sum over the other entries."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = row < rows
    tile, tiles = tl.program_id(1), tl.num_programs(1)
    ids = tile * COLUMNS + tl.arange(0, COLUMNS)
    exists = ids < vocab
    logits = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, dim, DEPTH):
        k = start + tl.arange(0, DEPTH)
        a = tl.load(hidden + row[:, None] * dim + k[None], mask=live[:, None] & (k < dim)[None], other=0.0)
        logits = dot(a, load_weight(weight, ids, exists, k, dim), logits)
    if WARM:
        logits = tl.div_rn(logits, tl.full([ROWS, COLUMNS], temperature, tl.float32))
    scores = logits
    if WARM:
        key0, key1 = tl.load(seed + row, mask=live, other=0), tl.load(position + row, mask=live, other=0)
        counter = tl.load(step + row, mask=live, other=0)
        scores += gumbel(key0[:, None], key1[:, None], counter[:, None], ids[None])
    infinity = float("inf")
    logits = tl.where(exists[None], logits, -infinity)
    scores = tl.where((exists & (ids != mask_id))[None], scores, -infinity)
    for rank in tl.static_range(KEPT):
        best = tl.max(scores, 1)
        token = tl.min(tl.where(scores == best[:, None], ids[None], vocab), 1)  # the lowest id among equals
        chosen = ids[None] == token[:, None]
        if rank == 0:
            rest = tl.where(chosen, -infinity, logits)
            highest = tl.max(rest, 1)
            shift = tl.where(highest == -infinity, 0.0, highest)
            at = rest_out + row * 3 * tiles + tile
            tl.store(at, tl.sum(tl.where(chosen, logits, 0.0), 1), mask=live)
            tl.store(at + tiles, highest, mask=live)
            tl.store(at + 2 * tiles, tl.sum(tl.exp(rest - shift[:, None]), 1), mask=live)
        scores = tl.where(chosen, -infinity, scores)
        tl.store(score_out + (row * KEPT + rank) * tiles + tile, best, mask=live)
        tl.store(token_out + (row * KEPT + rank) * tiles + tile, token, mask=live)


@triton.jit
def _merge(
    score, token, rest, tokens, odds, gap, tiles, vocab,
    RANKS: tl.constexpr, KEPT: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """One program: all tiles of one row. Every tile's best but the winner goes back among the rest."""
    row = tl.program_id(0).to(tl.int64)
    infinity = float("inf")
    entry = tl.arange(0, CANDIDATES)
    scores = tl.load(score + row * KEPT * tiles + entry, mask=entry < KEPT * tiles, other=-infinity)
    ids = tl.load(token + row * KEPT * tiles + entry, mask=entry < KEPT * tiles, other=vocab)
    first, second, winner = -infinity, -infinity, 0
    for rank in tl.static_range(KEPT):
        best = tl.max(scores, 0)
        found = tl.min(tl.where(scores == best, ids, vocab), 0)
        found = tl.minimum(found, vocab - 1)  # a row of NaN has no best
        if rank == 0:
            first, winner = best, found
        if rank == 1:
            second = best
        if rank < RANKS:
            tl.store(tokens + row * RANKS + rank, found)
        scores = tl.where(ids == found, -infinity, scores)
    tl.store(gap + row, first - second)
    tile = tl.arange(0, TILES)
    exists = tile < tiles
    at = rest + row * 3 * tiles + tile
    chosen = tl.load(at, mask=exists, other=-infinity)
    highest = tl.load(at + tiles, mask=exists, other=-infinity)
    total = tl.load(at + 2 * tiles, mask=exists, other=0.0)
    won = tile == winner // COLUMNS
    others = tl.where(won, -infinity, chosen)
    top = tl.maximum(tl.max(highest, 0), tl.max(others, 0))
    top = tl.where(top == -infinity, 0.0, top)
    total = tl.sum(total * tl.exp(highest - top) + tl.exp(others - top), 0)
    tl.store(odds + row, tl.sum(tl.where(won, chosen, 0.0), 0) - (top + tl.log(total)))
