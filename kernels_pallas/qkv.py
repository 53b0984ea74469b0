"""From the sums of the fused projection to queries, keys and values of every row: bias, q/k norm, rotary embedding. One program a row."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.arguments import HALF, require
from kernels_pallas.launch import launch

HEADS_MULTIPLE = 4
"""One head a warp at a time."""


class Rotary(NamedTuple):
    """Rotary embedding of every row, and the factor of its queries (None: 1)."""

    cos: Float[Array, "rows half_head_dim"]
    sin: Float[Array, "rows half_head_dim"]
    query_scale: Float[Array, " rows"] | None


@partial(jax.jit, static_argnames=("heads", "kv_heads", "head_dim", "eps", "dtype"))
def attention_inputs(
    sums: Float[Array, "splits capacity columns"],
    slot: Int[Array, " rows"] | None,
    row_count: Int[Array, "1"],
    rotary: Rotary,
    bias: Float[Array, " columns"] | None,
    q_norm: Float[Array, " head_dim"] | None,
    k_norm: Float[Array, " head_dim"] | None,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    eps: float,
    dtype: Any,
) -> Float[Array, "rows all_heads head_dim"]:
    """Query heads, key heads and value heads of the first `row_count` rows, from the sums at each one's `slot` (None: its own).

    Heads beyond those are padding, other rows unspecified.
    """
    splits, capacity, columns = sums.shape
    rows, half, every = rotary.cos.shape[0], head_dim // 2, columns // head_dim
    if head_dim % 64:
        raise NotImplementedError(f"{head_dim=} is not supported; the kernel takes multiples of 64")
    if dtype not in HALF:
        raise NotImplementedError(f"{dtype=} is not supported; the Pallas kernels take bfloat16 and float16")
    if columns % (HEADS_MULTIPLE * head_dim) or every < heads + 2 * kv_heads:
        raise ValueError(f"sums have {columns} columns; {heads=} + 2 x {kv_heads=} need a multiple of {HEADS_MULTIPLE} heads of {head_dim}")
    fp32, int32 = jnp.float32, jnp.int32
    optional = {  # of each: what is given, its shape and type, its shape inside the kernel
        "sums": (sums, (splits, capacity, columns), fp32, (splits, capacity, every, 2, half)),
        "slot": (slot, (rows,), int32, (rows,)),
        "row_count": (row_count, (1,), int32, (1,)),
        "cos": (rotary.cos, (rows, half), fp32, (rows, half)),
        "sin": (rotary.sin, (rows, half), fp32, (rows, half)),
        "query_scale": (rotary.query_scale, (rows,), fp32, (rows,)),
        "bias": (bias, (columns,), dtype, (every, 2, half)),
        "q_norm": (q_norm, (head_dim,), dtype, (2, half)),
        "k_norm": (k_norm, (head_dim,), dtype, (2, half)),
    }
    given: dict[str, Array] = {}
    for name, (array, wanted, kind, view) in optional.items():
        if array is not None:
            require(name, array, wanted, kind)
            given[name] = array.reshape(view)
    layout = plgpu.Layout.TILED(plgpu.Tiling(((HEADS_MULTIPLE, half), (half // 32,))), (-3,), (-2,), -1)
    shape = (every, half)

    def body(*refs: Any) -> None:
        *ins, out = refs
        ref = dict(zip(given, ins, strict=True))
        row = lax.axis_index("row")

        @pl.when(row < ref["row_count"][0])
        def _() -> None:
            at = row if slot is None else ref["slot"][row]
            head = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
            is_query, is_value = head < heads, head >= heads + kv_heads

            def load(source: Any) -> Array:
                return plgpu.load(source, layout=layout, optimized=False)

            def load_shared(source: Any) -> Array:
                """[half], the same for all heads."""
                return lax.broadcast_in_dim(plgpu.load(source, layout=layout.reduce((0,)), optimized=False), shape, (1,))

            def load_half(n: int) -> Array:
                """First or second halves of all heads: the sums of all splits, rounded, and the bias."""
                total = load(ref["sums"].at[0, at, :, n])
                for split in range(1, splits):
                    total += load(ref["sums"].at[split, at, :, n])
                total = total.astype(dtype)
                return (total + load(ref["bias"].at[:, n]) if bias is not None else total).astype(jnp.float32)

            first, second = load_half(0), load_half(1)
            unrotated = first, second
            if q_norm is not None:
                mean = (jnp.sum(first * first, axis=1) + jnp.sum(second * second, axis=1)) / head_dim
                scale = lax.broadcast_in_dim(lax.rsqrt(mean + eps), shape, (0,))
                weights = [jnp.where(is_query, load_shared(ref["q_norm"].at[n]), load_shared(ref["k_norm"].at[n])) for n in range(2)]
                first, second = (((x * scale).astype(dtype) * w).astype(jnp.float32) for x, w in zip(unrotated, weights, strict=True))
            cos, sin = load_shared(ref["cos"].at[row]), load_shared(ref["sin"].at[row])
            rotated = first * cos - second * sin, second * cos + first * sin
            for n, (wide, plain) in enumerate(zip(rotated, unrotated, strict=True)):
                value = wide.astype(dtype)
                if rotary.query_scale is not None:
                    value = jnp.where(is_query, (value.astype(jnp.float32) * ref["query_scale"][row]).astype(dtype), value)
                out[row, :, n] = jnp.where(is_value, plain.astype(dtype), value)

    out = jax.ShapeDtypeStruct((rows, every, 2, half), dtype)
    found = launch("attention_inputs", body, out, {"row": rows}, *given.values())
    return found.reshape(rows, every, head_dim)
