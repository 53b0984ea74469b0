"""How far two results are apart, and how far they may be: one table, by operation and dtype."""

import torch

Outputs = dict[str, torch.Tensor]
"""Named outputs of an operation on the CPU: only the rows that mean something."""

EXACT = 0.0
TOLERANCE: dict[str, dict[torch.dtype, float]] = {
    op: dict(zip((torch.float32, torch.bfloat16, torch.float16), row, strict=True))
    for op, row in {
        "gate": (EXACT, EXACT, EXACT),
        "pack": (EXACT, EXACT, EXACT),
        "packed_qkv": (1e-6, 8e-3, 1.1e-3),
        "branch_attention": (1e-6, 4e-3, 5e-4),
        "packed_linear": (3e-6, 4.5e-3, 6e-4),
        "packed_silu_pair": (1e-6, 1e-2, 2.3e-3),
        "add_inherited": (EXACT, 5e-3, 5e-4),
        "head": (1e-5, 4.5e-5, 1e-5),
    }.items()
}
"""Largest relative RMS error against the fp32 reference on the same rounded inputs: about twice what the reference shows in that dtype.

Decisions and token ids must be the same in every dtype. The head's scores are fp32 whatever its inputs are; its gap is a difference of
large scores, and matrix units cut their fp32 sums off.
"""


def relative_rms(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||; 0 for nothing, infinite for NaN. Integers and flags: the share that differs."""
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: {list(got.shape)} and {list(want.shape)}")
    if not want.numel():
        return 0.0
    if not want.dtype.is_floating_point:
        return float((got != want).double().mean())
    got, want = got.double(), want.double()
    error = float(torch.linalg.vector_norm(got - want) / torch.linalg.vector_norm(want))
    return error if error == error else float("inf")


def errors(got: Outputs, want: Outputs) -> dict[str, float]:
    """Relative RMS error of each named output."""
    if got.keys() != want.keys():
        raise ValueError(f"outputs differ: {sorted(got)} and {sorted(want)}")
    return {name: relative_rms(got[name], want[name]) for name in want}


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    return got.dtype == want.dtype and torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
