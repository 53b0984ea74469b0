"""Configurations: what a model is, how to decode, how to fold.

All three are frozen dataclasses and pytrees. `jax.jit` sees two kinds of fields:

- Static fields shape the program: sizes and switches. They are part of the tree's structure, and another value compiles again.
- Swept numbers are leaves: threshold, temperature, seed, tau and guard. Another value runs the program that is there.

A temperature of 0 is part of the program. Greedy decoding needs no noise, and a program that does not know this would hold the code for
noise and a branch around it in every check. So a temperature that is the number 0 is no leaf: it is left out of the tree, as None is.
Trees with and without it differ in structure, and `jax.jit` compiles one program for 0 and one for all other temperatures. Inside `jit`,
`DecodeConfig.greedy` says which one is traced.
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
    """Whether a number is the 0 that `_store_number` keeps on the host. Reading a JAX array would wait for its device."""
    return isinstance(value, np.generic) and bool(value == 0)


def _register[T: type](cls: T) -> T:
    """Registers a configuration as a pytree. A field marked `static_zero` is a leaf, or None in the tree if it is 0.

    Unflattening goes past the constructor, because leaves may be tracers and reading arrays would wait for the device.
    """
    fields = cls.__dataclass_fields__.values()
    static = [f.name for f in fields if f.metadata.get("static")]
    swept = [f.name for f in fields if f.name not in static]
    static_zero = [f.name for f in fields if f.metadata.get("static_zero")]

    def flatten(config: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        numbers = {name: getattr(config, name) for name in swept}
        numbers |= {name: None for name in static_zero if _is_zero(numbers[name])}
        return [(jax.tree_util.GetAttrKey(name), value) for name, value in numbers.items()], tuple(getattr(config, n) for n in static)

    def unflatten(switches: tuple[Any, ...], numbers: Iterable[Any]) -> Any:
        values = dict(zip((*swept, *static), (*numbers, *switches), strict=True))
        values |= {name: ZERO for name in static_zero if values[name] is None}
        config = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(config, name, value)
        return config

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls


def concrete(value: Any) -> np.ndarray | None:
    """An array's values. None if it is a tracer, or a placeholder in a pytree."""
    if isinstance(value, Tracer) or not isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return None
    return np.asarray(value)


@np.errstate(over="ignore")  # beyond a dtype is infinity
def _store_number(config: Any, name: str, dtype: type, rule: str, valid: Any, axes: int = 0) -> None:
    """Validates a swept number and stores it in its field's dtype, because 0.9 and np.float32(0.9) then share one compilation.

    A JAX array stays on its device. But the 0 of a `static_zero` field goes to the host, where `_is_zero` finds it. A tracer has no values
    yet, so only its dtype and shape are validated.
    """
    value = getattr(config, name)
    traced = isinstance(value, Tracer)
    try:
        found = value if traced else np.asarray(value)
        number = jnp.issubdtype(found.dtype, np.floating) or jnp.isdtype(found.dtype, "integral")
    except (TypeError, ValueError):  # uneven lists, random keys
        found, number = np.asarray(None), False
    fault = None
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
    on_device = isinstance(value, jax.Array) and not static
    object.__setattr__(config, name, lax.convert_element_type(value, dtype) if on_device else found.astype(dtype)[()])


@_register
@dataclass(frozen=True)
class ModelConfig:
    """One transformer. A family is a set of switches, which `families.py` reads from a checkpoint's `config.json`.

    Attributes:
        block_origin: "absolute" if blocks begin at multiples of `block_size`, "prompt" if the first one begins at the prompt's end.
        shift: position i is predicted by the row of position i - 1.
        draws_first_token: a block's first token is drawn from the last row of the block before.
        commit: attention inside a block when it is committed, "block" or "causal".
        strict: a token is revealed if its score is above the threshold. Otherwise it may also be equal.
        stop_rule: "reveal" tests for a stop token after each reveal, and the row ends. "reveal_commit" does the same, and a commit
            follows. "commit" tests after a block's commit.
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
    """How to decode. None stands for the model family's own value.

    Attributes:
        max_new_tokens: the most new tokens of a row.
        threshold: the probability above which a token is revealed. 1 reveals one token a step, 0 all at once.
        sub_block: positions that are finished before the next ones. Divides the block.
        block_size: positions that are denoised together.
        steps: reveal at least block_size / steps tokens a step.
        order: which tokens are revealed if too few pass the threshold, the most confident ("confidence") or the leftmost ("left").
        temperature: 0 is greedy. Above, tokens are sampled.
        seed: of the sampling noise, one number or one a row.
        stop_ids: tokens that end a row.
        impl: "xla", "pallas" (NotImplementedError if the kernels cannot run), or "auto" (`specfold_jax.backends.choice`).
        pack: evaluate only the rows that matter, in one of a few capacities. False gives the same results from one dense program.
        share: one forward pass may commit a block and check the next block's first canvas. That takes the place of one draft.
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
        _store_number(self, "threshold", np.float32, "a probability in [0, 1]", lambda v: (v >= 0) & (v <= 1))
        _store_number(self, "temperature", np.float32, "a finite number of at least 0", lambda v: (v >= 0) & (v <= LARGEST))
        _store_number(
            self, "seed", np.int32, "an int32, or one int32 a row", lambda v: (v == np.floor(v)) & (v >= -(2**31)) & (v < 2**31), axes=1
        )
        if self.impl not in IMPLEMENTATIONS:
            raise ValueError(f"impl={self.impl!r} must be one of {IMPLEMENTATIONS}")

    @property
    def greedy(self) -> bool:
        """Whether the temperature is known to be 0. Programs then hold nothing that draws.

        A temperature that is an argument of your own `jit` is not known. The program then decodes greedily if the value turns out to be 0.
        """
        return _is_zero(self.temperature)

    @property
    def sampling_temperature(self) -> Float[Array, ""] | None:
        """The temperature that programs compute with, fp32. None if `greedy`."""
        return None if self.greedy else jnp.asarray(self.temperature, jnp.float32)

    def block(self, model: ModelConfig) -> int:
        """How many positions a block has."""
        return self.block_size or model.block_size

    def window(self, model: ModelConfig) -> int:
        """How many positions a sub-block has."""
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
    """Residual-gated folding (SpecFold, arXiv 2610.04875). What is marked "ours" is this project's.

    Attributes:
        tau: a position is folded if its relative residual is at most tau.
        guard (ours): the log-odds margin that a decision from a folded branch must have. 0 trusts all of them. inf trusts none, and
            decoding is lossless.
        gates: one gate a layer, or a second one before the feed-forward network (ours).
        reference: compare with the "parent" branch, or with the "source" that a position would be folded onto.
        correction: evaluate the attention of a folded position over its own branch's keys.
        force_revealed (ours): always compute newly revealed positions.
        scope: fold whole layers ("layer"), or only feed-forward networks ("ffn").
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
        _store_number(self, "tau", np.float32, "a number of at least 0", lambda v: v >= 0)
        _store_number(self, "guard", np.float32, "a number of at least 0 (inf: lossless)", lambda v: v >= 0)
