"""A check may keep branches in any order, and leave what is not wanted unspecified: nobody who reads it may notice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specfold_jax as sf
from kernels_pallas.partition import Partition
from parity_tests.harness.laws import FAST, GRAPHS, config, specfold
from specfold_jax.backends.choice import XLA
from specfold_jax.diffusion import loop
from specfold_jax.diffusion.decoding import Decoding
from specfold_jax.evaluation import agreement
from specfold_jax.models.check import Checked
from specfold_jax.models.sampling import Ranked
from specfold_jax.running import stepping
from specfold_jax.tuning import gates
from specfold_jax.tuning.gates import record_gates

GRAPH = GRAPHS["everything at once"]


def backwards(checked: Checked) -> Checked:
    """The same, its branches in the opposite order."""
    number = checked.hidden[..., 0, 0].size

    def flip(x: jax.Array) -> jax.Array:
        return x.reshape(number, *x.shape[2:])[::-1].reshape(x.shape)

    entry = jnp.arange(number, dtype=jnp.int32)[::-1].reshape(checked.hidden.shape[:2])
    return checked._replace(hidden=flip(checked.hidden), kv=jax.tree.map(flip, checked.kv), entry=entry)


@pytest.fixture
def disordered(monkeypatch):
    """Checks keep their branches backwards; rows that are not wanted have NaN and the first token."""

    def poisoned(params, hidden, seed, position, step, wanted, *options):
        tokens, odds, gap = XLA.rank(params, hidden, seed, position, step, wanted, *options)
        return Ranked(jnp.where(wanted[..., None], tokens, 0), *(jnp.where(wanted, x, jnp.nan) for x in (odds, gap)))

    backend = XLA._replace(check=lambda *arguments: backwards(XLA.check(*arguments)), rank=poisoned)
    for module in (loop, agreement, gates):
        monkeypatch.setattr(module, "backend_of", lambda *_: backend)
    # What is jitted by name would be found compiled, and in order.
    for module, name in ((agreement, "margins"), (gates, "_gates")):
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name)))
    monkeypatch.setattr(stepping, "_step", jax.jit(lambda *arguments: loop.decode_step(*arguments)))


def decoded(run, model, params, ragged) -> list[np.ndarray]:
    """Tokens and counts of SpecFold, greedy and sampled."""
    found = [run(params, *ragged, model, config(temperature=t), GRAPH, sf.FoldConfig(tau=0.1)) for t in (0.0, 0.8)]
    return [np.asarray(x) for x in jax.tree.leaves(found)]


@pytest.fixture(scope="module")
def ordered(fast, ragged) -> list[np.ndarray]:
    """What decodes give without disorder."""
    return decoded(specfold, fast.model, fast.params, ragged)


def test_decodes_do_not_notice(fast, ragged, ordered, disordered):
    anew = jax.jit(lambda *arguments: sf.specfold_decode(*arguments), compiler_options=FAST)
    for one, other in zip(decoded(anew, fast.model, fast.params, ragged), ordered, strict=True):
        np.testing.assert_array_equal(one, other)


def looked_at(model, params, ragged) -> tuple[list, dict]:
    """Margins of vanilla's decisions, also of a single step a block; and what gates decide."""
    ids = [tokens[:length].tolist() for tokens, length in zip(*ragged, strict=True)][1:4]
    margins = [
        agreement.replay(params, *ragged, [1, 4], Decoding.of("vanilla", model, config(steps=steps)), margins_too=True) for steps in (1, 16)
    ]
    found = [visit.margin for visited in margins for row in visited.values() for visit in row]
    return found, record_gates(params, ids, Decoding(model, config(seed=0), GRAPH, sf.FoldConfig(tau=0.1)))


@pytest.fixture(scope="module")
def seen(fast, ragged) -> tuple[list, dict]:
    """What is seen without disorder."""
    return looked_at(fast.model, fast.params, ragged)


def test_margins_and_gates_do_not_notice(fast, ragged, seen, disordered):
    margins, recorded = looked_at(fast.model, fast.params, ragged)
    assert margins == seen[0]
    assert all(margin is None or margin >= 0 for margin in margins)
    assert recorded == seen[1]


def test_partition():
    partition = Partition.of(jnp.asarray([True, False, True, True, False]))
    x = jnp.arange(10).reshape(5, 2)
    np.testing.assert_array_equal(partition.apply(x)[:, 0], [0, 4, 6, 2, 8])
    np.testing.assert_array_equal(partition.invert(partition.apply(x)), x)
    assert partition.count.tolist() == [3]
