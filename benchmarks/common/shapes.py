"""The tiny trained model inside a larger model's shape: the same function at the larger model's cost.

Acceptance and folding are then a trained model's, while every pass reads and multiplies what the large shape does. Exact but for rounding:

- Width is padded with zeros. RMSNorm over DIM instead of dim values is the same function with its weight times sqrt(dim / DIM) and its
  epsilon times dim / DIM; the ratio is no power of two, so weights in bfloat16 are rounded once more than the tiny model's.
- head_dim is padded inside each half, as the rotary embedding pairs lane i of the first half with lane i of the second. The softmax
  scale's sqrt(new / old) goes into the query's weight and bias.
- A query head stays in the group of its key-value head; where groups are smaller than the tiny model's, the key-value head is repeated.
- Layers are spread evenly, each at the end of its stretch; the others' output projections are zero. A filler's input is then that of the
  trained layer after it, and so is what a gate in front of it decides: recompute ratios are the tiny model's, layer by layer.
- The head is untied. One spare dimension of the residual stream holds a constant, too small to move a norm, which the final norm
  enlarges and the padded ids' rows turn into logits far below all others: a padded id never wins, nor weighs in a softmax.

Padding is zeros where it may be anything. A GPU multiplying zeros may draw less power, and so clock higher, than on random weights.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from specfold_jax.config import ModelConfig
from specfold_jax.models.parameters import shapes
from specfold_jax.models.transformer import Params, head_weight

SPARE = 2.0**-20
"""The constant in the spare dimension; the final norm's weight and the padded rows hold its inverse. Exact in bfloat16."""


class Shape(NamedTuple):
    """A model's sizes."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab: int


SHAPES: dict[str, Shape | None] = {
    "tiny": None,
    "1.5b": Shape(28, 1536, 12, 2, 128, 8960, 151936),
    "3b": Shape(36, 2048, 16, 2, 128, 11008, 151936),
    "7b": Shape(28, 3584, 28, 4, 128, 18944, 152064),
    "8b": Shape(34, 4096, 32, 8, 128, 14336, 131072),
    "14b": Shape(40, 5120, 32, 8, 128, 16384, 131072),
}
"""Qwen2.5's sizes (Fast-dLLM v2 1.5B and 7B), and Nemotron-Labs-Diffusion's 8B and 14B. None: the model as it is."""


class _Places(NamedTuple):
    """Where rows of the tiny model go: of the fused projection (query; key and value), and columns of the output projection."""

    query: np.ndarray
    key_value: np.ndarray
    key_value_from: np.ndarray
    layers: list[int]


def embed(params: Params, model: ModelConfig, shape: Shape, dtype: Any) -> tuple[ModelConfig, Params]:
    """The model in a larger shape, parameters of `dtype` on JAX's default device; best given float32 parameters.

    Raises ValueError if the shape is too small anywhere, NotImplementedError for a model with q/k norm (its mean would change).
    """
    if model.qk_norm:
        raise NotImplementedError("a model with q/k norm cannot be padded in head_dim; embed one without")
    _require_room(model, shape)
    large = replace(
        model, tied=False, norm_eps=model.norm_eps * model.dim / shape.dim, inv_freq=_frequencies(model, shape), **shape._asdict()
    )
    places, wanted, shrink = _places(model, large), shapes(large), math.sqrt(model.dim / shape.dim)

    def zeros(name: str) -> Array:
        return jnp.zeros(wanted["layers"][0][name], dtype)

    def padded(name: str, x: Array, *where: Any) -> Array:
        return zeros(name).at[where].set(x.astype(dtype))

    def pad_layer(layer: Params) -> Params:
        inside, hidden = slice(model.dim), model.ffn_dim
        gate, up = layer["gate_up"][:hidden], layer["gate_up"][hidden:]
        out = {
            "attn_norm": padded("attn_norm", layer["attn_norm"] * shrink, inside),
            "qkv": _pad_qkv(zeros("qkv"), layer["qkv"], places, model, large),
            "o": padded("o", layer["o"], inside, places.query),
            "ffn_norm": padded("ffn_norm", layer["ffn_norm"] * shrink, inside),
            "gate_up": padded("gate_up", gate, slice(hidden), inside)
            .at[large.ffn_dim : large.ffn_dim + hidden, inside]
            .set(up.astype(dtype)),
            "down": padded("down", layer["down"], inside, slice(hidden)),
        }
        return out | ({"qkv_bias": _pad_qkv(zeros("qkv_bias"), layer["qkv_bias"], places, model, large)} if model.qkv_bias else {})

    trained = dict(zip(places.layers, params["layers"], strict=True))
    table = jnp.zeros(wanted["embed"], dtype).at[: model.vocab, : model.dim].set(params["embed"].astype(dtype))
    norm = jnp.zeros(wanted["norm"], dtype).at[: model.dim].set((params["norm"] * shrink).astype(dtype))
    head = jnp.zeros(wanted["head"], dtype).at[: model.vocab, : model.dim].set(head_weight(params).astype(dtype))
    if large.vocab > model.vocab:
        table = table.at[: model.vocab, model.dim].set(SPARE)
        norm = norm.at[model.dim].set(1 / SPARE)
        head = head.at[model.vocab :, model.dim].set(-1 / SPARE)
    layers = [pad_layer(trained[i]) if i in trained else {name: zeros(name) for name in wanted["layers"][0]} for i in range(large.layers)]
    return large, {"embed": table, "layers": layers, "norm": norm, "head": head}


def _require_room(model: ModelConfig, shape: Shape) -> None:
    small = [f"{name}={size} below {getattr(model, name)}" for name, size in shape._asdict().items() if size < getattr(model, name)]
    if small:
        raise ValueError(f"the shape must hold the model, but has {', '.join(small)}")
    if shape.vocab > model.vocab and shape.dim == model.dim:
        raise ValueError(f"a vocabulary larger than {model.vocab} needs a spare dimension: dim must be above {model.dim}")
    if shape.heads % shape.kv_heads or shape.head_dim % 2:
        raise ValueError(f"kv_heads={shape.kv_heads} must divide heads={shape.heads}, and head_dim={shape.head_dim} be even")
    if (needed := model.kv_heads * _copies(model, shape)) > shape.kv_heads:
        raise ValueError(f"kv_heads={shape.kv_heads} with {shape.heads} heads must be at least {needed}")


def _copies(model: ModelConfig, shape: Shape | ModelConfig) -> int:
    """Into how many groups of the large shape one group of heads goes."""
    return -(-(model.heads // model.kv_heads) // (shape.heads // shape.kv_heads))


def _frequencies(model: ModelConfig, shape: Shape) -> tuple[float, ...]:
    """Padded lanes hold zeros, which no rotation moves."""
    return model.inv_freq + (0.0,) * ((shape.head_dim - model.head_dim) // 2)


def _places(model: ModelConfig, large: ModelConfig) -> _Places:
    half, large_half = model.head_dim // 2, large.head_dim // 2
    lanes = np.concatenate([np.arange(half), large_half + np.arange(half)])
    group, large_group, copies = model.heads // model.kv_heads, large.heads // large.kv_heads, _copies(model, large)
    kv_head, member = np.divmod(np.arange(model.heads), group)
    head = (kv_head * copies + member // large_group) * large_group + member % large_group
    source = np.repeat(np.arange(model.kv_heads), copies)
    return _Places(
        query=(head[:, None] * large.head_dim + lanes).ravel(),
        key_value=(np.arange(len(source))[:, None] * large.head_dim + lanes).ravel(),
        key_value_from=(source[:, None] * model.head_dim + np.arange(model.head_dim)).ravel(),
        layers=[(i + 1) * large.layers // model.layers - 1 for i in range(model.layers)],
    )


def _pad_qkv(out: Array, x: Array, places: _Places, model: ModelConfig, large: ModelConfig) -> Array:
    """The fused projection's weight [rows, dim] or bias [rows], written into zeros."""
    tail = (slice(model.dim),) * (x.ndim - 1)
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    large_queries, large_keys = large.heads * large.head_dim, large.kv_heads * large.head_dim
    out = out.at[(places.query, *tail)].set((x[:queries] * math.sqrt(large.head_dim / model.head_dim)).astype(out.dtype))
    for number in range(2):  # keys, then values
        rows = x[queries + number * keys + places.key_value_from]
        out = out.at[(large_queries + number * large_keys + places.key_value, *tail)].set(rows.astype(out.dtype))
    return out
