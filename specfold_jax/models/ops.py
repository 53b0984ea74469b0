"""The reference operations: short, plain `jnp`, fp32 where it matters. Every kernel answers to these.

Weights are `[out, in]`, as checkpoints hold them. Activations keep their dtype (bf16 or fp32). Norms, softmax, residual
comparisons and accumulators are fp32.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specfold_jax.config import ModelConfig


def rms_norm(x: Float[Array, "*rows dim"], weight: Float[Array, " dim"], eps: float) -> Float[Array, "*rows dim"]:
    """x / rms(x) * weight, statistics in fp32 (arXiv 1910.07467)."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight


@jax.custom_vjp
def linear(x: Float[Array, "*rows in"], weight: Float[Array, "out in"]) -> Float[Array, "*rows out"]:
    """x @ weight.T, accumulated in fp32 and rounded to x's dtype. Gradients multiply in that dtype too."""
    out = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return out.astype(x.dtype)


def _linear_forward(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return linear(x, weight), (x, weight)


def _linear_backward(operands: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, weight = operands
    rows = tuple(range(x.ndim - 1))
    to_x = lax.dot_general(cotangent, weight, (((x.ndim - 1,), (0,)), ((), ())))
    return to_x, lax.dot_general(cotangent, x, ((rows, rows), ((), ())))


linear.defvjp(_linear_forward, _linear_backward)


def rotate(
    x: Float[Array, "*rows heads head_dim"], positions: Int[Array, "*rows"], model: ModelConfig
) -> Float[Array, "*rows heads head_dim"]:
    """Rotary position embedding, half-split layout, angles in fp32 (arXiv 2104.09864)."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(model.inv_freq, jnp.float32)
    cos, sin = (f(angles)[..., None, :] * jnp.float32(model.rope_scale) for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def query_scale(positions: Int[Array, "*rows"], model: ModelConfig) -> Float[Array, "*rows"]:
    """Llama-4's scale of the queries by position: 1 + beta ln(1 + floor(position / original length))."""
    return 1 + model.query_scale_beta * jnp.log1p((positions // model.query_scale_length).astype(jnp.float32))


class Segment(NamedTuple):
    """Keys and values that queries may attend to.

    Attributes:
        key, value: [batch, branch, key, kv_heads, head_dim], or [batch, key, kv_heads, head_dim] if all branches share them.
        mask: bool, broadcast to [batch, branch, query, key].
    """

    key: Array
    value: Array
    mask: Bool[Array, "..."]


def attention(
    q: Float[Array, "batch branch query heads head_dim"], segments: Sequence[Segment]
) -> Float[Array, "batch branch query heads head_dim"]:
    """Softmax attention over the union of the segments, with grouped key-value heads.

    The same as attending to each segment and merging by log-sum-exp. A query that may see nothing gets zeros.
    """
    batch, branch, length, heads, head_dim = q.shape
    kv_heads = segments[0].key.shape[-2]
    grouped = q.reshape(batch, branch, length, kv_heads, heads // kv_heads, head_dim)
    scale = jnp.float32(head_dim**-0.5)
    scores = []
    for segment in segments:
        keys = "bskd" if segment.key.ndim == 4 else "bnskd"
        score = jnp.einsum(f"bnqkgd,{keys}->bnkgqs", grouped, segment.key, preferred_element_type=jnp.float32) * scale
        mask = jnp.broadcast_to(segment.mask, (batch, branch, length, score.shape[-1]))[:, :, None, None]
        scores.append(jnp.where(mask, score, -jnp.inf))
    top = jnp.max(jnp.stack([jnp.max(s, axis=-1) for s in scores]), axis=0)[..., None]
    top = jnp.where(jnp.isfinite(top), top, 0)
    weights = [jnp.exp(s - top) for s in scores]
    total = sum(jnp.sum(w, axis=-1) for w in weights)
    out = jnp.zeros(grouped.shape, jnp.float32)
    for segment, weight in zip(segments, weights, strict=True):
        values = "bskd" if segment.value.ndim == 4 else "bnskd"
        weight = weight.astype(segment.value.dtype)
        out += jnp.einsum(f"bnkgqs,{values}->bnqkgd", weight, segment.value, preferred_element_type=jnp.float32)
    total = jnp.moveaxis(total, -1, 2)[..., None]
    return (out / jnp.where(total > 0, total, 1)).reshape(q.shape).astype(q.dtype)


def silu_pair(gate_up: Float[Array, "*rows two_hidden"]) -> Float[Array, "*rows hidden"]:
    """silu(gate) * up of a fused projection (gate rows first)."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate.astype(jnp.float32)).astype(up.dtype) * up
