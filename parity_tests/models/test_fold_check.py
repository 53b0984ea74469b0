"""Folding inside a check: against the slow reading of the algorithm, and the laws that make it what it is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specfold_jax as sf
from parity_tests.harness import slow_fold
from parity_tests.harness.branches import BATCH, BLOCK, branches_of, cache_of
from specfold_jax.models import fold as folding
from specfold_jax.models.check import Checked, check
from specfold_jax.models.transformer import Cache

INF = float("inf")
checked = jax.jit(check, static_argnames="pack", compiler_options={"xla_backend_optimization_level": 0})
OPTIONS = {
    "defaults": {},
    "one gate": {"gates": 1},
    "source": {"reference": "source"},
    "no correction": {"correction": False},
    "not forced": {"force_revealed": False},
    "ffn": {"scope": "ffn"},
}


def run(checkpoint, fold, pack=True, context=False) -> Checked:
    _, model, params = checkpoint
    branches = branches_of(model, context)
    return checked(params, branches, cache_of(model), branches.start, model, fold, pack=pack)


def against_slow(checkpoint, fold, context=False) -> None:
    _, model, params = checkpoint
    branches = jax.tree.map(np.asarray, branches_of(model, context))
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    cache = jax.tree.map(lambda x: np.asarray(x, np.float64), cache_of(model))
    out = run(checkpoint, fold, context=context)
    for row in range(BATCH):
        start, valid, parent = int(branches.start[row]), branches.valid[row], branches.parent[row]
        behind = branches.context[row] if context else np.full(7, -1)
        prefix = [(k[row, :start], v[row, :start]) for k, v in zip(*cache, strict=True)]
        want = slow_fold.check(wide, branches.tokens[row], valid, parent, start, prefix, branches.causal[row], behind, model, fold)
        assert want.closest > 1e-3  # else float32 may decide otherwise, and the comparison says nothing
        np.testing.assert_allclose(out.hidden[row][valid], want.hidden[valid], rtol=0, atol=1e-4)
        for got, pair in zip(out.kv, want.kv, strict=True):
            for g, w in zip(got, pair, strict=True):
                np.testing.assert_allclose(g[row][valid], w[valid], rtol=0, atol=1e-4)
        np.testing.assert_array_equal(out.computed_rows[row], want.computed_rows)
        np.testing.assert_array_equal(out.folded[row], want.folded)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("tau", [0.07, 0.3, INF])
def test_every_option_is_the_definition(name, tau, checkpoints):
    against_slow(checkpoints["fast_dllm_v2"], sf.FoldConfig(tau=tau, **OPTIONS[name]))


@pytest.mark.parametrize("tau", [None, 0.3])
def test_every_family_is_the_definition(small, tau):
    """Query scale, q/k norm and causal commits; without a fold, every row of a valid branch is computed."""
    against_slow(small, None if tau is None else sf.FoldConfig(tau=tau))


def test_a_next_block_is_evaluated_behind_its_context(checkpoints):
    against_slow(checkpoints["fast_dllm_v2"], sf.FoldConfig(tau=0.3), context=True)


@pytest.mark.parametrize("name", ["fast_dllm_v2", "sdar"])
def test_a_next_block_sees_its_context_as_if_it_were_committed(name, checkpoints):
    """The same tokens with the context's keys and values written into the cache give the same hidden states."""
    _, model, params = checkpoints[name]
    ahead = run(checkpoints[name], None, context=True)
    cache = jax.tree.map(
        lambda old, new: jnp.stack(
            [jnp.concatenate([old[row, :start], new[row, 3], jnp.zeros((2, *old.shape[2:]))])[:14] for row, start in ((0, 6), (1, 4))]
        ),
        tuple(zip(*cache_of(model), strict=True)),
        ahead.kv,
    )
    branches = branches_of(model, True)
    start = branches.start + BLOCK
    later = branches._replace(
        start=start, context=None, tokens=branches.tokens[:, 6:], valid=branches.valid[:, :1], parent=branches.parent[:, :1]
    )
    committed = checked(params, later, Cache.of(cache), start, model, None)
    np.testing.assert_allclose(ahead.hidden[:, 6], committed.hidden[:, 0], rtol=0, atol=2e-5)
    for got, want in zip(jax.tree.leaves(ahead.kv), jax.tree.leaves(committed.kv), strict=True):
        np.testing.assert_allclose(got[:, 6], want[:, 0], rtol=0, atol=2e-5)
    # The other branches are what they are without it.
    np.testing.assert_allclose(ahead.hidden[:, :4], run(checkpoints[name], None).hidden[:, :4], rtol=0, atol=2e-5)


def test_two_gates_without_tolerance_are_exact_and_one_is_not(small):
    """With one gate the feed-forward update is inherited from a source whose state after attention is another."""
    dense = run(small, None)
    valid = np.asarray(branches_of(small.model).valid)
    two, one = (np.asarray(run(small, sf.FoldConfig(tau=0.0, gates=gates)).hidden)[valid] for gates in (2, 1))
    want = np.asarray(dense.hidden)[valid]
    np.testing.assert_allclose(two, want, rtol=0, atol=2e-5)
    assert np.abs(one - want).max() > 0.01


def test_without_correction_the_gate_is_blind(checkpoints):
    """The draft's new token never reaches other positions: at any depth only the revealed rows are computed."""
    out = run(checkpoints["fast_dllm_v2"], sf.FoldConfig(tau=1e-6, correction=False))
    tokens, parent = (np.asarray(x) for x in branches_of(checkpoints["fast_dllm_v2"].model)[0:3:2])
    revealed = [(tokens[row, b] != tokens[row, parent[row, b]]).sum() for row, b in ((0, 1), (0, 2), (0, 3), (0, 4))]
    np.testing.assert_array_equal(out.computed_rows[0], np.full((3, 2), sum(revealed)))
    corrected = run(checkpoints["fast_dllm_v2"], sf.FoldConfig(tau=1e-6)).computed_rows[0]
    np.testing.assert_array_equal(corrected[0], [sum(revealed), 4 * BLOCK])  # the ripple comes with the first attention
    np.testing.assert_array_equal(corrected[1:], np.full((2, 2), 4 * BLOCK))


@pytest.mark.parametrize("name", OPTIONS)
def test_packing_changes_no_value(name, checkpoints):
    checkpoint = checkpoints["fast_dllm_v2"]
    fold = sf.FoldConfig(tau=0.3, **OPTIONS[name])
    valid = np.asarray(branches_of(checkpoint.model).valid)
    packed, dense = run(checkpoint, fold), run(checkpoint, fold, pack=False)
    np.testing.assert_allclose(np.asarray(packed.hidden)[valid], np.asarray(dense.hidden)[valid], rtol=0, atol=2e-5)
    np.testing.assert_array_equal(packed.computed_rows, dense.computed_rows)
    np.testing.assert_array_equal(packed.folded, dense.folded)


def test_rows_that_are_not_computed_are_never_read(small, monkeypatch):
    """With NaN in every row that packing leaves unspecified, nothing changes."""
    fold = sf.FoldConfig(tau=0.3)
    want = run(small, fold, pack=False)

    def poisoned(function, computed, *inputs):
        def spoil(y):
            return jnp.where(computed.reshape(computed.shape + (1,) * (y.ndim - 3)), y, jnp.nan)

        return jax.tree.map(spoil, function(*inputs))

    monkeypatch.setattr(folding, "packed", poisoned)
    branches = branches_of(small.model)
    poison = jax.jit(lambda *arguments: check(*arguments), compiler_options={"xla_backend_optimization_level": 0})
    got = poison(small.params, branches, cache_of(small.model), branches.start, small.model, fold)
    valid = np.asarray(branches.valid)
    np.testing.assert_array_equal(np.asarray(got.hidden)[valid], np.asarray(want.hidden)[valid])
    for a, b in zip(jax.tree.leaves(got.kv), jax.tree.leaves(want.kv), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[valid], np.asarray(b)[valid])
    np.testing.assert_array_equal(got.computed_rows, want.computed_rows)


def test_tau_infinity_computes_only_what_is_forced(checkpoints):
    out = run(checkpoints["fast_dllm_v2"], sf.FoldConfig(tau=INF, force_revealed=False))
    assert not np.asarray(out.computed_rows).any()
    np.testing.assert_array_equal(out.folded, [[False] + [True] * 4 + [False] * 2, [False] + [True] * 3 + [False] * 3])
    hidden = np.asarray(out.hidden)
    assert np.isfinite(hidden[0, :5]).all()
    forced = run(checkpoints["fast_dllm_v2"], sf.FoldConfig(tau=INF)).computed_rows
    np.testing.assert_array_equal(forced[0], np.full((3, 2), 1 + 1 + 5 + 1))


def test_the_main_branch_is_the_same_whatever_is_folded(small):
    want = run(small, None).hidden[:, 0]
    for tau in (0.0, 0.3, INF):
        np.testing.assert_allclose(run(small, sf.FoldConfig(tau=tau)).hidden[:, 0], want, rtol=0, atol=2e-5)


def test_bfloat16_folds(checkpoints):
    from specfold_jax.models.transformer import cast

    _, model, params = checkpoints["fast_dllm_v2"].first_layers(2)
    branches = branches_of(model)
    cache = cast(cache_of(dataclasses.replace(model)), jnp.bfloat16)
    out = checked(cast(params, jnp.bfloat16), branches, cache, branches.start, model, sf.FoldConfig(tau=0.1))
    assert out.hidden.dtype == out.kv[0][0].dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(out.hidden, np.float32)[np.asarray(branches.valid)]).all()
