"""Training batches for block diffusion (Fast-dLLM v2's recipe, arXiv 2509.26328), in which a row sees the same as in decoding.

A sample is question, separator, answer and stop token, padded with MASK to complete blocks. It has three copies in a pack. The clean copy
has all its blocks. The two noisy copies have the blocks from the first answer token on, and one masks the tokens that the other shows:

    pack = [clean blocks | noisy blocks | complement blocks]        several samples a pack, each row at its sample's own position

A row sees its own block of its own copy, and the clean blocks before that of the same sample. So the clean copy is block-causal, and a
noisy block is a canvas on top of committed blocks. Attention needs no keys but those of the clean rows and of the row's own block.

Position i is predicted by the row of i - 1. The first token of a block is different: decoding draws it from the last row of the commit
before, and knows it whenever it denoises the block. So, unlike in the recipe, it is never masked, and the clean row of i - 1 predicts it.
Every other answer token is masked in one of the two noisy copies, and the row of i - 1 in that copy predicts it. So every answer token,
the stop token included, is a target once. Padding is MASK in every copy, as positions after the end are in decoding. It is no target.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt16


class Samples(NamedTuple):
    """Token ids of all samples end to end (separator and stop token included), their lengths and where their answers start."""

    tokens: UInt16[np.ndarray, " total"]
    lengths: Int[np.ndarray, " samples"]
    answer_starts: Int[np.ndarray, " samples"]


class Packs(NamedTuple):
    """Packed samples, by block slot; arrays on the host, or on the device for training.

    `sample`: the clean slot at which the slot's sample starts; -1 for an empty slot. `number`: the block's number in its sample.
    `source`: the clean slot that a noisy slot copies. Offsets `first` <= o < `last` of a noisy slot are answer tokens.
    """

    tokens: Int[Array | np.ndarray, "packs clean block"]
    sample: Int[Array | np.ndarray, "packs clean"]
    number: Int[Array | np.ndarray, "packs clean"]
    source: Int[Array | np.ndarray, "packs noisy"]
    first: Int[Array | np.ndarray, "packs noisy"]
    last: Int[Array | np.ndarray, "packs noisy"]


class Batch(NamedTuple):
    """Rows of some packs, [clean | noisy | complement], and the targets to predict from them.

    `sees[p, i, j]`: the block i of rows sees the clean block j (besides itself). Target t is token `targets[p, t]`, predicted from row
    `rows[p, t]`; it counts where `valid[p, t]`.
    """

    tokens: Int[Array, "packs rows"]
    positions: Int[Array, "packs rows"]
    sees: Bool[Array, "packs blocks clean"]
    targets: Int[Array, "packs targets"]
    rows: Int[Array, "packs targets"]
    valid: Bool[Array, "packs targets"]


def pack(samples: Samples, clean: int, noisy: int, block: int, mask_id: int) -> tuple[Packs, int]:
    """Packs the samples: larger ones first, each where it leaves the least room. Also returns how many samples are too long.

    `clean`, `noisy`: block slots of a pack for clean blocks and for each noisy copy. A pack has (clean + 2 noisy) block rows. Raises
    ValueError if an answer starts at position 0, where no row predicts its first token, or if no sample fits.
    """
    lengths, starts = np.asarray(samples.lengths, np.int64), np.asarray(samples.answer_starts, np.int64)
    if np.any((starts < 1) | (starts >= lengths)):
        raise ValueError("every sample must have a question token before its answer and at least one answer token")
    need_clean = -(-lengths // block)
    need_noisy = need_clean - starts // block
    kept = np.flatnonzero((need_clean <= clean) & (need_noisy <= noisy))
    if not kept.size:
        raise ValueError(f"{clean=} and {noisy=} blocks a pack hold none of the {lengths.size} samples")
    where, at_clean, at_noisy, count = _assign(need_clean[kept], need_noisy[kept], clean, noisy)

    of, within = _ragged(need_clean[kept])  # one entry a clean block
    padded = np.full((of.size, block), mask_id, np.int16)
    ends = np.cumsum(lengths)
    token_of, token_within = _ragged(lengths[kept])
    start_of_blocks = np.cumsum(need_clean[kept]) - need_clean[kept]
    padded.reshape(-1)[start_of_blocks[token_of] * block + token_within] = samples.tokens[(ends - lengths)[kept][token_of] + token_within]
    tokens = np.full((count, clean, block), mask_id, np.int16)
    sample, number = np.full((count, clean), -1, np.int16), np.zeros((count, clean), np.int16)
    slots = where[of], at_clean[of] + within
    tokens[slots], sample[slots], number[slots] = padded, at_clean[of], within

    of, within = _ragged(need_noisy[kept])  # one entry a noisy block
    source, first, last = (np.zeros((count, noisy), np.int16) for _ in range(3))
    slots, numbers = (where[of], at_noisy[of] + within), (starts[kept] // block)[of] + within
    source[slots] = at_clean[of] + numbers
    first[slots] = np.clip(starts[kept][of] - numbers * block, 0, block)
    last[slots] = np.clip(lengths[kept][of] - numbers * block, 0, block)
    return Packs(tokens, sample, number, source, first, last), lengths.size - kept.size


def _ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For items of `counts` parts, laid end to end: the item of each part, and the part's index in it."""
    of = np.repeat(np.arange(counts.size), counts)
    return of, np.arange(of.size) - np.repeat(np.cumsum(counts) - counts, counts)


def _assign(need_clean: np.ndarray, need_noisy: np.ndarray, clean: int, noisy: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Best fit, decreasing, all samples of a size at a time: each sample's pack and first slots, and the number of packs."""
    where, at_clean, at_noisy = (np.zeros(need_clean.size, np.int64) for _ in range(3))
    room: dict[tuple[int, int], list[np.ndarray]] = {}  # packs by free clean and noisy slots
    count, sizes = 0, need_clean + 2 * need_noisy
    classes = sorted({(int(s), int(c), int(n)) for s, c, n in zip(sizes, need_clean, need_noisy, strict=True)}, reverse=True)
    for _, c, n in classes:
        todo = np.flatnonzero((need_clean == c) & (need_noisy == n))
        while todo.size:
            fits = [free for free in room if free[0] >= c and free[1] >= n]
            if fits:
                free = min(fits, key=lambda f: (f[0] - c + 2 * (f[1] - n), f))
                packs = room[free].pop()
                if not room[free]:
                    del room[free]
            else:  # as many new packs as the rest of this size fills
                free = (clean, noisy)
                fresh = -(-todo.size // min(clean // c, noisy // n))
                packs, count = np.arange(count, count + fresh), count + fresh
            used = packs[: todo.size]
            items, todo = todo[: used.size], todo[used.size :]
            where[items], at_clean[items], at_noisy[items] = used, clean - free[0], noisy - free[1]
            for left, rest in (((free[0] - c, free[1] - n), used), (free, packs[used.size :])):
                if rest.size:
                    room.setdefault(left, []).append(rest)
    return where, at_clean, at_noisy, count


def batch_indices(seed: int, packs: int, batch: int, start: int, steps: int) -> Int[np.ndarray, "steps batch"]:
    """The packs of the steps `start` .. `start + steps - 1`, from an endless stream of permutations, one an epoch."""
    stream = np.arange(start * batch, (start + steps) * batch)
    epochs = stream // packs
    orders = {epoch: np.random.default_rng([seed, epoch]).permutation(packs) for epoch in np.unique(epochs)}
    out = np.concatenate([orders[epoch][stream[epochs == epoch] % packs] for epoch in sorted(orders)])
    return out.reshape(steps, batch).astype(np.int32)


def make_batch(packs: Packs, key: Array, mask_id: int) -> Batch:
    """Draws the masks. Each noisy block draws t ~ U(0, 1). Its answer tokens, but for the block's first, are masked with probability
    (1 - 1e-3) t + 1e-3."""
    count, clean, block = packs.tokens.shape
    noisy = packs.source.shape[1]
    tokens = packs.tokens.astype(jnp.int32)
    sample, number, source = (x.astype(jnp.int32) for x in (packs.sample, packs.number, packs.source))
    copied = jnp.take_along_axis(tokens, source[..., None], axis=1)  # [packs, noisy, block]
    offset = jnp.arange(block, dtype=jnp.int32)
    answer = (offset >= packs.first[..., None].astype(jnp.int32)) & (offset < packs.last[..., None].astype(jnp.int32))
    block_key, token_key = jax.random.split(key)
    t = jax.random.uniform(block_key, (count, noisy, 1), jnp.float32)
    drawn = jax.random.uniform(token_key, copied.shape, jnp.float32) < (1 - 1e-3) * t + 1e-3
    maskable = answer & (offset > 0)
    masked = maskable & drawn
    canvases = [jnp.where(hidden, mask_id, copied) for hidden in (masked, maskable & ~drawn)]

    block_sample = jnp.concatenate([sample, *[jnp.take_along_axis(sample, source, axis=1)] * 2], axis=1)
    block_number = jnp.concatenate([number, *[jnp.take_along_axis(number, source, axis=1)] * 2], axis=1)
    sees = (block_sample[:, :, None] == sample[:, None]) & (block_number[:, :, None] > number[:, None])
    slot = jnp.arange(noisy, dtype=jnp.int32)[:, None]
    in_copy = (clean + jnp.where(masked, slot, noisy + slot)) * block + offset - 1
    rows = jnp.where(offset > 0, in_copy, jnp.maximum(source[..., None] * block - 1, 0))
    return Batch(
        tokens=jnp.concatenate([tokens, *canvases], axis=1).reshape(count, -1),
        positions=(block_number[..., None] * block + offset).reshape(count, -1),
        sees=sees,
        targets=copied.reshape(count, -1),
        rows=rows.reshape(count, -1),
        valid=answer.reshape(count, -1),
    )
