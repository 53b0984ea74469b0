"""Counter-based sampling noise: the same (seed, position, step, token) gives the same draw, whoever asks and in whatever order.

Generator: Threefry-2x32, 20 rounds (Salmon et al., SC 2011). 32-bit words are held in int64, whose sums never overflow.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_WORD = 0xFFFFFFFF


def threefry(
    key0: Int[Tensor, "*shape"], key1: Int[Tensor, "*shape"], counter0: Int[Tensor, "*shape"], counter1: Int[Tensor, "*shape"]
) -> tuple[Int[Tensor, "*shape"], Int[Tensor, "*shape"]]:
    """Threefry-2x32-20 on broadcast words: int64 tensors of values in [0, 2^32)."""
    keys = (key0, key1, key0 ^ key1 ^ _PARITY)
    x0, x1 = (counter0 + keys[0]) & _WORD, (counter1 + keys[1]) & _WORD
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = (x0 + x1) & _WORD
            x1 = ((x1 << rotation) & _WORD) | (x1 >> (32 - rotation))
            x1 = x1 ^ x0
        x0 = (x0 + keys[(group + 1) % 3]) & _WORD
        x1 = (x1 + keys[(group + 2) % 3] + group + 1) & _WORD
    return x0, x1


def gumbel(
    seed: Int[Tensor, "*rows"], position: Int[Tensor, "*rows"], step: Int[Tensor, "*rows"], vocab: int
) -> Float[Tensor, "*rows vocab"]:
    """Standard Gumbel noise for every token of a row: key (seed, position), counter (step, token), 23 bits of the first word."""
    key0, key1, counter = (x.long()[..., None] & _WORD for x in (seed, position, step))
    bits, _ = threefry(key0, key1, counter, torch.arange(vocab, device=seed.device))
    uniform = ((bits >> 9).float() + 0.5) * 2**-23
    return -torch.log(-torch.log(uniform))
