"""Training: what rows see, masks, targets, packing, and runs that stop and go on."""

import dataclasses
import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from specfold_jax.models import checkpoint
from specfold_jax.models.transformer import forward
from specfold_jax.training.batches import Samples, batch_indices, make_batch, pack
from specfold_jax.training.data import load, prepare
from specfold_jax.training.run import TrainConfig, train
from specfold_jax.training.run_folder import latest, load_state, read_curve, read_meta
from specfold_jax.training.step import attend, init_params, init_state, rate, target_logits

MASK = 3
TINY = TrainConfig(
    dim=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn_dim=32, rope_theta=100.0, block_size=8, clean=60, noisy=44,
    packs=2, steps=6, rate=1e-2, warmup=2, scan=2, dtype="float32",
)  # fmt: skip
SMALL = dataclasses.replace(TINY, clean=7, noisy=5, layers=2, heads=4, kv_heads=2)


draw = jax.jit(make_batch, static_argnums=2)


def samples_of(sizes: list[tuple[int, int]]) -> Samples:
    """Random samples of (question, answer) lengths."""
    rng = np.random.default_rng(0)
    starts = np.array([q for q, _ in sizes], np.int32)
    lengths = np.array([q + a for q, a in sizes], np.int32)
    return Samples(rng.integers(4, 40, lengths.sum()).astype(np.uint16), lengths, starts)


# Answers that start at, before and after a block's edge; that end at one; of one token; a question of one token.
SIZES = [(8, 9), (7, 9), (9, 7), (5, 30), (1, 1), (16, 8), (3, 2), (23, 17), (12, 1)]


@pytest.fixture(scope="module")
def samples() -> Samples:
    return samples_of(SIZES)


@pytest.fixture(scope="module")
def packs(samples):
    packed, dropped = pack(samples, 7, 5, 8, MASK)
    assert dropped == 0
    return packed


@pytest.fixture(scope="module")
def model():
    return SMALL.model(40, MASK, 2, 0)


def tokens_of(samples: Samples, i: int) -> np.ndarray:
    end = int(np.cumsum(samples.lengths)[i])
    return samples.tokens[end - samples.lengths[i] : end].astype(int)


def find(packs, tokens: np.ndarray, block: int = 8) -> tuple[int, int]:
    """Pack and first clean slot of a sample."""
    blocks = -(-tokens.size // block)
    padded = np.full(blocks * block, MASK)
    padded[: tokens.size] = tokens
    hits = [
        (p, s)
        for p in range(packs.tokens.shape[0])
        for s in range(packs.tokens.shape[1] - blocks + 1)
        if np.all(packs.sample[p, s : s + blocks] == s) and np.array_equal(packs.tokens[p, s : s + blocks].reshape(-1), padded)
    ]
    assert len(hits) == 1, "a sample is packed once"
    return hits[0]


def test_packing_covers_every_sample_once(samples, packs):
    blocks = 0
    for i in range(len(SIZES)):
        tokens = tokens_of(samples, i)
        p, s = find(packs, tokens)
        count = -(-tokens.size // 8)
        np.testing.assert_array_equal(packs.number[p, s : s + count], np.arange(count))
        mine = [n for n in range(5) if s <= packs.source[p, n] < s + count and packs.last[p, n] > 0]
        first = SIZES[i][0] // 8
        np.testing.assert_array_equal(packs.source[p, mine], s + np.arange(first, count))
        assert np.sum(packs.last[p, mine] - packs.first[p, mine]) == SIZES[i][1]
        blocks += count
    assert np.sum(packs.sample >= 0) == blocks
    assert np.sum(packs.last - packs.first) == sum(a for _, a in SIZES)


def test_packing_drops_and_refuses(samples):
    _, dropped = pack(samples, 3, 2, 8, MASK)
    assert dropped == 2  # (5, 30) and (23, 17)
    with pytest.raises(ValueError, match="hold none"):
        pack(samples_of([(30, 30)]), 3, 2, 8, MASK)
    for size in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="every sample must have"):
            pack(samples_of([size]), 3, 2, 8, MASK)


def test_masks_partition_the_answer_and_targets_cover_it(packs):
    rng_batches = [jax.tree.map(np.asarray, draw(packs, jax.random.key(k), MASK)) for k in range(20)]
    rates = []
    for batch in rng_batches:
        tokens = batch.tokens.reshape(len(batch.tokens), -1, 8)
        noisy, other = tokens[:, 7:12], tokens[:, 12:]
        clean = np.take_along_axis(packs.tokens, packs.source[..., None].astype(int), axis=1)
        offset = np.arange(8)
        answer = (offset >= packs.first[..., None]) & (offset < packs.last[..., None])
        masked, complement = (noisy == MASK) & (clean != MASK), (other == MASK) & (clean != MASK)
        np.testing.assert_array_equal(masked | complement, answer & (offset > 0))
        assert not np.any(masked & complement)
        np.testing.assert_array_equal(np.where(masked, clean, noisy), clean)
        np.testing.assert_array_equal(batch.valid, answer.reshape(len(answer), -1))
        np.testing.assert_array_equal(batch.targets, clean.reshape(len(clean), -1))
        rates += list((masked.sum(-1) / np.maximum((masked | complement).sum(-1), 1))[answer.sum(-1) == 8])
    assert 0.4 < np.mean(rates) < 0.6
    assert np.std(rates) > 0.25  # one t a block spreads the shares evenly; one t for all would give 0.19


def test_targets_are_read_where_decoding_reads_them(samples, packs, model):
    """Every target's logits equal those of a block-causal forward pass over [committed blocks, canvas], the decoder's own view."""
    params = init_params(model, 0)
    batch = draw(packs, jax.random.key(5), MASK)
    got = np.asarray(jax.jit(target_logits, static_argnums=2)(params, batch, model))
    rows = np.asarray(batch.tokens).reshape(packs.tokens.shape[0], -1, 8)
    views, compared = [], []  # sequences; (view, position in it, pack, target)
    for i in range(len(SIZES)):
        p, s = find(packs, tokens_of(samples, i))
        for n in np.flatnonzero((packs.sample[p, packs.source[p]] == s) & (packs.last[p] > 0)):
            start = 8 * (packs.source[p, n] - s)
            for copy in range(2):
                canvas = rows[p, 7 + 5 * copy + n]
                # what follows the canvas is later blocks, which no earlier row sees: it only makes all views equally long
                views.append(np.concatenate([packs.tokens[p, s : s + start // 8].reshape(-1), canvas, np.full(48 - start - 8, 9)]))
                anchor = [0] if packs.first[p, n] == 0 else []
                hidden = [o for o in range(packs.first[p, n], packs.last[p, n]) if canvas[o] == MASK]
                compared += [(len(views) - 1, start + o, p, n * 8 + o) for o in anchor + hidden]
    want = np.asarray(jax.jit(forward, static_argnums=2)(params, jnp.asarray(np.stack(views), jnp.int32), model))  # shifted
    view, position, pack_index, target = np.array(compared).T
    assert {(p, t) for _, _, p, t in compared} == set(zip(*np.nonzero(np.asarray(batch.valid)), strict=True))
    np.testing.assert_allclose(got[pack_index, target], want[view, position], atol=1e-4, rtol=0)
    assert np.std(want) > 1e-3


def test_attention_equals_a_dense_mask(packs):
    packs = jax.tree.map(lambda x: x[:2], packs)
    batch = draw(packs, jax.random.key(0), MASK)
    count, rows = batch.tokens.shape
    q, k, v = (jax.random.normal(jax.random.key(i), (count, rows, h, 8), jnp.float32) for i, h in enumerate((4, 2, 2)))
    mask = jnp.pad(batch.sees, ((0, 0), (0, 0), (0, 10))) | jnp.eye(17, dtype=bool)
    mask = jnp.repeat(jnp.repeat(mask, 8, axis=1), 8, axis=2)[:, None]

    @jax.jit
    def both(q, k, v):
        want, pull_dense = jax.vjp(lambda *x: jax.nn.dot_product_attention(*x, mask=mask, implementation="xla"), q, k, v)
        got, pull = jax.vjp(lambda *x: attend(*x, batch.sees), q, k, v)
        return (want, *pull_dense(q)), (got, *pull(q))

    for want, got in zip(*both(q, k, v), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


def test_batches_are_permutations():
    stream = batch_indices(0, 7, 3, 0, 14).reshape(-1)
    for epoch in range(6):
        assert sorted(stream[7 * epoch : 7 * epoch + 7]) == list(range(7))
    np.testing.assert_array_equal(batch_indices(0, 7, 3, 5, 4), batch_indices(0, 7, 3, 0, 14)[5:9])


def test_rate():
    config = dataclasses.replace(TINY, steps=1000, warmup=100, rate=1.0)

    def at(step: int, restart: int = 0) -> float:
        return float(rate(config, jnp.int32(step), jnp.int32(restart)))

    assert at(0) == pytest.approx(0.01)
    assert at(99) == pytest.approx(1.0)
    assert at(999) == pytest.approx(0.05)
    assert at(500, 500) == pytest.approx(at(500) / 50)
    assert at(549, 500) == at(549)


def test_config_refuses():
    with pytest.raises(ValueError, match="scan=4 must divide steps=6"):
        dataclasses.replace(TINY, scan=4)
    with pytest.raises(ValueError, match=r"attention='flash' must be one of \('xla', 'cudnn'\)"):
        dataclasses.replace(TINY, attention="flash")
    with pytest.raises(ValueError, match="layers=0 must be a whole number of at least 1"):
        dataclasses.replace(TINY, layers=0)


@pytest.fixture(scope="module")
def compile_once(tmp_path_factory):
    """Runs share one compilation of the step."""
    settings = {"jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")), "jax_persistent_cache_min_compile_time_secs": 0.1}
    before = {name: getattr(jax.config, name) for name in settings}
    compilation_cache.reset_cache()
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, compile_once):
    out = tmp_path_factory.mktemp("data") / "tiny"
    meta = prepare(out, draws=60, held_out=5, vocab=320)
    assert meta["samples"] > 50
    return out


def weights(run) -> bytes:
    return b"".join(p.read_bytes() for p in sorted(latest(run).glob("state-*")))


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    assert train(TINY, folder, out).reason == "finished"
    return out


def test_a_finished_run_is_a_model(folder, finished):
    model, params = checkpoint.load(finished / "model")
    assert (model.vocab, model.mask_id, model.stop_ids, model.block_size) == (320, MASK, (2,), 8)
    assert params["embed"].shape == (320, 16)
    curve = read_curve(finished)
    assert [r["step"] for r in curve] == [2, 4, 6]
    assert curve[-1]["loss"] < curve[0]["loss"]
    card = (finished / "model" / "README.md").read_text()
    assert "not evaluated yet" in card
    assert "6 steps" in card
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(finished / "model")("1<|answer|>").input_ids[-1] == 1
    assert load(folder).samples.lengths.size == load(folder).meta["samples"]
    assert train(TINY, folder, finished).step == 6  # nothing left to do


def test_interrupted_runs_resume(folder, finished, tmp_path):
    out, export = tmp_path / "run", tmp_path / "export"
    result = train(TINY, folder, out, report=lambda record: signal.raise_signal(signal.SIGINT), export=export, shard_mib=0.08)
    assert (result.step, result.reason, result.model) == (2, "SIGINT", None)
    assert read_meta(latest(out))["kind"] == "complete"
    assert train(TINY, folder, out, save_seconds=0.0).reason == "finished"
    assert weights(out) == weights(finished)
    assert [r["loss"] for r in read_curve(out)] == [r["loss"] for r in read_curve(finished)]

    compact = latest(export)
    assert read_meta(compact)["kind"] == "compact"
    sizes = [p.stat().st_size for p in compact.glob("state-*")]
    assert len(sizes) > 1
    assert max(sizes) <= 0.08 * 2**20
    fresh = init_state(TINY, TINY.model(320, MASK, 2, 0))
    state, _ = load_state(compact, fresh)
    assert (int(state.step), int(state.restart)) == (2, 2)
    jax.tree.map(np.testing.assert_array_equal, state.moments, fresh.moments)
    result = train(TINY, folder, export, max_seconds=0.0)
    assert (result.step, result.reason) == (4, "max_seconds")
    assert [r["step"] for r in read_curve(export)] == [2, 4]
    assert int(load_state(latest(export), fresh)[0].restart) == 2


def test_train_refuses_what_is_not_its_run(folder, finished, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="it holds other files"):
        train(TINY, folder, tmp_path)
    with pytest.raises(ValueError, match=r"same configuration: rate=0\.01 there, 0\.5 here"):
        train(dataclasses.replace(TINY, rate=0.5), folder, finished)
    other = tmp_path / "data"
    prepare(other, draws=40, held_out=2, vocab=320)
    with pytest.raises(ValueError, match="same training data"):
        train(TINY, other, finished)
    with pytest.raises(ValueError, match="new or empty"):
        prepare(other, draws=10)
    (other / "samples-000.npz.xz").unlink()
    with pytest.raises(ValueError, match="lacks"):
        load(other)


def test_initial_state_is_finite(model):
    state = init_state(SMALL, model)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(state))
    assert json.dumps(dataclasses.asdict(SMALL))
