"""Parameters between the two sides and from checkpoint folders, bit for bit; and what is refused on the way."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import specfold_jax as sf
from parity_tests.harness.golden_cases import GOLDEN, MASK
from parity_tests.harness.torch_twin import to_jax, twin
from specfold_jax.models import transformer as jax_model
from specfold_torch_ref.diffusion.loop import specfold_decode, spiffy_decode, vanilla_decode
from specfold_torch_ref.models import checkpoint as torch_checkpoint
from specfold_torch_ref.models import transformer as torch_model
from specfold_torch_ref.models.convert import name_table, require_fitting, to_torch

NAMES = ("fast_dllm_v2", "fast_dllm_v2/tied", "nld", "nld/yarn_quarter", "sdar")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name, dtype, checkpoints):
    model = checkpoints[name].model
    params = jax_model.cast(checkpoints[name].params, jnp.dtype(dtype))
    there = to_torch(params, model)
    assert there["layers"][0]["qkv"].dtype == getattr(torch, dtype)
    back = to_jax(there)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))


def test_the_table_names_every_parameter_once(checkpoints):
    for checkpoint in checkpoints.values():
        table = name_table(checkpoint.model)
        paths = {
            tuple(key.key if hasattr(key, "key") else key.idx for key in path) for path, _ in jax.tree.leaves_with_path(checkpoint.params)
        }
        assert set(table) == paths
        assert len(set(table.values())) == len(table)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_both_sides_read_the_same_folder_alike(name, dtype):
    mask_id = MASK[name.split("/")[0]]
    model, params = sf.load(GOLDEN / name, dtype=dtype, mask_id=mask_id)
    ours_model, ours = torch_checkpoint.load(GOLDEN / name, dtype=dtype, mask_id=mask_id)
    assert ours_model == model
    for got, want in zip(jax.tree.leaves(to_jax(ours)), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: p.pop("norm"), "missing norm"),
        (lambda p: p["layers"][1].pop("down"), "missing layers.1.down"),
        (lambda p: p["layers"].pop(), "missing layers.1.attn_norm"),
        (lambda p: p.update(extra=p["norm"]), "unexpected extra"),
        (
            lambda p: p["layers"][0].update(o=p["layers"][0]["o"][:3]),
            r"layers\.0\.o has shape \[3, 64\], the configuration says \[64, 64\]",
        ),
        (lambda p: p.update(norm=p["norm"].double()), "norm has dtype torch.float64, needs one of float32, bfloat16, float16"),
    ],
)
def test_parameters_that_do_not_fit_are_named(spoil, message, fast):
    params = twin(fast)
    spoil(params)
    with pytest.raises(ValueError, match=message):
        require_fitting(params, fast.model)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing model.norm.weight"),
        (lambda t: t.update({"model.more": torch.zeros(1)}), "unexpected model.more"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight has shape \[3\], the configuration says \[64\]"),
    ],
)
def test_folders_that_do_not_fit_are_named(spoil, message, tmp_path):
    tensors = load_file(GOLDEN / "sdar" / "model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((GOLDEN / "sdar" / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        torch_checkpoint.load(tmp_path, mask_id=310)


def test_folders_without_tensors_and_unknown_dtypes_are_refused(tmp_path):
    (tmp_path / "config.json").write_text((GOLDEN / "sdar" / "config.json").read_text())
    with pytest.raises(ValueError, match=r"no \*.safetensors"):
        torch_checkpoint.load(tmp_path, mask_id=310)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="truncated or not a safetensors file"):
        torch_checkpoint.load(tmp_path, mask_id=310)
    with pytest.raises(ValueError, match="dtype='int8' must be 'float32', 'bfloat16' or 'float16'"):
        torch_checkpoint.load(tmp_path, dtype="int8")


def test_shards_are_one_checkpoint(tmp_path):
    tensors = load_file(GOLDEN / "sdar" / "model.safetensors")
    names = sorted(tensors)
    for part in range(2):
        save_file({name: tensors[name] for name in names[part::2]}, tmp_path / f"model-{part}.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((GOLDEN / "sdar" / "config.json").read_text())))
    _, got = torch_checkpoint.load(tmp_path, mask_id=310)
    _, want = torch_checkpoint.load(GOLDEN / "sdar", mask_id=310)
    assert all(torch.equal(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))


@pytest.mark.parametrize(
    ("prompts", "lengths", "message"),
    [
        (np.ones((2, 3), np.int32), np.ones(3, np.int32), r"must have shapes \[batch, capacity\] and \[batch\]"),
        (np.ones((1, 3), np.float32), np.ones(1, np.int32), "prompts has dtype float32, needs whole numbers"),
        (np.ones((1, 3), np.int32), np.array([4], np.int32), "beyond the capacity of 3"),
        (np.ones((1, 3), np.int32), np.array([0], np.int32), "needs at least one token"),
        (np.full((1, 3), 320, np.int32), np.array([2], np.int32), "token id 320 at 0 lies outside"),
        (np.full((1, 3), 310, np.int32), np.array([2], np.int32), "the mask token 310 at 0 cannot be part of a prompt"),
    ],
)
def test_prompts_that_cannot_be_decoded_are_named(prompts, lengths, message, fast):
    params = twin(fast)
    for form in (np.asarray, torch.from_numpy):
        with pytest.raises(ValueError, match=message):
            vanilla_decode(params, form(prompts), form(lengths), fast.model, sf.DecodeConfig())


def test_decoding_with_kernels_outside_the_interpreter_or_an_unknown_name_is_refused(fast, monkeypatch):
    from kernels_triton import arguments

    monkeypatch.setattr(arguments.INTERPRET, "value", False)
    prompts, lengths, decode = np.ones((1, 3), np.int32), np.array([3], np.int32), sf.DecodeConfig(max_new_tokens=4)
    graph = sf.DraftGraph.from_sets([frozenset({(0, 0)})], [1])
    calls = ((vanilla_decode, ()), (spiffy_decode, (graph,)), (specfold_decode, (graph, sf.FoldConfig())))
    for function, more in calls:
        with pytest.raises(NotImplementedError, match="need CUDA tensors, not cpu"):
            function(twin(fast), prompts, lengths, fast.model, decode, *more, impl="triton")
        with pytest.raises(ValueError, match="impl='xla' must be 'torch' or 'triton'"):
            function(twin(fast), prompts, lengths, fast.model, decode, *more, impl="xla")


def test_cast_changes_every_tensor(fast):
    params = torch_model.cast(twin(fast), torch.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(params)} == {torch.bfloat16}
