"""Where kernels start: what they demand of the machine and of their arguments, in errors that say what was wrong and what would do."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import config  # the interpreter's switch can be set from public names, but not asked
from jax.experimental.pallas import mosaic_gpu as plgpu

SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
"""How a tile of 16-bit numbers lies in shared memory for the matrix units."""
THREAD = "warpgroup"
LANES = 128
"""Threads of a warpgroup; a row is a whole number of them."""


def interpreting() -> bool:
    """Whether kernels traced now are meant for Mosaic's interpreter (`plgpu.force_gpu_interpret_mode`)."""
    return config.pallas_tpu_interpret_mode_context_manager.value is not None


def no_hopper() -> str | None:
    """Why the kernels, which use matrix and copy instructions of compute capability 9.0, cannot run on this machine; None where they can.

    All of JAX's devices must have them: a program is compiled for a platform, and may run on any device of it.
    """
    if interpreting():
        return None
    for device in jax.devices():
        capability = getattr(device, "compute_capability", None)
        if capability != "9.0":
            found = f"{device.device_kind} (compute capability {capability})" if capability else device.device_kind
            return f"the Pallas kernels need a Hopper GPU (compute capability 9.0), not {found}"
    return None


def launch(
    name: str, body: Callable[..., None], out: Any, grid: Mapping[str, int], *inputs: jax.Array, warpgroups: int = 1, **options: Any
) -> Any:
    """Runs `body(*input refs, *output refs)` once per point of the grid, whose last axis is the fastest. Profilers show the name.

    Callers are jitted functions: a model's layers then share one lowering and one compiled kernel.
    """
    threads = {"num_threads": warpgroups, "thread_name": THREAD} if warpgroups > 1 else {}
    kernel = plgpu.kernel(body, out_type=out, grid=tuple(grid.values()), grid_names=tuple(grid), kernel_name=name, **threads, **options)
    return kernel(*inputs)


def pad(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """x with zeros behind it up to a multiple along an axis; x itself where it is one."""
    missing = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, missing if n == axis else 0) for n in range(x.ndim)]) if missing else x
