"""Parameters of the JAX side and of this side, moved both ways bit for bit: one table of names, and NumPy in between."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from specfold_jax.config import ModelConfig
from specfold_jax.models.checkpoint import at, shapes
from specfold_torch_ref.models.transformer import Params

Path = tuple[str | int, ...]
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
DTYPES = ("float32", "bfloat16", "float16")


def name_table(model: ModelConfig) -> dict[Path, Path]:
    """Place in the JAX pytree -> place in this side's dict, for every parameter of the model."""
    wanted = shapes(model)
    table: dict[Path, Path] = {(name,): (TOP[name],) for name in wanted if name != "layers"}
    for index, layer in enumerate(wanted["layers"]):
        table |= {("layers", index, name): ("layers", index, LAYER[name]) for name in layer}
    return table


def to_torch(params: dict[str, Any], model: ModelConfig, device: torch.device | str = "cpu") -> Params:
    """The JAX side's parameters as tensors. Raises ValueError naming what is missing, extra, or of a wrong shape or dtype."""
    return _move(
        params, model, {path: (place, path) for path, place in name_table(model).items()}, lambda x: _tensor(np.array(x)).to(device)
    )


def to_jax(params: Params, model: ModelConfig) -> dict[str, Any]:
    """This side's parameters as JAX arrays. Raises ValueError naming what is missing, extra, or of a wrong shape or dtype."""
    return _move(params, model, {place: (path, path) for path, place in name_table(model).items()}, lambda x: jnp.asarray(_array(x)))


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype == jnp.bfloat16:  # which torch does not take from NumPy
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
    return tensor.numpy()


def _move(
    params: dict[str, Any], model: ModelConfig, table: dict[Path, tuple[Path, Path]], convert: Callable[[Any], Any]
) -> dict[str, Any]:
    """Converts each parameter. `table`: where it is -> where it goes, and its place in the JAX pytree, which has its shape."""
    found = _leaves(params)
    _require_shapes(found, model, {path: named for path, (_, named) in table.items()})
    out: dict[str, Any] = {"layers": [{} for _ in range(model.layers)]}
    for path, (place, _) in table.items():
        at(out, place[:-1])[place[-1]] = convert(found[path])
    return out


def require_fitting(params: Params, model: ModelConfig) -> None:
    """Raises TypeError unless all are tensors, ValueError naming what is missing, extra, of a wrong shape or of another dtype."""
    found = _leaves(params)
    for path, value in found.items():
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise TypeError(
                f"params.{_show(path)} is a {kind}, must be a tensor; specfold_torch_ref.models.convert.to_torch(params, model) makes them"
            )
    _require_shapes(found, model, {place: path for path, place in name_table(model).items()})
    if len(kinds := {str(value.dtype) for value in found.values()}) > 1:
        raise ValueError(f"params have dtypes {', '.join(sorted(kinds))}, must have one")


def _require_shapes(found: dict[Path, Any], model: ModelConfig, table: dict[Path, Path]) -> None:
    """`table`: where a parameter must be -> its place in the JAX pytree."""
    wanted, problems = shapes(model), [f"unexpected {_show(path)}" for path in found.keys() - table.keys()]
    for path, named in table.items():
        shape = at(wanted, named)
        if path not in found:
            problems.append(f"missing {_show(path)}")
        elif tuple(found[path].shape) != shape:
            problems.append(f"{_show(path)} has shape {list(found[path].shape)}, the configuration says {list(shape)}")
        elif str(found[path].dtype).removeprefix("torch.") not in DTYPES:
            problems.append(f"{_show(path)} has dtype {found[path].dtype}, needs one of {', '.join(DTYPES)}")
    if problems:
        raise ValueError("; ".join(sorted(problems)))


def _leaves(params: dict[str, Any]) -> dict[Path, Any]:
    leaves: dict[Path, Any] = {(name,): value for name, value in params.items() if name != "layers"}
    for index, layer in enumerate(params.get("layers", [])):
        leaves |= {("layers", index, name): value for name, value in layer.items()}
    return leaves


def _show(path: Path) -> str:
    return ".".join(map(str, path))
