"""Speculation changes nothing but the number of forwards: tokens, lengths and steps are vanilla's, whatever is drafted."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specfold_jax as sf
from parity_tests.harness.laws import (
    EXACT,
    GRAPHS,
    SEEDS,
    STOPS,
    config,
    lossless,
    random_graph,
    same,
    specfold,
    spiffy,
    vanilla,
)


@pytest.fixture(scope="session")
def reference(small, ragged):
    """Vanilla's results by arguments."""
    known = {}

    def run(**arguments) -> sf.Decoded:
        key = (small.family, *sorted(arguments.items()))
        if key not in known:
            known[key] = vanilla(small.params, *ragged, small.model, config(**arguments))
        return known[key]

    return run


CASES = [
    *(("chain and second tokens", {"threshold": t, "temperature": 0.0}) for t in (0.0, 0.5, 0.9, 1.0)),
    ("chain and second tokens", {"threshold": 0.9, "temperature": 1.0}),
    ("everything at once", {"threshold": 0.9, "temperature": 0.0}),
    ("never right", {"threshold": 0.9, "temperature": 1.0}),
]


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_spiffy_is_vanilla_in_fewer_forwards(name, arguments, small, ragged, reference):
    want = reference(**arguments)
    got = spiffy(small.params, *ragged, small.model, config(**arguments), GRAPHS[name])
    lossless(got, want)
    if name != "never right" and arguments["threshold"] > 0:
        assert int(got.stats.accepted.sum()) > 0
        assert int(got.stats.drafted.sum()) > 0
    if arguments["threshold"] == 0.9:  # the cases would show little if no row stopped, or all
        stopped = np.isin(np.asarray(got.tokens)[np.arange(8), np.asarray(got.lengths) - 1], STOPS)
        assert stopped.any()
        assert not stopped.all()


@settings(max_examples=8)
@given(st.integers(0, 10**6), st.sampled_from([(0.9, 0.0), (0.5, 0.6), (1.0, 1.0), (0.3, 0.0)]))
def test_random_graphs(small, ragged, reference, seed, numbers):
    threshold, temperature = numbers
    graph = random_graph(seed)
    arguments = {"threshold": threshold, "temperature": temperature}
    lossless(spiffy(small.params, *ragged, small.model, config(**arguments), graph), reference(**arguments))


@pytest.mark.parametrize("arguments", [{"threshold": 0.9, "temperature": 0.0}, {"threshold": 1.0, "temperature": 1.0}])
def test_specfold_with_an_infinite_guard_is_vanilla_in_no_more_forwards(arguments, small, ragged, reference):
    """A folded branch is never trusted; what is not folded at all may be."""
    want = reference(**arguments)
    got = specfold(small.params, *ragged, small.model, config(**arguments), GRAPHS["chain and second tokens"], EXACT)
    lossless(got, want)
    stats = jax.tree.map(np.asarray, got.stats)
    assert stats.guard_stops.sum() > 0
    assert np.all(stats.nfe <= np.asarray(want.stats.nfe))
    assert np.all(stats.computed_rows <= stats.total_rows[:, None, None])
    assert stats.computed_rows.sum() < 2 * 2 * stats.total_rows.sum()


def test_specfold_commits_from_a_draft_it_computed_in_full(small, ragged, reference):
    """The draft before a continuation is folded onto nothing, so that it may commit and the next block's first check is used."""
    arguments = {"threshold": 0.9, "temperature": 0.0}
    got = specfold(small.params, *ragged, small.model, config(**arguments), GRAPHS["everything at once"], EXACT)
    lossless(got, reference(**arguments))
    commits = (int(got.stats.saved_commits.sum()) > 0, int(got.stats.shared.sum()) > 0)
    assert commits == ((True, True) if small.model.commit == "block" else (False, False))


def test_an_infinite_guard_trusts_no_folded_commit(fast, ragged):
    """Neither its keys and values, nor the token it would start the next block with."""
    fold = dataclasses.replace(EXACT, tau=float("inf"))
    same(
        specfold(fast.params, *ragged, fast.model, config(share=False), GRAPHS["everything at once"], fold),
        vanilla(fast.params, *ragged, fast.model, config()),
    )


def test_specfold_without_folding_is_spiffy(small, ragged):
    """tau = 0 folds only positions that are equal to the last bit, so no guard is needed."""
    decode, graph = config(0.9), GRAPHS["chain and second tokens"]
    got = specfold(small.params, *ragged, small.model, decode, graph, sf.FoldConfig(tau=0.0, guard=0.0))
    same(got, spiffy(small.params, *ragged, small.model, decode, graph))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_are_independent(small, ragged, temperature):
    """A row's result, counts included, is the same among copies of itself as among the others, and in any order."""
    decode, graph, fold = config(0.9, temperature), GRAPHS["chain and second tokens"], sf.FoldConfig(tau=0.1, guard=0.5)
    together = specfold(small.params, *ragged, small.model, decode, graph, fold)
    for row in (0, 2, 5):
        copies = (np.repeat(x[row : row + 1], 8, axis=0) for x in ragged)
        seeded = dataclasses.replace(decode, seed=np.repeat(SEEDS[row], 8))
        alone = specfold(small.params, *copies, small.model, seeded, graph, fold)
        for got, want in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
            np.testing.assert_array_equal(got, np.repeat(np.asarray(want)[row : row + 1], 8, axis=0))
    order = np.array([5, 2, 7, 0, 1, 6, 3, 4])
    moved = specfold(small.params, *(x[order] for x in ragged), small.model, dataclasses.replace(decode, seed=SEEDS[order]), graph, fold)
    for got, want in zip(jax.tree.leaves(moved), jax.tree.leaves(together), strict=True):
        np.testing.assert_array_equal(got, np.asarray(want)[order])


def test_seeds(fast, ragged):
    """Equal seeds and prompts draw equal tokens, other seeds others; a greedy run has no use for them."""
    copies = [np.repeat(x[3:4], 8, axis=0) for x in ragged]
    tokens = np.asarray(vanilla(fast.params, *copies, fast.model, config(1.0, 3.0)).tokens)
    assert (tokens[0] == tokens[4]).all()
    assert (tokens[6] == tokens[7]).all()
    assert len({tuple(row) for row in tokens.tolist()}) == 6
    again = np.asarray(vanilla(fast.params, *copies, fast.model, config(1.0, 3.0)).tokens)
    np.testing.assert_array_equal(tokens, again)
    greedy = np.asarray(vanilla(fast.params, *copies, fast.model, config(1.0)).tokens)
    assert (greedy == greedy[0]).all()
    assert not (greedy == tokens[0]).all()


ODD = {
    "fast_dllm_v2": dict(max_new_tokens=1),
    "nld": dict(max_new_tokens=13, block_size=6, sub_block=3, steps=4, order="left"),
    "sdar": dict(max_new_tokens=11, block_size=9, sub_block=9, steps=5),
}


def test_one_row_odd_sizes_schedules(small, ragged):
    """Batch 1, a single new token or blocks that fit nothing else, steps schedules, order from the left."""
    decode = config(0.7, seed=4, stop_ids=(), **ODD[small.family])
    graph = dataclasses.replace(GRAPHS["chain and second tokens"], run_on=False)
    for row in (0, 2, 3):
        prompts, lengths = (x[row : row + 1] for x in ragged)
        want = vanilla(small.params, prompts, lengths, small.model, decode)
        lossless(spiffy(small.params, prompts, lengths, small.model, decode, graph), want)
        assert int(want.lengths[0]) == int(lengths[0]) + decode.max_new_tokens
        np.testing.assert_array_equal(np.asarray(want.tokens)[0, : lengths[0]], prompts[0, : lengths[0]])
        assert small.model.mask_id not in np.asarray(want.tokens)[0, : int(want.lengths[0])]


def test_a_batch_of_one_is_the_row_of_a_batch(fast, ragged):
    """The same row in another shape of call."""
    graph, fold = GRAPHS["chain and second tokens"], sf.FoldConfig(tau=0.1, guard=0.5)
    together = specfold(fast.params, *ragged, fast.model, config(0.9, 1.0), graph, fold)
    for row in (1, 3):
        decode = config(0.9, 1.0, seed=SEEDS[row : row + 1])
        alone = specfold(fast.params, *(x[row : row + 1] for x in ragged), fast.model, decode, graph, fold)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        assert int(alone.lengths[0]) == int(together.lengths[row])
        assert int(alone.stats.nfe[0]) == int(together.stats.nfe[row])
