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

from specfold_jax.config import Attention, ModelConfig
from specfold_jax.models.ops import Segment, attention, linear, query_scale, rms_norm, rotate, silu_pair

Params = dict[str, Any]
KeyValue = tuple[Array, Array]


class Cache(NamedTuple):
    """Keys and values of all layers in one array each, because one operation then writes a block."""

    key: Float[Array, "layers batch capacity kv_heads head_dim"]
    value: Float[Array, "layers batch capacity kv_heads head_dim"]

    @classmethod
    def of(cls, pairs: Sequence[KeyValue]) -> Self:
        """The cache of one (keys, values) pair a layer."""
        return cls(*(jnp.stack(side) for side in zip(*pairs, strict=True)))


@jax.custom_vjp
def lookup(table: Float[Array, "vocab dim"], tokens: Int[Array, "*rows"]) -> Float[Array, "*rows dim"]:
    """table[tokens]. Its gradient is a matrix product, because scattering many rows onto one (MASK's) would serialise."""
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

    `attention`: "block" (block-causal), "bidirectional" or "causal". None is the family's denoising pattern: bidirectional if blocks start
    at the prompt's end, else block-causal.
    """
    pattern = attention or ("bidirectional" if model.block_origin == "prompt" else "block")
    hidden, _ = prefill(params, tokens, model, pattern, model.block_size)
    out = logits(params, hidden)
    return jnp.concatenate([out[:, :1], out[:, :-1]], axis=1) if model.shift else out


def cast(params: Params, dtype: Any) -> Params:
    """The same parameters in another dtype."""
    return jax.tree.map(lambda x: x.astype(dtype), params)
