"""Device seconds of one operation among others like it, by JAX and by PyTorch: what it costs where its neighbours are kernels too."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jaxtyping import Array

from benchmarks.operations.cases import Arrays

METHOD = (
    "Operations in a chain inside one program (JAX) or one CUDA graph (Triton), each over the next copy of its weight or cache: copies of "
    "rotated_mb in all. Other inputs are the same each time and stay in the GPU's cache, as in a pass. In JAX an operation waits for the "
    "one before by a kernel that writes one number, which depends on that one's outputs, into its first input; the same chain with these "
    "kernels alone (link_us each) is subtracted. Times are host wall time of the program (JAX) or between two CUDA events around the "
    "graph (Triton), over the number of operations (links): the gap between kernels is part of them. Median and quartiles over the "
    "repetitions, after three that warm up. program_copies counts XLA's copies of arrays, the operations' own among them."
)

Link = Callable[[Array, Arrays, Arrays], Any]


def _touch(first: Array, outputs: Any) -> Array:
    """`first` with one in front, unless the outputs start with huge negative numbers: XLA cannot know that they do not."""
    seen = sum(x.reshape(-1)[0].astype(jnp.float32) for x in jax.tree.leaves(outputs))
    one = jnp.where(seen < -1e30, 0, 1).astype(first.dtype).reshape((1,) * first.ndim)
    return lax.dynamic_update_slice(first, one, (0,) * first.ndim)


def chain(link: Link, loops: int) -> Any:
    """A jitted function of (first, hot, copies) that runs `link(first, hot, cold)` for all copies, `loops` times over, one by one.

    Barriers keep XLA from computing of the outputs only what the next one waits for, and from computing what depends on `hot` alone only
    once; on a GPU they stand until kernels are settled.
    """
    link = jax.jit(link)  # traced once, not once a copy

    @jax.jit
    def run(first: Array, hot: Arrays, copies: Sequence[Arrays]) -> Array:
        def turn(_: Any, first: Array) -> Array:
            for cold in copies:
                first, again = lax.optimization_barrier((first, hot))
                outputs, first = lax.optimization_barrier((link(first, again, cold), first))
                first = _touch(first, outputs)
            return first

        return lax.fori_loop(0, loops, turn, first)

    return run


def _wall(program: Callable[[], Any], repetitions: int) -> list[float]:
    """Seconds of each repetition, from the call until the device is done."""
    out = []
    for _ in range(3 + repetitions):
        begun = time.perf_counter()
        jax.block_until_ready(program())
        out.append(time.perf_counter() - begun)
    return out[3:]


@functools.cache
def _links_alone(shape: tuple[int, ...], dtype: Any, copies: int, loops: int, repetitions: int) -> float:
    """Median seconds of a chain whose operations do nothing."""
    run = chain(lambda first, hot, cold: hot["nothing"], loops)
    given = jnp.ones(shape, dtype), {"nothing": jnp.zeros(1)}, [{}] * copies
    return statistics.median(_wall(lambda: run(*given), repetitions))


class Timed(NamedTuple):
    """`seconds` of one operation, of each repetition; seconds of what ties two together, not in them; XLA's copies in the program."""

    seconds: list[float]
    link: float = 0.0
    copies: int = 0


def jax_seconds(link: Link, first: Array, hot: Arrays, copies: Sequence[Arrays], loops: int, repetitions: int) -> Timed:
    """Times `link(first, hot, cold)` in a chain."""
    given, links = (first, hot, copies), loops * len(copies)
    run = chain(link, loops).lower(*given).compile()
    alone = _links_alone(first.shape, first.dtype, len(copies), loops, repetitions)
    seconds = [(each - alone) / links for each in _wall(lambda: run(*given), repetitions)]
    return Timed(seconds, alone / links, run.as_text().count(" copy("))


def graph_seconds(calls: Sequence[Callable[[], Any]], loops: int, repetitions: int) -> Timed:
    """Times one of the calls, in a CUDA graph of all of them, `loops` times over."""
    for call in calls:  # compiles
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in loops * list(calls):
            call()
    out = []
    for _ in range(3 + repetitions):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        out.append(begun.elapsed_time(ended) / 1000 / (loops * len(calls)))
    return Timed(out[3:])
