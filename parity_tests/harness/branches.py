"""A cache and nested branches that a check is tried on."""

import jax.numpy as jnp
import numpy as np

from specfold_jax.models.check import Branches
from specfold_jax.models.transformer import Cache

BATCH, BLOCK, PREFIX, CAPACITY = 2, 8, 6, 9


def cache_of(model, seed: int = 3):
    """Keys and values whose entries beyond the prefix must not be seen."""
    rng = np.random.default_rng(seed)
    cache = []
    for _ in range(model.layers):
        pair = rng.normal(size=(2, BATCH, CAPACITY, model.kv_heads, model.head_dim)).astype(np.float32)
        pair[:, :, PREFIX:] = 1e3
        pair[:, 1, PREFIX - 2 :] = 1e3
        cache.append((jnp.asarray(pair[0]), jnp.asarray(pair[1])))
    return Cache.of(cache)


def branches_of(model, context: bool = False) -> Branches:
    """Nested drafts of two rows: a chain 1-2-3, a sibling 4, an absent branch 5 and, with `context`, a next block behind branch 3."""
    rng, mask = np.random.default_rng(8), model.mask_id
    tokens = np.full((BATCH, 7, BLOCK), mask, np.int32)
    tokens[:, :, 0] = [[200], [210]]
    for row in range(BATCH):
        drafted = rng.integers(101, 300, BLOCK)
        for branch, count in ((1, 1), (2, 2), (3, BLOCK - 1)):
            tokens[row, branch, 1 : 1 + count] = drafted[:count]
        tokens[row, 4, 5] = 150
        tokens[row, 6, 0] = 222
    valid = np.array([[True] * 5 + [False, context]] * BATCH)
    valid[1, 4] = False
    return Branches(
        tokens=jnp.asarray(tokens),
        valid=jnp.asarray(valid),
        parent=jnp.array([[0, 0, 1, 2, 0, 0, 6]] * BATCH, jnp.int32),
        start=jnp.array([PREFIX, PREFIX - 2], jnp.int32),
        causal=jnp.array([False, model.commit == "causal"]),
        context=jnp.array([[-1] * 6 + [3]] * BATCH, jnp.int32) if context else None,
    )
