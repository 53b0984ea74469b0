"""The parameter tree of a model: its shapes, its paths, and whether given parameters fit it, be they JAX arrays or tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

from specfold_jax.config import ModelConfig

Path = tuple[str | int, ...]
"""Where a parameter stands in the tree: ("embed",), ("layers", 0, "qkv")."""
DTYPES = ("float32", "bfloat16", "float16")


def shapes(model: ModelConfig) -> dict[str, Any]:
    """The parameter pytree with shapes in place of arrays."""
    qkv, out = (model.heads + 2 * model.kv_heads) * model.head_dim, model.heads * model.head_dim
    layer = {
        "attn_norm": (model.dim,),
        "qkv": (qkv, model.dim),
        "o": (model.dim, out),
        "ffn_norm": (model.dim,),
        "gate_up": (2 * model.ffn_dim, model.dim),
        "down": (model.dim, model.ffn_dim),
    }
    if model.qkv_bias:
        layer["qkv_bias"] = (qkv,)
    if model.qk_norm:
        layer |= {"q_norm": (model.head_dim,), "k_norm": (model.head_dim,)}
    tree = {"embed": (model.vocab, model.dim), "layers": [dict(layer) for _ in range(model.layers)], "norm": (model.dim,)}
    return tree if model.tied else tree | {"head": (model.vocab, model.dim)}


def at(tree: Any, path: Sequence[str | int]) -> Any:
    """What stands at a path in a parameter tree."""
    for key in path:
        tree = tree[key]
    return tree


def leaves(params: Mapping[str, Any]) -> dict[Path, Any]:
    """Every parameter by its path."""
    found: dict[Path, Any] = {(name,): value for name, value in params.items() if name != "layers"}
    for index, layer in enumerate(params.get("layers", [])):
        found |= {("layers", index, name): value for name, value in layer.items()}
    return found


def path_text(path: Path) -> str:
    """A path in a message: layers.0.qkv."""
    return ".".join(map(str, path))


def require_fitting(params: Mapping[str, Any], model: ModelConfig) -> None:
    """Raises ValueError naming every parameter that is missing, extra, or of a shape or dtype the model cannot have.

    Values may be anything that has a shape and a dtype.
    """
    found, wanted = leaves(params), leaves(shapes(model))
    problems = [f"unexpected {path_text(path)}" for path in found.keys() - wanted.keys()]
    for path, shape in wanted.items():
        if path not in found:
            problems.append(f"missing {path_text(path)}")
            continue
        dtype = str(found[path].dtype).removeprefix("torch.")
        if tuple(found[path].shape) != shape:
            problems.append(f"{path_text(path)} has shape {list(found[path].shape)}, the configuration says {list(shape)}")
        elif dtype not in DTYPES:
            problems.append(f"{path_text(path)} has dtype {found[path].dtype}, needs one of {', '.join(DTYPES)}")
    if problems:
        raise ValueError("params: " + "; ".join(sorted(problems)))
