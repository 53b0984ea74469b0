"""One functional transformer for all families: parameters are a plain pytree, layers are unrolled, every pass is a pure function.

Parameters: {"embed": [vocab, dim], "layers": [{"attn_norm", "qkv", "qkv_bias"?, "q_norm"?, "k_norm"?, "o", "ffn_norm", "gate_up",
"down"}], "norm": [dim], "head": [vocab, dim] unless tied}.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specfold_jax.config import Attention, FoldConfig, ModelConfig
from specfold_jax.fold import Rows
from specfold_jax.ops import Segment, attention, linear, query_scale, rms_norm, rotate, silu_pair

Params = dict[str, Any]
KeyValue = tuple[Array, Array]


class Cache(NamedTuple):
    """Keys and values of all layers in one array each, so that one operation writes a block."""

    key: Float[Array, "layers batch capacity kv_heads head_dim"]
    value: Float[Array, "layers batch capacity kv_heads head_dim"]

    @classmethod
    def of(cls, pairs: Sequence[KeyValue]) -> Self:
        """Layer by layer given pairs, put together."""
        return cls(*(jnp.stack(side) for side in zip(*pairs, strict=True)))


class Branches(NamedTuple):
    """The canvases one check evaluates. Branch 0 is the main branch.

    `start` is the absolute position of the block. A branch with `context[b, n] = m >= 0` stands one block further on and also sees
    branch m's block. `causal` rows use causal attention inside the block. Parents come before children; a root is its own parent.
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
    """What a check computed.

    `hidden` [batch, branch, block, dim] after the final norm; `kv` per layer [batch, branch, block, kv_heads, head_dim];
    `computed_rows` int32 [batch, layers, 2] rows of draft branches computed before attention and before the feed-forward network;
    `folded` [batch, branch] whether any row of the branch was inherited. `place` int32 [batch, branch]: where a branch stands in `hidden`
    and `kv`, seen as lists of batch x branch entries. What an invalid branch has there is unspecified.
    """

    hidden: Float[Array, "batch branch block dim"]
    kv: tuple[KeyValue, ...]
    computed_rows: Int[Array, "batch layers 2"]
    folded: Bool[Array, "batch branch"]
    place: Int[Array, "batch branch"]

    def ordered(self, x: Float[Array, "batch branch block ..."]) -> Float[Array, "batch branch block ..."]:
        """`hidden`, or keys or values, with every branch in its own place."""
        return x.reshape(-1, *x.shape[2:]).at[self.place].get(mode="promise_in_bounds")

    def block_of(self, x: Float[Array, "batch branch block ..."], branch: Int[Array, " batch"]) -> Float[Array, "batch block ..."]:
        """Of `hidden`, or of keys or values, a branch of each sequence."""
        place = jnp.take_along_axis(self.place, branch[:, None], axis=1)[:, 0]
        return x.reshape(-1, *x.shape[2:]).at[place].get(mode="promise_in_bounds")


@jax.custom_vjp
def lookup(table: Float[Array, "vocab dim"], tokens: Int[Array, "*rows"]) -> Float[Array, "*rows dim"]:
    """table[tokens], with a gradient by matrix product: scattering many rows onto one (MASK's) would serialise."""
    return table[tokens]


def _lookup_forward(table: Array, tokens: Array) -> tuple[Array, tuple[Array, int]]:
    return table[tokens], (tokens, table.shape[0])


def _lookup_backward(saved: tuple[Array, int], cotangent: Array) -> tuple[Array, None]:
    tokens, vocab = saved
    rows = tuple(range(tokens.ndim))
    return lax.dot_general(jax.nn.one_hot(tokens, vocab, dtype=cotangent.dtype), cotangent, ((rows, rows), ((), ()))), None


lookup.defvjp(_lookup_forward, _lookup_backward)


def embed(params: Params, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows dim"]:
    """Token embeddings."""
    return lookup(params["embed"], tokens)


def head_weight(params: Params) -> Float[Array, "vocab dim"]:
    """The language-model head's weight (the embedding when tied)."""
    return params.get("head", params["embed"])


def logits(params: Params, hidden: Float[Array, "*rows dim"]) -> Float[Array, "*rows vocab"]:
    """fp32 logits."""
    weight = head_weight(params)
    return lax.dot_general(hidden, weight, (((hidden.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def attention_inputs(
    layer: Params, x: Float[Array, "*rows dim"], positions: Int[Array, "*rows"], model: ModelConfig
) -> tuple[Array, Array, Array]:
    """Norm, fused projection, bias, q/k norm, rotary embedding: q [*rows, heads, head_dim], k and v [*rows, kv_heads, head_dim]."""
    qkv = linear(rms_norm(x, layer["attn_norm"], model.norm_eps), layer["qkv"])
    if model.qkv_bias:
        qkv = qkv + layer["qkv_bias"]
    qkv = qkv.reshape(*x.shape[:-1], model.heads + 2 * model.kv_heads, model.head_dim)
    q, k, v = jnp.split(qkv, [model.heads, model.heads + model.kv_heads], axis=-2)
    if model.qk_norm:
        q, k = rms_norm(q, layer["q_norm"], model.norm_eps), rms_norm(k, layer["k_norm"], model.norm_eps)
    q, k = rotate(q, positions, model), rotate(k, positions, model)
    if model.query_scale_beta:
        q = (q.astype(jnp.float32) * query_scale(positions, model)[..., None, None]).astype(q.dtype)
    return q, k, v


def feed_forward(layer: Params, y: Float[Array, "*rows dim"], model: ModelConfig) -> Float[Array, "*rows dim"]:
    """Norm, SiLU-gated pair, down projection."""
    return linear(silu_pair(linear(rms_norm(y, layer["ffn_norm"], model.norm_eps), layer["gate_up"])), layer["down"])


def merge_heads(o: Float[Array, "*rows heads head_dim"]) -> Float[Array, "*rows heads_dim"]:
    """Concatenates the heads."""
    return o.reshape(*o.shape[:-2], o.shape[-2] * o.shape[-1])


def trunk(
    params: Params,
    tokens: Int[Array, "batch length"],
    positions: Int[Array, "batch length"],
    model: ModelConfig,
    attend: Callable[[Array, Array, Array], Array],
) -> Float[Array, "batch length dim"]:
    """Whole sequences through all layers, to the final norm. `attend(q, k, v)` works on [batch, length, heads, head_dim]."""
    return _trunk(params, tokens, positions, model, attend)[0]


def _trunk(params: Params, tokens: Array, positions: Array, model: ModelConfig, attend: Callable[..., Array]) -> tuple[Array, Cache]:
    x, pairs = embed(params, tokens), []
    for layer in params["layers"]:
        q, k, v = attention_inputs(layer, x, positions, model)
        x = x + linear(merge_heads(attend(q, k, v)), layer["o"])
        x = x + feed_forward(layer, x, model)
        pairs.append((k, v))
    return rms_norm(x, params["norm"], model.norm_eps), Cache.of(pairs)


def sequence_mask(length: int, pattern: Attention, block_size: int) -> Bool[Array, "query key"]:
    """Which keys a query sees in a whole sequence."""
    query, key = jnp.arange(length)[:, None], jnp.arange(length)[None]
    match pattern:
        case "block":
            return query // block_size >= key // block_size
        case "bidirectional":
            return jnp.ones((length, length), bool)
        case "causal":
            return query >= key


def prefill(
    params: Params, tokens: Int[Array, "batch length"], model: ModelConfig, pattern: Attention, block_size: int
) -> tuple[Float[Array, "batch length dim"], Cache]:
    """Whole sequences from position 0: hidden states after the final norm, and the keys and values of every position."""
    length = tokens.shape[1]
    mask = sequence_mask(length, pattern, block_size)

    def attend(q: Array, k: Array, v: Array) -> Array:
        return attention(q[:, None], [Segment(k, v, mask)])[:, 0]

    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    return _trunk(params, tokens, positions, model, attend)


def forward(
    params: Params, tokens: Int[Array, "batch length"], model: ModelConfig, attention: Attention | None = None
) -> Float[Array, "batch length vocab"]:
    """Logits of whole sequences, aligned to the positions they predict (the family's shift is applied).

    `attention`: "block" (block-causal), "bidirectional" or "causal"; None is the family's denoising pattern: block-causal, or
    bidirectional where blocks start at the prompt's end.
    """
    pattern = attention or ("bidirectional" if model.block_origin == "prompt" else "block")
    hidden, _ = prefill(params, tokens, model, pattern, model.block_size)
    out = logits(params, hidden)
    return jnp.concatenate([out[:, :1], out[:, :-1]], axis=1) if model.shift else out


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

    Each branch attends to the `prefix[b]` first entries of the cache and to its own block only (and its context's). Nothing is
    written to the cache.
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
    own = jnp.arange(complete.size, dtype=jnp.int32).reshape(complete.shape)
    return Checked(hidden, tuple(kv), jnp.stack(counts, axis=1), branches.valid & ~complete, own)


def cast(params: Params, dtype: Any) -> Params:
    """The same parameters in another dtype."""
    return jax.tree.map(lambda x: x.astype(dtype), params)
