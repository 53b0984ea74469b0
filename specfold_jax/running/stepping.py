"""The decode loop driven from Python, one jitted step at a time, where somebody wants to look in between."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specfold_jax.diffusion.decoding import Decoding
from specfold_jax.diffusion.loop import begin, decode_step, unfinished
from specfold_jax.diffusion.state import DecodeState
from specfold_jax.diffusion.validate import row_status
from specfold_jax.models.transformer import Params

_begin, _step = jax.jit(begin), jax.jit(decode_step)


def states(params: Params, prompts: Int[Array, "batch capacity"], lengths: Int[Array, " batch"], how: Decoding) -> Iterator[DecodeState]:
    """The state after the prefill, and after every forward pass until all rows are done: `loop.diffusion_decode`, watched.

    Nothing is validated: rows with bad values are done at once.
    """
    prompts, lengths = jnp.asarray(prompts, jnp.int32), jnp.asarray(lengths, jnp.int32)
    model, decode, graph, fold = how
    state = _begin(params, prompts, lengths, model, decode, graph, row_status(prompts, lengths, model, decode, fold))
    yield state
    while bool(unfinished(state)):
        state = _step(state, params, model, decode, graph, fold)
        yield state
