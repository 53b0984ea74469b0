"""The reveal rule, on both sides, against a slow reading of its definition: candidates, ranks, reveals, margins, stops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specfold_jax as sf
from parity_tests.harness.slow_reveal import BLOCK, MASK, slow
from parity_tests.harness.torch_twin import tensor
from specfold_jax.diffusion import reveal
from specfold_jax.models import sampling
from specfold_jax.models.noise import gumbel
from specfold_jax.models.sampling import Ranked
from specfold_torch_ref.diffusion import reveal as torch_reveal
from specfold_torch_ref.models import sampling as torch_sampling

ODDS = st.sampled_from([-1.0, 0.0, 0.0, 0.5, 2.0, 9.0])  # few values, so that ties and equality with the threshold occur
decide = jax.jit(reveal.decide)
rank = jax.jit(sampling.rank, static_argnums=(5, 6))


@st.composite
def canvases(draw) -> np.ndarray:
    """One canvas with at least one MASK."""
    masked = draw(st.lists(st.booleans(), min_size=BLOCK, max_size=BLOCK).filter(any))
    return np.where(masked, MASK, 7).astype(np.int32)


@settings(max_examples=400)
@given(
    canvas=canvases(),
    odds=st.lists(ODDS, min_size=BLOCK, max_size=BLOCK),
    gap=st.lists(st.sampled_from([0.25, 4.0, 30.0, 30.0]), min_size=BLOCK, max_size=BLOCK),
    step=st.integers(0, 9),
    threshold=st.sampled_from([0.0, 0.5, 0.5, 0.9, 1.0]),  # 0.5 has log-odds 0
    strict=st.booleans(),
    sub_block=st.sampled_from([2, 8]),
    steps=st.sampled_from([None, 1, 3, 8]),
    order=st.sampled_from(["confidence", "left"]),
)
def test_decide_is_the_definition(checkpoints, canvas, odds, gap, step, threshold, strict, sub_block, steps, order):
    model = dataclasses.replace(checkpoints["fast_dllm_v2"].model, strict=strict)
    decode = sf.DecodeConfig(threshold=threshold, block_size=BLOCK, sub_block=sub_block, steps=steps, order=order)
    odds, gap = (np.array([x], np.float32) for x in (odds, gap))
    ranked = Ranked(jnp.zeros((1, BLOCK, 1), jnp.int32), jnp.asarray(odds), jnp.asarray(gap))
    decision = decide(canvas[None], ranked, jnp.int32([step]), model, decode)
    shown, margin = slow(canvas, odds[0], gap[0], step, threshold, strict, sub_block, steps, order)
    assert set(np.flatnonzero(decision.reveal[0]).tolist()) == shown
    assert float(decision.margin[0]) == pytest.approx(margin, abs=1e-5)
    twin = torch_reveal.decide(tensor(canvas[None]), torch_sampling.Ranked(*map(tensor, ranked)), torch.tensor([step]), model, decode)
    assert set(np.flatnonzero(twin.reveal[0]).tolist()) == shown
    assert float(twin.margin[0]) == pytest.approx(margin, abs=1e-5)
    assert shown  # a step always makes progress
    assert all(canvas[i] == MASK for i in shown)


def test_threshold_one_reveals_one_token_however_confident(checkpoints):
    ranked = Ranked(jnp.zeros((1, BLOCK, 1), jnp.int32), jnp.full((1, BLOCK), jnp.inf), jnp.ones((1, BLOCK)))
    for strict in (True, False):
        model = dataclasses.replace(checkpoints["fast_dllm_v2"].model, strict=strict)
        decode = sf.DecodeConfig(threshold=1.0, block_size=BLOCK, sub_block=BLOCK)
        decision = decide(jnp.full((1, BLOCK), MASK, jnp.int32), ranked, jnp.int32([0]), model, decode)
        np.testing.assert_array_equal(np.flatnonzero(decision.reveal[0]), [0])


@pytest.mark.parametrize("steps", [1, 2, None])
def test_nothing_is_read_where_nothing_is_to_be_revealed(steps, checkpoints):
    """Log-odds and gaps of known positions may be anything, also where a single step reveals the whole block."""
    model = checkpoints["fast_dllm_v2"].model
    canvas = np.where([True, False, True, True, False, False, True, False], MASK, 7).astype(np.int32)[None]
    odds, gap = np.random.default_rng(0).normal(size=(2, 1, BLOCK)).astype(np.float32)
    config = sf.DecodeConfig(block_size=BLOCK, sub_block=BLOCK, steps=steps, threshold=0.9)

    def decided(other: float) -> reveal.Decision:
        ranked = Ranked(jnp.zeros((1, BLOCK, 1), jnp.int32), *(jnp.asarray(np.where(canvas == MASK, x, other)) for x in (odds, gap)))
        return decide(canvas, ranked, jnp.int32([0]), dataclasses.replace(model, mask_id=MASK), config)

    for other in (-5.0, jnp.inf, jnp.nan):
        for one, another in zip(decided(other), decided(0.0), strict=True):
            np.testing.assert_array_equal(one, another)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7, 8])
def test_the_schedule_reveals_the_whole_block(steps):
    least = [int(reveal.at_least(jnp.int32(s), steps, BLOCK)) for s in range(steps)]
    assert sum(least) == BLOCK
    assert max(least) - min(least) <= 1
    assert sorted(least, reverse=True) == least
    assert int(reveal.at_least(jnp.int32(3), None, BLOCK)) == 1


@given(canvas=canvases(), odds=st.lists(ODDS, min_size=BLOCK, max_size=BLOCK), sub_block=st.sampled_from([1, 2, 4, 8]))
def test_candidates_and_confidence_ranks(canvas, odds, sub_block):
    first = int(np.flatnonzero(canvas == MASK)[0]) // sub_block * sub_block
    want = [canvas[i] == MASK and first <= i < first + sub_block for i in range(BLOCK)]
    candidate = reveal.candidates(jnp.asarray(canvas), MASK, sub_block)
    assert np.asarray(candidate).tolist() == want
    ranks = np.asarray(reveal.confidence_rank(jnp.float32(odds), candidate))
    best = sorted(np.flatnonzero(want).tolist(), key=lambda i: (-odds[i], i))
    assert [int(ranks[i]) for i in best] == list(range(len(best)))
    assert all(ranks[i] >= len(best) for i in range(BLOCK) if not want[i])


@given(
    logits=st.lists(st.sampled_from([-4.0, 0.0, 1.0, 1.0, 2.5, 30.0]), min_size=6, max_size=6),
    mask=st.integers(0, 5),
    temperature=st.sampled_from([0.0, 0.7]),
)
def test_rank_orders_tokens_without_mask_and_scores_against_all_others(logits, mask, temperature):
    logits = np.array(logits, np.float32)
    zero = jnp.int32([0])
    ranked = rank(logits[None], zero, zero, zero, jnp.float32(temperature), mask, 3)
    scaled = logits.astype(np.float64) / (temperature or 1)
    scores = scaled
    if temperature:
        scores = scaled + np.asarray(gumbel(zero, zero, zero, 6)[0], np.float64)
    order = sorted((token for token in range(6) if token != mask), key=lambda token: (-scores[token], token))
    assert ranked.tokens[0].tolist() == order[:3]
    others = np.delete(scaled, order[0])
    odds = scaled[order[0]] - others.max() - np.log(np.exp(others - others.max()).sum())
    assert float(ranked.odds[0]) == pytest.approx(odds, rel=1e-5, abs=1e-5)
    assert float(ranked.gap[0]) == pytest.approx(scores[order[0]] - scores[order[1]], rel=1e-5, abs=1e-5)


def test_odds_do_not_saturate_where_a_probability_does():
    zero = jnp.int32([0, 0])
    logits = jnp.array([[60.0, 0.0, 0.0], [61.0, 0.0, 0.0]])
    odds = rank(logits, zero, zero, zero, jnp.float32(0), 2, 1).odds
    np.testing.assert_allclose(odds, [60 - np.log(2), 61 - np.log(2)], rtol=1e-6)


@given(
    canvas=st.lists(st.sampled_from([MASK, 5, 11, 12]), min_size=BLOCK, max_size=BLOCK),
    known=st.integers(0, BLOCK),
    ids=st.sampled_from([(), (11,), (11, 12)]),
)
def test_stop_test(canvas, known, ids):
    """A generated stop token with no MASK before it; positions below `known` are the prompt's."""
    generated = np.arange(BLOCK) >= known
    want = any(canvas[i] in ids and i >= known and MASK not in canvas[:i] for i in range(BLOCK))
    assert bool(reveal.shows_stop(jnp.int32([canvas]), jnp.asarray(generated[None]), ids, MASK)[0]) == want
