"""Counter-based sampling noise: Threefry-2x32, 20 rounds (Salmon et al., SC 2011), drawn inside a kernel.

The same words as `specfold_jax.models.noise`, which a kernel may not import. `parity_tests/models/test_noise.py` holds all copies equal.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry(
    key0: UInt[Array, "*shape"], key1: UInt[Array, "*shape"], counter0: UInt[Array, "*shape"], counter1: UInt[Array, "*shape"]
) -> tuple[UInt[Array, "*shape"], UInt[Array, "*shape"]]:
    """Threefry-2x32-20 on broadcast uint32 words."""
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(_PARITY))
    x0, x1 = counter0 + keys[0], counter1 + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << jnp.uint32(rotation)) | (x1 >> jnp.uint32(32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def draw(
    seed: Int[Array, "*shape"], position: Int[Array, "*shape"], step: Int[Array, "*shape"], token: Int[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Standard Gumbel noise, fp32, on broadcast words: key (seed, position), counter (step, token), 23 bits of the first word."""
    bits, _ = threefry(*(x.astype(jnp.uint32) for x in (seed, position, step, token)))
    uniform = ((bits >> jnp.uint32(9)).astype(jnp.float32) + jnp.float32(0.5)) * jnp.float32(2**-23)
    return -jnp.log(-jnp.log(uniform))
