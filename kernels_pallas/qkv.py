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


class Turns(NamedTuple):
    """Rotary embedding of every row: `cos`, `sin` fp32 [rows, head_dim / 2], and what queries are multiplied with, fp32 [rows], or None."""

    cos: Array
    sin: Array
    query_scale: Array | None


@partial(jax.jit, static_argnames=("heads", "kv_heads", "head_dim", "eps", "dtype"))
def attention_inputs(
    sums: Float[Array, "splits capacity columns"],
    slot: Int[Array, " rows"] | None,
    here: Int[Array, "1"],
    turns: Turns,
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
    """Query heads, key heads and value heads of the first `here` rows, from the sums at each one's `slot` (None: its own).

    Heads beyond those are padding, other rows unspecified.
    """
    splits, capacity, columns = sums.shape
    rows, half, every = turns.cos.shape[0], head_dim // 2, columns // head_dim
    if head_dim % 64:
        raise NotImplementedError(f"{head_dim=} is not supported; the kernel takes multiples of 64")
    if dtype not in HALF:
        raise NotImplementedError(f"{dtype=} is not supported; the Pallas kernels take bfloat16 and float16")
    if columns % (HEADS_MULTIPLE * head_dim) or every < heads + 2 * kv_heads:
        raise ValueError(f"sums have {columns} columns; {heads=} + 2 x {kv_heads=} need a multiple of {HEADS_MULTIPLE} heads of {head_dim}")
    require("sums", sums, (splits, capacity, columns), jnp.float32)
    given = {
        "sums": (sums, (splits, capacity, columns), (splits, capacity, every, 2, half)),
        "slot": (slot, (rows,), (rows,)),
        "here": (here, (1,), (1,)),
        "cos": (turns.cos, (rows, half), (rows, half)),
        "sin": (turns.sin, (rows, half), (rows, half)),
        "query_scale": (turns.query_scale, (rows,), (rows,)),
        "bias": (bias, (columns,), (every, 2, half)),
        "q_norm": (q_norm, (head_dim,), (2, half)),
        "k_norm": (k_norm, (head_dim,), (2, half)),
    }
    given = {name: each for name, each in given.items() if each[0] is not None}
    for name, (array, shape, _) in given.items():
        require(
            name, array, shape, jnp.int32 if name in ("slot", "here") else dtype if name in ("bias", "q_norm", "k_norm") else jnp.float32
        )
    layout = plgpu.Layout.TILED(plgpu.Tiling(((HEADS_MULTIPLE, half), (half // 32,))), (-3,), (-2,), -1)
    shape = (every, half)

    def body(*refs: Any) -> None:
        *ins, out = refs
        ref = dict(zip(given, ins, strict=True))
        row = lax.axis_index("row")

        @pl.when(row < ref["here"][0])
        def _() -> None:
            at = row if slot is None else ref["slot"][row]
            head = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
            is_query, is_value = head < heads, head >= heads + kv_heads

            def load(source: Any) -> Array:
                return plgpu.load(source, layout=layout, optimized=False)

            def alike(source: Any) -> Array:
                """The same [half] for all heads."""
                return lax.broadcast_in_dim(plgpu.load(source, layout=layout.reduce((0,)), optimized=False), shape, (1,))

            def side(n: int) -> Array:
                total = load(ref["sums"].at[0, at, :, n])
                for split in range(1, splits):
                    total += load(ref["sums"].at[split, at, :, n])
                total = total.astype(dtype)
                return (total + load(ref["bias"].at[:, n]) if bias is not None else total).astype(jnp.float32)

            first, second = side(0), side(1)
            plain = first, second
            if q_norm is not None:
                mean = (jnp.sum(first * first, axis=1) + jnp.sum(second * second, axis=1)) / head_dim
                scale = lax.broadcast_in_dim(lax.rsqrt(mean + eps), shape, (0,))
                weights = [jnp.where(is_query, alike(ref["q_norm"].at[n]), alike(ref["k_norm"].at[n])) for n in range(2)]
                first, second = (((x * scale).astype(dtype) * w).astype(jnp.float32) for x, w in zip(plain, weights, strict=True))
            cos, sin = alike(ref["cos"].at[row]), alike(ref["sin"].at[row])
            turned = first * cos - second * sin, second * cos + first * sin
            for n, (wide, unturned) in enumerate(zip(turned, plain, strict=True)):
                value = wide.astype(dtype)
                if turns.query_scale is not None:
                    value = jnp.where(is_query, (value.astype(jnp.float32) * ref["query_scale"][row]).astype(dtype), value)
                out[row, :, n] = jnp.where(is_value, unturned.astype(dtype), value)

    out = jax.ShapeDtypeStruct((rows, every, 2, half), dtype)
    found = launch("attention_inputs", body, out, {"row": rows}, *(array.reshape(view) for array, _, view in given.values()))
    return found.reshape(rows, every, head_dim)
