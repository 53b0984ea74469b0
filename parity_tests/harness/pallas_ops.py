"""The operations of the parity matrix on the Pallas kernels: what `specfold_jax/backends/pallas.py` composes, one operation at a time."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

import specfold_jax as sf
from kernels_pallas.arguments import pad
from kernels_pallas.attention import branch_attention
from kernels_pallas.head import head
from kernels_pallas.linear import linear, silu_pair
from kernels_pallas.pack import pack
from kernels_pallas.qkv import HEADS_MULTIPLE, attention_inputs
from kernels_pallas.rows import NEVER, Norm, gate, needs
from kernels_pallas.tiles import LANES
from specfold_jax.backends.pallas import rotary
from specfold_jax.models.fold import take_branch


def on_kernels(races: bool = True) -> contextlib.AbstractContextManager:
    """Where kernels run: compiled on a GPU, else in Mosaic's interpreter, which looks for `races` if asked to."""
    if jax.default_backend() == "gpu":
        return contextlib.nullcontext()
    return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=races))


def _wide(x: jax.Array) -> jax.Array:
    """Rows padded to whole warpgroups."""
    return pad(x, x.ndim - 1, LANES)


def _norm(weight: jax.Array, eps: float) -> Norm:
    return Norm(_wide(weight), eps, weight.shape[0])


def _all(rows: jax.Array) -> jax.Array:
    """Their number, as kernels take it."""
    return jnp.full((1,), rows.shape[0], jnp.int32)


def _gate(x: Any, parent: Any, revealed: Any, valid: Any, tau: float, reference: Any, force_revealed: bool) -> dict[str, Any]:
    assert reference == "parent"
    rows, shape = _wide(x.reshape(-1, x.shape[-1])), revealed.shape
    tau, count = jnp.full((1,), tau, jnp.float32), _all(rows)
    parents = (parent + jnp.arange(shape[0], dtype=jnp.int32)[:, None] * shape[1]).reshape(-1)
    reference, need = needs(parents, revealed.reshape(-1, shape[2]), force_revealed)
    _, flags = gate(rows, None, None, reference, jnp.where(jnp.repeat(valid.reshape(-1), shape[2]), need, NEVER), count, tau)
    _, _, _, source = pack(rows, flags, parents, count, _norm(jnp.ones(x.shape[-1], x.dtype), 1e-6))
    return {"computed": (flags[: rows.shape[0]] > 0).reshape(shape), "source": (source // shape[2] % shape[1]).reshape(shape)}


def _packed(x: Any, computed: Any, norm: Norm) -> tuple[Any, Any, Any]:
    """Packed and normed rows, their count, and every row's slot: for rows that are computed it is their own."""
    flags = pad(computed.reshape(-1).astype(jnp.int32), 0, LANES)
    rows, own = _wide(x.reshape(-1, x.shape[-1])), jnp.arange(computed[..., 0].size, dtype=jnp.int32)
    normed, count, slot, _ = pack(rows, flags, own, _all(rows), norm)
    return normed, count, slot


def _packed_qkv(x: Any, computed: Any, norm: Any, weight: Any, bias: Any, q_norm: Any, k_norm: Any, positions: Any, model: Any) -> dict:
    normed, count, slot = _packed(x, computed, _norm(norm, model.norm_eps))
    rotated = rotary(positions.reshape(-1), model)
    sums = linear(normed, pad(weight, 0, HEADS_MULTIPLE * model.head_dim), count)
    bias = None if bias is None else pad(bias, 0, HEADS_MULTIPLE * model.head_dim)
    sizes = {"heads": model.heads, "kv_heads": model.kv_heads, "head_dim": model.head_dim}
    every = attention_inputs(
        sums, slot, _all(positions.reshape(-1)), rotated, bias, q_norm, k_norm, **sizes, eps=model.norm_eps, dtype=x.dtype
    )
    ends = [model.heads, model.heads + model.kv_heads, model.heads + 2 * model.kv_heads]
    heads = jnp.split(every.reshape(*computed.shape, -1, model.head_dim), ends, axis=3)[:3]
    return dict(zip(("q", "k", "v"), heads, strict=True))


def _branch_attention(
    q: Any, k: Any, v: Any, source: Any, k_prefix: Any, v_prefix: Any, prefix: Any, causal: Any, context: Any
) -> dict[str, Any]:
    batch, branches, *_ = q.shape
    dense = jnp.concatenate([take_branch(x, source) for x in (q, k, v)], axis=3)
    k_cache, v_cache = (pad(x, 1, 8)[None] for x in (k_prefix, v_prefix))
    sequence = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), branches)
    if context is not None:
        context = jnp.where(context >= 0, context + branches * jnp.arange(batch, dtype=jnp.int32)[:, None], -1).reshape(-1)
    where = jnp.zeros(1, jnp.int32), sequence, prefix, causal, context, jnp.full(1, batch * branches, jnp.int32)
    o = branch_attention(dense.reshape(-1, *dense.shape[2:]), k_cache, v_cache, *where, heads=q.shape[3])
    return {"o": o.reshape(q.shape)}


def _added(x: jax.Array, sums: jax.Array, slot: jax.Array | None = None) -> jax.Array:
    """Rows x with the sums at each row's slot added."""
    rows = x.shape[0]
    own = jnp.arange(rows, dtype=jnp.int32)
    return gate(_wide(x), _wide(sums), slot, own, jnp.full_like(own, NEVER), _all(x), jnp.zeros(1))[0][:, : x.shape[1]]


def _packed_linear(x: Any, computed: Any, weight: Any, residual: Any) -> dict[str, Any]:
    rows = computed.size
    number = jnp.cumsum(computed.reshape(-1), dtype=jnp.int32) - 1
    index = jnp.flatnonzero(computed, size=rows, fill_value=0)
    sums = linear(pad(x.reshape(rows, -1)[index], 1, 64), pad(pad(weight, 1, 64), 0, 8), number[-1:] + 1)[..., : weight.shape[0]]
    before = jnp.zeros((rows, weight.shape[0]), x.dtype) if residual is None else residual.reshape(rows, -1)
    return {"y": _added(before, sums, jnp.maximum(number, 0)).reshape(*computed.shape, -1)}


def _packed_silu_pair(x: Any, computed: Any, norm: Any, weight: Any, eps: float) -> dict[str, Any]:
    normed, count, slot = _packed(x, computed, _norm(norm, eps))
    return {"h": silu_pair(normed, pad(weight, 1, 64), count)[slot].reshape(*computed.shape, -1)}


def _add_inherited(x: Any, update: Any, source: Any) -> dict[str, Any]:
    batch, branches, block, dim = x.shape
    first = jnp.arange(batch, dtype=jnp.int32)[:, None, None] * branches
    slot = ((first + source) * block + jnp.arange(block, dtype=jnp.int32)).reshape(-1)
    sums = update.astype(jnp.float32).reshape(1, -1, dim)
    return {"x": _added(x.reshape(-1, dim), sums, slot).reshape(x.shape)}


def _head(hidden: Any, weight: Any, seed: Any, position: Any, step: Any, temperature: float, mask_id: int, ranks: int) -> dict[str, Any]:
    found = head(hidden, weight, seed, position, step, sf.DecodeConfig(temperature=temperature).sampling_temperature, mask_id, ranks)
    return dict(zip(("tokens", "odds", "gap"), found, strict=True))


PALLAS = {
    "gate": _gate,
    "packed_qkv": _packed_qkv,
    "branch_attention": _branch_attention,
    "packed_linear": _packed_linear,
    "packed_silu_pair": _packed_silu_pair,
    "add_inherited": _add_inherited,
    "head": _head,
}
