"""How tiles lie in shared memory."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def transforms(columns: int, itemsize: int) -> tuple[Any, Any]:
    """Tiles of 8 rows by `columns`, swizzled over a tile's whole row."""
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]: abstract to a type checker alone
    swizzle = plgpu.SwizzleTransform(columns * itemsize)  # pyright: ignore[reportAbstractUsage]: the same
    return tiling, swizzle


SWIZZLED = transforms(64, 2)
"""16-bit numbers for the matrix units."""


def swizzled(shape: tuple[int, ...], dtype: Any, columns: int) -> Any:
    """Shared memory in such tiles."""
    return plgpu.SMEM(shape, dtype, transforms=transforms(columns, jnp.dtype(dtype).itemsize))
