"""What a decode holds in device memory, in bytes, and an error that says so when there is not enough.

The table names arrays that must be there at once, or the largest of those that come one after another. What XLA adds in copies and
padding is its own, so a decode takes at least this much.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from specfold_jax.backends.choice import backend_of, impl_name
from specfold_jax.config import ModelConfig
from specfold_jax.diffusion.decoding import Decoding

FLOAT = 4
"""Bytes of an fp32 number: logits and attention scores are fp32 whatever the parameters are."""
PHASES = ("prefill", "activations of a check", "logits")
"""What of the table is held one after another; the rest is held throughout."""


class OutOfDeviceMemory(MemoryError):
    """A decode that does not fit: what holds how much, and what to lower. Chained to JAX's own error."""


@dataclass(frozen=True)
class Sizes:
    """What sets how much a decode holds. `capacity`: of the prompt array; `drafts`: branches a check may have beside the main one.

    `parameters`: bytes; `itemsize`: bytes of one of their numbers; `reach`: sub-blocks whose distributions are kept; `impl`: "xla" or
    "pallas"; `greedy`: temperature 0, at which all branches are ranked at once; `shared`: a branch may see another one's block.
    """

    batch: int
    capacity: int
    max_new_tokens: int
    drafts: int
    parameters: int
    itemsize: int
    block: int
    sub_block: int
    reach: int = 1
    impl: str = "xla"
    greedy: bool = True
    shared: bool = False

    @property
    def span(self) -> int:
        """Cache entries a row: prompt, new tokens and a block, in whole eights."""
        return -(-(self.capacity + self.max_new_tokens + self.block) // 8) * 8

    @property
    def rows(self) -> int:
        """Rows of a check: positions of all its branches."""
        return self.batch * (self.drafts + 1) * self.block


def table(model: ModelConfig, sizes: Sizes) -> dict[str, int]:
    """Bytes by what holds them.

    "K/V cache": keys and values of all layers. "prefill": one layer's fp32 attention scores over the prompt. "activations of a check":
    the residual stream and what is widest after it in a layer, keys and values of all layers, and with XLA one layer's fp32 attention
    scores. "logits": with XLA fp32 logits of the rows that can matter; the kernels keep none.
    """
    key_value = 2 * model.kv_heads * model.head_dim * sizes.itemsize
    xla = sizes.impl == "xla"
    widest = max((model.heads + 2 * model.kv_heads) * model.head_dim, model.ffn_dim * (3 if xla else 1))  # gate, up and their product
    keys = sizes.span + sizes.block * (1 + sizes.shared)
    scores = model.heads * keys * FLOAT if xla else 0
    a_row = (model.dim + widest) * sizes.itemsize + model.layers * key_value + scores
    ranked = sizes.batch * (sizes.drafts + 1 if sizes.greedy else 1)
    heads = ranked * (min(sizes.block, sizes.reach * sizes.sub_block) + model.draws_first_token)
    return {
        "parameters": sizes.parameters,
        "K/V cache": model.layers * sizes.batch * sizes.span * key_value,
        "prefill": sizes.batch * model.heads * sizes.capacity**2 * FLOAT,
        "activations of a check": sizes.rows * a_row,
        "logits": heads * model.vocab * FLOAT if xla else 0,
    }


def peak(found: dict[str, int]) -> int:
    """Bytes held at once at least: a prefill is over when checks begin."""
    phases = [found[name] for name in PHASES]
    return sum(found.values()) - sum(phases) + max(phases)


def levers(model: ModelConfig, sizes: Sizes) -> dict[str, int]:
    """Bytes that halving batch, capacity, max_new_tokens or drafts saves of the peak, what saves most first.

    What is as small as it can be, or saves nothing, is left out; so is what saves less than a hundredth, except the best.
    """
    whole = peak(table(model, sizes))
    names = ("batch", "capacity", "max_new_tokens", "drafts")
    least = {name: 0 if name == "drafts" else 1 for name in names}
    smaller = {name: getattr(sizes, name) // 2 for name in names if getattr(sizes, name) > least[name]}
    saved = {name: whole - peak(table(model, replace(sizes, **{name: value}))) for name, value in smaller.items()}
    best = max(saved.values(), default=0)
    return {name: size for name, size in sorted(saved.items(), key=lambda pair: -pair[1]) if size > 0 and size >= min(best, whole / 100)}


def sizes_of(params: Any, how: Decoding, batch: int, capacity: int, impl: str = "xla") -> Sizes:
    """The sizes of a decode of `batch` prompts in arrays of `capacity` tokens."""
    leaves = jax.tree.leaves(params)
    model, decode, graph, _ = how
    return Sizes(
        batch=batch,
        capacity=capacity,
        max_new_tokens=decode.max_new_tokens,
        drafts=graph.max_drafts,
        parameters=sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
        itemsize=params["embed"].dtype.itemsize,
        block=decode.block(model),
        sub_block=decode.window(model),
        reach=graph.reach,
        impl=impl,
        greedy=not np.any(np.asarray(decode.temperature)),
        shared=decode.share and model.commit == "block" and graph.max_drafts > 0,
    )


def message(model: ModelConfig, sizes: Sizes, limit: int | None = None) -> str:
    """The error's words. `limit`: bytes the device has, if it says."""
    found = table(model, sizes)
    parts = {name: f"{name} {readable(size)}" for name, size in found.items() if size}
    phases = [parts.pop(name) for name in PHASES if name in parts]
    held = f"{', '.join(parts.values())}, and the largest of {', '.join(phases)}"
    has = f" of the device's {readable(limit)}" if limit else ""
    drafts = f"D={sizes.drafts} drafts"
    setting = f"batch={sizes.batch}, capacity={sizes.capacity} + max_new_tokens={sizes.max_new_tokens}, {drafts}, impl={sizes.impl!r}"
    named = {
        "batch": "batch, the prompts decoded together",
        "capacity": "the prompts' capacity",
        "max_new_tokens": "max_new_tokens",
        "drafts": "D",
    }
    saved = [f"{named[name]} (half of it saves {readable(size)})" for name, size in levers(model, sizes).items()]
    advice = f"lower {', then '.join(saved)}" if saved else "lowering none of these helps; the model needs a larger device"
    return f"out of device memory with {setting}: at least {readable(peak(found))}{has} are needed at once: {held}; {advice}"


def readable(size: int) -> str:
    """Bytes in the largest binary unit that leaves a whole part."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def implementation(params: Any, how: Decoding) -> str:
    """What a decode runs on, "xla" or "pallas". Raises NotImplementedError for kernels that are asked for in vain."""
    return impl_name(backend_of(how.decode, params, how.model, how.fold, how.graph.token_ranks), params)


@contextmanager
def explained(params: Any, how: Decoding, shape: tuple[int, ...]) -> Iterator[None]:
    """Raises OutOfDeviceMemory in place of JAX's RESOURCE_EXHAUSTED from a decode of prompts of this shape [batch, capacity].

    The caller waits for the device inside, because JAX raises when results are asked for. Other errors pass.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_full(error):
            raise
        batch, capacity = shape
        sizes = sizes_of(params, how, batch, capacity, implementation(params, how))
        first = str(error).strip().splitlines()[0]
        raise OutOfDeviceMemory(f"{message(how.model, sizes, _limit(params))} ({first})") from error


def is_full(error: Exception) -> bool:
    """Whether a device had no room left."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def _limit(params: Any) -> int | None:
    """Bytes JAX may take of the parameters' device."""
    stats = next(iter(getattr(params["embed"], "devices", jax.devices)())).memory_stats()
    return (stats or {}).get("bytes_limit")
