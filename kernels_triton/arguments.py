"""What launchers demand of their arguments, with errors that say what was wrong and what would be right."""

import torch

from kernels_triton.numerics import INTERPRET

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CAPABILITY = (8, 0)
"""Ampere: the first with bf16 matrix units."""


def require_device(device: torch.device) -> None:
    """NotImplementedError where the kernels cannot run; ValueError for a GPU that is not the current one."""
    if INTERPRET.value:
        return
    if device.type != "cuda":
        raise NotImplementedError(f"Triton kernels need CUDA tensors, not {device}; on a CPU start Python with TRITON_INTERPRET=1")
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        raise NotImplementedError(f"Triton kernels need a GPU of compute capability {CAPABILITY} or higher; {device} has {capability}")
    if device.index != torch.cuda.current_device():
        raise ValueError(f"tensors on {device} need that GPU to be the current one, not cuda:{torch.cuda.current_device()}")


def require_main(name: str, tensor: torch.Tensor, axes: str) -> None:
    """The tensor whose dtype, device and shape the other arguments must fit: floating point with the named axes, none of them empty."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} must be a tensor [{axes}], not {type(tensor).__name__}")
    require_device(tensor.device)
    if tensor.dtype not in FLOATS:
        raise NotImplementedError(f"{name} has dtype {tensor.dtype}; the kernels take {', '.join(map(str, FLOATS))}")
    if tensor.ndim != len(axes.split()) or 0 in tensor.shape:
        raise ValueError(f"{name} must be [{axes}] with no empty axis, not of shape {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, not of strides {tensor.stride()}")


def require(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """A contiguous tensor of exactly this shape, dtype and device."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} must be a tensor {list(shape)}, not {type(tensor).__name__}")
    found = (tuple(tensor.shape), tensor.dtype, tensor.device)
    if found != (tuple(shape), dtype, device):
        raise ValueError(f"{name} must be {dtype} {list(shape)} on {device}, not {tensor.dtype} {list(tensor.shape)} on {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, not of strides {tensor.stride()}")


def require_packed(packed: tuple[torch.Tensor, torch.Tensor], rows: int, device: torch.device) -> None:
    """A row list and its count, as `pack` returns them."""
    index, count = packed
    require("packed index", index, (rows,), torch.int32, device)
    require("packed count", count, (), torch.int32, device)


def require_head_dim(head_dim: int) -> None:
    """Rotary embedding turns pairs, and a head is one tile."""
    if head_dim % 2 or not 2 <= head_dim <= 256:
        raise NotImplementedError(f"{head_dim=} is not supported; the kernels take even ones up to 256")
