"""Host-level generation: prompts become arrays, a method's jitted decode runs over them in batches, and is timed and summarised."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specfold_jax.backends.choice import chosen
from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.diffusion.loop import specfold_decode, spiffy_decode, vanilla_decode
from specfold_jax.diffusion.state import Decoded
from specfold_jax.diffusion.validate import validate
from specfold_jax.models.transformer import Params
from specfold_jax.running.memory import explained
from specfold_jax.running.summary import Run, summarise
from specfold_jax.values import Size, as_array, conforming

Method = Literal["vanilla", "spiffy", "specfold"]
METHODS: tuple[Method, ...] = get_args(Method)
CAPACITY_STEP = 32
_vanilla, _spiffy, _specfold = jax.jit(vanilla_decode), jax.jit(spiffy_decode), jax.jit(specfold_decode)


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


def run(
    method: Method,
    params: Params,
    prompts: Int[Array, "batch capacity"],
    lengths: Int[Array, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    graph: DraftGraph | None = None,
    fold: FoldConfig | None = None,
) -> Decoded:
    """One jitted decode of a batch. Methods that draft need a graph, and "specfold" a fold. Nothing waits for the device."""
    if method not in METHODS:
        raise ValueError(f"{method=} must be one of {METHODS}")
    if method == "vanilla":
        return _vanilla(params, prompts, lengths, model, decode)
    if graph is None:
        raise ValueError(f"{method=} needs a draft graph")
    if method == "spiffy":
        return _spiffy(params, prompts, lengths, model, decode, graph)
    if fold is None:
        raise ValueError(f"{method=} needs a FoldConfig")
    return _specfold(params, prompts, lengths, model, decode, graph, fold)


def implementation(
    method: Method,
    params: Params,
    model: ModelConfig,
    decode: DecodeConfig,
    graph: DraftGraph | None = None,
    fold: FoldConfig | None = None,
) -> str:
    """What `run` with these arguments runs on, "xla" or "pallas". Raises NotImplementedError for kernels that are asked for in vain."""
    used = DraftGraph.empty() if method == "vanilla" or graph is None else graph
    return chosen(decode, params, model, fold if method == "specfold" else None, used.token_ranks)


def batches(ids: Sequence[Sequence[int]], batch: int) -> list[tuple[Int[np.ndarray, "batch capacity"], Int[np.ndarray, " batch"]]]:
    """The prompts in batches of one shape. The last one is filled up with empty rows, which end at once."""
    prompts, lengths = pad(ids)
    batch = min(conforming("batch", batch, Size), len(ids))
    missing = -len(ids) % batch
    prompts, lengths = np.pad(prompts, ((0, missing), (0, 0))), np.pad(lengths, (0, missing))
    return [(prompts[n : n + batch], lengths[n : n + batch]) for n in range(0, len(prompts), batch)]


def run_all(
    method: Method,
    params: Params,
    ids: Sequence[Sequence[int]],
    model: ModelConfig,
    decode: DecodeConfig,
    graph: DraftGraph | None = None,
    fold: FoldConfig | None = None,
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
    validate(params, jnp.asarray(prompts), jnp.asarray(lengths), model, decode, None if method == "vanilla" else graph, fold)
    parts = [(jnp.asarray(prompts), jnp.asarray(lengths)) for prompts, lengths in batches(ids, batch)]
    impl = implementation(method, params, model, decode, graph, fold)
    used = (None, None) if method == "vanilla" else (graph, fold if method == "specfold" else None)
    decode_batch = partial(run, method, params, model=model, decode=decode, graph=graph, fold=fold)
    with explained(params, model, decode, parts[0][0].shape, *used):
        begun = time.perf_counter()
        jax.block_until_ready(decode_batch(parts[0][0], jnp.zeros_like(parts[0][1])))
        compile_seconds = time.perf_counter() - begun
        if warm_up:
            jax.block_until_ready(decode_batch(*parts[0]))
        done, seconds = [], 0.0
        for prompts, lengths in parts:
            begun = time.perf_counter()
            decoded = jax.block_until_ready(decode_batch(prompts, lengths))
            seconds += time.perf_counter() - begun
            done.append(jax.device_get(decoded))
            if progress:
                progress(min(len(done) * len(lengths), len(ids)))
    whole = jax.tree.map(lambda *parts: np.concatenate(parts)[: len(ids)], *done)
    prompt_lengths = pad(ids)[1]
    return Run(whole, prompt_lengths, summarise(whole, prompt_lengths, seconds, method, compile_seconds, impl))
