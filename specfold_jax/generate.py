"""Host-level generation: prompts become arrays, a method's jitted decode runs over them in batches, and is timed and summarised."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specfold_jax.checks import Size, as_array, checked
from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.decode import specfold_decode, spiffy_decode, vanilla_decode
from specfold_jax.graph import DraftGraph
from specfold_jax.implementations import chosen
from specfold_jax.memory import explained
from specfold_jax.model import Params
from specfold_jax.state import Decoded
from specfold_jax.validate import STATUS, validate

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


@dataclass(frozen=True)
class Summary:
    """What a run did. Counts are sums over `rows` decoded rows; `tokens`: tokens generated, stop tokens included.

    `seconds`: wall time of the decodes without `compile_seconds`. `nfe` = `checks` + `commits`, `prefills` apart. `recompute`: per
    layer, the shares of draft rows computed before attention and before the feed-forward network; None without drafts.
    `refused`: index and reason of each row that was not decoded. `impl`: the implementation it ran on, where that is known.
    """

    method: str
    rows: int
    tokens: int
    seconds: float
    compile_seconds: float
    nfe: int
    checks: int
    commits: int
    prefills: int
    steps: int
    drafting: int
    drafted: int
    accepted: int
    saved_commits: int
    shared: int
    guard_stops: int
    recompute: tuple[tuple[float, float], ...] | None = None
    refused: tuple[tuple[int, str], ...] = field(default=())
    impl: str | None = None

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second of decoding."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def nfe_per_token(self) -> float:
        """Forwards a generated token."""
        return self.nfe / self.tokens if self.tokens else 0.0

    @property
    def accepted_depth(self) -> float | None:
        """Mean accepted drafts a check that had drafts."""
        return self.accepted / self.drafting if self.drafting else None

    @property
    def recompute_ratio(self) -> float | None:
        """Computed rows over all rows of the draft branches, mean over layers and both gates."""
        return float(np.mean(self.recompute)) if self.recompute is not None else None

    def record(self) -> dict[str, Any]:
        """All fields and derived figures, for JSON."""
        derived = {name: getattr(self, name) for name in ("tokens_per_second", "nfe_per_token", "accepted_depth", "recompute_ratio")}
        return asdict(self) | derived


def summarise(
    decoded: Decoded,
    prompt_lengths: Int[np.ndarray, " batch"],
    seconds: float,
    method: str = "",
    compile_seconds: float = 0.0,
    impl: str | None = None,
) -> Summary:
    """The summary of a decode; `seconds` is its wall time."""
    lengths, stats = jax.device_get((decoded.lengths, decoded.stats))
    ok = stats.status == 0
    counts = ("nfe", "checks", "commits", "prefills", "steps", "drafting", "drafted", "accepted", "saved_commits", "shared", "guard_stops")
    total = int(stats.total_rows[ok].sum())
    computed = stats.computed_rows[ok].sum(axis=0) / total if total else None
    return Summary(
        method=method,
        rows=int(ok.sum()),
        tokens=int((lengths - prompt_lengths)[ok].sum()),
        seconds=seconds,
        compile_seconds=compile_seconds,
        **{name: int(getattr(stats, name)[ok].sum()) for name in counts},
        recompute=None if computed is None else tuple((float(a), float(f)) for a, f in computed),
        refused=tuple((int(row), STATUS[int(stats.status[row])]) for row in np.flatnonzero(~ok)),
        impl=impl,
    )


class Run(NamedTuple):
    """A run over any number of prompts: `decoded` on the host, the prompts' lengths, the summary."""

    decoded: Decoded
    prompt_lengths: Int[np.ndarray, " batch"]
    summary: Summary

    def generated(self, row: int) -> list[int]:
        """The row's new tokens."""
        return self.decoded.tokens[row, self.prompt_lengths[row] : self.decoded.lengths[row]].tolist()

    def only(self, row: int) -> Summary:
        """The row's own counts; times are not known row by row and stand at 0."""
        one = jax.tree.map(lambda x: x[row : row + 1], self.decoded)
        return summarise(one, self.prompt_lengths[row : row + 1], 0.0, self.summary.method, impl=self.summary.impl)


def batches(ids: Sequence[Sequence[int]], batch: int) -> list[tuple[Int[np.ndarray, "batch capacity"], Int[np.ndarray, " batch"]]]:
    """The prompts in batches of one shape. The last one is filled up with empty rows, which end at once."""
    prompts, lengths = pad(ids)
    batch = min(checked("batch", batch, Size), len(ids))
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


def same_tokens(a: Run, b: Run) -> list[bool]:
    """Row by row, whether two runs on the same prompts generated the same tokens."""
    rows = range(len(a.prompt_lengths))
    return [a.generated(row) == b.generated(row) for row in rows]
