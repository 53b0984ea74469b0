"""Vanilla decoding against a plain loop over whole sequences without a cache: tokens, sampling noise, steps, forwards, commits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specfold_jax as sf
from parity_tests.harness.checkpoints import Checkpoint
from parity_tests.harness.laws import SEEDS, STOPS, config, vanilla
from parity_tests.harness.slow_reveal import slow as slow_decide
from specfold_jax.models.noise import gumbel
from specfold_jax.models.transformer import logits, prefill

BLOCK, SUB, TOTAL, VOCAB = 16, 8, 80, 320


@jax.jit
def rows(params, model, tokens, position, seed, step):
    """Logits of every row under the block-causal mask, and noise for every position at one step."""
    hidden, _ = prefill(params, tokens[None], model, "block", BLOCK)
    return logits(params, hidden)[0], gumbel(jnp.full_like(position, seed), position, jnp.full_like(position, step), VOCAB)


def draw(scaled: np.ndarray, noise: np.ndarray, mask: int, temperature: float) -> tuple[int, float]:
    """The token drawn from one row of logits / T, and its log-odds."""
    scores = (scaled + noise if temperature else scaled).copy()
    scores[mask] = -np.inf
    token = int(scores.argmax())
    others = np.delete(scaled, token).astype(np.float64)
    return token, float(scaled[token] - others.max() - np.log(np.exp(others - others.max()).sum()))


def plain_loop(checkpoint: Checkpoint, prompt: list[int], seed: int, decode: sf.DecodeConfig) -> dict[str, int | list[int]]:
    _, model, params = checkpoint
    mask, temperature, length = model.mask_id, float(decode.temperature), len(prompt)
    tokens = np.array(prompt + [mask] * (TOTAL - length), np.int32)
    limit, start, counts = length + decode.max_new_tokens, length // BLOCK * BLOCK, {"steps": 0, "commits": 0}

    def evaluate(positions: range, step: int) -> list[tuple[int, float]]:
        out, noise = map(np.asarray, rows(params, model, tokens, np.arange(TOTAL, dtype=np.int32), np.int32(seed), np.int32(step)))
        out = out / np.float32(temperature or 1)
        return [draw(out[max(i - model.shift, 0)], noise[i], mask, temperature) for i in positions]

    def stopped() -> bool:
        for i in range(max(start, length), start + BLOCK):
            if tokens[i] == mask:
                return False
            if tokens[i] in STOPS:
                return True
        return False

    def over() -> bool:
        return stopped() or (limit <= start + BLOCK and mask not in tokens[start:limit])

    if model.draws_first_token and start == length:
        tokens[start] = evaluate(range(start, start + 1), 0)[0][0]
    while start < limit and not (model.stop_rule == "reveal" and over()):
        step = 0
        while mask in tokens[start : start + BLOCK] and not (model.stop_rule == "reveal" and over()):
            drawn = evaluate(range(start, start + BLOCK), step)
            odds = np.array([x for _, x in drawn])
            canvas = tokens[start : start + BLOCK]
            shown, _ = slow_decide(canvas, odds, np.ones(BLOCK), step, float(decode.threshold), model.strict, SUB, None, "confidence")
            for i in shown:
                tokens[start + i] = drawn[i][0]
            step += 1
        counts["steps"] += step
        if model.stop_rule == "reveal" and over():
            break
        counts["commits"] += 1
        if model.stop_rule == "commit" and stopped():
            break
        start += BLOCK
        if model.draws_first_token and start < limit:
            tokens[start] = evaluate(range(start, start + 1), 0)[0][0]
    end = next((i + 1 for i in range(length, limit) if tokens[i] in STOPS), limit)
    return counts | {"tokens": tokens[:end].tolist()}


@pytest.mark.parametrize("numbers", [(0.9, 0.0), (0.9, 1.0), (0.5, 0.7)])
@pytest.mark.parametrize("family", ["fast_dllm_v2", "sdar"])  # whole sequences of the third family mix two kinds of attention
def test_vanilla_is_the_plain_loop(family, numbers, checkpoints, ragged):
    checkpoint, decode = checkpoints[family].first_layers(2), config(*numbers)
    out = vanilla(checkpoint.params, *ragged, checkpoint.model, decode)
    for row, length in enumerate(ragged.lengths.tolist()):
        want = plain_loop(checkpoint, ragged.tokens[row, :length].tolist(), int(SEEDS[row]), decode)
        assert np.asarray(out.tokens)[row, : int(out.lengths[row])].tolist() == want["tokens"]
        assert int(out.stats.steps[row]) == int(out.stats.checks[row]) == want["steps"]
        assert int(out.stats.commits[row]) == want["commits"]
