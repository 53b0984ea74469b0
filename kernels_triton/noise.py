"""Counter-based sampling noise: Threefry-2x32, 20 rounds (Salmon et al., SC 2011), drawn where it is used."""

# Triton compiles kernels from their text: to a type checker, a number is no tl.constexpr.
# pyright: reportArgumentType=false

import triton
import triton.language as tl


@triton.jit
def _rotations(x0, x1, first: tl.constexpr, second: tl.constexpr, third: tl.constexpr, fourth: tl.constexpr):
    x0 = x0 + x1
    x1 = ((x1 << first) | (x1 >> (32 - first))) ^ x0
    x0 = x0 + x1
    x1 = ((x1 << second) | (x1 >> (32 - second))) ^ x0
    x0 = x0 + x1
    x1 = ((x1 << third) | (x1 >> (32 - third))) ^ x0
    x0 = x0 + x1
    x1 = ((x1 << fourth) | (x1 >> (32 - fourth))) ^ x0
    return x0, x1


@triton.jit
def threefry(key0, key1, counter0, counter1):
    """Two uint32 words for every element of the broadcast uint32 arguments."""
    key2 = key0 ^ key1 ^ 0x1BD11BDA
    x0, x1 = counter0 + key0, counter1 + key1
    x0, x1 = _rotations(x0, x1, 13, 15, 26, 6)
    x0, x1 = _rotations(x0 + key1, x1 + key2 + 1, 17, 29, 16, 24)
    x0, x1 = _rotations(x0 + key2, x1 + key0 + 2, 13, 15, 26, 6)
    x0, x1 = _rotations(x0 + key0, x1 + key1 + 3, 17, 29, 16, 24)
    x0, x1 = _rotations(x0 + key1, x1 + key2 + 4, 13, 15, 26, 6)
    return x0 + key2, x1 + key0 + 5


@triton.jit
def gumbel(seed, position, step, token):
    """Standard Gumbel noise, fp32: key (seed, position), counter (step, token), 23 bits of the first word. int32 arguments broadcast."""
    bits, _ = threefry(seed.to(tl.uint32), position.to(tl.uint32), step.to(tl.uint32), token.to(tl.uint32))
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
    return -tl.log(-tl.log(uniform))
