"""Logits, hidden states, keys and values of the authors' code, for whole sequences and for blocks on a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specfold_jax as sf
from parity_tests.harness.golden_files import TOLERANCE, read
from specfold_jax.models import transformer
from specfold_jax.models.check import Branches, check
from specfold_jax.models.ops import query_scale
from specfold_jax.models.transformer import prefill

forward = jax.jit(sf.forward, static_argnames="attention")
prefilled = jax.jit(prefill, static_argnames=("pattern", "block_size"))
checked = jax.jit(check)
head = jax.jit(transformer.logits)


def close(got, want) -> None:
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=TOLERANCE)


def test_fast_dllm_v2_whole_sequences(checkpoints):
    _, model, params = checkpoints["fast_dllm_v2"]
    golden = read("fast_dllm_v2")
    close(forward(params, golden["full_ids"], model), golden["full_logits_shifted"])
    close(forward(params, golden["full_ids"], model, attention="block"), golden["full_logits_shifted"])
    hidden, _ = prefilled(params, golden["full_ids"], model, "block", 32)
    close(hidden, golden["full_last_hidden"])
    hidden, _ = prefilled(params, golden["full_ids_b3"], model, "block", 32)
    close(head(params, hidden)[:, -1], golden["full_logits_b3_last"])


def test_tied_embeddings(checkpoints):
    _, model, params = checkpoints["fast_dllm_v2/tied"]
    golden = read("fast_dllm_v2/tied")
    assert model.tied
    assert "head" not in params
    hidden, _ = prefilled(params, golden["ids"], model, "block", 32)
    close(head(params, hidden), golden["logits"])


def test_nemotron_whole_sequences(checkpoints):
    _, model, params = checkpoints["nld"]
    golden = read("nld")
    close(forward(params, golden["full_ids"], model), golden["bidirectional_logits"])
    close(forward(params, golden["full_ids"], model, attention="bidirectional"), golden["bidirectional_logits"])
    close(forward(params, golden["clean_ids"], model, attention="causal"), golden["causal_logits"])
    hidden, _ = prefilled(params, golden["clean_ids"], model, "causal", 32)
    close(hidden, golden["causal_last_hidden"])


@pytest.mark.parametrize("name", ["nld", "nld/yarn_quarter"])
def test_yarn_tables(name, checkpoints):
    model, golden = checkpoints[name].model, read(name)
    np.testing.assert_allclose(model.inv_freq, golden["rope_inv_freq"], rtol=1e-6)
    assert model.rope_scale == pytest.approx(float(golden["rope_attention_scaling"]), rel=1e-7)


def test_query_scale(checkpoints):
    model, golden = checkpoints["nld"].model, read("nld")
    scale = query_scale(jnp.arange(256, dtype=jnp.int32), model)
    np.testing.assert_allclose(scale, golden["llama4_query_scale"], rtol=1e-6)
    assert scale[31] == 1 < scale[32]


def test_yarn_with_a_factor_below_one(checkpoints):
    _, model, params = checkpoints["nld/yarn_quarter"]
    golden = read("nld/yarn_quarter")
    close(forward(params, golden["ids"], model, attention="causal"), golden["causal_logits"])


@pytest.mark.parametrize("block", [4, 32])
def test_sdar_whole_sequences(block, checkpoints):
    _, model, params = checkpoints["sdar"]
    golden = read("sdar")
    hidden, _ = prefilled(params, golden[f"b{block}_full_ids"], model, "block", block)
    close(hidden, golden[f"b{block}_full_last_hidden"])
    close(head(params, hidden), golden[f"b{block}_full_logits"])
    if block == model.block_size:
        close(forward(params, golden["b4_full_ids"], model), golden["b4_full_logits"])


@pytest.mark.parametrize(("name", "prefix", "block"), [("fast_dllm_v2", "", 32), ("nld", "", 32), ("sdar", "b4_", 4), ("sdar", "b32_", 32)])
def test_a_prefix_and_blocks_on_its_cache(name, prefix, block, checkpoints):
    """Prefill, a denoising check and a commit, the latter two also as rows and branches of one call and with a longer cache."""
    _, model, params = checkpoints[name]
    golden = read(name)
    full, clean = golden[f"{prefix}full_ids"], golden[f"{prefix}clean_ids"]
    start, pattern = full.shape[1] - block, "causal" if model.commit == "causal" else "block"
    hidden, cache = prefilled(params, full[:, :start], model, pattern, block)
    close(head(params, hidden), golden[f"{prefix}prefill_logits"])
    keys_and_values(zip(*cache, strict=True), golden[f"{prefix}prefill_kv"])

    junk = 5  # capacity beyond the prefix holds what must not be seen
    cache = jax.tree.map(lambda x: np.pad(np.repeat(x, 2, axis=1), ((0, 0), (0, 0), (0, junk), (0, 0), (0, 0)), constant_values=1e3), cache)
    canvas, commit = full[:, start:], clean[:, start:]
    branches = Branches(
        tokens=jnp.asarray(np.stack([[canvas[0], commit[0]], [commit[0], commit[0]]])),
        valid=jnp.ones((2, 2), bool),
        parent=jnp.zeros((2, 2), jnp.int32),
        start=jnp.full(2, start, jnp.int32),
        causal=jnp.array([False, model.commit == "causal"]),
    )
    out = checked(params, branches, cache, branches.start, model)
    close(head(params, out.hidden)[:1, 0], golden[f"{prefix}block_logits"])
    close(head(params, out.hidden)[1:, 0], golden[f"{prefix}commit_logits"])
    keys_and_values(jax.tree.map(lambda x: x[1:, 0], out.kv), golden[f"{prefix}commit_kv"])
    if model.commit == "block":  # a complete draft's keys and values serve as the commit
        keys_and_values(jax.tree.map(lambda x: x[:1, 1], out.kv), golden[f"{prefix}commit_kv"])
    assert not bool(out.folded.any())


def keys_and_values(cache, want: np.ndarray) -> None:
    """[layer, key|value, batch, kv_head, position, dim] against a cache of [batch, position, kv_head, dim] pairs."""
    got = np.stack([np.stack([np.asarray(x) for x in pair]) for pair in cache])
    close(got.swapaxes(3, 4), want)


def test_bfloat16_runs_and_gives_float32_logits(checkpoints):
    _, model, params = checkpoints["fast_dllm_v2"]
    golden = read("fast_dllm_v2")
    half = transformer.cast(params, jnp.bfloat16)
    out = forward(half, golden["full_ids"], model)
    assert out.dtype == jnp.float32
    error = np.asarray(out) - golden["full_logits_shifted"]
    assert np.sqrt(np.mean(error**2)) < 0.1 * np.sqrt(np.mean(golden["full_logits_shifted"] ** 2))
