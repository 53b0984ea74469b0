"""Checkpoint folders in the Hugging Face layout, read and written without torch, one tensor at a time."""

import json
import os
import struct
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from specfold_jax.config import ModelConfig
from specfold_jax.files import read_json
from specfold_jax.models.families import model_config
from specfold_jax.models.parameters import at, shapes
from specfold_jax.models.transformer import Params
from specfold_jax.values import conforming

_SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class Part(NamedTuple):
    """Where a checkpoint tensor goes: rows `start:stop` of the parameter at `path`."""

    path: tuple[str | int, ...]
    start: int
    stop: int


def name_table(model: ModelConfig) -> dict[str, Part]:
    """Checkpoint tensor name -> its place in the parameter pytree (projections are fused: q, k, v and gate, up by rows)."""
    root, head = ("encoder", "diffusion_head") if model.family == "nemotron_labs_diffusion" else ("model", "lm_head")
    q, kv, hidden = model.heads * model.head_dim, model.kv_heads * model.head_dim, model.ffn_dim
    table = {f"{root}.embed_tokens.weight": Part(("embed",), 0, model.vocab), f"{root}.norm.weight": Part(("norm",), 0, model.dim)}
    if not model.tied:
        table[f"{head}.weight"] = Part(("head",), 0, model.vocab)
    for index in range(model.layers):
        parts = {
            "input_layernorm.weight": ("attn_norm", 0, model.dim),
            "post_attention_layernorm.weight": ("ffn_norm", 0, model.dim),
            "self_attn.q_proj.weight": ("qkv", 0, q),
            "self_attn.k_proj.weight": ("qkv", q, q + kv),
            "self_attn.v_proj.weight": ("qkv", q + kv, q + 2 * kv),
            "self_attn.o_proj.weight": ("o", 0, model.dim),
            "mlp.gate_proj.weight": ("gate_up", 0, hidden),
            "mlp.up_proj.weight": ("gate_up", hidden, 2 * hidden),
            "mlp.down_proj.weight": ("down", 0, model.dim),
        }
        if model.qkv_bias:
            parts |= {name.replace("weight", "bias"): ("qkv_bias", *rows) for name, (key, *rows) in list(parts.items()) if key == "qkv"}
        if model.qk_norm:
            parts |= {f"self_attn.{n}_norm.weight": (f"{n}_norm", 0, model.head_dim) for n in ("q", "k")}
        table |= {f"{root}.layers.{index}.{name}": Part(("layers", index, key), *rows) for name, (key, *rows) in parts.items()}
    return table


def _part_shape(model: ModelConfig, part: Part) -> tuple[int, ...]:
    return (part.stop - part.start, *at(shapes(model), part.path)[1:])


def resolve_folder(name: str | os.PathLike[str]) -> Path:
    """A checkpoint folder, or the name of a model inside the package ("tiny")."""
    path = Path(name)
    if path.is_dir():
        return path
    packaged = Path(str(resources.files("specfold_jax"))) / "assets" / str(name)
    if path.name == str(name) and packaged.is_dir():
        return packaged
    raise ValueError(f"{str(name)!r} is neither a checkpoint folder nor a model inside the package (tiny)")


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder}: no config.json; a checkpoint folder holds config.json and *.safetensors")
    return conforming(str(file), read_json(file, "a model's configuration"), dict[str, Any])


def read_model(folder: Path, mask_id: int | None = None, stop_ids: Sequence[int] | None = None) -> ModelConfig:
    """The model of the folder's config.json. Raises ValueError as `model_config` does, naming the file."""
    config = read_config(folder)
    try:
        return model_config(config, mask_id, stop_ids)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from error


def _files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index of a sharded checkpoint or from the single file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        content = conforming(str(index), read_json(index, "a table of shards"), dict[str, Any])
        weight_map = conforming(f"{index}: weight_map", content.get("weight_map"), dict[str, str])
        if missing := sorted({f for f in weight_map.values() if not (folder / f).is_file()}):
            raise ValueError(f"{folder}: missing shards {', '.join(missing)}, which {index.name} names")
        return {name: folder / file for name, file in weight_map.items()}
    file = folder / "model.safetensors"
    if not file.is_file():
        raise ValueError(f"{folder}: no model.safetensors and no model.safetensors.index.json")
    with _open(file) as tensors:
        return dict.fromkeys(tensors.keys(), file)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, "numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: truncated or not a safetensors file ({error})") from error


def load(
    path: str | os.PathLike[str],
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    mask_id: int | None = None,
    stop_ids: Sequence[int] | None = None,
) -> tuple[ModelConfig, Params]:
    """Loads a checkpoint folder, or a model inside the package by name.

    `dtype` "auto" is float32 on a CPU and bfloat16 elsewhere. `mask_id` and `stop_ids` override the checkpoint's. Tensors are read
    one by one into the wanted dtype and moved to the device as soon as a parameter is complete. Raises ValueError naming every
    missing, extra or mis-shaped tensor.
    """
    if dtype not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"{dtype=} must be 'auto', 'float32' or 'bfloat16'")
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    folder = resolve_folder(path)
    model = read_model(folder, mask_id, stop_ids)
    table, files = name_table(model), _files(folder)
    extra = [n for n in files if n not in table and not n.endswith("rotary_emb.inv_freq") and not (model.tied and "head" in n)]
    problems = [f"missing {name}" for name in table if name not in files] + [f"unexpected {name}" for name in extra]
    handles = {file: _open(file) for file in set(files.values())}
    for name in table.keys() & files.keys():
        shape, wanted = tuple(_slice(handles[files[name]], name, folder).get_shape()), _part_shape(model, table[name])
        if shape != wanted:
            problems.append(f"{name} has shape {list(shape)}, the configuration says {list(wanted)}")
    if problems:
        raise ValueError(f"{folder}: " + "; ".join(sorted(problems)))
    return model, _read(model, table, files, handles, jnp.dtype(dtype))


def _slice(tensors: Any, name: str, folder: Path) -> Any:
    try:
        return tensors.get_slice(name)
    except SafetensorError as error:
        raise ValueError(f"{folder}: {name} is not in the shard the index names ({error})") from error


def _read(model: ModelConfig, table: dict[str, Part], files: dict[str, Path], handles: dict[Path, Any], dtype: np.dtype) -> Params:
    tree = jax.tree.map(lambda shape: shape, shapes(model), is_leaf=lambda x: isinstance(x, tuple))
    wanted: dict[tuple[str | int, ...], list[str]] = {}
    for name, part in table.items():
        wanted.setdefault(part.path, []).append(name)
    for path, names in wanted.items():
        parent = at(tree, path[:-1])
        host = np.empty(parent[path[-1]], dtype)
        for name in names:
            part = table[name]
            host[part.start : part.stop] = handles[files[name]].get_tensor(name).astype(dtype)
        parent[path[-1]] = jnp.asarray(host)
    return tree


def tensors(params: Params, model: ModelConfig, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    """The checkpoint's tensors by name, each on the host in the wanted dtype."""
    for name, part in sorted(name_table(model).items()):
        yield name, np.asarray(jax.device_get(at(params, part.path)[part.start : part.stop])).astype(dtype)


def save(path: str | os.PathLike[str], params: Params, model: ModelConfig, config: dict[str, Any], dtype: str = "bfloat16") -> None:
    """Writes config.json and model.safetensors, one tensor at a time; the file appears only when it is complete."""
    folder = Path(path)
    if (folder / "model.safetensors").exists():
        raise ValueError(f"{folder}: holds a model.safetensors already; choose another folder")
    if model_config(config, model.mask_id, model.stop_ids) != model:
        raise ValueError("config does not describe the model to be saved")
    folder.mkdir(parents=True, exist_ok=True)
    numpy_dtype, header, offset = jnp.dtype(dtype), {}, 0
    for name, part in sorted(name_table(model).items()):
        shape = _part_shape(model, part)
        end = offset + int(np.prod(shape)) * numpy_dtype.itemsize
        header[name] = {"dtype": _SAFETENSORS_DTYPES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    text += b" " * (-len(text) % 8)
    partial = folder / "model.safetensors.partial"
    with partial.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, array in tensors(params, model, numpy_dtype):
            file.write(np.ascontiguousarray(array).tobytes())
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    partial.rename(folder / "model.safetensors")
