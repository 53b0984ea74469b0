"""Where the Torch side of the parity tests runs: the first CUDA device, else the CPU with Triton in its interpreter.

To be imported before Triton, which reads its switch once, and before JAX takes a GPU's memory, which Torch shares with it here.
"""

import os

import torch

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
else:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
