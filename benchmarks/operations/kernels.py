"""The operations of `cases.py` in every implementation: functions of the case and of the arrays that their parameters name.

Outputs are named; an implementation may lack some. What is cut where differs, and times are of what each does:

- Of fewer rows than there are, Pallas is handed the packed ones, XLA gathers and scatters them in the smallest bucket that holds them
  (`specfold_jax.models.fold.packed`), Triton gathers them inside the kernel.
- Row operations add the product before them: XLA and Triton a rounded update, Pallas the fp32 sums of all its splits.
- Triton has no product without the norm in front of it, but that of the output and of down: `norm_qkv` (norm, product, bias, rotary
  embedding) and `norm_gate_up` (norm, product, SiLU) are the same work everywhere. Of "gate" Triton's part is addition, gate and
  sources, of "pack" the row list alone, of "advance_norm" the addition.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from benchmarks.operations.cases import BLOCK, EPS, MASK, RANKS, TAU, Arrays, Case, family
from kernels_pallas import attention, head, linear, pack, qkv, rows
from specfold_jax.config import FoldConfig
from specfold_jax.models import fold, ops, sampling, transformer

Function = Callable[..., Arrays]


def takes(function: Function) -> list[str]:
    """Names of the arrays that an implementation takes."""
    return list(inspect.signature(function).parameters)[1:]


def reference(case: Case, arrays: Arrays) -> Arrays:
    """Outputs in fp32 of the same inputs, products exact, all rows computed."""
    wide = {name: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for name, x in arrays.items()}
    with jax.default_matmul_precision("highest"):
        function = XLA[case.op]
        return jax.jit(functools.partial(function, case._replace(count=case.rows)))(**{name: wide[name] for name in takes(function)})


def _some(function: Callable[[Array], Array], case: Case, computed: Array, x: Array) -> Arrays:
    """A row-wise function of the counted rows."""
    return {"y": function(x) if case.count == case.rows else fold.packed(function, computed[None, None], x[None, None])[0, 0]}


def _xla_linear(case: Case, x: Any, weight: Any, computed: Any) -> Arrays:
    return _some(lambda x: ops.linear(x, weight), case, computed, x)


def _xla_gate_up(case: Case, x: Any, weight: Any, computed: Any) -> Arrays:
    return _some(lambda x: ops.silu_pair(ops.linear(x, weight)), case, computed, x)


def _xla_norm_gate_up(case: Case, x: Any, norm: Any, weight: Any, computed: Any) -> Arrays:
    return _some(lambda x: ops.silu_pair(ops.linear(ops.rms_norm(x, norm, EPS), weight)), case, computed, x)


def _xla_norm_qkv(case: Case, x: Any, norm: Any, weight: Any, bias: Any, positions: Any) -> Arrays:
    layer = {"attn_norm": norm, "qkv": weight, "qkv_bias": bias}
    return dict(zip("qkv", transformer.attention_inputs(layer, x, positions, family(case.shape)), strict=True))


def _xla_attention(_: Case, q: Any, k: Any, v: Any, k_prefix: Any, v_prefix: Any, prefix: Any, causal: Any) -> Arrays:
    within = jnp.arange(BLOCK)
    seen = (jnp.arange(k_prefix.shape[1]) < prefix[:, None])[:, None, None]
    inside = ~causal[:, None, None, None] | (within[:, None] >= within)
    return {"y": ops.attention(q, [ops.Segment(k_prefix, v_prefix, seen), ops.Segment(k, v, inside)])}


def _xla_gate(_: Case, x: Any, update: Any, parent: Any, revealed: Any, valid: Any) -> Arrays:
    x = x + update
    return {"x": x, "flags": fold.gate(x.reshape(*revealed.shape, -1), parent, revealed, valid, FoldConfig(tau=TAU)).computed}


def _xla_pack(case: Case, x: Any, norm: Any, computed: Any, parent: Any) -> Arrays:
    branch = fold.resolve(computed.reshape(1, -1, BLOCK), parent)
    source = (branch * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)).reshape(-1)
    index = jnp.flatnonzero(computed, size=case.rows, fill_value=case.rows).astype(jnp.int32)
    slot = (jnp.cumsum(computed, dtype=jnp.int32) - 1)[source]
    normed = ops.rms_norm(x.at[index].get(mode="clip"), norm, EPS)
    return {"normed": normed, "count": jnp.sum(computed, dtype=jnp.int32)[None], "slot": slot, "source": source, "index": index}


def _xla_attention_inputs(case: Case, update: Any, bias: Any, positions: Any) -> Arrays:
    s, like = case.shape, family(case.shape)
    q, k, v = jnp.split((update + bias).reshape(case.rows, -1, s.head_dim), [s.heads, s.heads + s.kv_heads], axis=1)
    return {"q": ops.rotate(q, positions, like), "k": ops.rotate(k, positions, like), "v": v}


def _xla_advance_norm(_: Case, x: Any, update: Any, norm: Any) -> Arrays:
    x = x + update
    return {"x": x, "normed": ops.rms_norm(x, norm, EPS)}


def _xla_head(_: Case, x: Any, weight: Any, seed: Any, position: Any, step: Any) -> Arrays:
    return sampling.rank(transformer.logits({"embed": weight}, x), seed, position, step, None, MASK, RANKS)._asdict()


XLA: dict[str, Function] = {
    **{"qkv": _xla_linear, "o": _xla_linear, "down": _xla_linear, "gate_up": _xla_gate_up, "norm_gate_up": _xla_norm_gate_up},
    **{"norm_qkv": _xla_norm_qkv, "attention": _xla_attention, "attention_inputs": _xla_attention_inputs, "gate": _xla_gate},
    **{"pack": _xla_pack, "advance_norm": _xla_advance_norm, "head": _xla_head},
}


def _all(rows: Array) -> Array:
    """Their number, as kernels take it."""
    return jnp.full((1,), rows.shape[0], jnp.int32)


def _norm(case: Case, weight: Array) -> rows.Norm:
    return rows.Norm(weight, EPS, case.shape.dim)


def _pallas_linear(_: Case, x: Any, weight: Any, count: Any) -> Arrays:
    return {"sums": linear.linear(x, weight, count)}


def _pallas_gate_up(_: Case, x: Any, weight: Any, count: Any) -> Arrays:
    return {"y": linear.silu_pair(x, weight, count)}


def _pallas_norm_gate_up(case: Case, x: Any, norm: Any, weight: Any, count: Any) -> Arrays:
    return {"y": linear.silu_pair(rows.norm(x, _norm(case, norm)), weight, count)}


def _pallas_norm_qkv(case: Case, x: Any, norm: Any, weight: Any, count: Any, bias: Any, cos: Any, sin: Any) -> Arrays:
    return _pallas_attention_inputs(case, linear.linear(rows.norm(x, _norm(case, norm)), weight, count), bias, cos, sin)


def _pallas_attention_inputs(case: Case, sums: Any, bias: Any, cos: Any, sin: Any) -> Arrays:
    s = case.shape
    sizes = {"heads": s.heads, "kv_heads": s.kv_heads, "head_dim": s.head_dim}
    return {
        "qkv": qkv.attention_inputs(sums, None, _all(cos), qkv.Rotary(cos, sin, None), bias, None, None, **sizes, eps=EPS, dtype=bias.dtype)
    }


def _pallas_attention(case: Case, qkv: Any, k_prefix: Any, v_prefix: Any, prefix: Any, causal: Any) -> Arrays:
    branches, first = qkv[0], jnp.zeros(1, jnp.int32)
    where = first, jnp.zeros(len(branches), jnp.int32), prefix, causal, None, jnp.full(1, len(branches), jnp.int32)
    return {"y": attention.branch_attention(branches, k_prefix[None], v_prefix[None], *where, heads=case.shape.heads)[None]}


def _pallas_gate(_: Case, x: Any, sums: Any, reference: Any, need: Any, tau: Any) -> Arrays:
    return dict(zip(("x", "flags"), rows.gate(x, sums, None, reference, need, _all(x), tau), strict=True))


def _pallas_pack(case: Case, x: Any, norm: Any, flags: Any, parent: Any) -> Arrays:
    return dict(zip(("normed", "count", "slot", "source"), pack.pack(x, flags, parent[0], _all(x), _norm(case, norm)), strict=True))


def _pallas_advance_norm(case: Case, x: Any, sums: Any, norm: Any) -> Arrays:
    return dict(zip(("x", "normed"), rows.advance_norm(x, sums, None, _all(x), _norm(case, norm)), strict=True))


def _pallas_head(_: Case, x: Any, weight: Any, seed: Any, position: Any, step: Any) -> Arrays:
    return dict(zip(("tokens", "odds", "gap"), head.head(x, weight, seed, position, step, None, MASK, RANKS), strict=True))


PALLAS: dict[str, Function] = {
    **{"qkv": _pallas_linear, "o": _pallas_linear, "down": _pallas_linear, "gate_up": _pallas_gate_up},
    **{"norm_gate_up": _pallas_norm_gate_up, "norm_qkv": _pallas_norm_qkv, "attention": _pallas_attention},
    **{"attention_inputs": _pallas_attention_inputs, "gate": _pallas_gate, "pack": _pallas_pack},
    **{"advance_norm": _pallas_advance_norm, "head": _pallas_head},
}


def _triton_linear(_: Case, x: Any, weight: Any, index: Any, count: Any) -> Arrays:
    from kernels_triton import linear

    return {"y": linear.packed_linear(x[None, None], (index, count[0]), weight, None)}


def _triton_norm_gate_up(_: Case, x: Any, norm: Any, weight: Any, index: Any, count: Any) -> Arrays:
    from kernels_triton import silu_pair

    return {"y": silu_pair.packed_silu_pair(x[None, None], (index, count[0]), norm, weight, EPS)}


def _triton_norm_qkv(case: Case, x: Any, norm: Any, weight: Any, index: Any, count: Any, bias: Any, positions: Any) -> Arrays:
    from specfold_torch_ref.models import ops

    packed = ops.Packed(index, count[0])
    args = (x[None, None], packed, norm, weight, bias, None, None, positions[None, None], family(case.shape))
    return dict(zip("qkv", ops.packed_qkv(*args, impl="triton"), strict=True))


def _triton_attention(_: Case, q: Any, k: Any, v: Any, own: Any, k_prefix: Any, v_prefix: Any, prefix: Any, causal: Any) -> Arrays:
    from kernels_triton import attention

    return {"y": attention.branch_attention(q, k, v, own, k_prefix, v_prefix, prefix, causal, None)}


def _triton_gate(_: Case, x: Any, update: Any, own: Any, parent: Any, revealed: Any, valid: Any) -> Arrays:
    from kernels_triton import gate, inherit

    x = inherit.add_inherited(x.view(*own.shape, -1), update.view(*own.shape, -1), own)
    return {"x": x, "flags": gate.gate(x, parent, revealed, valid, TAU, reference="parent", force_revealed=True)[0]}


def _triton_pack(_: Case, computed: Any) -> Arrays:
    from kernels_triton import pack

    return dict(zip(("index", "count"), pack.pack(computed), strict=True))


def _triton_advance_norm(_: Case, x: Any, update: Any, own: Any) -> Arrays:
    from kernels_triton import inherit

    return {"x": inherit.add_inherited(x.view(*own.shape, -1), update.view(*own.shape, -1), own)}


def _triton_head(_: Case, x: Any, weight: Any, seed: Any, position: Any, step: Any) -> Arrays:
    from kernels_triton import head

    return dict(zip(("tokens", "odds", "gap"), head.head(x, weight, seed, position, step, 0.0, MASK, RANKS), strict=True))


TRITON: dict[str, Function] = {
    **{"o": _triton_linear, "down": _triton_linear, "norm_gate_up": _triton_norm_gate_up, "norm_qkv": _triton_norm_qkv},
    **{"attention": _triton_attention, "gate": _triton_gate, "pack": _triton_pack, "advance_norm": _triton_advance_norm},
    **{"head": _triton_head},
}
IMPLEMENTATIONS = {"xla": XLA, "pallas": PALLAS, "triton": TRITON}
