"""The operations of a layer and the head at real models' shapes: inputs, floors, and how far a result may be from fp32.

Rows are those of one sequence, branches of 32; branch n > 0 descends from (n - 1) // 2. Weights and activations are bfloat16. The
implementations are in `kernels.py`.
"""

import functools
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from benchmarks.common.environment import BYTES_A_SECOND, OPERATIONS_A_SECOND
from benchmarks.common.shapes import SHAPES, Shape
from kernels_pallas.arguments import pad
from kernels_pallas.rows import needs
from kernels_pallas.tiles import LANES, product_tile
from specfold_jax.config import ModelConfig

OP_SHAPES = {name: shape for name, shape in SHAPES.items() if shape} | {"toy": Shape(1, 128, 4, 2, 64, 128, 300)}
BLOCK, EPS, RANKS, MASK, TAU = 32, 1e-6, 4, 5, 0.1
TOLERANCE = {
    **{"qkv": 4.5e-3, "o": 4.5e-3, "gate_up": 1e-2, "down": 4.5e-3, "attention": 4e-3, "gate": 5e-3, "pack": 5e-3},
    **{"attention_inputs": 8e-3, "advance_norm": 5e-3, "head": 4.5e-5, "norm_qkv": 8e-3, "norm_gate_up": 1e-2},
}
"""Largest relative RMS error of floating-point outputs, as in the parity matrix. Whole numbers must be equal, but for `TOKENS_APART` of
the head's tokens: among thousands of rows two logits may be closer than rounding."""
TOKENS_APART = 1e-3
OPS = tuple(TOLERANCE)
PACKED = ("qkv", "o", "gate_up", "down", "norm_gate_up")
"""Operations that may be given more rows than are to be computed."""

Arrays = dict[str, Any]


class Case(NamedTuple):
    """An operation at a size: `rows` in all, of which the first `count` are computed; `prefix` cache entries before the block."""

    op: str
    shape: Shape
    rows: int
    count: int
    prefix: int

    @property
    def flagged(self) -> int:
        """Rows that the pack finds flagged: those of the main branch, and every other one behind it."""
        return (self.rows + BLOCK) // 2

    @property
    def width(self) -> tuple[int, int]:
        """Input and output columns of the product: the operation's own, or the one before it."""
        s = self.shape
        match self.op:
            case "o" | "gate" | "advance_norm":
                return s.heads * s.head_dim, s.dim
            case "down":
                return s.ffn_dim, s.dim
            case "gate_up" | "norm_gate_up":
                return s.dim, 2 * s.ffn_dim
            case "head":
                return s.dim, s.vocab
            case _:
                return s.dim, (s.heads + 2 * s.kv_heads) * s.head_dim


@functools.cache
def family(shape: Shape) -> ModelConfig:
    """A model of that shape with Qwen2.5's switches."""
    frequencies = tuple(1e6 ** (-2 * i / shape.head_dim) for i in range(shape.head_dim // 2))
    fixed: dict[str, Any] = {"tied": True, "qkv_bias": True, "qk_norm": False, "block_size": BLOCK, "sub_block": None}
    return ModelConfig(family="none", norm_eps=EPS, inv_freq=frequencies, mask_id=MASK, stop_ids=(), pad_id=0, **fixed, **shape._asdict())


def floors(case: Case) -> tuple[float, float]:
    """Least seconds on an H200: to move every input and output once, activations as bfloat16; and to multiply."""
    s, (wide, out) = case.shape, case.width
    stream = 2 * case.rows * s.dim  # bytes of the residual stream
    moved, operations = 0, 0
    match case.op:
        case "attention":
            heads = s.heads * s.head_dim
            moved = 4 * case.prefix * s.kv_heads * s.head_dim + 2 * case.rows * (out + heads)
            operations = 4 * case.rows * (case.prefix + BLOCK) * heads
        case "gate":  # stream and update in, stream out
            moved = 3 * stream
        case "pack":
            moved = 2 * (2 * case.flagged * s.dim)
        case "attention_inputs":
            moved = 2 * (2 * case.rows * out)
        case "advance_norm":  # stream and update in, stream and normed rows out
            moved = 4 * stream
        case "head":
            moved, operations = 2 * wide * (out + case.rows), 2 * case.rows * wide * out
        case _:
            written = out // 2 if case.op.endswith("gate_up") else out
            moved, operations = 2 * (wide * out + case.count * (wide + written)), 2 * case.count * wide * out
    return moved / BYTES_A_SECOND, operations / OPERATIONS_A_SECOND


def floor(case: Case) -> float:
    """Seconds on an H200 that no implementation can fall below."""
    return max(floors(case))


def inputs(case: Case) -> Arrays:
    """Random arrays; an implementation takes those that its parameters name."""
    number, s, (wide, out) = itertools.count(), case.shape, case.width
    rows, branches = case.rows, case.rows // BLOCK
    row = jnp.arange(rows, dtype=jnp.int32)
    parent = jnp.maximum(jnp.arange(branches, dtype=jnp.int32) - 1, 0)[None] // 2

    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Array:
        return (mean + scale * jax.random.normal(jax.random.key(next(number)), shape)).astype(jnp.bfloat16)

    def sums() -> Arrays:
        """An update, and fp32 sums that add up to it, as many as splits of the product before."""
        update, splits = normal(rows, out), product_tile(out, wide, rows).splits
        others = normal(splits - 1, rows, out).astype(jnp.float32)
        return {"update": update, "sums": jnp.concatenate([(update.astype(jnp.float32) - others.sum(0))[None], others])}

    def rotary() -> Arrays:
        positions = case.prefix + row % BLOCK
        angles = positions[:, None].astype(jnp.float32) * jnp.asarray(family(s).inv_freq, jnp.float32)
        return {"bias": normal(out), "positions": positions, "cos": jnp.cos(angles), "sin": jnp.sin(angles)}

    norm = {"norm": normal(s.dim, scale=0.2, mean=1)}
    own = {"own": (row // BLOCK).reshape(1, branches, BLOCK)}
    match case.op:
        case "attention":
            q, k, v = (normal(1, branches, BLOCK, n, s.head_dim) for n in (s.heads, s.kv_heads, s.kv_heads))
            capacity = max(-(-case.prefix // BLOCK), 1) * BLOCK
            cache = {name: normal(1, capacity, s.kv_heads, s.head_dim) for name in ("k_prefix", "v_prefix")}
            switches = {"prefix": jnp.full(1, case.prefix, jnp.int32), "causal": jnp.zeros(1, bool)}
            return {"q": q, "k": k, "v": v, "qkv": jnp.concatenate([q, k, v], axis=3)} | cache | switches | own
        case "gate":
            given, marks = sums(), {"revealed": jnp.zeros((1, branches, BLOCK), bool), "valid": jnp.ones((1, branches), bool)}
            x = _drifting(normal(branches, BLOCK, s.dim).astype(jnp.float32)) - given["update"].astype(jnp.float32)
            asked = dict(zip(("reference", "need"), needs(parent[0], marks["revealed"][0], True), strict=True))
            return given | marks | asked | own | {"x": x.astype(jnp.bfloat16), "parent": parent, "tau": jnp.full(1, TAU, jnp.float32)}
        case "pack":
            computed = (row < BLOCK) | (row % 2 == 0)
            flags = pad(computed.astype(jnp.int32), 0, LANES)
            return {"x": normal(rows, s.dim), "computed": computed, "flags": flags, "parent": parent} | norm
        case "attention_inputs":
            return rotary() | sums()
        case "advance_norm":
            return {"x": normal(rows, s.dim)} | sums() | norm | own
        case "head":
            names = {name: (17 * row + n) % 1000 for n, name in enumerate(("seed", "position", "step"))}
            return {"x": normal(rows, wide), "weight": normal(out, wide, scale=3 * wide**-0.5)} | names
        case _:
            packed = {"computed": row < case.count, "index": jnp.where(row < case.count, row, rows)}
            counted = packed | {"count": jnp.full(1, case.count, jnp.int32)}
            given = {"x": normal(rows, wide), "weight": normal(out, wide, scale=wide**-0.5)} | counted | norm
            return given | rotary() if case.op == "norm_qkv" else given


def _drifting(x: Array) -> Array:
    """[rows, dim] from [branch, block, dim]: branches apart from their parents by 0.05 or 0.2 of them; tau lies between."""
    out = [x[0]]
    for n in range(1, len(x)):
        size = jnp.where(jnp.arange(BLOCK) % 2 == n % 2, 0.05, 0.2)[:, None]
        out.append(out[(n - 1) // 2] * (1 + size * jnp.sign(x[n])))
    return jnp.concatenate(out)


def errors(case: Case, got: Mapping[str, Array], want: Mapping[str, Array]) -> dict[str, float]:
    """Of each output in `got`: ||got - want|| / ||want||, infinite for NaN; of whole numbers the share that differ."""
    found, out = dict(got), {}
    if "sums" in found:
        found["y"] = found.pop("sums").sum(0)
    if "qkv" in found:
        ends = [case.shape.heads + n * case.shape.kv_heads for n in range(3)]
        found |= zip("qkv", jnp.split(found.pop("qkv"), ends, axis=1)[:3], strict=True)
    for name, x in found.items():
        means = case.count if case.op in PACKED else case.flagged if name in ("normed", "index") and case.op == "pack" else case.rows
        size = want[name].size * means // case.rows
        one, other = x.reshape(-1)[:size], want[name].reshape(-1)[:size]
        if jnp.issubdtype(other.dtype, jnp.floating):
            error = float(jnp.linalg.norm(one.astype(jnp.float32) - other) / jnp.linalg.norm(other))
            out[name] = error if error == error else float("inf")
        else:
            out[name] = float(jnp.mean(one.astype(jnp.int32) != other.astype(jnp.int32)))
    return out


def allowed(op: str, name: str, want: Array) -> float:
    """Largest error of an output."""
    if jnp.issubdtype(want.dtype, jnp.floating):
        return TOLERANCE[op]
    return TOKENS_APART if name == "tokens" else 0.0
