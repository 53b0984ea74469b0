"""How kernels start, and what they demand of the machine."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax._src import config  # the interpreter's switch can be set from public names, but not asked
from jax.experimental.pallas import mosaic_gpu as plgpu

THREAD = "warpgroup"
"""The axis of a program's threads, by warpgroups."""


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
