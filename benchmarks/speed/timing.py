"""What is timed of a decode, the same for JAX and PyTorch: whole decodes, and the parts of one iteration before its largest check."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from jaxtyping import Int

from specfold_jax.diffusion.decoding import Decoding
from specfold_jax.running.batch import batches

Part = Literal["check", "head", "step"]
PARTS: tuple[Part, ...] = ("check", "head", "step")
"""Of an iteration: the branches' forward pass, ranking the tokens of the rows that matter, and the iteration with all else."""

COUNTED = ("nfe", "checks", "commits", "drafting", "drafted", "accepted", "saved_commits", "shared", "guard_stops", "total_rows")
GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "pallas": {
        "gate": ("gate",),
        "pack": ("pack",),
        "attention": ("attention",),
        "products": ("linear", "silu_pair"),
        "rows": ("norm", "advance_norm", "attention_inputs"),
        "head": ("head", "merge"),
    },
    "triton": {
        "gate": ("_gate",),
        "pack": ("_pack",),
        "inherit": ("_add_inherited",),
        "attention": ("_block", "_prefix"),
        "products": ("_qkv", "_linear", "_silu_pair"),
        "head": ("_logits", "_merge"),
    },
}
"""Kernels of `kernels_pallas` and `kernels_triton` by what they do. Sources and the correction have no kernels of their own: they are
indices that attention and the next row kernel follow, so what they cost is the difference to Spiffy's attention. Pallas adds the sums of
the product before in "gate", and norms in "pack": without folding "rows" does both."""


class Side(Protocol):
    """A model on one side, and how it decodes. States are what the side makes them; every call returns when the device is done."""

    @property
    def how(self) -> Decoding: ...

    @property
    def compile_seconds(self) -> Mapping[str, float] | None:
        """Of each program, seconds of tracing, lowering and compiling, all programs side by side; None where nothing is compiled apart."""
        ...

    def begin(self, prompts: np.ndarray, lengths: np.ndarray) -> Any:
        """The prompts' first state: the prefill."""
        ...

    def decode(self, prompts: np.ndarray, lengths: np.ndarray) -> Any:
        """A whole decode, prefill included, on the host."""
        ...

    def unfinished(self, state: Any) -> bool:
        """Whether any row goes on."""
        ...

    def step(self, state: Any) -> Any:
        """The state one iteration on."""
        ...

    def lay_out(self, state: Any) -> Any:
        """The branches of the state's check."""
        ...

    def computed_rows(self, state: Any) -> Int[np.ndarray, "batch layers 2"]:
        """Of the state's check, rows of draft branches computed before attention and before the feed-forward network."""
        ...

    def rebase(self, state: Any, index: Int[np.ndarray, "batch span"], shift: Int[np.ndarray, " batch"]) -> Any:
        """The state with the tokens and cache entries that `index` names, and every position `shift` further on."""
        ...

    def seconds(self, part: Part, state: Any, repetitions: int) -> list[float]:
        """Seconds of a part on this state, again and again."""
        ...

    def kernels(self, part: Part, state: Any) -> dict[str, float] | None:
        """Milliseconds of each kernel of a part by its name, over one run; None where no profiler tells."""
        ...


@dataclass(frozen=True)
class Timed:
    """`generated`: new tokens of each prompt. `stats`: sums over prompts; `gates`: rows computed in front of a gate, all layers.
    `iterations` of the loop over all batches. Seconds of each repetition over all prompts, prefill included and alone; and seconds an
    iteration, of each batch of each repetition."""

    generated: list[list[int]]
    stats: dict[str, int]
    gates: int
    iterations: int
    seconds: list[float]
    prefill_seconds: list[float]
    iteration_seconds: list[float]

    @property
    def tokens(self) -> int:
        """New tokens of all prompts."""
        return sum(map(len, self.generated))


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, in milliseconds."""
    low, middle, high = np.percentile(1000 * np.asarray(seconds), (25, 50, 75)).tolist()
    return {"median_ms": middle, "low_ms": low, "high_ms": high, "repetitions": len(seconds)}


def timed[T](function: Callable[[], T]) -> tuple[T, float]:
    """What a call returns, and its wall seconds."""
    begun = time.perf_counter()
    out = function()
    return out, time.perf_counter() - begun


def decode_all(side: Side, ids: Sequence[Sequence[int]], batch: int, repetitions: int) -> Timed:
    """Decodes all prompts, again and again, after a first batch that warms up."""
    parts = batches(ids, batch)
    side.decode(*parts[0])
    side.begin(*parts[0])
    seconds, prefills, each = [0.0] * repetitions, [0.0] * repetitions, []
    decoded: list[Any] = []
    for n in range(repetitions):
        decoded = []
        for part in parts:
            prefill = timed(lambda part=part: side.begin(*part))[1]
            out, whole = timed(lambda part=part: side.decode(*part))
            decoded.append(out)
            seconds[n] += whole
            prefills[n] += prefill
            each.append((whole - prefill) / max(_iterations(out), 1))
    generated: list[list[int]] = []
    totals: dict[str, int] = {name: 0 for name in COUNTED}
    gates = 0
    for (_, lengths), out in zip(parts, decoded, strict=True):
        real = np.flatnonzero(lengths > 0)  # the last batch is filled up with empty rows
        tokens, ends = np.asarray(out.tokens), np.asarray(out.lengths)
        generated += [tokens[row, lengths[row] : ends[row]].tolist() for row in real]
        for name in COUNTED:
            totals[name] += int(np.asarray(getattr(out.stats, name))[real].sum())
        gates += int(np.asarray(out.stats.computed_rows)[real].sum())
    return Timed(generated, totals, gates, sum(map(_iterations, decoded)), seconds, prefills, each)


def _iterations(decoded: Any) -> int:
    """Iterations of the loop: rows start together and take part until they end."""
    return int(np.asarray(decoded.stats.nfe).max())


def span(capacity: int, how: Decoding, prefix: int) -> int:
    """Cache entries that prompts of this capacity need, or a prefix and two blocks behind it; a multiple of 8, as kernels copy."""
    block = how.decode.block(how.model)
    return -(-max(capacity + how.decode.max_new_tokens + block, prefix + 2 * block) // 8) * 8


def largest(side: Side, prompts: np.ndarray, lengths: np.ndarray, entries: int) -> Any:
    """The state before the largest check of a batch, with room for so many cache entries."""
    state = side.begin(prompts, lengths)
    index = np.minimum(np.arange(entries), state.tokens.shape[1] - 1)  # what is behind a row's start does not count
    state = side.rebase(state, np.tile(index, (len(prompts), 1)), np.zeros(len(prompts), np.int32))
    found, most = state, -1
    while side.unfinished(state):
        if (count := int(np.asarray(side.lay_out(state).valid).sum())) > most:
            found, most = state, count
        state = side.step(state)
    return found


def at_prefix(side: Side, state: Any, prefix: int) -> Any:
    """The state moved so that every row's block starts at `prefix`; as it is for 0. ValueError if no block starts there.

    A longer prefix repeats the row's own keys and values: they are a trained model's, but no text's.
    """
    if prefix % (block := side.how.decode.block(side.how.model)):
        raise ValueError(f"{prefix=} must be a multiple of the block of {block} positions, or 0")
    if not prefix:
        return state
    start, position = np.asarray(state.row.start)[:, None], np.arange(state.tokens.shape[1])
    behind = np.clip(position - prefix + start, 0, position[-1])
    index = np.where(position < prefix, position % np.maximum(start, 1), behind)
    return side.rebase(state, index, (prefix - start[:, 0]).astype(np.int32))


def time_parts(side: Side, state: Any, impl: str, repetitions: int) -> dict[str, Any]:
    """One iteration on this state: what its check evaluates, milliseconds of each part, and on a GPU of kernels by group.

    `overhead_ms`: what the iteration takes beyond the check and the head. With a wait for each repetition (PyTorch) it is too small by
    the host's share of two of them.
    """
    branches, block = side.lay_out(state), side.how.decode.block(side.how.model)
    valid = np.asarray(branches.valid)
    drafted = int(np.asarray(branches.drafts()).sum()) * block
    computed = side.computed_rows(state).sum(axis=0).mean(axis=0)
    parts: dict[str, Any] = {part: spread(side.seconds(part, state, repetitions)) for part in PARTS}
    middle = {part: parts[part]["median_ms"] for part in PARTS}
    for part in PARTS:
        parts[part]["kernels"] = None
        try:
            parts[part]["kernels"] = grouped(side.kernels(part, state), impl)
        except Exception as error:  # profilers exclude one another, and times are worth having without them
            parts[part]["kernels_error"] = f"{type(error).__name__}: {error}"
    return parts | {
        "overhead_ms": middle["step"] - middle["check"] - middle["head"],
        "rows": int(valid.sum()) * block,
        "draft_rows": drafted,
        "recompute": (computed / drafted).tolist() if drafted else None,
        "prefix": np.asarray(state.row.start)[valid[:, 0]].tolist(),
    }


def grouped(found: Mapping[str, float] | None, impl: str) -> dict[str, Any] | None:
    """Kernel milliseconds: "all"; by group, where kernels are named by what they do (xla and torch: no); and the most costly by name."""
    if not found:
        return None
    most = dict(sorted(found.items(), key=lambda item: -item[1])[:12])
    groups = {group: sum(found.get(name, 0.0) for name in names) for group, names in GROUPS.get(impl, {}).items()}
    rest = {"rest": sum(found.values()) - sum(groups.values())} if any(groups.values()) else {}
    return {"all": sum(found.values()), "groups": groups | rest if rest else None, "most": most}
