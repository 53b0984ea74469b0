"""The JAX side of `benchmarks.speed.decode`: whole decodes from one jit, and the parts of an iteration in loops on the device.

A part runs in a `lax.fori_loop` of its own, as the decode runs in one. The number of turns is given when it is called, and each turn waits
for the one before. The time of a call with one turn is taken off, and with it the cost of the call to the host. A turn of the loop itself
(its condition goes to the host) belongs to an iteration. It is taken off the check and the head, as measured with an empty loop.
"""

import functools
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Compiled
from jaxtyping import Array, Int

from benchmarks.speed.timing import Part, timed
from specfold_jax.backends.choice import Backend, backend_of
from specfold_jax.diffusion.decoding import Decoding
from specfold_jax.diffusion.distribution import Distributions
from specfold_jax.diffusion.layout import lay_out
from specfold_jax.diffusion.loop import begin, decode_step, diffusion_decode, unfinished
from specfold_jax.diffusion.state import Decoded, DecodeState
from specfold_jax.diffusion.validate import row_status
from specfold_jax.models.check import Branches, Checked
from specfold_jax.models.sampling import Ranked
from specfold_jax.models.transformer import Cache, Params

LEAST_TURNS, MOST_TURNS = 10, 50
"""Repetitions in one loop: a time is the mean of so many."""
LOOP_SECONDS = 0.1
"""A loop has more turns than the least until it takes so long: what a call costs the host, a few tenths of a millisecond more or less, is
then lost in it."""


def _backend(params: Params, how: Decoding) -> Backend:
    """The implementation that a whole decode chooses, for its parts."""
    return backend_of(how.decode, params, how.model, how.fold, how.graph.token_ranks)


def _begin(params: Params, prompts: Array, lengths: Array, how: Decoding) -> DecodeState:
    status = row_status(prompts, lengths, how.model, how.decode, how.fold)
    return begin(params, prompts, lengths, how.model, how.decode, how.graph, status)


def _lay_out(state: DecodeState, how: Decoding) -> Branches:
    return lay_out(state, how.graph, how.model, how.decode)


def _after[T](given: T, last: Any) -> T:
    """`given`, whose whole numbers wait for the first of `last`'s arrays: one is added where it starts with a hugely negative number.

    It never does, which XLA cannot know: it would compute what is the same in every turn before the loop, barriers or not.
    """
    never = jax.tree.leaves(last)[0].reshape(-1)[0].astype(jnp.float32) < -1e30

    def wait(x: Array) -> Array:
        return x if jnp.issubdtype(x.dtype, jnp.inexact) else x ^ never.astype(x.dtype)

    return jax.tree.map(wait, given)


def loop[T](turns: Array, function: Callable[..., T], given: Any) -> T:
    """`function(given)` so many times, each after the one before; the last one's."""
    shapes = jax.eval_shape(function, given)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return lax.fori_loop(0, turns, lambda _, last: function(_after(given, last)), nothing)


def check_loop(params: Params, branches: Branches, cache: Cache, starts: Array, how: Decoding, turns: Array) -> Checked:
    """So many checks of the same branches, each after the one before; without keys and values, which in a decode nobody copies: those of
    the block to commit are taken from where attention read them."""

    backend = _backend(params, how)

    def once(given: tuple[Branches, Array]) -> Checked:
        return backend.check(params, given[0], cache, given[1], how.model, how.decode, how.fold)._replace(kv=())

    return loop(turns, once, (branches, starts))


def _check(params: Params, state: DecodeState, branches: Branches, how: Decoding, turns: Array) -> Checked:
    return check_loop(params, branches, state.cache, state.row.start, how, turns)


def _head(params: Params, state: DecodeState, branches: Branches, checked: Checked, how: Decoding, turns: Array) -> Ranked:
    def once(given: tuple[DecodeState, Branches, Checked]) -> Ranked:
        state, branches, checked = given
        return Distributions.of(_backend(params, how), params, branches, checked, state.row, how.model, how.decode, how.graph).greedy

    return loop(turns, once, (state.replace(cache=()), branches, checked))


def _step(params: Params, state: DecodeState, how: Decoding, turns: Array) -> DecodeState:
    """Every turn starts anew, but for the cache: it is written in place, at the same entries, as in a decode."""

    def turn(_: Any, last: DecodeState) -> DecodeState:
        again = _after(state.replace(cache=()), last)
        return decode_step(again.replace(cache=last.cache), params, how.model, how.decode, how.graph, how.fold)

    return lax.fori_loop(0, turns, turn, state)


@jax.jit
def _rebase(state: DecodeState, index: Array, shift: Array) -> DecodeState:
    def take(x: Array) -> Array:  # [..., batch, span, kv_heads, head_dim]
        where = index.reshape((1,) * (x.ndim - 4) + index.shape + (1, 1))
        return jnp.take_along_axis(x, where, axis=-3)

    moved = {name: getattr(state.row, name) + shift for name in ("start", "lengths", "limit")}
    tokens = jnp.take_along_axis(state.tokens, index, axis=1)
    return state.replace(row=state.row.replace(**moved), tokens=tokens, cache=jax.tree.map(take, state.cache))


@functools.cache
def empty_turn() -> float:
    """Seconds of a turn of a loop that does next to nothing."""
    nothing = jax.jit(lambda turns, x: loop(turns, lambda given: given + 1, x))
    return float(np.median(turn_seconds(lambda turns: nothing(turns, jnp.zeros(8, jnp.int32)), 100)))


def turn_seconds(run: Callable[[np.int32], Any], repetitions: int) -> list[float]:
    """Seconds of a turn, the mean of a loop of them, for as many loops as have `repetitions` turns or more; of the least at least two.

    `run(turns)` returns when the device is done, or what to wait for.
    """

    def wall(turns: int) -> float:
        return timed(lambda: jax.block_until_ready(run(np.int32(turns))))[1]

    wall(1)
    one = float(np.median([wall(1) for _ in range(5)]))
    least = min(LEAST_TURNS, repetitions)
    turn = (wall(1 + least) - one) / least
    turns = int(np.clip(LOOP_SECONDS / max(turn, 1e-9), least, MOST_TURNS))
    return [(wall(1 + turns) - one) / turns for _ in range(max(2, -(-repetitions // LEAST_TURNS)))]


def kernel_times(program: Compiled, *given: Any) -> dict[str, float] | None:
    """Milliseconds of each kernel by its name; None without a GPU.

    By CUPTI, through Mosaic's profiler; Pallas kernels have the names of their bodies in `kernels_pallas`.
    """
    if jax.devices()[0].platform != "gpu":
        return None
    from jax.experimental.mosaic.gpu.profiler import Cupti

    found: Any = Cupti().measure(program, aggregate=False)(*given)[1] or ()
    out: dict[str, float] = {}
    for name, milliseconds in found:
        name = re.sub(r"_mosaic_gpu.*", "", name)
        out[name] = out.get(name, 0.0) + milliseconds
    return out


@dataclass(frozen=True)
class Programs:
    """What a way of decoding is compiled to; thresholds, and all numbers that one sweeps, are arguments."""

    compiled: Mapping[str, Compiled]
    seconds: Mapping[str, float]


def compile_programs(
    params: Params, prompts: np.ndarray, lengths: np.ndarray, span: int, ways: Mapping[str, Decoding]
) -> dict[str, Programs]:
    """The programs of several ways of decoding one shape of batch, compiled side by side. `span`: cache entries of the parts' states.

    Ways that differ by their fold alone share what has none.
    """
    jobs: dict[tuple[str, str], tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    names: dict[str, dict[str, tuple[str, str]]] = {}
    for name, how in ways.items():
        index, zeros, turns = np.zeros((len(prompts), span), np.int32), np.zeros(len(prompts), np.int32), np.int32(1)
        plain = how._replace(fold=None)
        first = jax.eval_shape(_begin, params, prompts, lengths, plain)
        state = jax.eval_shape(_rebase, first, index, zeros)
        branches = jax.eval_shape(_lay_out, state, plain)
        checked = jax.eval_shape(_check, params, state, branches, plain, turns)
        own = {
            "decode": (diffusion_decode, (params, prompts, lengths, *how)),
            "check": (_check, (params, state, branches, how, turns)),
            "step": (_step, (params, state, how, turns)),
        }
        shared = {
            "begin": (_begin, (params, prompts, lengths, plain)),
            "lay_out": (_lay_out, (state, plain)),
            "head": (_head, (params, state, branches, checked, plain, turns)),
        }
        base = next(n for n, other in ways.items() if other.graph is how.graph and other.decode == how.decode)
        jobs |= {(name, program): job for program, job in own.items()} | (
            {(base, n): job for n, job in shared.items()} if base == name else {}
        )
        names[name] = {program: (name, program) for program in own} | {program: (base, program) for program in shared}

    def build(job: tuple[Callable[..., Any], tuple[Any, ...]]) -> tuple[Compiled, float]:
        return timed(lambda: jax.jit(job[0]).lower(*job[1]).compile())

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = dict(zip(jobs, pool.map(build, jobs.values()), strict=True))
    found = {way: {program: built[name] for program, name in mine.items()} for way, mine in names.items()}
    return {way: Programs({n: x[0] for n, x in mine.items()}, {n: x[1] for n, x in mine.items()}) for way, mine in found.items()}


@dataclass(frozen=True)
class JaxSide:
    """See `benchmarks.speed.timing.Side`."""

    params: Params
    how: Decoding
    programs: Programs

    @property
    def compile_seconds(self) -> Mapping[str, float]:
        return self.programs.seconds

    def _run(self, program: str, *given: Any) -> Any:
        return jax.block_until_ready(self.programs.compiled[program](*given))

    def begin(self, prompts: np.ndarray, lengths: np.ndarray) -> DecodeState:
        return self._run("begin", self.params, prompts, lengths, self.how._replace(fold=None))

    def decode(self, prompts: np.ndarray, lengths: np.ndarray) -> Decoded:
        return self._run("decode", self.params, prompts, lengths, *self.how)

    def unfinished(self, state: DecodeState) -> bool:
        return bool(unfinished(state))

    def step(self, state: DecodeState) -> DecodeState:
        return self._run("step", self.params, state, self.how, np.int32(1))

    def lay_out(self, state: DecodeState) -> Branches:
        return self._run("lay_out", state, self.how._replace(fold=None))

    def computed_rows(self, state: DecodeState) -> Int[np.ndarray, "batch layers 2"]:
        return np.asarray(self._checked(state).computed_rows)

    def _checked(self, state: DecodeState) -> Checked:
        return self._run("check", self.params, state, self.lay_out(state), self.how, np.int32(1))

    def rebase(self, state: DecodeState, index: Int[np.ndarray, "batch span"], shift: Int[np.ndarray, " batch"]) -> DecodeState:
        return _rebase(state, index.astype(np.int32), shift)

    def _given(self, part: Part, state: DecodeState) -> tuple[Any, ...]:
        """What the part's program takes, but for the number of turns."""
        match part:
            case "check":
                return self.params, state, self.lay_out(state), self.how
            case "head":
                return self.params, state, self.lay_out(state), self._checked(state), self.how._replace(fold=None)
            case "step":
                return self.params, state, self.how

    def seconds(self, part: Part, state: DecodeState, repetitions: int) -> list[float]:
        program, given = self.programs.compiled[part], self._given(part, state)
        off = 0.0 if part == "step" else empty_turn()
        return [seconds - off for seconds in turn_seconds(lambda turns: program(*given, turns), repetitions)]

    def kernels(self, part: Part, state: DecodeState) -> dict[str, float] | None:
        return kernel_times(self.programs.compiled[part], *self._given(part, state), np.int32(1))
