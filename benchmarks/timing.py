"""Times of the PyTorch side's decoding: iteration by iteration, and of one check, kernel by kernel."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.generate import batches
from specfold_jax.graph import DraftGraph
from specfold_torch_ref.branches import lay_out
from specfold_torch_ref.decode import decode_step
from specfold_torch_ref.model import Params, check
from specfold_torch_ref.ops import Implementation
from specfold_torch_ref.row import COMMIT, DENOISE
from specfold_torch_ref.state import DecodeState, Stats, begin, finish, unfinished

KERNELS = {
    "gate": ("_gate",),
    "pack": ("_pack",),
    "block_attention": ("_block",),
    "prefix_attention": ("_prefix",),
    "add_inherited": ("_add_inherited",),
    "projections": ("_qkv", "_linear", "_silu_pair"),
}
"""Kernels of `kernels_triton` by what they do. The block's attention with its source indirection is the correction: its whole time is
counted, what it costs more than without folding is the difference to Spiffy's."""


@dataclass(frozen=True)
class Subject:
    """A model on the PyTorch side, and how it decodes. `graph` is empty for vanilla."""

    params: Params
    model: ModelConfig
    decode: DecodeConfig
    graph: DraftGraph
    fold: FoldConfig | None
    impl: Implementation

    def begin(self, prompts: np.ndarray, lengths: np.ndarray) -> DecodeState:
        """The prompts' first state."""
        given = torch.from_numpy(prompts), torch.from_numpy(lengths)
        return begin(self.params, *given, self.model, self.decode, self.graph, impl=self.impl)

    def step(self, state: DecodeState) -> DecodeState:
        """One iteration."""
        return decode_step(state, self.params, self.model, self.decode, self.graph, self.fold, impl=self.impl)


@dataclass(frozen=True)
class Timed:
    """`generated`: new tokens of each prompt; `stats`: sums over prompts; seconds of prefills, and of each iteration."""

    generated: list[list[int]]
    stats: dict[str, int]
    prefill_seconds: list[float]
    step_seconds: list[float]

    @property
    def tokens(self) -> int:
        """New tokens of all prompts."""
        return sum(map(len, self.generated))

    @property
    def seconds(self) -> float:
        """Prefills and iterations."""
        return sum(self.prefill_seconds) + sum(self.step_seconds)


def wait(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, in milliseconds."""
    low, middle, high = np.percentile(1000 * np.asarray(seconds), (25, 50, 75)).tolist()
    return {"median_ms": middle, "low_ms": low, "high_ms": high, "repetitions": len(seconds)}


def _timed[T](function: Callable[[], T], device: torch.device) -> tuple[T, float]:
    begun = time.perf_counter()
    out = function()
    wait(device)
    return out, time.perf_counter() - begun


@torch.inference_mode()
def decode_all(it: Subject, ids: Sequence[Sequence[int]], batch: int) -> tuple[Timed, DecodeState]:
    """Decodes the prompts, after a first batch that compiles and warms up; and the state before the largest check of that batch.

    States share the cache that grows in place; an earlier one may be checked again, for what was added lies past what counts for it.
    """
    device, parts = it.params["embed"].device, batches(ids, batch)
    state = it.begin(*parts[0])
    largest, most = state, -1
    while unfinished(state):
        live = state.row.phase[:, None]
        branches = lay_out(state, it.graph, it.model, it.decode)
        count = int((branches.valid & (live == DENOISE)).sum())
        if count > most:
            largest, most = state, count
        state = it.step(state)
    wait(device)

    generated: list[list[int]] = []
    prefills: list[float] = []
    steps: list[float] = []
    totals: dict[str, int] = dict.fromkeys(Stats._fields, 0)
    for prompts, lengths in parts:
        state, seconds = _timed(partial(it.begin, prompts, lengths), device)
        prefills.append(seconds)
        while unfinished(state):
            state, seconds = _timed(partial(it.step, state), device)
            steps.append(seconds)
        decoded = finish(state, it.model, it.decode)
        for row in np.flatnonzero(lengths > 0)[: len(ids) - len(generated)].tolist():
            generated.append(decoded.tokens[row, int(lengths[row]) : int(decoded.lengths[row])].tolist())
        real = torch.from_numpy(lengths > 0)
        for name, value in decoded.stats._asdict().items():
            totals[name] += int(value[real].sum())
    return Timed(generated, totals, prefills, steps), largest


@torch.inference_mode()
def time_check(it: Subject, state: DecodeState, repetitions: int) -> dict[str, Any]:
    """One check, again and again: wall time, rows, the share of draft rows computed, and on a GPU kernel times.

    `kernels_ms` sums each group's kernels over one check; with plain PyTorch, whose kernels are not named by what they do here, only
    "all". Wall time includes the host's: the gap between the two is what launching costs.
    """
    device, row = it.params["embed"].device, state.row
    branches = lay_out(state, it.graph, it.model, it.decode)
    once = partial(check, it.params, branches, state.cache, row.start, it.model, it.fold, it.decode.pack, impl=it.impl)
    checked = once()
    wait(device)
    seconds = [_timed(once, device)[1] for _ in range(repetitions)]
    block = branches.tokens.shape[2]
    drafted = int(branches.drafts().sum()) * block
    computed = checked.computed_rows.float().sum(dim=0).mean(dim=0).cpu()
    return spread(seconds) | {
        "rows": int(branches.valid.sum()) * block,
        "draft_rows": drafted,
        "recompute": (computed / drafted).tolist() if drafted else None,
        "prefix": row.start[row.phase <= COMMIT].tolist(),
        "kernels_ms": _kernels(once, it.impl) if device.type == "cuda" else None,
    }


def _kernels(once: Callable[[], Any], impl: Implementation) -> dict[str, float]:
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        once()
        torch.cuda.synchronize()
    found = {e.key: e.self_device_time_total / 1000 for e in profiled.key_averages() if e.self_device_time_total > 0}
    out: dict[str, float] = {"all": sum(found.values())}
    if impl == "triton":
        out |= {group: sum(found.get(name, 0.0) for name in names) for group, names in KERNELS.items()}
        out["other"] = 2 * out["all"] - sum(out.values())
        if not out["projections"]:
            raise RuntimeError(f"the profiler names no kernel {KERNELS['projections']}, but {sorted(found)}: no group can be told apart")
    return out
