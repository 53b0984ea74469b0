"""Checks on arrays: on the host with clear errors, and under `jit` as a status per row."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig, concrete
from specfold_jax.diffusion.graph import DraftGraph, require_made_for
from specfold_jax.models.parameters import require_fitting

STATUS = (
    "decoded",
    "the prompt is empty",
    "the length is beyond the prompt array's capacity",
    "a token id lies outside the vocabulary",
    "the prompt holds the mask token",
    "threshold, temperature, tau or guard is out of range",
)
"""What `stats.status` means: why a row was not decoded."""


def row_status(
    prompts: Int[Array, "batch capacity"], lengths: Int[Array, " batch"], model: ModelConfig, decode: DecodeConfig, fold: FoldConfig | None
) -> Int[Array, " batch"]:
    """`STATUS` index of each row; the first rule that is broken counts."""
    inside = jnp.arange(prompts.shape[1]) < lengths[:, None]
    threshold, temperature = (jnp.asarray(x, jnp.float32) for x in (decode.threshold, decode.temperature))
    sane = (threshold >= 0) & (threshold <= 1) & (temperature >= 0) & jnp.isfinite(temperature)
    if fold is not None:
        sane = sane & (jnp.asarray(fold.tau) >= 0) & (jnp.asarray(fold.guard) >= 0)
    broken = [
        lengths < 1,
        lengths > prompts.shape[1],
        jnp.any(inside & ((prompts < 0) | (prompts >= model.vocab)), axis=1),
        jnp.any(inside & (prompts == model.mask_id), axis=1),
        jnp.broadcast_to(~sane, lengths.shape),
    ]
    status = jnp.zeros(lengths.shape, jnp.int32)
    for code in range(len(broken), 0, -1):
        status = jnp.where(broken[code - 1], code, status)
    return status


def validate(
    params: Any,
    prompts: Int[Array, "batch capacity"],
    lengths: Int[Array, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    graph: DraftGraph | None = None,
    fold: FoldConfig | None = None,
) -> None:
    """Raises ValueError naming the value and the rule for anything the decode functions cannot run on, TypeError for arguments mixed up.

    Static facts (shapes, sizes) are always checked; values only where they are concrete.
    """
    for name, value, kind in (
        ("model", model, ModelConfig),
        ("decode", decode, DecodeConfig),
        ("graph", graph, DraftGraph),
        ("fold", fold, FoldConfig),
    ):
        if not isinstance(value, kind) and not (value is None and name in ("graph", "fold")):
            hint = "; DraftGraph.load(path) reads one from a file" if name == "graph" else ""
            raise TypeError(f"{name} must be a {kind.__name__}, not {type(value).__name__}{hint}")
    require_fitting(params, model)
    for config in (decode, fold):  # again: leaves may have been replaced behind their constructors' backs
        if config is not None:
            replace(config)
    block, sub_block = decode.block(model), decode.window(model)
    for name, array in (("prompts", prompts), ("lengths", lengths)):
        dtype = getattr(array, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
            raise ValueError(f"{name} has dtype {dtype}, needs whole numbers (an int32 array)")
    if prompts.ndim != 2 or lengths.shape != prompts.shape[:1]:
        raise ValueError(f"prompts {prompts.shape} and lengths {lengths.shape} must have shapes [batch, capacity] and [batch]")
    if 0 in prompts.shape:
        raise ValueError(f"prompts {prompts.shape} must hold at least one row of at least one token")
    if jnp.shape(decode.seed) not in ((), lengths.shape):
        raise ValueError(f"seed has shape {jnp.shape(decode.seed)}, needs one number or one a row {lengths.shape}")
    if prompts.shape[1] + decode.max_new_tokens + block >= 2**31:
        raise ValueError(f"max_new_tokens={decode.max_new_tokens} is too large: positions are int32")
    if bad := [i for i in decode.stop_tokens(model) if not 0 <= i < model.vocab]:
        raise ValueError(f"stop_ids={bad} lie outside the vocabulary of {model.vocab}")
    if graph is not None:
        require_made_for(graph, None, model.vocab, block, sub_block)
        if graph.token_ranks > model.vocab:
            raise ValueError(f"token_ranks={graph.token_ranks} of the draft graph must be at most {model.vocab}, the vocabulary")
        if concrete(graph.pairs) is not None:
            graph.validate(block)
    tokens, sizes = concrete(prompts), concrete(lengths)
    if tokens is None or sizes is None:
        return
    for row, (ids, length) in enumerate(zip(tokens, sizes, strict=True)):
        if length < 1:
            raise ValueError(f"row {row}: lengths[{row}]={length}, a prompt needs at least one token")
        if length > len(ids):
            raise ValueError(f"row {row}: lengths[{row}]={length} is beyond the capacity of {len(ids)}")
        ids = ids[:length]
        if outside := np.flatnonzero((ids < 0) | (ids >= model.vocab)).tolist():
            raise ValueError(f"row {row}: token id {ids[outside[0]]} at {outside[0]} lies outside the vocabulary of {model.vocab}")
        if masks := np.flatnonzero(ids == model.mask_id).tolist():
            raise ValueError(f"row {row}: the mask token {model.mask_id} at {masks[0]} cannot be part of a prompt")
