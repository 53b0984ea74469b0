"""Configurations: what a model is, how to decode, how to fold.

All three are frozen dataclasses registered as pytrees. Fields that shape the program (sizes, switches) are static metadata;
numbers one sweeps (threshold, temperature, seed, tau, guard) are leaves, so changing them never recompiles a jitted decode. A
temperature of exactly 0 is static too: a greedy decode's program has nothing that draws, so 0 and all others are two compilations.
"""
# ruff: noqa: RUF009  (`_static` makes a field of its own for each)

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float

from specfold_jax.values import Natural, Size, conform, show

Attention = Literal["block", "bidirectional", "causal"]
IMPLEMENTATIONS = ("auto", "xla", "pallas")
LARGEST = float(np.finfo(np.float32).max)
ZERO = np.float32(0)


def _static(**kwargs: Any) -> Any:
    return field(metadata={"static": True}, **kwargs)


def _is_zero(value: Any) -> bool:
    """Whether a number is the host's 0 that `_number` stores. Arrays are not looked at: that would wait for the device."""
    return isinstance(value, np.generic) and bool(value == 0)


def _register[T: type](cls: T) -> T:
    """A pytree whose unflattening goes past the constructor: leaves may be tracers, and checking arrays would wait for the device.

    Fields marked `static_zero` are leaves unless they are 0.
    """
    fields = cls.__dataclass_fields__.values()
    static = [f.name for f in fields if f.metadata.get("static")]
    swept = [f.name for f in fields if f.name not in static]
    may_be_static = [f.name for f in fields if f.metadata.get("static_zero")]

    def flatten(config: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        zeros = tuple(n for n in may_be_static if _is_zero(getattr(config, n)))
        leaves = [(jax.tree_util.GetAttrKey(n), getattr(config, n)) for n in swept if n not in zeros]
        return leaves, (zeros, *(getattr(config, n) for n in static))

    def unflatten(aux: tuple[Any, ...], leaves: Iterable[Any]) -> Any:
        zeros, *facts = aux
        names = [*(n for n in swept if n not in zeros), *zeros, *static]
        config = object.__new__(cls)
        for name, value in zip(names, (*leaves, *(ZERO for _ in zeros), *facts), strict=True):
            object.__setattr__(config, name, value)
        return config

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls


def concrete(value: Any) -> np.ndarray | None:
    """An array's values, or None while it is being traced (or is a pytree placeholder)."""
    if isinstance(value, Tracer) or not isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return None
    return np.asarray(value)


@np.errstate(over="ignore")  # beyond a dtype is infinity
def _number(config: Any, name: str, dtype: type, rule: str, valid: Any, axes: int = 0) -> None:
    """Checks a swept number and stores it with a strong dtype, so that 0.9 and np.float32(0.9) share one compilation.

    JAX's arrays stay on their device, except that a 0 which is to be static is stored on the host. Of a tracer only dtype and shape
    are checked.
    """
    value, fault = getattr(config, name), None
    traced = isinstance(value, Tracer)
    try:
        found = value if traced else np.asarray(value)
        number = jnp.issubdtype(found.dtype, np.floating) or jnp.isdtype(found.dtype, "integral")
    except (TypeError, ValueError):  # uneven lists, random keys
        found, number = np.asarray(None), False
    if not number:
        fault = rule + ", not a truth value" * (found.dtype == bool)
    elif found.ndim > axes:
        fault = f"a number{' or one a row' * axes}, not an array of shape {found.shape}"
    elif not traced and not (found.size and np.all(valid(found.astype(np.float64)))):
        fault = rule
    if fault:
        raise ValueError(f"{name}={show(value)} must be {fault}")
    if traced:
        return
    static = config.__dataclass_fields__[name].metadata.get("static_zero") and not found.any()
    on_host = static or not isinstance(value, jax.Array)
    object.__setattr__(config, name, found.astype(dtype)[()] if on_host else lax.convert_element_type(value, dtype))


@_register
@dataclass(frozen=True)
class ModelConfig:
    """One transformer; a family is a row of switches (`families.py` reads them from a checkpoint's `config.json`).

    `block_origin`: "absolute" (blocks are cut at multiples of `block_size`) or "prompt" (at the prompt's end).
    `shift`: position i is predicted by the row of i - 1. `draws_first_token`: a block's first token is drawn from the commit's last row.
    `commit`: attention inside a block when it is committed. `strict`: the reveal test is `>` rather than `>=`.
    `stop_rule`: "reveal" (tested after each reveal, then the row ends), "reveal_commit" (the same, but a commit follows),
    "commit" (tested when a block has been committed).
    """

    family: str = _static()
    vocab: Size = _static()
    dim: Size = _static()
    layers: Size = _static()
    heads: Size = _static()
    kv_heads: Size = _static()
    head_dim: Size = _static()
    ffn_dim: Size = _static()
    norm_eps: float = _static()
    inv_freq: tuple[float, ...] = _static()
    tied: bool = _static()
    qkv_bias: bool = _static()
    qk_norm: bool = _static()
    block_size: Size = _static()
    sub_block: Size | None = _static()
    mask_id: Natural = _static()
    stop_ids: tuple[Natural, ...] = _static()
    pad_id: Natural = _static(default=0)
    rope_scale: float = _static(default=1.0)
    query_scale_beta: float = _static(default=0.0)
    query_scale_length: Size = _static(default=1)
    block_origin: Literal["absolute", "prompt"] = _static(default="absolute")
    shift: bool = _static(default=False)
    draws_first_token: bool = _static(default=False)
    commit: Literal["block", "causal"] = _static(default="block")
    strict: bool = _static(default=True)
    stop_rule: Literal["reveal", "reveal_commit", "commit"] = _static(default="reveal")

    def __post_init__(self) -> None:
        conform(self)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary embeddings turn pairs")
        if len(self.inv_freq) * 2 != self.head_dim:
            raise ValueError(f"inv_freq has {len(self.inv_freq)} entries, head_dim={self.head_dim} needs {self.head_dim // 2}")
        for name, ids in (("mask_id", (self.mask_id,)), ("pad_id", (self.pad_id,)), ("stop_ids", self.stop_ids)):
            if outside := [i for i in ids if i >= self.vocab]:
                raise ValueError(f"{name}={outside[0]} must lie inside the vocabulary of {self.vocab}")


@_register
@dataclass(frozen=True)
class DecodeConfig:
    """How to decode. `None` means the model family's own value.

    `threshold` and the scores it is compared with are probabilities of the best token (1: one token a step; 0: all at once).
    `steps`: reveal at least block_size / steps tokens a step. `order`: which tokens are revealed when too few pass the threshold.
    `pack`: evaluate only the rows that matter, in capacity buckets (same results; False keeps one dense program).
    `share`: one forward may serve as a block's commit and as the next block's first check; it takes one of the drafts' places.
    `impl`: "xla", "pallas" (NotImplementedError where the kernels cannot run), or "auto" (`specfold_jax.backends.choice`).
    """

    max_new_tokens: Size = _static(default=256)
    threshold: float = 0.9
    sub_block: Size | None = _static(default=None)
    block_size: Size | None = _static(default=None)
    steps: Size | None = _static(default=None)
    order: Literal["confidence", "left"] = _static(default="confidence")
    temperature: float = field(default=0.0, metadata={"static_zero": True})
    seed: Any = 0
    stop_ids: tuple[Natural, ...] | None = _static(default=None)
    impl: str = _static(default="auto")
    pack: bool = _static(default=True)
    share: bool = _static(default=True)

    def __post_init__(self) -> None:
        conform(self, ("threshold", "temperature", "seed"))
        _number(self, "threshold", np.float32, "a probability in [0, 1]", lambda v: (v >= 0) & (v <= 1))
        _number(self, "temperature", np.float32, "a finite number of at least 0", lambda v: (v >= 0) & (v <= LARGEST))
        _number(
            self, "seed", np.int32, "an int32, or one int32 a row", lambda v: (v == np.floor(v)) & (v >= -(2**31)) & (v < 2**31), axes=1
        )
        if self.impl not in IMPLEMENTATIONS:
            raise ValueError(f"impl={self.impl!r} must be one of {IMPLEMENTATIONS}")

    @property
    def greedy(self) -> bool:
        """Whether the temperature is known to be 0, so that programs hold nothing that draws.

        False under `jit` for a temperature that is passed in as an array of its own: it decodes greedily if it turns out to be 0.
        """
        return _is_zero(self.temperature)

    @property
    def sampling_temperature(self) -> Float[Array, ""] | None:
        """The temperature for programs to compute with, fp32, or None when `greedy`."""
        return None if self.greedy else jnp.asarray(self.temperature, jnp.float32)

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

    def stop_tokens(self, model: ModelConfig) -> tuple[int, ...]:
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
    `scope`: fold the "layer", or the "ffn" only (attention dense).
    """

    tau: float = 0.1
    guard: float = 0.5
    gates: Literal[1, 2] = _static(default=2)
    reference: Literal["parent", "source"] = _static(default="parent")
    correction: bool = _static(default=True)
    force_revealed: bool = _static(default=True)
    scope: Literal["layer", "ffn"] = _static(default="layer")

    def __post_init__(self) -> None:
        conform(self, ("tau", "guard"))
        _number(self, "tau", np.float32, "a number of at least 0", lambda v: v >= 0)
        _number(self, "guard", np.float32, "a number of at least 0 (inf: lossless)", lambda v: v >= 0)
