"""One check: several canvases of every sequence evaluated in a single forward pass."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specfold_jax.config import FoldConfig, ModelConfig
from specfold_jax.models.fold import Rows
from specfold_jax.models.ops import Segment, attention, linear, rms_norm
from specfold_jax.models.transformer import Cache, KeyValue, Params, attention_inputs, embed, feed_forward, merge_heads


class Branches(NamedTuple):
    """The canvases one check evaluates. Branch 0 is the main branch, the row's true state.

    Attributes:
        tokens [batch, branch, block]: each branch's canvas.
        valid [batch, branch]: whether the branch is there. Nothing is known of the others.
        parent [batch, branch]: the branch it is folded onto. Parents come before children. A root is its own parent.
        start [batch]: absolute position of the main canvas.
        causal [batch]: whether positions of a block see only those before them.
        context [batch, branch]: -1, or the branch whose block comes before this one. This branch then stands one block further on, and
            also sees its context's block. None if no branch has a context.

    A finished canvas and the next block's first canvas behind it, in blocks of 4 from position 8 on:

    >>> _ = 99  # MASK
    >>> tokens = jnp.array([[[1, 2, 3, 4], [5, _, _, _]]])
    >>> start, context = jnp.array([8]), jnp.array([[-1, 0]])
    >>> branches = Branches(tokens, jnp.array([[True, True]]), jnp.array([[0, 1]]), start, jnp.array([False]), context)
    >>> branches.starts().tolist()
    [[8, 12]]

    Without a context, branch 1 is a draft of the same block. Its parent is the main branch, which it contains:

    >>> tokens = jnp.array([[[1, _, _, _], [1, 2, _, _]]])
    >>> branches = Branches(tokens, jnp.array([[True, True]]), jnp.array([[0, 0]]), start, jnp.array([False]))
    >>> branches.starts().tolist(), branches.drafts().tolist()
    ([[8, 8]], [[False, True]])
    """

    tokens: Int[Array, "batch branch block"]
    valid: Bool[Array, "batch branch"]
    parent: Int[Array, "batch branch"]
    start: Int[Array, " batch"]
    causal: Bool[Array, " batch"]
    context: Int[Array, "batch branch"] | None = None

    def starts(self) -> Int[Array, "batch branch"]:
        """Absolute position of each branch's block."""
        start = jnp.broadcast_to(self.start[:, None], self.valid.shape)
        return start if self.context is None else start + jnp.where(self.context >= 0, self.tokens.shape[2], 0)

    def drafts(self) -> Bool[Array, "batch branch"]:
        """The valid draft branches: not the main one, and not a continuation."""
        drafts = self.valid & (jnp.arange(self.valid.shape[1]) > 0)
        return drafts if self.context is None else drafts & (self.context < 0)


class Checked(NamedTuple):
    """The result of a check. Invalid branches hold unspecified values.

    Attributes:
        hidden [batch, branch, block, dim]: states after the final norm.
        kv: of each layer, keys and values [batch, branch, block, kv_heads, head_dim].
        computed_rows [batch, layers, 2]: rows of draft branches computed before attention, and before the feed-forward network.
        folded [batch, branch]: whether any row of the branch was inherited.
        entry [batch, branch]: where a branch stands in `hidden` and `kv`, if those are read as lists of batch x branch entries. The
            kernels move valid branches to the front, so `hidden[b, n]` need not be branch n of row b.
    """

    hidden: Float[Array, "batch branch block dim"]
    kv: tuple[KeyValue, ...]
    computed_rows: Int[Array, "batch layers 2"]
    folded: Bool[Array, "batch branch"]
    entry: Int[Array, "batch branch"]

    def ordered(self, x: Float[Array, "batch branch block ..."]) -> Float[Array, "batch branch block ..."]:
        """`hidden`, keys or values, ordered by row and branch."""
        return x.reshape(-1, *x.shape[2:]).at[self.entry].get(mode="promise_in_bounds")

    def block_of(self, x: Float[Array, "batch branch block ..."], branch: Int[Array, " batch"]) -> Float[Array, "batch block ..."]:
        """One branch of each row, of `hidden`, keys or values."""
        entry = jnp.take_along_axis(self.entry, branch[:, None], axis=1)[:, 0]
        return x.reshape(-1, *x.shape[2:]).at[entry].get(mode="promise_in_bounds")


def check(
    params: Params,
    branches: Branches,
    cache: Cache,
    prefix: Int[Array, " batch"],
    model: ModelConfig,
    fold: FoldConfig | None = None,
    pack: bool = True,
) -> Checked:
    """Evaluates several canvases in one forward pass.

    A branch attends to the first `prefix[b]` entries of the cache, to its own block and to its context's block. It sees no other branch.
    Nothing is written to the cache.
    """
    tokens, capacity = branches.tokens, cache.key.shape[2]
    block = tokens.shape[2]
    within = jnp.arange(block, dtype=jnp.int32)
    positions = branches.starts()[..., None] + within
    revealed = tokens != jnp.take_along_axis(tokens, branches.parent[..., None], axis=1)
    rows = Rows(branches.valid, branches.parent, revealed, fold, pack)
    seen = (jnp.arange(capacity) < prefix[:, None])[:, None, None]  # [batch, 1, 1, key]
    inside = ~branches.causal[:, None, None, None] | (within[:, None] >= within)

    def attend(q: Array, k: Array, v: Array, layer_cache: KeyValue) -> Array:
        segments = [Segment(layer_cache[0], layer_cache[1], seen)]
        if branches.context is not None:
            k_context, v_context = (jnp.take_along_axis(x, jnp.maximum(branches.context, 0)[..., None, None, None], axis=1) for x in (k, v))
            segments.append(Segment(k_context, v_context, (branches.context >= 0)[..., None, None]))
        return attention(q, [*segments, Segment(k, v, inside)])

    x, kv, counts = embed(params, tokens), [], []
    complete = jnp.broadcast_to(branches.valid, tokens.shape[:2])
    for layer, layer_cache in zip(params["layers"], zip(*cache, strict=True), strict=True):
        first = rows.before_attention(x)
        q, k, v = rows.apply(lambda x, p, layer=layer: attention_inputs(layer, x, p, model), first, x, positions)
        k, v = rows.inherit(k, first), rows.inherit(v, first)
        if fold is None or fold.correction:
            o = attend(rows.inherit(q, first), k, v, layer_cache)
        else:
            o = rows.inherit(attend(q, k, v, layer_cache), first)
        x = x + linear(merge_heads(o), layer["o"])
        second = rows.before_ffn(x, first)
        update = rows.apply(lambda y, layer=layer: feed_forward(layer, y, model), second, x)
        x = x + rows.inherit(update, second)
        kv.append((k, v))
        both = jnp.stack([first.computed, second.computed])  # [2, batch, branch, block]
        counts.append(jnp.sum(both & branches.drafts()[..., None], axis=(2, 3), dtype=jnp.int32).T)
        complete = complete & jnp.all(both, axis=(0, 3))
    hidden = rms_norm(x, params["norm"], model.norm_eps)
    entry = jnp.arange(complete.size, dtype=jnp.int32).reshape(complete.shape)
    return Checked(hidden, tuple(kv), jnp.stack(counts, axis=1), branches.valid & ~complete, entry)
