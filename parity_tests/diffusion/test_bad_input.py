"""Bad input: on the host a ValueError that names the value and the rule; under jit a row that is not decoded, and says why."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specfold_jax as sf
from parity_tests.harness.checkpoints import Ragged
from parity_tests.harness.laws import EXACT, FAST, GRAPHS, config, specfold, spiffy, vanilla
from specfold_jax.diffusion.graph import MadeFor
from specfold_jax.diffusion.validate import STATUS
from specfold_jax.tuning.profile import Profile

GRAPH = GRAPHS["chain and second tokens"]
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def prompts(ragged) -> Ragged:
    return Ragged(ragged.tokens.copy(), ragged.lengths.copy())


def test_good_input_passes_and_padding_may_hold_anything(fast, prompts):
    sf.validate(fast.params, *prompts, fast.model, config(), GRAPH, EXACT)
    assert (prompts.tokens < 0).any()


def test_arguments_of_another_kind_are_named(fast, prompts):
    first = (fast.params, *prompts)
    for call, message in (
        (lambda: sf.spiffy_decode(*first, fast.model, config(), "graph.json"), "graph must be a DraftGraph, not str; DraftGraph.load"),
        (lambda: sf.spiffy_decode(*first, config(), fast.model, GRAPH), "model must be a ModelConfig, not DecodeConfig"),
        (lambda: sf.specfold_decode(*first, fast.model, config(), GRAPH, 0.1), "fold must be a FoldConfig, not float"),
        (lambda: sf.validate(*first, fast.model, {"max_new_tokens": 8}), "decode must be a DecodeConfig, not dict"),
    ):
        with pytest.raises(TypeError, match=message):
            call()


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
    monkeypatch.setattr("specfold_jax.diffusion.loop.begin", lambda *_: pytest.fail("ran"))
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


NO_NUMBER = (None, "0.5", "", True, [], [0.5], (0.5,), {}, [[1], [2, 3]], 1j, np.array(["1"]), np.float32([0.5]), object())
BAD_NUMBERS = [("threshold", x) for x in (*NO_NUMBER, -0.1, 1.1, NAN, INF)] + [
    ("temperature", x) for x in (*NO_NUMBER, -1.0, NAN, INF, 1e39)
]
BAD_NUMBERS += [("seed", x) for x in (0.5, 2**31, -(2**31) - 1, -(2**63), 10**30, NAN, [1, 2.5], None, "1", True, [], [[1]], (True,), {})]
BAD_NUMBERS += [("seed", jax.random.key(0))]


@pytest.mark.parametrize(("name", "value"), BAD_NUMBERS)
def test_numbers_out_of_range(name, value):
    with pytest.raises(ValueError, match=rf"(?s){name}=.* must be a"):
        sf.DecodeConfig(**{name: value})


@pytest.mark.parametrize(("name", "value"), [(n, v) for n in ("tau", "guard") for v in (*NO_NUMBER, -0.5, NAN, -INF)])
def test_fold_numbers_out_of_range(name, value):
    with pytest.raises(ValueError, match=name):
        sf.FoldConfig(**{name: value})
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(EXACT, **{name: value})


@pytest.mark.parametrize("name", ["threshold", "temperature", "tau", "guard"])
@pytest.mark.parametrize("value", [np.float16(0.5), jnp.bfloat16(0.5), jnp.asarray(0.5, jnp.bfloat16), np.longdouble(0.5)])
def test_narrow_and_wide_numbers_pass(name, value):
    kind = sf.FoldConfig if name in sf.FoldConfig.__dataclass_fields__ else sf.DecodeConfig
    assert getattr(kind(**{name: value}), name) == np.float32(0.5)


def test_a_truth_value_is_no_number():
    for true in (True, np.True_, jnp.asarray(True)):
        with pytest.raises(ValueError, match=r"temperature=.* must be .*, not a truth value"):
            sf.DecodeConfig(temperature=true)
        with pytest.raises(ValueError, match=r"temperature=.* must be .*, not a truth value"):
            jax.jit(lambda x: sf.DecodeConfig(temperature=x).threshold)(true)
    with pytest.raises(ValueError, match=r"seed=.* must be an int32"):
        jax.jit(lambda x: sf.DecodeConfig(seed=x).threshold)(jax.random.key(0))


SIZES, SWITCHES = ("max_new_tokens", "block_size", "sub_block", "steps"), ("correction", "force_revealed", "pack", "share")
WRONG = [
    (name, value, "must be a whole number of at least 1") for name in SIZES for value in (0, -3, 1.5, "8", True, [8], NAN, np.float32(8))
]
WRONG += [(name, 2**31, "must be at most 2147483647") for name in SIZES] + [("max_new_tokens", None, "must be a whole number")]
WRONG += [(name, value, "must be true or false") for name in SWITCHES for value in ("false", "", 0, 1, None, [], np.float32(1))]
WRONG += [("stop_ids", value, "must be a list") for value in ("12", "", 12, {1: 2}, {1, 2})]
WRONG += [("stop_ids", value, "must be a whole number of at least 0") for value in ((1.7,), ["1"], (True,), (3, -1), [[1]], (None,))]
CHOICES = ("gates", "reference", "scope", "order")
WRONG += [(name, value, "must be one of") for name in CHOICES for value in ("other", "", 0, 3, True, 1.0, None, ["own"])]
WRONG += [("impl", value, "must be") for value in ("cuda", "triton", "", None, 1, ["xla"])]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_values_of_the_wrong_kind(name, value, message):
    kind = sf.FoldConfig if name in sf.FoldConfig.__dataclass_fields__ else sf.DecodeConfig
    with pytest.raises(ValueError, match=rf"{name}.*=.* {message}"):
        kind(**{name: value})


def test_values_of_another_kind_of_number_are_the_same():
    """One hash, so one compilation; and a traced number passes the constructor."""
    numbers = dict(max_new_tokens=np.int64(8), sub_block=np.int32(4), pack=np.bool_(True), stop_ids=[np.int32(3), 4])
    got, want = sf.DecodeConfig(**numbers), sf.DecodeConfig(max_new_tokens=8, sub_block=4, stop_ids=(3, 4))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert hash(jax.tree.structure(got)) == hash(jax.tree.structure(want))
    assert float(jax.jit(lambda x: sf.DecodeConfig(threshold=x, temperature=x, seed=x).threshold)(np.float32(7))) == 7
    assert float(jax.jit(lambda x: sf.FoldConfig(tau=x, guard=x).guard)(np.float32(-7))) == -7
    with pytest.raises(ValueError, match=r"sub_block=.* must be a whole number"):
        jax.jit(lambda x: sf.DecodeConfig(sub_block=x).threshold)(8)


def test_unknown_arguments_are_type_errors():
    for config_class in (sf.DecodeConfig, sf.FoldConfig):
        with pytest.raises(TypeError, match="treshold"):
            config_class(treshold=0.9)


STATIC = [
    (dict(block_size=10, sub_block=4), "sub_block=4 must divide block_size=10"),
    (dict(block_size=4), "sub_block=8 must divide block_size=4"),
    (dict(steps=17), "steps=17 must be at most block_size=16"),
    (dict(stop_ids=(3, 320)), r"stop_ids=\[320\] lie outside the vocabulary of 320"),
    (dict(seed=np.int32([1, 2])), r"seed has shape \(2,\)"),
    (dict(max_new_tokens=2**31 - 1), "max_new_tokens=2147483647 is too large"),
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
    (lambda p, n: (p.tolist(), n), "prompts has dtype None"),
    (lambda p, n: (p, None), "lengths has dtype None"),
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


FOREIGN = [("vocab", 321), ("block", 32), ("sub_block", 4)]


@pytest.mark.parametrize(("name", "value"), FOREIGN)
def test_a_graph_made_for_other_sizes_is_refused(name, value, fast, ragged):
    made_for = MadeFor("another name", 320, 16, 8, threshold=0.3, temperature=2.0)
    graph = dataclasses.replace(GRAPH, made_for=made_for)
    sf.validate(fast.params, *ragged, fast.model, config(), graph)
    graph = dataclasses.replace(GRAPH, made_for=dataclasses.replace(made_for, **{name: value}))
    for call in (
        lambda: sf.validate(fast.params, *ragged, fast.model, config(), graph),
        lambda: sf.spiffy_decode(fast.params, *ragged, fast.model, config(), graph),
    ):
        with pytest.raises(ValueError, match=rf"calibrated for {name}={value} \(here \d+\); calibrate one"):
            call()


def test_a_graph_keeps_at_most_the_vocabulary(fast, ragged):
    graph = dataclasses.replace(GRAPH, token_ranks=321)
    for decoder in (sf.spiffy_decode, spiffy):
        with pytest.raises(ValueError, match="token_ranks=321 of the draft graph must be at most 320"):
            decoder(fast.params, *ragged, fast.model, config(), graph)


MADE = {"model": "m", "vocab": 320, "block": 16, "sub_block": 8}
PROFILE = {
    "threshold": ("decode", ["0.9", None, True, [0.9], [], {}]),
    "seed": ("decode", [None, "1", [], [1.5]]),
    "stop_ids": ("decode", ["12", [1.7], ["1"], 3, {}]),
    "share": ("decode", ["false", 0, None]),
    "max_new_tokens": ("decode", ["24", 24.0, None, True]),
    "order": ("decode", ["right", None, 1, []]),
    "tau": ("fold", [None, "0.1", "NaN", [], True]),
    "gates": ("fold", [True, "2", 2.0, None]),
    "correction": ("fold", ["false", 1, None]),
    "vocab": ("made_for", ["320", 320.0, None, 0]),
    "model": ("made_for", [3, None, [], "\ud800"]),
    "max_drafts": ("graph", ["2", True, None, 2.0]),
    "run_on": ("graph", ["false", 0, None]),
    "weight": ("graph", ["1", None, [[1]], ["a"]]),
    "method": (None, ["magic", None, 1, ["specfold"], {}]),
    "notes": (None, ["note", [1], None, {}]),
    "measured": (None, [None, [], "x", 3]),
    "decode": (None, [None, [], "x"]),
    "graph": (None, [[], "x", 3]),
}


def written(path, where: str | None = None, **changes):
    """A profile's file, with other values in the object `where`."""
    Profile("specfold", config(), GRAPH, EXACT, MADE, {}, ("note",)).save(path)
    record = json.loads(path.read_text())
    (record if where is None else record[where]).update(changes)
    path.write_text(json.dumps(record))
    return path


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (_, values) in PROFILE.items() for value in values])
def test_profiles_with_values_of_the_wrong_kind(name, value, tmp_path):
    Profile.load(written(tmp_path / "p.json"))
    with pytest.raises(ValueError, match=rf"p\.json: .*{name}.* must "):
        Profile.load(written(tmp_path / "p.json", PROFILE[name][0], **{name: value}))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b"9" * 5000, b"[]", b"null"])
def test_files_that_are_no_profile(content, tmp_path):
    (tmp_path / "p.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"p\.json: (the profile )?must be"):
        Profile.load(tmp_path / "p.json")


@pytest.mark.parametrize(("name", "value"), [*FOREIGN, ("model", "other")])
def test_profiles_whose_graph_was_made_for_something_else(name, value, tmp_path):
    made_for = MADE | {"threshold": 0.1, "temperature": 1.0}
    Profile.load(written(tmp_path / "p.json", "graph", made_for=made_for))
    with pytest.raises(ValueError, match=rf"p\.json: the draft graph was calibrated for {name}="):
        Profile.load(written(tmp_path / "p.json", "graph", made_for=made_for | {name: value}))


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


UNCHECKED = [NAN, -1.0, np.float32([0.5, 0.5]), jnp.asarray(NAN), jnp.asarray([0.5, 0.5])]


@pytest.mark.parametrize("value", UNCHECKED, ids=str)
@pytest.mark.parametrize("name", ["threshold", "temperature", "tau", "guard"])
def test_leaves_that_no_constructor_saw_are_checked(name, value, fast, ragged):
    def with_it(numbers):
        return jax.tree.map_with_path(lambda path, leaf: value if path[-1].name == name else leaf, numbers)

    decode, fold = with_it(config(temperature=1.0)), with_it(EXACT)
    for check in (sf.validate, sf.specfold_decode):
        with pytest.raises(ValueError, match=rf"{name}=.* must be a"):
            check(fast.params, *ragged, fast.model, decode, graph=GRAPH, fold=fold)
    if np.ndim(value):
        with pytest.raises(ValueError, match=rf"{name}=.* must be a number, not an array of shape \(2,\)"):
            specfold(fast.params, *ragged, fast.model, decode, GRAPH, fold)


def test_rebuilding_a_configuration_from_its_leaves_checks_nothing():
    """Trees are rebuilt with tracers, placeholders and device values; only a constructor call looks at numbers."""
    for value in (config(), EXACT):
        leaves, structure = jax.tree.flatten(value)
        jax.tree.unflatten(structure, [NAN] * len(leaves))
