"""Checkpoint folders: round trips, shards, tied heads, dtypes, and one clear error for whatever is wrong with a folder."""

import json
import shutil
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specfold_jax as sf
from parity_tests.harness.golden_cases import GOLDEN
from specfold_jax.models import checkpoint
from specfold_jax.models.families import model_config
from specfold_jax.models.transformer import cast

NAMES = {"fast_dllm_v2": 310, "fast_dllm_v2/tied": 310, "nld": None, "sdar": 310}


def config_of(name: str) -> dict:
    return json.loads((GOLDEN / name / "config.json").read_text())


@pytest.fixture
def folder(tmp_path):
    """A writable copy of the tied checkpoint."""
    shutil.copytree(GOLDEN / "fast_dllm_v2/tied", tmp_path / "model", ignore=shutil.ignore_patterns("*.npz"))
    return tmp_path / "model"


def edit(folder, change) -> None:
    """Rewrites the folder's tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def configure(folder, **changes) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))


def load(folder, **arguments):
    return sf.load(folder, **({"mask_id": 310} | arguments))


def equal(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name, dtype, checkpoints, tmp_path):
    """What is saved is the checkpoint it came from, tensor for tensor and name for name."""
    _, model, params = checkpoints[name]
    params = cast(params, dtype)
    checkpoint.save(tmp_path / "new", params, model, config_of(name), dtype)
    again, loaded = sf.load(tmp_path / "new", dtype, mask_id=NAMES[name])
    assert again == model
    equal(loaded, params)
    ours, theirs = load_file(tmp_path / "new" / "model.safetensors"), load_file(GOLDEN / name / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        np.testing.assert_array_equal(ours[key], tensor.astype(jnp.dtype(dtype)))
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["config.json", "model.safetensors"]


def test_a_bfloat16_file_is_widened_exactly_and_a_float32_file_rounded(folder):
    _, wide = load(folder, dtype="float32")
    _, rounded = load(folder, dtype="bfloat16")
    equal(rounded, cast(wide, jnp.bfloat16))
    edit(folder, lambda tensors: tensors.update({k: v.astype(ml_dtypes.bfloat16) for k, v in tensors.items()}))
    equal(load(folder, dtype="bfloat16")[1], rounded)
    equal(load(folder, dtype="float32")[1], cast(rounded, jnp.float32))
    assert {x.dtype for x in jax.tree.leaves(load(folder)[1])} == {jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")}


def shard(folder) -> dict[str, str]:
    """Splits the file in two and returns the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    index = {name: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(names)}
    for file in set(index.values()):
        save_file({name: tensors[name] for name in names if index[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return index


def test_shards_with_an_index(folder):
    whole = load(folder)[1]
    shard(folder)
    equal(load(folder)[1], whole)


def test_a_missing_shard_is_named(folder):
    index = shard(folder)
    gone = sorted(set(index.values()))[1]
    (folder / gone).unlink()
    with pytest.raises(ValueError, match=gone):
        load(folder)


def test_a_tensor_that_is_not_in_its_shard_is_named(folder):
    index = shard(folder)
    first, *_ = (name for name in index if name.endswith("o_proj.weight"))
    index[first] = next(file for file in index.values() if file != index[first])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ValueError, match=first):
        load(folder)


def test_every_wrong_tensor_is_named_at_once(folder):
    def change(tensors):
        tensors["model.norm.bias"] = tensors.pop("model.norm.weight")
        tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"][:-1]
        tensors["model.layers.0.self_attn.q_proj.weight"] = tensors["model.layers.0.self_attn.q_proj.weight"].T[:, :3].copy()

    edit(folder, change)
    with pytest.raises(ValueError, match="missing") as error:
        load(folder)
    for text in (
        "missing model.norm.weight",
        "unexpected model.norm.bias",
        "model.layers.1.mlp.up_proj.weight has shape [127, 64], the configuration says [128, 64]",
        "model.layers.0.self_attn.q_proj.weight has shape [64, 3], the configuration says [64, 64]",
    ):
        assert text in str(error.value)


def test_one_layer_too_many_or_too_few(folder):
    configure(folder, num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"missing model\.layers\.2"):
        load(folder)
    configure(folder, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"unexpected model\.layers\.1"):
        load(folder)


def test_harmless_extras_are_ignored(folder):
    """Old files carry rotary tables, and some tied checkpoints a copy of the head."""

    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    whole = load(folder)[1]
    edit(folder, change)
    equal(load(folder)[1], whole)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_reported(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors: truncated or not a safetensors file"):
        load(folder)


def test_a_file_with_a_wild_header_is_reported(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}")
    with pytest.raises(ValueError, match="truncated or not a safetensors file"):
        load(folder)


def test_missing_files(folder, tmp_path):
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config\.json"):
        load(folder)
    with pytest.raises(ValueError, match="neither a checkpoint folder nor a model inside the package"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="float16"):
        load(folder, dtype="float16")


NO_JSON = [b"", b"{", b"{'a': 1}", b"\x00", b"\xff", b"[" * 100_000, b'{"vocab_size": ' + b"9" * 5000 + b"}"]


@pytest.mark.parametrize("content", NO_JSON)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_file_that_is_not_json(folder, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}: must be .* in JSON"):
        load(folder)


@pytest.mark.parametrize("content", ["[]", "3", "null"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_file_that_is_no_object(folder, name, content):
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name}=.* must be an object"):
        load(folder)


@pytest.mark.parametrize(
    "content", [{}, {"weight_map": None}, {"weight_map": ["a"]}, {"weight_map": {"a": 3}}, {"weight_map": {"a": ["b"]}}]
)
def test_an_index_without_a_table_of_shards(folder, content):
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: weight_map.* must be"):
        load(folder)


@pytest.mark.parametrize("name", ["unknown", "LlamaForCausalLM"])
def test_an_unknown_architecture_is_named(folder, name):
    configure(folder, architectures=[name])
    with pytest.raises(ValueError, match=rf"config\.json: unknown architecture '{name}'"):
        load(folder)


@pytest.mark.parametrize("value", [[], None, "absent"])
def test_no_architecture(folder, value):
    configure(folder, architectures=value)
    with pytest.raises(ValueError, match="unknown architecture"):
        load(folder)


FIELDS = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"]


@pytest.mark.parametrize("name", [*FIELDS, "rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize("value", [None, "absent"])
def test_a_missing_field_is_named(folder, name, value):
    configure(folder, **{name: value})
    with pytest.raises(ValueError, match=rf"config\.json: missing {name}"):
        load(folder)


def test_several_missing_fields_are_named_at_once(folder):
    configure(folder, vocab_size=None, rms_norm_eps=None)
    with pytest.raises(ValueError, match="missing vocab_size, rms_norm_eps"):
        load(folder)


def test_the_mask_id_must_be_in_the_vocabulary(folder):
    """The family's own mask id, which config.json leaves out, is beyond this small vocabulary."""
    for mask_id in (None, 320):
        with pytest.raises(ValueError, match=r"config\.json: mask_id=\d+ must lie inside the vocabulary of 320"):
            load(folder, mask_id=mask_id)
    model, _ = load(folder, mask_id=5, stop_ids=[1, 2])
    assert (model.mask_id, model.stop_ids) == (5, (1, 2))


def test_zero_is_a_value_and_null_is_none(folder):
    configure(folder, mask_token_id=0, eos_token_id=0, pad_token_id=None, tie_word_embeddings=True, block_size=None, bd_size=16)
    model, _ = load(folder, mask_id=None)
    assert (model.mask_id, model.stop_ids, model.pad_id, model.block_size) == (0, (0,), 0, 16)


SIZES = ("bd_size", "head_dim", *FIELDS)
WRONG = [(name, value) for name in SIZES for value in ("64", 0, -4, 2.5, True, [64], 2**31)]
WRONG += [("tie_word_embeddings", value) for value in ("false", 0, 1, [])]
WRONG += [("rms_norm_eps", value) for value in ("1e-6", 0, -1e-6, float("nan"), float("inf"), True, 10**400)]
WRONG += [("rope_theta", value) for value in ("1e4", 0, 1, -1e4, float("nan"), [1e4])]
WRONG += [(f"{name}_token_id", value) for name in ("eos", "pad") for value in ("2", -1, 1.7, True, 320, ["2"], [1.7], {}, [[2]])]
WRONG += [("mask_token_id", value) for value in ("3", -1, 3.0, False, 320, [3])]
WRONG += [("architectures", value) for value in ("Fast_dLLM_QwenForCausalLM", 3, [3], [["x"]])]
WRONG += [("rope_scaling", value) for value in ("yarn", [1], {"rope_type": 3})]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_value_of_the_wrong_kind_is_named_with_its_file(folder, name, value):
    configure(folder, **{name: value})
    shown = {"eos_token_id": "(eos_token_id|stop_ids)", "pad_token_id": "pad_(token_)?id", "mask_token_id": "mask_(token_)?id"}
    with pytest.raises(ValueError, match=rf"config\.json: {shown.get(name, name)}|config\.json: rope_type=3"):
        load(folder, mask_id=None if name == "mask_token_id" else 310)


@pytest.mark.parametrize("value", [None, "8", 0, -1, float("nan"), [8]])
@pytest.mark.parametrize("name", ["factor", "original_max_position_embeddings", "beta_fast", "mscale", "attention_factor", "truncate"])
def test_yarn_takes_numbers(name, value):
    config = config_of("nld")
    config["rope_parameters"] |= {name: value}
    if value is None and not name.startswith(("factor", "original")):
        assert model_config(config)
    elif (name, value) != ("mscale", 0):
        with pytest.raises(ValueError, match=name):
            model_config(config)


@pytest.mark.parametrize("arguments", [dict(mask_id="5"), dict(mask_id=-1), dict(mask_id=5.0), dict(stop_ids="12"), dict(stop_ids=(1.7,))])
def test_arguments_of_the_wrong_kind(folder, arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        load(folder, **arguments)


@pytest.mark.parametrize("kind", ["linear", "llama3", "dynamic"])
def test_an_unsupported_rope_is_named(kind):
    with pytest.raises(ValueError, match=f"rope_type='{kind}'"):
        model_config(config_of("nld") | {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}})


def test_families_read_their_own_switches(checkpoints):
    fast, nld, sdar = (checkpoints[name].model for name in ("fast_dllm_v2", "nld", "sdar"))
    assert [m.block_size for m in (fast, nld, sdar)] == [32, 32, 4]
    assert [m.sub_block for m in (fast, nld, sdar)] == [8, None, None]
    assert [m.mask_id for m in (fast, nld, sdar)] == [310, 100, 310]
    assert [m.stop_ids for m in (fast, nld, sdar)] == [(311,), (11,), (311,)]
    assert [m.pad_id for m in (fast, nld, sdar)] == [311, 0, 0]
    assert [m.strict for m in (fast, nld, sdar)] == [True, False, True]
    assert [m.shift for m in (fast, nld, sdar)] == [True, False, False]
    assert [m.commit for m in (fast, nld, sdar)] == ["block", "causal", "block"]
    assert model_config(config_of("sdar") | {"eos_token_id": [1, 2]}).stop_ids == (1, 2)


def test_saving_over_a_checkpoint_is_refused(folder, checkpoints):
    _, model, params = checkpoints["fast_dllm_v2/tied"]
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"holds a model\.safetensors already"):
        checkpoint.save(folder, params, model, config_of("fast_dllm_v2/tied"))
    assert (folder / "model.safetensors").read_bytes() == before


def test_saving_with_another_models_config_is_refused(tmp_path, checkpoints):
    _, model, params = checkpoints["fast_dllm_v2"]
    with pytest.raises(ValueError, match="does not describe the model"):
        checkpoint.save(tmp_path / "new", params, model, config_of("fast_dllm_v2/tied"))
    assert not (tmp_path / "new").exists()


def test_an_interrupted_save_leaves_nothing_that_loads(tmp_path, checkpoints, monkeypatch):
    _, model, params = checkpoints["fast_dllm_v2/tied"]
    whole = checkpoint.tensors

    def breaks_off(*arguments):
        for n, item in enumerate(whole(*arguments)):
            if n == 5:
                raise KeyboardInterrupt
            yield item

    monkeypatch.setattr(checkpoint, "tensors", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path / "new", params, model, config_of("fast_dllm_v2/tied"))
    assert not (tmp_path / "new" / "model.safetensors").exists()
    with pytest.raises(ValueError, match=r"no config\.json|no model\.safetensors"):
        load(tmp_path / "new")
    monkeypatch.undo()
    checkpoint.save(tmp_path / "new", params, model, config_of("fast_dllm_v2/tied"), "float32")  # and can be repeated
    equal(load(tmp_path / "new", dtype="float32")[1], params)
