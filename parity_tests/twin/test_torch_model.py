"""The Torch transformer against the authors' logits and against the JAX side: layer by layer, on a cache, folded and not."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import specfold_jax as sf
from parity_tests.harness.branches import BATCH, BLOCK, branches_of, cache_of
from parity_tests.harness.golden_files import TOLERANCE, read
from parity_tests.harness.torch_twin import tensor, twin
from parity_tests.lockstep.gates import Replay, recorded_gates
from specfold_jax.models import transformer as jax_model
from specfold_jax.models.check import check as check_on_jax
from specfold_torch_ref.models import fold as torch_fold
from specfold_torch_ref.models import transformer as torch_model
from specfold_torch_ref.models.check import Branches, Checked, check
from specfold_torch_ref.models.reference import logits
from specfold_torch_ref.models.transformer import forward, prefill

CLOSE = 2e-5
"""fp32, two implementations of the same sums."""
BFLOAT16 = 0.06
"""Relative RMS of bfloat16 against float32 on the same rounded parameters, about twice what either side shows."""


def close(got: torch.Tensor, want, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(got.numpy(), np.asarray(want), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "ids", "attention", "want"),
    [
        ("fast_dllm_v2", "full_ids", None, "full_logits_shifted"),
        ("nld", "full_ids", None, "bidirectional_logits"),
        ("nld", "clean_ids", "causal", "causal_logits"),
        ("nld/yarn_quarter", "ids", "causal", "causal_logits"),
        ("sdar", "b4_full_ids", None, "b4_full_logits"),
    ],
)
def test_whole_sequences_are_the_authors(name, ids, attention, want, checkpoints):
    golden = read(name)
    close(forward(twin(checkpoints[name]), tensor(golden[ids]), checkpoints[name].model, attention), golden[want])


def test_tied_embeddings(checkpoints):
    golden, params = read("fast_dllm_v2/tied"), twin(checkpoints["fast_dllm_v2/tied"])
    hidden, _ = prefill(params, tensor(golden["ids"]), checkpoints["fast_dllm_v2/tied"].model, "block", 32)
    close(logits(hidden, torch_model.head_weight(params)), golden["logits"])


@pytest.mark.parametrize(("name", "prefix", "block"), [("fast_dllm_v2", "", 32), ("nld", "", 32), ("sdar", "b4_", 4)])
def test_a_prefix_and_blocks_on_its_cache_are_the_authors(name, prefix, block, checkpoints):
    """Prefill, a denoising check and a commit, the latter two as rows of one call, with junk behind the prefix."""
    golden, model, params = read(name), checkpoints[name].model, twin(checkpoints[name])
    full, clean = (tensor(golden[f"{prefix}{kind}_ids"]) for kind in ("full", "clean"))
    start, pattern = full.shape[1] - block, "causal" if model.commit == "causal" else "block"
    hidden, cache = prefill(params, full[:, :start], model, pattern, block)
    close(logits(hidden, torch_model.head_weight(params)), golden[f"{prefix}prefill_logits"])
    cache = tuple(tuple(torch.nn.functional.pad(x.repeat(2, 1, 1, 1), (0, 0, 0, 0, 0, 5), value=1e3) for x in pair) for pair in cache)
    branches = Branches(
        tokens=torch.stack([full[:, start:], clean[:, start:]]),
        valid=torch.ones(2, 1, dtype=torch.bool),
        parent=torch.zeros(2, 1, dtype=torch.long),
        start=torch.tensor([start, start]),
        causal=torch.tensor([False, model.commit == "causal"]),
    )
    out = check(params, branches, cache, branches.start, model)
    scores = logits(out.hidden, torch_model.head_weight(params))
    close(scores[:1, 0], golden[f"{prefix}block_logits"])
    close(scores[1:, 0], golden[f"{prefix}commit_logits"])
    keys = torch.stack([torch.stack([x[1:, 0] for x in pair]) for pair in out.kv])
    close(keys.transpose(3, 4), golden[f"{prefix}commit_kv"])


def jax_check(params, branches, cache, model, fold):
    """The JAX side's check, with the decisions of all gates in order. Not compiled: single operations are soon shared by all tests."""
    with recorded_gates() as gates:
        return check_on_jax(params, branches, cache, branches.start, model, fold, pack=False), gates


OPTIONS = {
    "no fold": None,
    "defaults": {},
    "one gate": {"gates": 1},
    "source": {"reference": "source"},
    "no correction": {"correction": False},
    "not forced": {"force_revealed": False},
    "ffn": {"scope": "ffn"},
}


def compare_checks(checkpoint, fold, context: bool, pack: bool = True) -> tuple[Checked, Replay]:
    """Keys, values and gates of every layer, hidden states, counts."""
    branches, cache = branches_of(checkpoint.model, context), cache_of(checkpoint.model)
    want, gates = jax_check(checkpoint.params, branches, cache, checkpoint.model, fold)
    ours = Branches(*(None if x is None else tensor(x) for x in branches))
    replay = Replay()
    replay.expect(gates, 0)
    with mock.patch.object(torch_fold, "gate", replay):
        pairs = tuple((tensor(k), tensor(v)) for k, v in zip(*cache, strict=True))
        got = check(twin(checkpoint), ours, pairs, ours.start, checkpoint.model, fold, pack)
    valid = np.asarray(branches.valid)
    assert next(replay.wanted, None) is None
    for layer, (pair, other) in enumerate(zip(got.kv, want.kv, strict=True)):
        for a, b in zip(pair, other, strict=True):
            np.testing.assert_allclose(a.numpy()[valid], np.asarray(b)[valid], rtol=0, atol=CLOSE, err_msg=f"{layer=}")
    np.testing.assert_allclose(got.hidden.numpy()[valid], np.asarray(want.hidden)[valid], rtol=0, atol=CLOSE)
    np.testing.assert_array_equal(got.computed_rows, want.computed_rows)
    np.testing.assert_array_equal(got.folded, want.folded)
    return got, replay


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_layer_by_layer(name, fast):
    fold = None if OPTIONS[name] is None else sf.FoldConfig(tau=0.3, **OPTIONS[name])
    got, replay = compare_checks(fast, fold, context=True)
    assert replay.ties == 0
    assert (fold is not None) == bool(got.folded.any()) == bool(replay.folded)
    assert len(got.gates) == 2
    drafts = tensor(branches_of(fast.model, True).valid)[..., None] & (torch.arange(7)[:, None] > 0) & (torch.arange(7)[:, None] < 6)
    for layer, pair in enumerate(got.gates):  # the counts are the counts of the recorded gates
        for n, gate in enumerate(pair):
            assert torch.equal((gate.computed & drafts).sum(dim=(1, 2)), got.computed_rows[:, layer, n].long())


@pytest.mark.parametrize("tau", [None, 0.3])
def test_every_family_layer_by_layer(tau, checkpoint):
    compare_checks(checkpoint, None if tau is None else sf.FoldConfig(tau=tau), context=False)


def test_packing_changes_no_value(fast):
    fold = sf.FoldConfig(tau=0.3)
    valid = tensor(branches_of(fast.model, True).valid)
    packed, dense = (compare_checks(fast, fold, True, pack)[0] for pack in (True, False))
    torch.testing.assert_close(packed.hidden[valid], dense.hidden[valid], rtol=0, atol=CLOSE)


def test_a_swapped_source_is_seen(fast):
    """A folded position that inherits from another branch than its own source gives other states."""
    branches, cache = branches_of(fast.model), tuple((tensor(k), tensor(v)) for k, v in zip(*cache_of(fast.model), strict=True))
    ours = Branches(*(None if x is None else tensor(x) for x in branches))
    arguments = (twin(fast), ours, cache, ours.start, fast.model, sf.FoldConfig(tau=0.3))
    plain = torch_fold.gate

    def swapped(*inputs, **options):
        gate = plain(*inputs, **options)
        return gate._replace(source=torch.where(gate.computed, gate.source, 4 * (gate.source == 0).int()))

    want = check(*arguments).hidden
    with mock.patch.object(torch_fold, "gate", swapped):
        assert (check(*arguments).hidden - want)[0, 1:4].abs().max() > 100 * CLOSE


def test_bfloat16(checkpoint):
    """Both sides' bfloat16 lies equally close to float32 on the same rounded parameters."""
    rounded = jax_model.cast(jax_model.cast(checkpoint.params, jnp.bfloat16), jnp.float32)
    half = torch_model.cast(twin(checkpoint), torch.bfloat16)
    branches, cache = branches_of(checkpoint.model), cache_of(checkpoint.model)
    ours = Branches(*(None if x is None else tensor(x) for x in branches))
    narrow = tuple((tensor(k).bfloat16(), tensor(v).bfloat16()) for k, v in zip(*cache, strict=True))
    wide = tuple((k.float(), v.float()) for k, v in narrow)
    want = check(twin(checkpoint._replace(params=rounded)), ours, wide, ours.start, checkpoint.model).hidden[ours.valid]
    for fold in (None, sf.FoldConfig(tau=0.0)):
        got = check(half, ours, narrow, ours.start, checkpoint.model, fold).hidden
        assert got.dtype == torch.bfloat16
        assert (got[ours.valid].float() - want).pow(2).mean().sqrt() < BFLOAT16 * want.pow(2).mean().sqrt()
    jax_half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (checkpoint.params, cache))
    other = check_on_jax(jax_half[0], branches, jax_half[1], branches.start, checkpoint.model, None, pack=False)
    theirs = tensor(np.asarray(other.hidden.astype(jnp.float32)))[ours.valid]
    assert (theirs - want).pow(2).mean().sqrt() < BFLOAT16 * want.pow(2).mean().sqrt()
    assert got.shape == (BATCH, 7, BLOCK, checkpoint.model.dim)
