"""What kernels demand of their arguments, in errors that say what was wrong and what would do."""

from typing import Any

import jax.numpy as jnp

HALF = (jnp.bfloat16, jnp.float16)
"""The types whose products Hopper's matrix units sum in fp32 exactly as given."""


def require_main(name: str, x: Any, axes: str) -> None:
    """The array whose type and shape the other arguments must fit: 16-bit numbers with the named axes, none of them empty."""
    if x.ndim != len(axes.split()) or 0 in x.shape:
        raise ValueError(f"{name} must be [{axes}] with no empty axis, not of shape {list(x.shape)}")
    if x.dtype not in HALF:
        raise NotImplementedError(f"{name} has dtype {x.dtype}; the Pallas kernels take bfloat16 and float16")


def require(name: str, x: Any, shape: tuple[int, ...], dtype: Any) -> None:
    """An array of exactly this shape and type."""
    if tuple(x.shape) != tuple(shape) or x.dtype != jnp.dtype(dtype):
        raise ValueError(f"{name} must be {jnp.dtype(dtype)} {list(shape)}, not {x.dtype} {list(x.shape)}")
