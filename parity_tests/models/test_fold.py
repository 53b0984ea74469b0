"""The parts of folding: the residual test, sources, the gate, and packed evaluation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import specfold_jax as sf
from parity_tests.harness import slow_fold
from specfold_jax.models import fold
from specfold_jax.models.fold import Rows, buckets, packed, residual_exceeds, resolve

BRANCHES, BLOCK = 7, 4
INF = float("inf")
gate = jax.jit(fold.gate)
resolved = jax.jit(resolve)


@pytest.mark.parametrize(
    ("x", "reference", "tau", "exceeds"),
    [
        ([1.0, 0.0], [1.0, 0.0], 0.0, False),
        ([1.0, 1e-6], [1.0, 0.0], 0.0, True),
        ([0.0, 0.0], [0.0, 0.0], 0.0, False),  # 0/0 of the relative residual
        ([1e-20, 0.0], [0.0, 0.0], 10.0, False),  # squares to zero in float32
        ([1.0, 0.0], [0.0, 0.0], 10.0, True),
        ([2.0, 0.0], [1.0, 0.0], 1.0, False),  # equality folds
        ([2.0, 0.0], [1.0, 0.0], 0.999, True),
        ([1e6, 0.0], [1.0, 0.0], INF, False),
        ([np.nan, 0.0], [1.0, 0.0], INF, True),
        ([1.0, 0.0], [np.nan, 0.0], INF, True),
        ([1.0, 0.0], [0.0, 0.0], INF, True),  # inf * 0
    ],
)
def test_residual_test(x, reference, tau, exceeds):
    assert bool(residual_exceeds(jnp.float32(x), jnp.float32(reference), jnp.float32(tau))) == exceeds


def test_residual_test_is_taken_in_float32():
    """The squares of 300 such differences would stall a bfloat16 sum."""
    reference = jnp.ones(1024, jnp.bfloat16)
    x = reference.at[:].add(jnp.bfloat16(0.0625))
    assert bool(residual_exceeds(x, reference, jnp.float32(0.062)))
    assert not bool(residual_exceeds(x, reference, jnp.float32(0.063)))


@st.composite
def forests(draw) -> np.ndarray:
    """Parents before children; 0 is the main branch; a later branch may be a root of its own."""
    return np.array([0, *(draw(st.integers(0, b)) for b in range(1, BRANCHES))], np.int32)


def flags(*shape):
    size = int(np.prod(shape))
    return st.lists(st.booleans(), min_size=size, max_size=size).map(lambda bits: np.array(bits).reshape(shape))


@given(forests(), flags(BRANCHES, BLOCK))
def test_sources_end_at_the_branch_that_computed(parent, computed):
    computed |= (parent == np.arange(BRANCHES))[:, None]
    source = np.asarray(resolved(computed[None], parent[None]))[0]
    for b, i in np.ndindex(BRANCHES, BLOCK):
        at = b
        while not computed[at, i]:
            at = parent[at]
        assert source[b, i] == at


@pytest.mark.parametrize("branches", [1, 2, 3, 9, 17])
def test_a_chain_of_any_length_is_followed_to_its_root(branches):
    parent = np.maximum(np.arange(branches, dtype=np.int32) - 1, 0)
    computed = np.zeros((1, branches, 1), bool)
    computed[:, 0] = True
    assert not np.asarray(resolve(jnp.asarray(computed), jnp.asarray(parent[None]))).any()


@pytest.mark.parametrize("reference", ["parent", "source"])
@given(parent=forests(), revealed=flags(BRANCHES, BLOCK), valid=flags(BRANCHES), force=st.booleans(), seed=st.integers(0, 999))
def test_gate_is_the_definition(reference, parent, revealed, valid, force, seed):
    """Drifting chains, where the parent and the resolved source disagree."""
    rng = np.random.default_rng(seed)
    x = np.ones((BRANCHES, BLOCK, 3), np.float32)
    for b in range(1, BRANCHES):
        x[b] = x[parent[b]] + (rng.choice([0, 0.08, 0.12, 2.0], (BLOCK, 1)) * rng.uniform(0.9, 1.1, (BLOCK, 1))).astype(np.float32)
        valid[b] &= valid[parent[b]]  # as drafts descend from valid branches only
    config = sf.FoldConfig(tau=0.1, reference=reference, force_revealed=force)
    got = gate(x[None], parent[None], revealed[None], valid[None], config)
    computed, source, closest = slow_fold.gate(x.astype(np.float64), parent, revealed, valid, config)
    if closest < 1e-5:  # float32 may decide otherwise
        return
    np.testing.assert_array_equal(got.computed[0], computed)
    settled = np.array([[computed[s, i] for i, s in enumerate(row)] for row in source])  # an invalid root computes nothing
    np.testing.assert_array_equal(np.asarray(got.source[0])[settled], source[settled])


def test_reference_source_stops_drift_along_a_chain():
    """Each branch is 6 % from its parent; the third is too far from what it would inherit."""
    x = jnp.array([1.0, 1.06, 1.12, 1.19]).reshape(1, 4, 1, 1)
    parent, valid = jnp.array([[0, 0, 1, 2]], jnp.int32), jnp.ones((1, 4), bool)
    nothing = jnp.zeros((1, 4, 1), bool)
    by_parent = gate(x, parent, nothing, valid, sf.FoldConfig(tau=0.1, reference="parent"))
    by_source = gate(x, parent, nothing, valid, sf.FoldConfig(tau=0.1, reference="source"))
    assert by_parent.source[0, :, 0].tolist() == [0, 0, 0, 0]
    assert by_source.source[0, :, 0].tolist() == [0, 0, 2, 2]


def test_infinite_tau_computes_what_is_forced_and_nan():
    x = jnp.ones((1, 3, 4, 2)).at[0, 1, 2].set(50.0).at[0, 2, 3].set(jnp.nan)
    parent, valid = jnp.array([[0, 0, 1]], jnp.int32), jnp.ones((1, 3), bool)
    revealed = jnp.zeros((1, 3, 4), bool).at[0, 1, 0].set(True)
    computed = np.asarray(gate(x, parent, revealed, valid, sf.FoldConfig(tau=INF)).computed[0])
    np.testing.assert_array_equal(computed, [[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 1]])
    computed = np.asarray(gate(x, parent, revealed, valid, sf.FoldConfig(tau=INF, force_revealed=False)).computed[0])
    np.testing.assert_array_equal(computed, [[1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]])


def test_the_main_branch_is_never_folded_and_absent_branches_never_computed():
    x = jnp.zeros((2, 3, 4, 2))
    parent = jnp.zeros((2, 3), jnp.int32)
    valid = jnp.array([[True, True, False], [True, False, False]])
    out = gate(x, parent, jnp.ones((2, 3, 4), bool), valid, sf.FoldConfig(tau=INF))
    np.testing.assert_array_equal(out.computed[:, 0], np.ones((2, 4), bool))
    np.testing.assert_array_equal(np.asarray(out.computed).all(axis=2), valid)
    np.testing.assert_array_equal(out.source[~np.asarray(valid)], np.zeros((3, 4), np.int32))


def test_bucket_sizes():
    assert buckets(1) == (1,)
    assert buckets(32) == (32,)
    assert buckets(33) == (9, 17, 33)
    for rows in range(1, 300):
        sizes = buckets(rows)
        assert sizes[-1] == rows
        assert list(sizes) == sorted(set(sizes))


WEIGHT = np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32)


@functools.cache
def compiled(shape):
    """A packed product and a packed bit-exact function with two outputs, one of them of another dtype."""
    del shape

    def both(computed, x, y):
        product = packed(lambda x: x @ WEIGHT, computed, x)
        return product, packed(lambda x, y: {"scaled": x * 2 + y[..., None], "index": y.astype(jnp.int32)}, computed, x, y)

    return jax.jit(both)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 4, 4), (1, 3, 11), (2, 5, 4)])
def test_packed_rows_are_the_dense_rows_for_every_count(shape):
    """Every count from none to all, across the buckets' edges; rows that are not computed hold NaN, which must not spread."""
    rows, rng = int(np.prod(shape)), np.random.default_rng(0)
    for count in range(rows + 1):
        computed = np.zeros(rows, bool)
        computed[rng.permutation(rows)[:count]] = True
        computed = computed.reshape(shape)
        x = rng.normal(size=(*shape, 5)).astype(np.float32)
        y = rng.integers(0, 50, shape).astype(np.float32)
        product, out = compiled(shape)(computed, np.where(computed[..., None], x, np.nan), y)
        assert product.shape == (*shape, 6)
        np.testing.assert_allclose(np.asarray(product)[computed], (x @ WEIGHT)[computed], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(out["scaled"])[computed], (x * 2 + y[..., None])[computed])
        np.testing.assert_array_equal(np.asarray(out["index"])[computed], y[computed])


def test_packed_evaluates_the_smallest_bucket_that_holds_the_rows():
    """Seen from inside: the number of rows that the function is called with at run time."""
    sizes = []

    def watched(x):
        jax.debug.callback(lambda rows=x.shape[0]: sizes.append(rows))
        return x

    x = jnp.zeros((1, 4, 10, 1))
    run = jax.jit(lambda computed: packed(watched, computed, x))
    for count in (0, 10, 11, 20, 21, 40):
        jax.block_until_ready(run(jnp.arange(40).reshape(1, 4, 10) < count))
        jax.effects_barrier()
    assert sizes == [10, 10, 20, 20, 40, 40]


def test_rows_without_a_fold_are_all_computed_and_inherit_nothing():
    valid = jnp.array([[True, False]])
    rows = Rows(valid, jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 2, 3), bool), None, False)
    x = jnp.arange(6.0).reshape(1, 2, 3)
    everything = rows.before_attention(x[..., None])
    np.testing.assert_array_equal(everything.computed, [[[True] * 3, [False] * 3]])
    assert rows.inherit(x, everything) is x
    assert rows.before_ffn(x[..., None], everything) is everything
