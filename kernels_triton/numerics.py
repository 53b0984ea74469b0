"""Arithmetic that kernels share: products, rounding and norms that are right on a GPU and in Triton's interpreter alike.

The interpreter's bf16 arithmetic is wrong, so there operands become fp32 right after each load; on a GPU they stay narrow and use the
matrix units. Accumulators are fp32 everywhere.
"""

import triton
import triton.language as tl
from triton import knobs

INTERPRET = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def dot(a, b, accumulator):
    """accumulator + a @ b; fp32 operands are multiplied as fp32, not as tf32."""
    if INTERPRET:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision="ieee")


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 x in another dtype, rounded to nearest even (the interpreter's own cast to bf16 cuts off)."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        x = ((bits >> 16) << 16).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def inverse_rms(x, row, live, dim, eps, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """1 / sqrt(mean(x[row]^2) + eps), fp32 [ROWS]."""
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, dim, DEPTH):
        k = start + tl.arange(0, DEPTH)
        wide = tl.load(x + row[:, None] * dim + k[None], mask=live[:, None] & (k < dim)[None], other=0.0).to(tl.float32)
        total += tl.sum(wide * wide, 1)
    return tl.rsqrt(total / dim + eps)


@triton.jit
def load_normed(x, row, live, k, dim, scale, norm):
    """x[row, k] * scale * norm[k] in x's dtype, rounded once: [ROWS, DEPTH]."""
    wide = tl.load(x + row[:, None] * dim + k[None], mask=live[:, None] & (k < dim)[None], other=0.0).to(tl.float32)
    gain = tl.load(norm + k, mask=k < dim, other=0.0).to(tl.float32)
    return narrow(wide * scale[:, None] * gain[None], x.dtype.element_ty)


@triton.jit
def load_weight(weight, row, exists, k, dim):
    """weight[row, k] transposed: [DEPTH, COLUMNS]."""
    return tl.load(weight + row[None].to(tl.int64) * dim + k[:, None], mask=exists[None] & (k < dim)[:, None], other=0.0)
