"""The reference operations against NumPy in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specfold_jax.models import ops
from specfold_jax.models.ops import Segment

RNG = np.random.default_rng(5)


def normal(*shape) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def test_rms_norm():
    x, weight = normal(3, 5, 8), normal(8)
    want = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True) + 1e-3) * weight
    np.testing.assert_allclose(ops.rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-3), want, rtol=1e-5, atol=1e-6)
    assert np.all(np.asarray(ops.rms_norm(jnp.zeros((2, 8)), jnp.asarray(weight), 1e-6)) == 0)


def test_linear_accumulates_in_float32():
    """A sum that bfloat16 partial sums could not hold."""
    x = jnp.ones((2, 3, 1024), jnp.bfloat16)
    weight = jnp.ones((4, 1024), jnp.bfloat16).at[:, 0].set(0.5)
    out = ops.linear(x, weight)
    assert out.shape == (2, 3, 4)
    assert out.dtype == jnp.bfloat16
    assert np.all(np.asarray(out, np.float32) == 1024)
    x, weight = normal(2, 7), normal(3, 7)
    np.testing.assert_allclose(ops.linear(jnp.asarray(x), jnp.asarray(weight)), x @ weight.T, rtol=1e-5, atol=1e-6)


def test_rotate_turns_pairs_of_halves_and_keeps_relative_angles(checkpoints):
    model = dataclasses.replace(checkpoints["nld"].model, rope_scale=1.25)
    x, positions = normal(4, 2, model.head_dim), np.array([0, 1, 50, 100], np.int32)
    out = np.asarray(ops.rotate(jnp.asarray(x), jnp.asarray(positions), model))
    half = model.head_dim // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * positions[:, None, None] * np.array(model.inv_freq)) * model.rope_scale
    np.testing.assert_allclose(out, np.concatenate([turned.real, turned.imag], axis=-1), rtol=2e-5, atol=2e-5)


def naive(q: np.ndarray, segments: list[Segment]) -> np.ndarray:
    """Loops over everything, float64."""
    batch, branch, length, heads, head_dim = q.shape
    out = np.zeros(q.shape)
    for b, n, i, h in np.ndindex(batch, branch, length, heads):
        scores, values = [], []
        for key, value, mask in segments:
            mask = np.broadcast_to(mask, (batch, branch, length, key.shape[-3]))
            k, v = (np.asarray(x, np.float64)[b] if x.ndim == 4 else np.asarray(x, np.float64)[b, n] for x in (key, value))
            group = h // (heads // k.shape[1])
            for s in np.flatnonzero(mask[b, n, i]):
                scores.append(q[b, n, i, h].astype(np.float64) @ k[s, group] / np.sqrt(head_dim))
                values.append(v[s, group])
        if scores:
            weight = np.exp(np.array(scores) - max(scores))
            out[b, n, i, h] = weight @ np.array(values) / weight.sum()
    return out


@pytest.mark.parametrize("heads", [2, 6])
def test_attention_over_shared_and_own_segments(heads):
    """A ragged shared prefix and a branch's own keys; one row sees nothing of the prefix, one query sees nothing at all."""
    batch, branch, length, kv_heads, dim, prefix = 2, 3, 4, 2, 5, 7
    q = normal(batch, branch, length, heads, dim)
    own = np.tril(np.ones((length, length), bool))
    own[0] = False
    segments = [
        Segment(
            normal(batch, prefix, kv_heads, dim), normal(batch, prefix, kv_heads, dim), np.arange(prefix) < np.array([[[[0]]], [[[5]]]])
        ),
        Segment(normal(batch, branch, length, kv_heads, dim), normal(batch, branch, length, kv_heads, dim), own),
    ]
    out = jax.jit(ops.attention)(jnp.asarray(q), jax.tree.map(jnp.asarray, segments))
    np.testing.assert_allclose(out, naive(q, segments), rtol=1e-4, atol=1e-5)
    assert np.all(np.asarray(out)[0, :, 0] == 0)


def test_attention_does_not_overflow_and_ignores_what_is_masked():
    q = jnp.full((1, 1, 1, 1, 4), 300.0)
    key = jnp.stack([jnp.full((1, 1, 4), 300.0), jnp.full((1, 1, 4), 299.0), jnp.full((1, 1, 4), 1e30)], axis=1)
    value = jnp.array([[[[1.0] * 4], [[2.0] * 4], [[-1e30] * 4]]]).reshape(1, 3, 1, 4)
    out = ops.attention(q, [Segment(key.reshape(1, 3, 1, 4), value, jnp.array([True, True, False]))])
    np.testing.assert_array_equal(out, np.ones((1, 1, 1, 1, 4)))


def test_a_bfloat16_call_stays_bfloat16():
    q, k = jnp.ones((1, 2, 3, 2, 4), jnp.bfloat16), jnp.ones((1, 5, 1, 4), jnp.bfloat16)
    out = ops.attention(q, [Segment(k, k, jnp.ones((1, 1, 1, 5), bool))])
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(jnp.float32), np.ones(q.shape))


def test_silu_pair_takes_the_gate_first():
    x = normal(3, 8)
    want = x[:, :4] / (1 + np.exp(-x[:, :4])) * x[:, 4:]
    np.testing.assert_allclose(ops.silu_pair(jnp.asarray(x)), want, rtol=1e-5, atol=1e-6)
