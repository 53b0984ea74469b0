"""What a model must be for the kernels to decode with it: the one list of their demands, in words."""

from typing import Any

import jax

from kernels_pallas.arguments import HALF
from kernels_pallas.attention import BLOCKS, HEAD_DIMS
from kernels_pallas.tiles import DEPTH
from specfold_jax.config import FoldConfig, ModelConfig


def unmet_demand(params: Any, model: ModelConfig, block: int, fold: FoldConfig | None = None, ranks: int = 1) -> str | None:
    """Why the kernels cannot run a decode with blocks of so many positions that keeps so many tokens a position; None where they can.

    Devices apart (`launch.no_hopper`). Shapes and types alone are read, so that parameters may be traced, or `jax.ShapeDtypeStruct`s.
    """
    dtypes = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(params)})
    rules = (
        ("parameters' dtype", ", ".join(dtypes), len(dtypes) == 1 and params["embed"].dtype in HALF, "bfloat16 or float16, one for all"),
        ("block", block, block in BLOCKS, _among(BLOCKS)),
        ("head_dim", model.head_dim, model.head_dim in HEAD_DIMS, _among(HEAD_DIMS)),
        ("dim", model.dim, model.dim % DEPTH == 0, f"multiples of {DEPTH}"),
        ("ffn_dim", model.ffn_dim, model.ffn_dim % DEPTH == 0, f"multiples of {DEPTH}"),
        ("token_ranks", ranks, ranks < model.vocab, f"fewer than the vocabulary's {model.vocab}"),
        ("fold.reference", repr(fold.reference) if fold else None, fold is None or fold.reference == "parent", "'parent'"),
    )
    for name, value, fits, known in rules:
        if not fits:
            return f"{name}={value} is not supported by the Pallas kernels, which take {known}"
    return None


def _among(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))
