"""Counter-based sampling noise on registers: the draws of `specfold_jax.noise`, made where they are used."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specfold_jax.noise import threefry


def gumbel(
    seed: Int[Array, "*shape"], position: Int[Array, "*shape"], step: Int[Array, "*shape"], token: Int[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Standard Gumbel noise, fp32: key (seed, position), counter (step, token), 23 bits of the first word."""
    bits, _ = threefry(*(x.astype(jnp.uint32) for x in (seed, position, step, token)))
    uniform = ((bits >> jnp.uint32(9)).astype(jnp.float32) + jnp.float32(0.5)) * jnp.float32(2**-23)
    return -jnp.log(-jnp.log(uniform))
