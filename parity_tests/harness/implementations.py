"""The operations of the parity matrix in every implementation: the same inputs in, the named outputs that mean something out."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import specfold_jax as sf
from parity_tests.harness.cases import Case, Inputs, is_float
from parity_tests.harness.close import Outputs
from parity_tests.harness.devices import DEVICE
from parity_tests.harness.pallas_ops import PALLAS, on_kernels
from specfold_jax.models import fold, sampling
from specfold_jax.models import ops as jax_ops
from specfold_jax.models import transformer as jax_model
from specfold_jax.models.fold import packed, take_branch
from specfold_torch_ref.models import ops

IMPLEMENTATIONS = ("jnp", "torch", "triton", "pallas")
"""The reference is "jnp" in fp32."""


def takes(implementation: str, case: Case, dtype: torch.dtype) -> bool:
    """Whether an implementation has kernels for the case: the Pallas ones take 16-bit numbers of aligned sizes."""
    return implementation != "pallas" or (case.aligned and dtype != torch.float32 and case.op in PALLAS)


def _split(inputs: Inputs) -> tuple[dict[str, jax.Array], tuple[tuple[str, Any], ...]]:
    """Arrays for JAX, and what else there is."""
    arrays = {name: _to_jax(x) for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    return arrays, tuple((name, x) for name, x in inputs.items() if name not in arrays)


def lowered(case: Case, dtype: torch.dtype) -> str:
    """The case's program on the Pallas kernels, as it is given to a GPU."""
    arrays, rest = _split(case.inputs(dtype, DEVICE))
    return _compiled(case.op, rest, "pallas").trace(**arrays).lower(lowering_platforms=("cuda",)).as_text()


def run(op: str, inputs: Inputs, implementation: str) -> Outputs:
    """The operation's outputs on the CPU: of packed operations the computed rows, of all others everything."""
    if implementation in ("jnp", "pallas"):
        arrays, rest = _split(inputs)
        with on_kernels() if implementation == "pallas" else contextlib.nullcontext():
            outputs = {name: _to_torch(x) for name, x in _compiled(op, rest, implementation)(**arrays).items()}
    else:
        outputs = {name: x.cpu() for name, x in _torch(op, inputs, implementation).items()}
    if op in PACKED:
        outputs = {name: x[inputs["computed"].cpu()] for name, x in outputs.items()}
    return outputs


@functools.lru_cache(maxsize=1)
def reference(case: Case, dtype: torch.dtype) -> Outputs:
    """What the case's outputs should be: `jnp` in fp32 on the inputs as rounded to `dtype`."""
    inputs = case.inputs(dtype, DEVICE)
    return run(case.op, {name: x.float() if is_float(x) else x for name, x in inputs.items()}, "jnp")


PACKED = ("packed_linear", "packed_silu_pair", "packed_qkv")
NAMES = {
    "gate": ("computed", "source"),
    "pack": ("index", "count"),
    "packed_qkv": ("q", "k", "v"),
    "branch_attention": ("o",),
    "packed_linear": ("y",),
    "packed_silu_pair": ("h",),
    "add_inherited": ("x",),
    "head": ("tokens", "odds", "gap"),
}


def _torch(op: str, inputs: Inputs, impl: str) -> Outputs:
    arguments = dict(inputs)
    if op in PACKED:
        arguments["packed"] = ops.pack(arguments.pop("computed"), impl=impl)
    out = getattr(ops, op)(**arguments, impl=impl)
    return dict(zip(NAMES[op], out if isinstance(out, tuple) else (out,), strict=True))


@functools.cache
def _compiled(op: str, rest: tuple[tuple[str, Any], ...], implementation: str) -> Callable[..., dict[str, jax.Array]]:
    """One program per case, quickly compiled: most run a few times."""
    function = {"jnp": JNP, "pallas": PALLAS}[implementation][op]
    return jax.jit(functools.partial(function, **dict(rest)), compiler_options={"xla_backend_optimization_level": 0})


def _to_jax(x: torch.Tensor) -> jax.Array:
    if x.dtype.is_floating_point:
        return jnp.asarray(x.float().cpu().numpy()).astype(str(x.dtype).removeprefix("torch."))
    return jnp.asarray(x.cpu().numpy())


def _to_torch(x: jax.Array) -> torch.Tensor:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return torch.from_numpy(np.array(x.astype(jnp.float32))).to(getattr(torch, x.dtype.name))
    return torch.from_numpy(np.array(x))


def _gate(x: Any, parent: Any, revealed: Any, valid: Any, tau: float, reference: Any, force_revealed: bool) -> dict[str, Any]:
    config = sf.FoldConfig(tau=tau, reference=reference, force_revealed=force_revealed)
    return fold.gate(x, parent, revealed, valid, config)._asdict()


def _pack(computed: Any) -> dict[str, Any]:
    index = jnp.flatnonzero(computed, size=computed.size, fill_value=computed.size).astype(jnp.int32)
    return {"index": index, "count": jnp.sum(computed, dtype=jnp.int32)}


def _packed_qkv(x: Any, computed: Any, norm: Any, weight: Any, bias: Any, q_norm: Any, k_norm: Any, positions: Any, model: Any) -> dict:
    layer = {"attn_norm": norm, "qkv": weight, "qkv_bias": bias, "q_norm": q_norm, "k_norm": k_norm}
    out = packed(lambda x, positions: jax_model.attention_inputs(layer, x, positions, model), computed, x, positions)
    return dict(zip(NAMES["packed_qkv"], out, strict=True))


def _branch_attention(
    q: Any, k: Any, v: Any, source: Any, k_prefix: Any, v_prefix: Any, prefix: Any, causal: Any, context: Any
) -> dict[str, Any]:
    q, k, v = (take_branch(x, source) for x in (q, k, v))
    within = jnp.arange(q.shape[2])
    segments = [jax_ops.Segment(k_prefix, v_prefix, (jnp.arange(k_prefix.shape[1]) < prefix[:, None])[:, None, None])]
    if context is not None:
        behind = [jnp.take_along_axis(x, jnp.maximum(context, 0)[..., None, None, None], axis=1) for x in (k, v)]
        segments.append(jax_ops.Segment(*behind, (context >= 0)[..., None, None]))
    inside = ~causal[:, None, None, None] | (within[:, None] >= within)
    return {"o": jax_ops.attention(q, [*segments, jax_ops.Segment(k, v, inside)])}


def _packed_linear(x: Any, computed: Any, weight: Any, residual: Any) -> dict[str, Any]:
    if residual is None:
        return {"y": packed(lambda x: jax_ops.linear(x, weight), computed, x)}
    return {"y": packed(lambda x, residual: residual + jax_ops.linear(x, weight), computed, x, residual)}


def _packed_silu_pair(x: Any, computed: Any, norm: Any, weight: Any, eps: float) -> dict[str, Any]:
    return {"h": packed(lambda x: jax_ops.silu_pair(jax_ops.linear(jax_ops.rms_norm(x, norm, eps), weight)), computed, x)}


def _add_inherited(x: Any, update: Any, source: Any) -> dict[str, Any]:
    return {"x": x + take_branch(update, source)}


def _head(hidden: Any, weight: Any, seed: Any, position: Any, step: Any, temperature: float, mask_id: int, ranks: int) -> dict[str, Any]:
    logits = jax_model.logits({"embed": weight}, hidden)
    return sampling.rank(
        logits, seed, position, step, sf.DecodeConfig(temperature=temperature).sampling_temperature, mask_id, ranks
    )._asdict()


JNP: dict[str, Callable[..., dict[str, Any]]] = {
    "gate": _gate,
    "pack": _pack,
    "packed_qkv": _packed_qkv,
    "branch_attention": _branch_attention,
    "packed_linear": _packed_linear,
    "packed_silu_pair": _packed_silu_pair,
    "add_inherited": _add_inherited,
    "head": _head,
}
