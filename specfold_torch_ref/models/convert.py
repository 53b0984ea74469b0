"""Parameters of the JAX side as this side's, bit for bit: one table of names, and NumPy in between."""

import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from specfold_jax.config import ModelConfig
from specfold_jax.models.parameters import Path, at, leaves, path_text, shapes
from specfold_jax.models.parameters import require_fitting as require_shapes
from specfold_torch_ref.models.transformer import Params

TOP = {"embed": "embed", "norm": "norm", "head": "head"}
LAYER = {
    "attn_norm": "attn_norm",
    "qkv": "qkv",
    "qkv_bias": "qkv_bias",
    "q_norm": "q_norm",
    "k_norm": "k_norm",
    "o": "o",
    "ffn_norm": "ffn_norm",
    "gate_up": "gate_up",
    "down": "down",
}
"""Name on the JAX side -> name on this side. `head`, `qkv_bias`, `q_norm` and `k_norm` are there where the model has them."""


def name_table(model: ModelConfig) -> dict[Path, Path]:
    """Place in the JAX pytree -> place in this side's dict, for every parameter of the model."""
    wanted = shapes(model)
    table: dict[Path, Path] = {(name,): (TOP[name],) for name in wanted if name != "layers"}
    for index, layer in enumerate(wanted["layers"]):
        table |= {("layers", index, name): ("layers", index, LAYER[name]) for name in layer}
    return table


def to_torch(params: Params, model: ModelConfig, device: torch.device | str = "cpu") -> Params:
    """The JAX side's parameters as tensors. Raises ValueError naming what is missing, extra, or of a wrong shape or dtype."""
    require_shapes(params, model)
    found, out = leaves(params), {"layers": [{} for _ in range(model.layers)]}
    for path, place in name_table(model).items():
        at(out, place[:-1])[place[-1]] = _tensor(np.array(found[path])).to(device)
    return out


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype == jnp.bfloat16:  # which torch does not take from NumPy
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def require_fitting(params: Params, model: ModelConfig) -> None:
    """Raises TypeError unless all are tensors, ValueError naming what is missing, extra, of a wrong shape or of another dtype."""
    found = leaves(params)
    for path, value in found.items():
        if not isinstance(value, Tensor):
            advice = "specfold_torch_ref.models.convert.to_torch(params, model) makes them"
            raise TypeError(f"params.{path_text(path)} is a {type(value).__name__}, must be a tensor; {advice}")
    require_shapes(params, model)
    if len(kinds := {str(value.dtype) for value in found.values()}) > 1:
        raise ValueError(f"params have dtypes {', '.join(sorted(kinds))}, must have one")
