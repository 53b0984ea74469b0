"""Bad input: on the host a ValueError that names the value and the rule; under jit a row that is not decoded, and says why."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specfold_jax as sf
from conftest import Ragged
from specfold_jax.validate import STATUS
from test_lossless import EXACT, FAST, GRAPHS, config, specfold, spiffy, vanilla

GRAPH = GRAPHS["chain and second tokens"]
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def prompts(ragged) -> Ragged:
    return Ragged(ragged.tokens.copy(), ragged.lengths.copy())


def test_good_input_passes_and_padding_may_hold_anything(fast, prompts):
    sf.validate(fast.params, *prompts, fast.model, config(), GRAPH, EXACT)
    assert (prompts.tokens < 0).any()


# Row 3 has length 33: (what to write where, what the message says)
VALUES = {
    "an empty prompt": (("lengths", 3, 0), r"row 3: lengths\[3\]=0, a prompt needs at least one token"),
    "a negative length": (("lengths", 3, -4), r"row 3: lengths\[3\]=-4"),
    "a length beyond capacity": (("lengths", 3, 41), r"row 3: lengths\[3\]=41 is beyond the capacity of 40"),
    "a negative id": (("tokens", (3, 32), -1), r"row 3: token id -1 at 32 lies outside the vocabulary of 320"),
    "an id beyond the vocabulary": (("tokens", (3, 0), 320), r"row 3: token id 320 at 0 lies outside the vocabulary of 320"),
    "the mask token": (("tokens", (3, 7), 310), r"row 3: the mask token 310 at 7 cannot be part of a prompt"),
}
CODES = [1, 1, 2, 3, 3, 4]


@pytest.mark.parametrize("name", VALUES)
def test_bad_prompts_are_named_before_anything_runs(name, fast, prompts, monkeypatch):
    (field, where, value), message = VALUES[name]
    getattr(prompts, field)[where] = value
    monkeypatch.setattr("specfold_jax.decode.begin", lambda *_: pytest.fail("ran"))
    for call in (
        lambda: sf.validate(fast.params, *prompts, fast.model, config()),
        lambda: sf.vanilla_decode(fast.params, *prompts, fast.model, config()),
        lambda: sf.spiffy_decode(fast.params, *map(jnp.asarray, prompts), fast.model, config(), GRAPH),
        lambda: sf.specfold_decode(fast.params, *prompts, fast.model, config(), GRAPH, EXACT),
        lambda: sf.calibrate(fast.params, *prompts, fast.model, config()),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_under_jit_a_bad_row_is_left_alone_and_the_others_are_right(fast, ragged, prompts):
    """All faults at once, in different rows."""
    rows = [0, 1, 2, 3, 5, 6]
    for row, (_, ((field, where, value), _)) in zip(rows, VALUES.items(), strict=True):
        getattr(prompts, field)[(row, min(where[1], prompts.lengths[row] - 1)) if isinstance(where, tuple) else row] = value
    for decoder, more in ((vanilla, ()), (spiffy, (GRAPH,)), (specfold, (GRAPH, EXACT))):
        want = decoder(fast.params, *ragged, fast.model, config(), *more)
        got = decoder(fast.params, *prompts, fast.model, config(), *more)
        np.testing.assert_array_equal(np.asarray(got.stats.status)[rows], CODES)
        np.testing.assert_array_equal(np.asarray(got.stats.nfe)[rows], np.zeros(6))
        np.testing.assert_array_equal(np.asarray(got.lengths)[rows], prompts.lengths[rows])
        for row in (4, 7):
            np.testing.assert_array_equal(got.tokens[row], want.tokens[row])
            assert int(got.lengths[row]) == int(want.lengths[row]) > ragged.lengths[row]
            assert int(got.stats.nfe[row]) == int(want.stats.nfe[row]) > 0
            assert int(got.stats.status[row]) == 0
    assert len(STATUS) == 6


BAD_NUMBERS = [("threshold", x) for x in (-0.1, 1.1, NAN, INF, "0.9", [0.5, 2.0])] + [("temperature", x) for x in (-1.0, NAN, INF)]
BAD_NUMBERS += [("seed", x) for x in (0.5, 2**31, -(2**31) - 1, NAN, [1, 2.5])]


@pytest.mark.parametrize(("name", "value"), BAD_NUMBERS)
def test_numbers_out_of_range(name, value):
    with pytest.raises(ValueError, match=name):
        sf.DecodeConfig(**{name: value})


@pytest.mark.parametrize(("name", "value"), [(n, v) for n in ("tau", "guard") for v in (-0.5, NAN, -INF)])
def test_fold_numbers_out_of_range(name, value):
    with pytest.raises(ValueError, match=name):
        sf.FoldConfig(**{name: value})
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(EXACT, **{name: np.float32(value)})


@pytest.mark.parametrize(
    ("name", "value"), [("gates", 3), ("gates", 0), ("reference", "main"), ("scope", "attention"), ("draft_from", "other")]
)
def test_fold_choices(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} must be one of"):
        sf.FoldConfig(**{name: value})


@pytest.mark.parametrize("name", ["max_new_tokens", "block_size", "sub_block", "steps"])
@pytest.mark.parametrize("value", [0, -3, 1.5, "8"])
def test_sizes_are_whole_numbers_from_one(name, value):
    with pytest.raises(ValueError, match=f"{name}={value} must be a whole number of at least 1"):
        sf.DecodeConfig(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("order", "right"), ("impl", "cuda"), ("impl", "pallas")])
def test_unknown_choices(name, value):
    with pytest.raises(ValueError, match=f"{name}='{value}'"):
        sf.DecodeConfig(**{name: value})


def test_unknown_arguments_are_type_errors():
    for config_class in (sf.DecodeConfig, sf.FoldConfig):
        with pytest.raises(TypeError, match="treshold"):
            config_class(treshold=0.9)


STATIC = [
    (dict(block_size=10, sub_block=4), "sub_block=4 must divide block_size=10"),
    (dict(block_size=4), "sub_block=8 must divide block_size=4"),
    (dict(steps=17), "steps=17 must be at most block_size=16"),
    (dict(stop_ids=(3, 320)), r"stop_ids=\[320\] lie outside the vocabulary of 320"),
    (dict(stop_ids=(-1,)), r"stop_ids=\[-1\]"),
    (dict(seed=np.int32([1, 2])), r"seed has shape \(2,\)"),
    (dict(max_new_tokens=2**31), "max_new_tokens=2147483648 is too large"),
]


@pytest.mark.parametrize(("changes", "message"), STATIC)
def test_sizes_that_do_not_fit_raise(changes, message, fast, ragged):
    with pytest.raises(ValueError, match=message):
        sf.validate(fast.params, *ragged, fast.model, config(**changes))
    with pytest.raises(ValueError, match=message):
        vanilla(fast.params, *ragged, fast.model, config(**changes))  # static facts, so under jit as well


ARRAYS = [
    (lambda p, n: (p[0], n), "must have shapes"),
    (lambda p, n: (p, n[:3]), "must have shapes"),
    (lambda p, n: (p[None], n), "must have shapes"),
    (lambda p, n: (p, n[:, None]), "must have shapes"),
    (lambda p, n: (p[:0], n[:0]), "at least one row"),
    (lambda p, n: (p[:, :0], n), "at least one row of at least one token"),
    (lambda p, n: (p.astype(np.float32), n), "prompts has dtype float32"),
    (lambda p, n: (p, n.astype(np.float32)), "lengths has dtype float32"),
    (lambda p, n: (p.astype(bool), n), "prompts has dtype bool"),
]


@pytest.mark.parametrize(("change", "message"), ARRAYS)
def test_shapes_and_dtypes(change, message, fast, ragged):
    for decoder in (sf.vanilla_decode, vanilla):
        with pytest.raises(ValueError, match=message):
            decoder(fast.params, *change(*ragged), fast.model, config())


def with_leaf(name: str, where, value) -> sf.DraftGraph:
    """The graph with one number changed behind its constructor's back, as a file or a computation could give it."""
    array = np.array(getattr(GRAPH, name))
    array[where] = value
    leaves, structure = jax.tree.flatten(GRAPH)
    index = next(i for i, leaf in enumerate(leaves) if leaf is getattr(GRAPH, name))
    leaves[index] = array
    return jax.tree.unflatten(structure, leaves)


# Nodes in order: {(0,0)} {(0,1)} {(1,0)} {(0,0),(1,0)} {..(2,0)} {..(3,0)}
GRAPH_FAULTS = {
    "a cycle": (("parent", (0, 3), True), "cycle"),
    "an unreachable node": (("parent", (4, 3), False), "unreachable"),
    "an edge that is no containment": (("parent", (3, 1), True), "proper subset"),
    "a duplicate": (("pairs", (1, 0), (0, 0)), "duplicate"),
    "a position rank beyond the block": (("pairs", (2, 0), (16, 0)), "must be below the block of 16"),
    "a token rank beyond what is kept": (("pairs", (1, 0), (0, 4)), "token rank 4"),
    "a negative rank": (("pairs", (2, 0), (1, -2)), "at least 0"),
    "an empty node": (("pairs", (0, 0), (-1, -1)), "is empty"),
    "a position with two tokens": (("pairs", (3, 1), (0, 1)), "occurs twice"),
    "a level of zero": (("level", 0, 0), "level"),
    "a weight that is not a number": (("weight", 0, NAN), "weight"),
}


@pytest.mark.parametrize("name", GRAPH_FAULTS)
def test_bad_graphs(name, fast, ragged):
    change, message = GRAPH_FAULTS[name]
    graph = with_leaf(*change)
    with pytest.raises(ValueError, match=message):
        sf.validate(fast.params, *ragged, fast.model, config(), graph)
    with pytest.raises(ValueError, match=message):
        sf.spiffy_decode(fast.params, *ragged, fast.model, config(), graph)


@functools.partial(jax.jit, compiler_options=FAST)
def computed_numbers(params, prompts, lengths, model, numbers) -> sf.Decoded:
    """Decoding with numbers that exist on the device only, so that no constructor sees them."""
    decode = config(threshold=numbers["threshold"], temperature=numbers["temperature"])
    return sf.specfold_decode(params, prompts, lengths, model, decode, GRAPH, sf.FoldConfig(numbers["tau"], numbers["guard"]))


BAD = [("tau", NAN), ("tau", -1.0), ("guard", NAN), ("guard", -0.1), ("threshold", 1.5), ("threshold", NAN), ("temperature", INF)]


@pytest.mark.parametrize(("name", "value"), [*BAD, ("temperature", -1.0), (None, None)])
def test_numbers_that_go_bad_under_jit_leave_every_row_alone(name, value, fast, ragged):
    numbers = {"threshold": 0.9, "temperature": 0.0, "tau": 0.1, "guard": 0.5} | ({name: value} if name else {})
    out = computed_numbers(fast.params, *ragged, fast.model, {key: np.float32(number) for key, number in numbers.items()})
    np.testing.assert_array_equal(out.stats.status, np.full(8, 5 if name else 0))
    np.testing.assert_array_equal(np.asarray(out.lengths) == ragged.lengths, np.full(8, bool(name)))
    assert np.asarray(out.stats.nfe).any() != bool(name)


def test_rebuilding_a_configuration_from_its_leaves_checks_nothing():
    """Trees are rebuilt with tracers, placeholders and device values; only a constructor call looks at numbers."""
    for value in (config(), EXACT):
        leaves, structure = jax.tree.flatten(value)
        jax.tree.unflatten(structure, [NAN] * len(leaves))
