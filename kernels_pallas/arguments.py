"""What kernels demand of their arguments, in errors that say what was wrong and what would do; and the padding that meets a demand."""

from typing import Any

import jax
import jax.numpy as jnp

HALF = (jnp.bfloat16, jnp.float16)
"""The types whose products Hopper's matrix units sum in fp32 exactly as given."""


def require_main(name: str, x: jax.Array, axes: str) -> None:
    """The array whose type and shape the other arguments must fit: 16-bit numbers with the named axes, none of them empty."""
    if x.ndim != len(axes.split()) or 0 in x.shape:
        raise ValueError(f"{name} must be [{axes}] with no empty axis, not of shape {list(x.shape)}")
    if x.dtype not in HALF:
        raise NotImplementedError(f"{name} has dtype {x.dtype}; the Pallas kernels take bfloat16 and float16")


def require(name: str, x: jax.Array, shape: tuple[int, ...], dtype: Any) -> None:
    """An array of exactly this shape and type."""
    if tuple(x.shape) != tuple(shape) or x.dtype != jnp.dtype(dtype):
        raise ValueError(f"{name} must be {jnp.dtype(dtype)} {list(shape)}, not {x.dtype} {list(x.shape)}")


def pad(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """x with zeros behind it up to a multiple along an axis; x itself where it is one."""
    missing = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, missing if n == axis else 0) for n in range(x.ndim)]) if missing else x
