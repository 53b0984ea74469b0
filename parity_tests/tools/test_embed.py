"""The tiny model inside a larger shape is the same function, and its padded ids never matter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specfold_jax as sf
from benchmarks.common.shapes import SHAPES, Shape, embed
from specfold_jax.models.checkpoint import read_config, resolve_folder
from specfold_jax.models.families import model_config

TOKENS = jnp.asarray(np.random.default_rng(3).integers(4, 1536, (1, 40)), jnp.int32)
SPARSE = Shape(layers=5, dim=384, heads=10, kv_heads=2, head_dim=128, ffn_dim=1056, vocab=1600)
REPEATED = Shape(layers=2, dim=384, heads=8, kv_heads=4, head_dim=64, ffn_dim=1024, vocab=1536)
forward = jax.jit(sf.forward)


@pytest.fixture(scope="module")
def tiny():
    model, params = sf.load("tiny", dtype="float32")
    return dataclasses.replace(model, layers=2), params | {"layers": params["layers"][:2]}


@pytest.mark.parametrize("shape", [SPARSE, REPEATED], ids=["padded everywhere", "key-value head repeated"])
def test_same_logits(tiny, shape):
    model, params = tiny
    large, padded = embed(params, model, shape, jnp.float32)
    expected = np.asarray(forward(params, TOKENS, model))
    got = np.asarray(forward(padded, TOKENS, large))
    np.testing.assert_allclose(got[..., : model.vocab], expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    assert np.all(got[..., model.vocab :] < expected.min() - 1000)


def test_shape_too_small(tiny):
    model, params = tiny
    with pytest.raises(ValueError, match="ffn_dim=512 below 1024"):
        embed(params, model, SPARSE._replace(ffn_dim=512), jnp.float32)
    with pytest.raises(ValueError, match="spare dimension"):
        embed(params, model, SPARSE._replace(dim=320), jnp.float32)


def test_named_shapes_hold_the_tiny_model():
    model = model_config(read_config(resolve_folder("tiny")))
    for shape in filter(None, SHAPES.values()):
        group = shape.heads // shape.kv_heads
        assert -(-model.heads // group) <= shape.kv_heads
        assert all(size >= getattr(model, name) for name, size in shape._asdict().items())
