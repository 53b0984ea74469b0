"""Checkpoint folders in the Hugging Face layout, read into this side's parameters by the JAX side's name table."""

import os
from collections.abc import Sequence
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from specfold_jax.config import ModelConfig
from specfold_jax.models.checkpoint import name_table, read_model, resolve_folder
from specfold_jax.models.parameters import at, shapes
from specfold_torch_ref.models.transformer import Params


def load(
    path: str | os.PathLike[str],
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    mask_id: int | None = None,
    stop_ids: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> tuple[ModelConfig, Params]:
    """Loads a checkpoint folder, or a model inside the package by name, onto a device.

    `mask_id` and `stop_ids` override the checkpoint's. Files are read one by one. Raises ValueError naming every missing, extra or
    mis-shaped tensor.
    """
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"{dtype=} must be 'float32', 'bfloat16' or 'float16'")
    folder = resolve_folder(path)
    model = read_model(folder, mask_id, stop_ids)
    table, empty = name_table(model), {"dtype": getattr(torch, dtype), "device": device}
    params: Params = {name: torch.empty(shape, **empty) for name, shape in shapes(model).items() if name != "layers"}
    params["layers"] = [{name: torch.empty(shape, **empty) for name, shape in layer.items()} for layer in shapes(model)["layers"]]
    files, missing, problems = sorted(folder.glob("*.safetensors")), set(table), []
    if not files:
        raise ValueError(f"{folder}: no *.safetensors")
    for file in files:
        try:
            tensors = load_file(file)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: truncated or not a safetensors file ({error})") from error
        for name, tensor in tensors.items():
            if name not in table:
                if not name.endswith("rotary_emb.inv_freq") and not (model.tied and "head" in name):
                    problems.append(f"unexpected {name}")
                continue
            missing.discard(name)
            place = at(params, table[name].path)[table[name].start : table[name].stop]
            if tensor.shape == place.shape:
                place.copy_(tensor)
            else:
                problems.append(f"{name} has shape {list(tensor.shape)}, the configuration says {list(place.shape)}")
    problems += [f"missing {name}" for name in missing]
    if problems:
        raise ValueError(f"{folder}: " + "; ".join(sorted(problems)))
    return model, params
