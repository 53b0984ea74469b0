"""Counter-based noise: known answers of all four generators, Gumbel statistics, and independence of who asks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.random import threefry_2x32

from kernels_pallas import noise as pallas_noise
from kernels_triton.noise import threefry as triton_threefry
from parity_tests.harness.devices import DEVICE
from specfold_jax.models import noise as jax_noise
from specfold_jax.models import sampling
from specfold_jax.models.noise import gumbel, threefry
from specfold_torch_ref.models import noise as torch_noise

WORD = st.integers(0, 2**32 - 1)
noise = jax.jit(gumbel, static_argnums=3)


@triton.jit
def _triton_words(words, out):
    """From int32 `words` [4, n], two keys and two counters, to `out` [2, n]."""
    n, number = tl.program_id(0), tl.num_programs(0)
    key0, key1 = tl.load(words + n).to(tl.uint32), tl.load(words + number + n).to(tl.uint32)
    counter0, counter1 = tl.load(words + 2 * number + n).to(tl.uint32), tl.load(words + 3 * number + n).to(tl.uint32)
    first, second = triton_threefry(key0, key1, counter0, counter1)
    tl.store(out + n, first.to(tl.int32))
    tl.store(out + number + n, second.to(tl.int32))


def jax_words(words: np.ndarray) -> np.ndarray:
    return np.stack(jax_noise.threefry(*jnp.asarray(words)))


def pallas_words(words: np.ndarray) -> np.ndarray:
    return np.stack(pallas_noise.threefry(*jnp.asarray(words)))


def torch_words(words: np.ndarray) -> np.ndarray:
    return torch.stack(torch_noise.threefry(*torch.from_numpy(words.astype(np.int64)))).numpy().astype(np.uint32)


def triton_words(words: np.ndarray) -> np.ndarray:
    out = torch.empty((2, words.shape[1]), dtype=torch.int32, device=DEVICE)
    _triton_words[(words.shape[1],)](torch.from_numpy(words.view(np.int32)).to(DEVICE), out)
    return out.cpu().numpy().view(np.uint32)


GENERATORS = {
    "jax": jax_words,
    "torch": torch_words,
    "pallas": pallas_words,
    "triton": pytest.param(triton_words, marks=[pytest.mark.gpu] if DEVICE.type == "cuda" else []),
}
"""Each maps uint32 [4, n], two keys and two counters, to [2, n]. Four copies, because a kernel imports no model and no other package."""
all_generators = pytest.mark.parametrize("generator", GENERATORS.values(), ids=GENERATORS)


# Known answers published with Random123 (threefry2x32, 20 rounds): counter, key, output.
@all_generators
@pytest.mark.parametrize(
    ("counter", "key", "output"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers(generator, counter, key, output):
    words = generator(np.array([*key, *counter], np.uint32)[:, None])
    assert tuple(words[:, 0].tolist()) == output


@all_generators
def test_all_generators_give_the_same_words(generator):
    words = np.random.default_rng(0).integers(0, 2**32, (4, 50), np.uint32)
    np.testing.assert_array_equal(generator(words), jax_words(words))


def test_a_kernel_draws_what_the_model_draws():
    """Seeds, positions and steps at both ends of int32; bit for bit, from the same words."""
    seed, position, step = jnp.array([[0, -1, 2**31 - 1, -(2**31)], [5, 900, 0, 2**31 - 1], [0, 31, 2, 7]], jnp.int32)[..., None]
    token = jnp.arange(500, dtype=jnp.int32)
    draws = [jax.jit(module.draw)(seed, position, step, token) for module in (jax_noise, pallas_noise)]
    np.testing.assert_array_equal(*draws)


@given(key=st.tuples(WORD, WORD), counters=st.lists(st.tuples(WORD, WORD), min_size=4, max_size=4))
def test_it_is_jax_own_generator(key, counters):
    first, second = np.array(counters, np.uint32).T
    ours = threefry(jnp.uint32(key[0]), jnp.uint32(key[1]), jnp.asarray(first), jnp.asarray(second))
    theirs = threefry_2x32(jnp.array(key, jnp.uint32), jnp.concatenate([jnp.asarray(first), jnp.asarray(second)]))
    np.testing.assert_array_equal(jnp.concatenate(ours), theirs)


def test_gumbel_uses_key_seed_position_and_counter_step_token():
    """23 bits of the first word, at the middle of their interval."""
    seed, position, step, token = -3, 17, 5, 29
    word, _ = threefry_2x32_words((2**32 + seed, position), (step, token))
    want = -np.log(-np.log((float(word >> 9) + 0.5) * 2.0**-23))
    got = noise(*(jnp.int32(x) for x in (seed, position, step)), 32)[token]
    assert float(got) == pytest.approx(want, rel=1e-5)


def threefry_2x32_words(key, counter) -> list[int]:
    return np.asarray(threefry_2x32(jnp.array(key, jnp.uint32), jnp.array(counter, jnp.uint32))).tolist()


def test_gumbel_moments_and_range():
    rows = jnp.arange(400, dtype=jnp.int32)
    draws = np.asarray(noise(jnp.full_like(rows, 7), rows, rows % 5, 500), np.float64).ravel()
    assert np.isfinite(draws).all()
    error = 1 / np.sqrt(draws.size)
    assert draws.mean() == pytest.approx(0.5772157, abs=5 * 1.2825 * error)
    assert draws.var() == pytest.approx(np.pi**2 / 6, abs=5 * 2.7 * error)
    for quantile in (0.01, 0.5, 0.99):
        assert np.mean(draws < -np.log(-np.log(quantile))) == pytest.approx(quantile, abs=5 * 0.5 * error)


@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_the_extreme_words_give_finite_noise(word):
    uniform = (jnp.float32(word >> 9) + jnp.float32(0.5)) * jnp.float32(2**-23)
    assert np.isfinite(float(-jnp.log(-jnp.log(uniform))))


@pytest.mark.parametrize("change", ["seed", "position", "step"])
def test_streams_differ_and_do_not_correlate(change):
    base = {"seed": 3, "position": 11, "step": 0}
    first, second = (np.asarray(noise(*(jnp.int32(x) for x in d.values()), 4000)) for d in (base, base | {change: base[change] + 1}))
    assert not np.any(first == second)
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(4000)


def test_a_draw_does_not_depend_on_the_rest_of_the_call():
    rows = jnp.arange(6, dtype=jnp.int32)
    together = noise(rows, rows * 3, rows % 2, 40)
    for row in range(6):
        alone = noise(*(jnp.int32([x]) for x in (row, row * 3, row % 2)), 17)
        np.testing.assert_array_equal(alone[0], together[row, :17])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampled_tokens_follow_the_softmax(temperature):
    """Chi-square of 20000 draws of one distribution against softmax(logits / T) without MASK."""
    logits, mask, draws = jnp.array([1.0, 0.2, -0.5, 3.0, 0.9, -1.0, 0.0]), 3, 20000
    steps = jnp.arange(draws, dtype=jnp.int32)
    ranked = jax.jit(sampling.rank, static_argnums=(5, 6))(
        jnp.broadcast_to(logits, (draws, 7)), jnp.full_like(steps, 9), steps % 113, steps // 113, jnp.float32(temperature), mask, 1
    )
    counts = np.bincount(np.asarray(ranked.tokens[:, 0]), minlength=7)
    weights = np.exp(np.asarray(logits, np.float64) / temperature)
    kept = np.arange(7) != mask
    assert counts[mask] == 0
    expected = draws * weights[kept] / weights[kept].sum()
    assert np.sum((counts[kept] - expected) ** 2 / expected) < 25  # chi-square with 5 degrees of freedom: p = 1.4e-4
    # The score is the sampled token's log-odds among all entries, MASK's included.
    shares = weights / weights.sum()
    odds = np.log(shares / (1 - shares))[np.asarray(ranked.tokens[:, 0])]
    np.testing.assert_allclose(ranked.odds, odds, rtol=1e-4, atol=1e-5)
