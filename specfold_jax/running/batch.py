"""Host-level generation: prompts become arrays, a method's jitted decode runs over them in batches, and is timed and summarised."""

import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specfold_jax.diffusion.decoding import Decoding
from specfold_jax.diffusion.loop import diffusion_decode
from specfold_jax.diffusion.state import Decoded
from specfold_jax.diffusion.validate import validate
from specfold_jax.models.transformer import Params
from specfold_jax.running.memory import explained, implementation
from specfold_jax.running.summary import Run, summarise
from specfold_jax.values import Size, as_array, conforming

CAPACITY_STEP = 32
_decode = jax.jit(diffusion_decode)


def pad(ids: Sequence[Sequence[int]], capacity: int | None = None) -> tuple[Int[np.ndarray, "batch capacity"], Int[np.ndarray, " batch"]]:
    """Prompts as int32 [batch, capacity], right-padded with 0, and their lengths.

    `capacity` defaults to the longest prompt's length, rounded up to a multiple of 32 so that prompts of like lengths share a
    compilation. Raises ValueError if a prompt does not fit, or is no list of int32 numbers.
    """
    lengths = np.array([len(row) for row in ids], np.int32)
    longest = int(lengths.max(initial=1))
    capacity = -(-longest // CAPACITY_STEP) * CAPACITY_STEP if capacity is None else capacity
    if longest > capacity:
        raise ValueError(f"{capacity=} must hold the longest prompt, which has {longest} tokens")
    prompts = np.zeros((len(ids), capacity), np.int32)
    for index, tokens in enumerate(ids):
        prompts[index, : len(tokens)] = as_array(f"prompt {index}", tokens, np.int32, flat=True)
    return prompts, lengths


def run(params: Params, prompts: Int[Array, "batch capacity"], lengths: Int[Array, " batch"], how: Decoding) -> Decoded:
    """One jitted decode of a batch. Nothing waits for the device."""
    return _decode(params, prompts, lengths, *how)


def batches(ids: Sequence[Sequence[int]], batch: int) -> list[tuple[Int[np.ndarray, "batch capacity"], Int[np.ndarray, " batch"]]]:
    """The prompts in batches of one shape. The last one is filled up with empty rows, which end at once."""
    prompts, lengths = pad(ids)
    batch = min(conforming("batch", batch, Size), len(ids))
    missing = -len(ids) % batch
    prompts, lengths = np.pad(prompts, ((0, missing), (0, 0))), np.pad(lengths, (0, missing))
    return [(prompts[n : n + batch], lengths[n : n + batch]) for n in range(0, len(prompts), batch)]


def run_all(
    params: Params,
    ids: Sequence[Sequence[int]],
    how: Decoding,
    batch: int = 8,
    warm_up: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Decodes all prompts and times it.

    Compilation is timed apart, on a call without a single row to decode; `warm_up` makes one more untimed call, on the first batch.
    `progress` is called with the number of prompts done. Raises ValueError naming the row for a prompt that cannot be decoded, and
    `memory.OutOfDeviceMemory`, which says what to lower, for a batch that does not fit.
    """
    if not ids:
        raise ValueError("there must be at least one prompt")
    prompts, lengths = pad(ids)
    validate(params, jnp.asarray(prompts), jnp.asarray(lengths), *how)
    parts = [(jnp.asarray(prompts), jnp.asarray(lengths)) for prompts, lengths in batches(ids, batch)]
    impl = implementation(params, how)
    with explained(params, how, parts[0][0].shape):
        begun = time.perf_counter()
        jax.block_until_ready(run(params, parts[0][0], jnp.zeros_like(parts[0][1]), how))
        compile_seconds = time.perf_counter() - begun
        if warm_up:
            jax.block_until_ready(run(params, *parts[0], how))
        done, seconds = [], 0.0
        for prompts, lengths in parts:
            begun = time.perf_counter()
            decoded = jax.block_until_ready(run(params, prompts, lengths, how))
            seconds += time.perf_counter() - begun
            done.append(jax.device_get(decoded))
            if progress:
                progress(min(len(done) * len(lengths), len(ids)))
    whole = jax.tree.map(lambda *parts: np.concatenate(parts)[: len(ids)], *done)
    prompt_lengths = pad(ids)[1]
    return Run(whole, prompt_lengths, summarise(whole, prompt_lengths, seconds, how.method.name, compile_seconds, impl))
