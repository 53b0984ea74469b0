"""What may be swept without compiling again, and what may be passed in."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specfold_jax as sf
from parity_tests.harness import laws
from parity_tests.harness.checkpoints import Ragged
from parity_tests.harness.laws import FAST, GRAPHS, random_graph, specfold, spiffy, vanilla
from specfold_jax.models import noise

GRAPH, FOLD = GRAPHS["chain and second tokens"], sf.FoldConfig(tau=0.1, guard=0.5)
ROWS = [0, 3]
"""A prompt of one token and one of two blocks and a token: what is compiled runs often here, and two rows run in a quarter of the time."""
SEEDS = laws.SEEDS[ROWS]


def config(threshold: float = 0.9, temperature: float = 0.0, **changes) -> sf.DecodeConfig:
    """As for all rows, for these."""
    return laws.config(threshold, temperature, **({"seed": SEEDS} | changes))


@pytest.fixture(scope="module")
def ragged(ragged) -> Ragged:
    """The same prompts, these rows of them."""
    return Ragged(*(x[ROWS] for x in ragged))


class Compilations:
    """Counts compilations while it is entered."""

    def __enter__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)
        return self

    def _heard(self, name: str, *_, **__) -> None:
        self.count += name == "/jax/core/compile/backend_compile_duration"

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._heard)


def test_the_counter_counts():
    with Compilations() as compilations:
        jax.jit(lambda x: x * 3 + 1)(np.float32(2))
    assert compilations.count >= 1


SWEEPS = {
    "tau": [({}, {"tau": tau}, GRAPH) for tau in (0.0, 0.05, np.float32(0.3), float("inf"), 1)],
    "guard": [({}, {"guard": guard}, GRAPH) for guard in (0.0, 0.5, float("inf"), np.float64(2.5), 1)],
    "threshold": [({"threshold": threshold}, {}, GRAPH) for threshold in (0, 0.5, np.float32(0.9), 1.0)],
    "temperature": [({"temperature": temperature}, {}, GRAPH) for temperature in (1, 0.7, np.float64(2.5), np.float32(1e-3))],
    "no temperature": [({"temperature": zero}, {}, GRAPH) for zero in (0, 0.0, np.float32(0), jnp.zeros(()))],
    "seed": [({"seed": SEEDS + shift}, {}, GRAPH) for shift in (0, 1)],
    "graph": [({}, {}, graph) for graph in (*GRAPHS.values(), random_graph(5))],
}


@pytest.mark.parametrize("name", SWEEPS)
def test_sweeps_share_one_compilation(name, fast, ragged):
    """`jax.jit` of `sf.specfold_decode`, with no static arguments, compiles once whatever is swept."""
    first = {"temperature": SWEEPS[name][0][0].get("temperature", 0.0)}
    specfold(fast.params, *ragged, fast.model, config(**first), GRAPH, FOLD)  # other tests may have compiled it before
    size = specfold._cache_size()
    with Compilations() as compilations:
        for decode, fold, graph in SWEEPS[name]:
            out = specfold(fast.params, *ragged, fast.model, config(**decode), graph, dataclasses.replace(FOLD, **fold))
            assert not np.asarray(out.stats.status).any()
    assert specfold._cache_size() == size
    assert compilations.count == 0


@pytest.mark.parametrize("value", [jnp.asarray(0.5), jnp.asarray(1), jnp.asarray(0.5, jnp.bfloat16)], ids=str)
def test_arrays_are_stored_like_other_numbers(value):
    """With their field's own dtype, which is strong, and on the device."""
    given, plain = config(threshold=value, temperature=value), config(threshold=1.0, temperature=1.0)
    assert [jax.typeof(x) for x in jax.tree.leaves(given)] == [jax.typeof(x) for x in jax.tree.leaves(plain)]
    assert isinstance(given.temperature, jax.Array)


ZEROS = (0, 0.0, -0.0, np.float32(0), np.zeros(()), np.int64(0), jnp.zeros(()), jnp.int32(0))


@pytest.mark.parametrize("zero", ZEROS, ids=lambda zero: f"{type(zero).__name__} {zero}")
def test_a_temperature_of_zero_is_part_of_the_structure(zero):
    greedy, sampled = config(temperature=zero), config(temperature=0.7)
    assert greedy.greedy is True
    assert sampled.greedy is False
    leaves, structure = jax.tree.flatten(greedy)
    assert structure == jax.tree.structure(config())
    assert structure != jax.tree.structure(sampled)
    assert len(leaves) == len(jax.tree.leaves(sampled)) - 1
    again = jax.tree.unflatten(structure, leaves)
    assert again.greedy
    assert type(again.temperature) is np.float32
    assert dataclasses.replace(sampled, temperature=zero).greedy
    assert not dataclasses.replace(greedy, temperature=0.7).greedy
    assert jax.tree.map(jnp.asarray, greedy).greedy
    assert jax.jit(lambda x: x)(greedy).greedy


def program(checkpoint, ragged, temperature: float) -> str:
    """All of a decode's operations. Unpacked, because packing chooses among capacities."""
    arguments = (checkpoint.params, *ragged, checkpoint.model, config(temperature=temperature, pack=False), GRAPH, FOLD)
    return str(jax.make_jaxpr(sf.specfold_decode)(*arguments))


def test_a_greedy_program_draws_nothing(small, ragged):
    """No noise, and no branch for it; a sampled one, which has both, shows that they would be seen."""
    greedy, sampled = (program(small, ragged, temperature) for temperature in (0.0, 1.0))
    for sign in ("cond[", str(noise._PARITY)):
        assert sign not in greedy
        assert sign in sampled


def test_a_traced_temperature_may_be_zero(fast, ragged):
    """One program for all temperatures, whose results are those of the two."""

    def of_any(temperature):
        return sf.specfold_decode(fast.params, *ragged, fast.model, config(temperature=temperature), GRAPH, FOLD)

    of_any = jax.jit(of_any, compiler_options=FAST)
    for temperature in (0.0, 1.0):
        got = of_any(np.float32(temperature))
        want = specfold(fast.params, *ragged, fast.model, config(temperature=temperature), GRAPH, FOLD)
        jax.tree.map(np.testing.assert_array_equal, got, want)
    assert of_any._cache_size() == 1


def test_a_fresh_jit_compiles_once(fast, ragged):
    """The same, counted from nothing."""

    def fresh(params, prompts, lengths, model, decode, graph):
        return sf.spiffy_decode(params, prompts, lengths, model, decode, graph)

    jitted = jax.jit(fresh, compiler_options=FAST)
    for threshold in (0.5, 0.9):
        for graph in list(GRAPHS.values())[:2]:
            jitted(fast.params, *ragged, fast.model, config(threshold), graph)
    assert jitted._cache_size() == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_numpy_and_jax_inputs_are_alike(fast, ragged, temperature):
    arguments = (fast.params, *ragged, fast.model, config(temperature=temperature), GRAPH, FOLD)
    on_host = jax.tree.map(np.asarray, arguments)
    on_device = jax.tree.map(jnp.asarray, arguments)
    want = specfold(*arguments)
    with Compilations() as compilations:
        for same in (on_host, on_device):
            for got, expected in zip(jax.tree.leaves(specfold(*same)), jax.tree.leaves(want), strict=True):
                np.testing.assert_array_equal(got, expected)
    assert compilations.count == 0


def test_weakly_typed_arrays_compile_nothing(fast, ragged):
    """`jnp.asarray` of a Python number: the first of a kind compiles its conversion, which is not part of the decode."""
    weak = config(jnp.asarray(0.9), temperature=jnp.asarray(0.8)), dataclasses.replace(FOLD, tau=jnp.asarray(0.2), guard=jnp.asarray(0.5))
    specfold(fast.params, *ragged, fast.model, config(temperature=1.0), GRAPH, FOLD)
    with Compilations() as compilations:
        specfold(fast.params, *ragged, fast.model, weak[0], GRAPH, weak[1])
    assert compilations.count == 0


@pytest.mark.parametrize("dtype", [np.int64, np.uint16])
def test_other_integer_dtypes_are_accepted(dtype, fast, ragged):
    inside = np.arange(40) < ragged.lengths[:, None]
    prompts = np.where(inside, ragged.tokens, 0)
    want = vanilla(fast.params, prompts, ragged.lengths, fast.model, config())
    got = vanilla(fast.params, prompts.astype(dtype), ragged.lengths.astype(dtype), fast.model, config())
    np.testing.assert_array_equal(got.tokens, want.tokens)
    assert got.tokens.dtype == got.lengths.dtype == jnp.int32


def test_configurations_are_pytrees_whose_statics_are_hashable():
    for value in (config(), FOLD, GRAPH):
        leaves, structure = jax.tree.flatten(value)
        assert leaves
        hash(structure)
        again = jax.tree.unflatten(structure, leaves)
        assert jax.tree.structure(again) == structure
    assert jax.tree.structure(config(0.5)) == jax.tree.structure(config(0.9))
    assert jax.tree.structure(config(max_new_tokens=3)) != jax.tree.structure(config())


def test_outputs_have_the_documented_shapes_and_dtypes(fast, ragged):
    """And bfloat16 parameters run: tokens may differ from float32's, shapes and counts may not."""
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), fast.params)
    for params in (fast.params, half):
        out = spiffy(params, *ragged, fast.model, config(), GRAPH)
        assert out.tokens.shape == (2, 64)
        assert {x.dtype for x in jax.tree.leaves(out)} == {jnp.dtype("int32")}
        assert out.stats.computed_rows.shape == (2, 2, 2)
        lengths = np.asarray(out.lengths)
        tokens = np.asarray(out.tokens)
        inside = np.arange(64) < lengths[:, None]
        prompt = np.arange(40) < ragged.lengths[:, None]
        np.testing.assert_array_equal(tokens[:, :40][prompt], ragged.tokens[prompt])
        assert (tokens[~inside] == fast.model.pad_id).all()
        assert (tokens[inside] != fast.model.mask_id).all()
        assert ((lengths > ragged.lengths) & (lengths <= ragged.lengths + 24)).all()
        np.testing.assert_array_equal(out.stats.checks + out.stats.commits, out.stats.nfe)
        np.testing.assert_array_equal(out.stats.prefills, ragged.lengths >= 16)
