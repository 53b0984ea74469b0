"""Configurations: what a model is, how to decode, how to fold.

All three are frozen dataclasses registered as pytrees. Fields that shape the program (sizes, switches) are static metadata;
numbers one sweeps (threshold, temperature, seed, tau, guard) are leaves, so changing them never recompiles a jitted decode.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np
from jax.core import Tracer

Attention = Literal["block", "bidirectional", "causal"]
IMPLEMENTATIONS = ("auto", "xla")


def _static(**kwargs: Any) -> Any:
    return field(metadata={"static": True}, **kwargs)


def _register[T: type](cls: T) -> T:
    """A pytree whose unflattening goes past the constructor: leaves may be tracers, and checking arrays would wait for the device."""
    fields = cls.__dataclass_fields__.values()
    static = [f.name for f in fields if f.metadata.get("static")]
    swept = [f.name for f in fields if f.name not in static]

    def flatten(config: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        return [(jax.tree_util.GetAttrKey(n), getattr(config, n)) for n in swept], tuple(getattr(config, n) for n in static)

    def unflatten(aux: tuple[Any, ...], leaves: Iterable[Any]) -> Any:
        config = object.__new__(cls)
        for name, value in zip(swept + static, (*leaves, *aux), strict=True):
            object.__setattr__(config, name, value)
        return config

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls


def concrete(value: Any) -> np.ndarray | None:
    """The value as a NumPy array, or None while it is being traced (or is a pytree placeholder)."""
    if isinstance(value, Tracer) or not isinstance(value, (int, float, np.ndarray, np.generic, jax.Array, list)):
        return None
    return np.asarray(value)


def _number(config: Any, name: str, dtype: type, rule: str, valid: Any) -> None:
    """Checks a swept number and stores it with a strong dtype, so that 0.9 and np.float32(0.9) share one compilation."""
    if isinstance(getattr(config, name), str):
        raise ValueError(f"{name}={getattr(config, name)!r} must be {rule}, not text")
    value = concrete(getattr(config, name))
    if value is None:
        return
    if value.dtype.kind not in "iuf" or not bool(np.all(valid(value))):
        raise ValueError(f"{name}={getattr(config, name)} must be {rule}")
    if not isinstance(getattr(config, name), jax.Array):
        object.__setattr__(config, name, value.astype(dtype)[()])


@_register
@dataclass(frozen=True)
class ModelConfig:
    """One transformer; a family is a row of switches (`families.py` reads them from a checkpoint's `config.json`).

    `block_origin`: "absolute" (blocks are cut at multiples of `block_size`) or "prompt" (at the prompt's end).
    `shift`: position i is predicted by the row of i - 1. `seed`: a block's first token is drawn from the last row of the commit.
    `commit`: attention inside a block when it is committed. `strict`: the reveal test is `>` rather than `>=`.
    `stop_rule`: "reveal" (tested after each reveal, then the row ends), "reveal_commit" (the same, but a commit follows),
    "commit" (tested when a block has been committed).
    """

    family: str = _static()
    vocab: int = _static()
    dim: int = _static()
    layers: int = _static()
    heads: int = _static()
    kv_heads: int = _static()
    head_dim: int = _static()
    hidden: int = _static()
    norm_eps: float = _static()
    inv_freq: tuple[float, ...] = _static()
    tied: bool = _static()
    qkv_bias: bool = _static()
    qk_norm: bool = _static()
    block_size: int = _static()
    sub_block: int | None = _static()
    mask_id: int = _static()
    stop_ids: tuple[int, ...] = _static()
    pad_id: int = _static(default=0)
    rope_scale: float = _static(default=1.0)
    query_scale_beta: float = _static(default=0.0)
    query_scale_length: int = _static(default=1)
    block_origin: Literal["absolute", "prompt"] = _static(default="absolute")
    shift: bool = _static(default=False)
    seed: bool = _static(default=False)
    commit: Literal["block", "causal"] = _static(default="block")
    strict: bool = _static(default=True)
    stop_rule: Literal["reveal", "reveal_commit", "commit"] = _static(default="reveal")

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if len(self.inv_freq) * 2 != self.head_dim:
            raise ValueError(f"inv_freq has {len(self.inv_freq)} entries, head_dim={self.head_dim} needs {self.head_dim // 2}")
        if not 0 <= self.mask_id < self.vocab:
            raise ValueError(f"mask_id={self.mask_id} must lie inside the vocabulary of {self.vocab}")


@_register
@dataclass(frozen=True)
class DecodeConfig:
    """How to decode. `None` means the model family's own value.

    `threshold` and the scores it is compared with are probabilities of the best token (1: one token a step; 0: all at once).
    `steps`: reveal at least block_size / steps tokens a step. `order`: which tokens are revealed when too few pass the threshold.
    `pack`: evaluate only the rows that matter, in capacity buckets (same results; False keeps one dense program).
    `share`: one forward may serve as a block's commit and as the next block's first check; it takes one of the drafts' places.
    """

    max_new_tokens: int = _static(default=256)
    threshold: float = 0.9
    sub_block: int | None = _static(default=None)
    block_size: int | None = _static(default=None)
    steps: int | None = _static(default=None)
    order: Literal["confidence", "left"] = _static(default="confidence")
    temperature: float = 0.0
    seed: Any = 0
    stop_ids: tuple[int, ...] | None = _static(default=None)
    impl: str = _static(default="auto")
    pack: bool = _static(default=True)
    share: bool = _static(default=True)

    def __post_init__(self) -> None:
        _number(self, "threshold", np.float32, "a probability in [0, 1]", lambda v: (v >= 0) & (v <= 1))
        _number(self, "temperature", np.float32, "finite and at least 0", lambda v: np.isfinite(v) & (v >= 0))
        _number(self, "seed", np.int32, "an int32, or one int32 a row", lambda v: (v == np.floor(v)) & (abs(v) < 2**31))
        for name in ("max_new_tokens", "sub_block", "block_size", "steps"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, (int, np.integer)) or value < 1):
                raise ValueError(f"{name}={value} must be a whole number of at least 1")
        if self.stop_ids is not None:
            object.__setattr__(self, "stop_ids", tuple(int(i) for i in self.stop_ids))
        if self.order not in ("confidence", "left"):
            raise ValueError(f"order={self.order!r} must be 'confidence' or 'left'")
        if self.impl not in IMPLEMENTATIONS:
            raise ValueError(f"impl={self.impl!r} must be one of {IMPLEMENTATIONS}")

    def block(self, model: ModelConfig) -> int:
        """Positions a block."""
        return self.block_size or model.block_size

    def window(self, model: ModelConfig) -> int:
        """Positions a sub-block."""
        block = self.block(model)
        sub_block = self.sub_block or min(model.sub_block or block, block)
        if block % sub_block:
            raise ValueError(f"sub_block={sub_block} must divide block_size={block}")
        if self.steps is not None and self.steps > block:
            raise ValueError(f"steps={self.steps} must be at most block_size={block}")
        return sub_block

    def stops(self, model: ModelConfig) -> tuple[int, ...]:
        """The ids that end a row."""
        return model.stop_ids if self.stop_ids is None else self.stop_ids


@_register
@dataclass(frozen=True)
class FoldConfig:
    """Residual-gated folding (SpecFold, arXiv 2610.04875; algorithms marked "ours" below are this project's).

    `tau`: a position is folded when its relative residual is at most tau. `guard` (ours): log-odds margin that every decision drawn
    from a folded branch must have; 0 trusts them all, inf none (lossless). `gates`: one gate a layer, or a second one in front of the
    feed-forward network (ours). `reference`: compare with the parent branch or with the resolved source. `correction`: re-evaluate a
    folded position's attention over its own branch's keys. `force_revealed` (ours): newly revealed positions are always computed.
    `scope`: fold the "layer", or the "ffn" only (attention dense). `fold_commit`: take a commit from a folded branch as it is.
    `draft_from`: after a guard stop draft from the last "trusted" distribution or from the branch's "own".
    """

    tau: float = 0.1
    guard: float = 0.5
    gates: Literal[1, 2] = _static(default=2)
    reference: Literal["parent", "source"] = _static(default="parent")
    correction: bool = _static(default=True)
    force_revealed: bool = _static(default=True)
    scope: Literal["layer", "ffn"] = _static(default="layer")
    fold_commit: bool = _static(default=False)
    draft_from: Literal["trusted", "own"] = _static(default="trusted")

    def __post_init__(self) -> None:
        _number(self, "tau", np.float32, "a number of at least 0", lambda v: v >= 0)
        _number(self, "guard", np.float32, "a number of at least 0 (inf: lossless)", lambda v: v >= 0)
        choices = {"gates": (1, 2), "reference": ("parent", "source"), "scope": ("layer", "ffn"), "draft_from": ("trusted", "own")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {allowed}")
