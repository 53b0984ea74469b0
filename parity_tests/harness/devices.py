"""Where the Torch side of the parity tests runs: the first CUDA device, else the CPU with Triton in its interpreter.

To be imported before Triton and XLA, which read their switches once, and before JAX takes a GPU's memory, which Torch shares with it here.
"""

import os

import torch

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("NPROC", "8")  # XLA's threads: Mosaic's interpreter waits for ever if a kernel has more warpgroups
else:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def share_memory() -> None:
    """Gives back what is freed, so that several processes fit on one GPU: by itself JAX keeps the most it ever needed. Every array is
    then allocated by the driver, which waits for the device; next to compiling that is nothing, but no time may be measured."""
    if DEVICE.type == "cuda":
        os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
