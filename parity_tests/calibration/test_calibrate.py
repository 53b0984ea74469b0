"""Calibration: what is recorded is vanilla decoding, and the graph that is chosen saves forwards without changing a token."""

from itertools import pairwise

import jax
import numpy as np
import pytest

import specfold_jax as sf
from parity_tests.harness.laws import GRAPHS, config, lossless, spiffy, vanilla
from specfold_jax.calibration.records import Records, accepted_depth, chains, hits, record_vanilla
from specfold_jax.diffusion import draft
from specfold_jax.diffusion.graph import MadeFor

MASK, SUB = 310, 8
propose = jax.jit(draft.propose, static_argnums=(3, 4))


@pytest.fixture(scope="module")
def run(fast, ragged) -> sf.Decoded:
    return vanilla(fast.params, *ragged, fast.model, config())


@pytest.fixture(scope="module")
def records(fast, ragged) -> Records:
    return record_vanilla(fast.params, *ragged, fast.model, config())


def window(canvas: np.ndarray) -> list[int]:
    """Masked positions of the active sub-block."""
    masked = np.flatnonzero(canvas == MASK)
    return [i for i in masked.tolist() if i < masked[0] // SUB * SUB + SUB]


def test_records_follow_vanilla_decoding(records, run, ragged):
    """Each state leads to the next, reveals grow, and finished canvases are what was decoded."""
    _, levels, block = records.after.shape
    decoded = {tuple(np.asarray(run.tokens)[row, start : start + block].tolist()) for row in range(8) for start in range(0, 64, block)}
    complete = 0
    for canvas, after, steps in zip(records.canvas, records.after, records.steps, strict=True):
        assert 1 <= steps <= levels
        before = canvas
        for level in range(steps):
            changed = before != after[level]
            assert changed.any()
            assert (before[changed] == MASK).all()
            assert set(np.flatnonzero(changed).tolist()) <= set(window(before))
            before = after[level]
        assert (after[steps:] == after[steps - 1]).all()
        if (after[-1] != MASK).all():
            complete += 1
            assert tuple(after[-1].tolist()) in decoded or any(token in after[-1] for token in config().stop_ids)
    assert complete > 5
    # Nothing is known at a block's first check; a row passes its committed blocks and at most one more.
    first = int(run.stats.checks.sum()) - len(records.canvas)
    assert int(run.stats.commits.sum()) <= first <= int(run.stats.commits.sum()) + 8


def test_what_is_known_covers_the_masked_positions(records):
    for canvas, odds, tokens in zip(records.canvas, records.known.odds, records.known.tokens, strict=True):
        assert np.isfinite(odds[window(canvas)]).all()
        ranks = tokens[:, window(canvas)]
        assert (ranks != MASK).all()
        assert all(len(set(row.tolist())) == 4 for row in ranks.reshape(-1, 4))


def slow_chain(records: Records, r: int, position_ranks: int, token_ranks: int):
    """Positions by confidence in the active sub-block, tokens by rank, until something lies outside the ranks."""
    canvas, odds, tokens = records.canvas[r], records.known.odds[r], records.known.tokens[r]
    order = sorted(window(canvas), key=lambda i: (-odds[i], i))[:position_ranks]
    chain, pairs, before = [], frozenset(), canvas
    for level in range(records.steps[r]):
        after = records.after[r, level]
        for position in np.flatnonzero(before != after).tolist():
            candidates = tokens[level, position, :token_ranks].tolist()
            if position not in order or after[position] not in candidates:
                return tuple(chain)
            pairs |= {(order.index(position), candidates.index(after[position]))}
        chain.append(pairs)
        before = after
    return tuple(chain)


@pytest.mark.parametrize(("position_ranks", "token_ranks"), [(8, 4), (3, 1)])
def test_chains_are_what_the_next_steps_reveal(position_ranks, token_ranks, records):
    found = chains(records, MASK, SUB, position_ranks, token_ranks)
    assert found == [slow_chain(records, r, position_ranks, token_ranks) for r in range(len(records.canvas))]
    assert any(len(chain) > 1 for chain in found)
    for chain in found:
        assert all(a < b for a, b in pairwise(chain))


def test_hits_and_accepted_depth(records):
    """A draft hits a level when it is the canvas that many steps later; depth counts hits from the first level on, without a gap."""
    graph = GRAPHS["chain and second tokens"]
    drafts = propose(records.canvas, records.known, graph, MASK, SUB)
    tokens, valid = np.asarray(drafts.tokens), np.asarray(drafts.valid)
    want = np.zeros((*valid.shape, records.after.shape[1]), bool)
    for r, d, level in np.ndindex(want.shape):
        want[r, d, level] = valid[r, d] and level < records.steps[r] and (tokens[r, d] == records.after[r, level]).all()
    np.testing.assert_array_equal(hits(records, graph, MASK, SUB), want)
    depths = []
    for row in want.any(axis=1):
        depths.append(next((level for level, hit in enumerate(row) if not hit), len(row)))
    assert accepted_depth(records, graph, MASK, SUB) == pytest.approx(np.mean(depths))
    assert np.mean(depths) > 0.2


def test_the_calibrated_graph_is_lossless_and_saves_forwards(small, ragged):
    """Each family from its own runs, with another kind of drafts."""
    source = {"fast_dllm_v2": "union", "nld": "confidence", "sdar": "ranks"}[small.family]
    decode, seen = config(), []
    graph = sf.calibrate(small.params, *ragged, small.model, decode, drafts=4, source=source, name="golden", progress=seen.append)
    graph.validate(block=16)
    assert 1 <= graph.max_drafts <= 4
    assert graph.made_for == MadeFor("golden", 320, 16, 8, 0.9, 0.0)
    assert (graph.theta.size == 0) == (source == "ranks")
    assert graph.pairs.shape[0] == 0 or source != "confidence"
    want = vanilla(small.params, *ragged, small.model, decode)
    got = spiffy(small.params, *ragged, small.model, decode, graph)
    lossless(got, want)
    assert int(got.stats.nfe.sum()) < 0.9 * int(want.stats.nfe.sum())
    assert seen == list(range(1, int(want.stats.nfe.max()) + 1))


def test_calibration_errors(fast, ragged):
    for changes, message in (
        ({"drafts": 0}, "drafts=0"),
        ({"source": "ranks", "objective": "width"}, "objective"),
        ({"source": "thetas"}, "source='thetas'"),
        ({"source": "union", "objective": "paper"}, "objective='paper'"),
    ):
        with pytest.raises(ValueError, match=message):
            sf.calibrate(fast.params, *ragged, fast.model, config(), **changes)
    with pytest.raises(ValueError, match="nothing"):
        sf.calibrate(fast.params, *ragged, fast.model, config(0.0))  # every block is revealed at its first check
