"""What happens to rows between products: sums are added up and to the residual stream, normed, gated. One program a row."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.arguments import require, require_main
from kernels_pallas.launch import launch
from kernels_pallas.tiles import LANES

NEVER, GATED, ALWAYS = range(3)
"""What `need` says of a row: not to be computed, to be computed if it differs from its reference, to be computed."""


def needs(
    parent: Int[Array, " branch"], revealed: Bool[Array, "branch block"], force: bool
) -> tuple[Int[Array, " rows"], Int[Array, " rows"]]:
    """Of every row (branch, position): the row of the parent branch that the gate compares it with, and its need.

    A branch that is its own parent is always computed; with `force`, so is what is `revealed` in a branch and not in its parent.
    """
    branches, block = revealed.shape
    reference = (parent * block)[:, None] + jnp.arange(block, dtype=jnp.int32)
    forced = (parent == jnp.arange(branches))[:, None] | (revealed & force)
    return reference.reshape(-1), jnp.where(forced, ALWAYS, GATED).astype(jnp.int32).reshape(-1)


def total(sums_ref: Any, slot: Array) -> Array:
    """The sums of all splits at `slot`, added up in order; inside a kernel."""
    found = sums_ref[0, slot]
    for split in range(1, sums_ref.shape[0]):
        found += sums_ref[split, slot]
    return found


def advance(x: Array, added: Array) -> Array:
    """x + what is added in fp32, rounded to x's type."""
    return (x.astype(jnp.float32) + added).astype(x.dtype)


@partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["eps", "dim"])
@dataclass(frozen=True)
class Norm:
    """An RMSNorm (arXiv 1910.07467): `weight` [width], zeros beyond the model's `dim`."""

    weight: Float[Array, " width"]
    eps: float
    dim: int

    def __call__(self, x: Float[Array, " width"], weight: Float[Array, " width"]) -> Float[Array, " width"]:
        """One row normed, statistics in fp32; inside a kernel, with the weight as loaded there."""
        wide = x.astype(jnp.float32)
        return (wide * lax.rsqrt(jnp.sum(wide * wide) / self.dim + self.eps)).astype(x.dtype) * weight


@jax.jit
def norm(x: Float[Array, "rows width"], norm: Norm) -> Float[Array, "rows width"]:
    """Every row normed."""
    _require(x)
    require("weight", norm.weight, x.shape[1:], x.dtype)

    def body(x_ref: Any, weight_ref: Any, out_ref: Any) -> None:
        row = lax.axis_index("row")
        out_ref[row] = norm(x_ref[row], weight_ref[...])

    return launch("norm", body, jax.ShapeDtypeStruct(x.shape, x.dtype), {"row": x.shape[0]}, x, norm.weight)


@jax.jit
def advance_norm(
    x: Float[Array, "rows width"],
    sums: Float[Array, "splits capacity width"],
    slot: Int[Array, " rows"] | None,
    row_count: Int[Array, "1"],
    norm: Norm,
) -> tuple[Float[Array, "rows width"], Float[Array, "rows width"]]:
    """The residual stream with the sums at each row's `slot` (None: its own) added, and that normed.

    Rows from `row_count` on are unspecified.
    """
    _require_sums(x, sums, slot, row_count)
    require("weight", norm.weight, x.shape[1:], x.dtype)
    slots = () if slot is None else (slot,)

    def body(x_ref: Any, sums_ref: Any, row_count_ref: Any, weight_ref: Any, *refs: Any) -> None:
        *slot_ref, x_out, normed_out = refs
        row = lax.axis_index("row")
        # All loads start at once, before it is known whether the row exists. The slot of one that does not may be any number.
        at = jnp.clip(slot_ref[0][row], 0, sums_ref.shape[1] - 1) if slot_ref else row
        rows, weight, advanced = row_count_ref[0], weight_ref[...], advance(x_ref[row], total(sums_ref, at))
        normed = norm(advanced, weight)

        @pl.when(row < rows)
        def _() -> None:
            x_out[row], normed_out[row] = advanced, normed

    outs = (jax.ShapeDtypeStruct(x.shape, x.dtype),) * 2
    return launch("advance_norm", body, outs, {"row": x.shape[0]}, x, sums, row_count, norm.weight, *slots)


@jax.jit
def gate(
    x: Float[Array, "rows width"],
    sums: Float[Array, "splits capacity width"] | None,
    slot: Int[Array, " rows"] | None,
    reference: Int[Array, " rows"],
    need: Int[Array, " rows"],
    row_count: Int[Array, "1"],
    tau: Float[Array, "1"],
) -> tuple[Float[Array, "rows width"], Int[Array, " flags"]]:
    """The residual stream with the sums at each row's `slot` added (None: its own), and which rows to compute: 1, else 0.

    A row that `need` leaves to the gate is computed if not ||x - ref||^2 <= tau^2 ||ref||^2 (fp32), ref being row `reference`. Rows from
    `row_count` on do not exist: they are unspecified and their flags 0. Flags are padded with 0 to a multiple of 128. `sums` None:
    nothing to add, as at the first layer.
    """
    _require_sums(x, sums, slot, row_count)
    rows = x.shape[0]
    for name, array in (("reference", reference), ("need", need)):
        require(name, array, (rows,), jnp.int32)
    require("tau", tau, (1,), jnp.float32)
    given = {"x": x, "sums": sums, "slot": slot, "reference": reference, "need": need, "row_count": row_count, "tau": tau}
    names = [name for name, array in given.items() if array is not None]

    def body(*refs: Any) -> None:
        ref = dict(zip(names, refs, strict=False))
        *outs, flags_out = refs[len(names) :]
        row, end = lax.axis_index("row"), ref["row_count"][0]

        @pl.when(row >= end)
        def _() -> None:
            flags_out[row] = 0

        @pl.when(row < end)
        def _() -> None:
            # All indices are loaded first, then the rows they name: a row and its reference are in flight together.
            needed, pair = ref["need"][row], (row, ref["reference"][row])
            slots = [at if slot is None else ref["slot"][at] for at in pair]
            mine, other = (ref["x"][at] for at in pair)
            if sums is not None:
                mine, other = (advance(x, total(ref["sums"], at)) for x, at in zip((mine, other), slots, strict=True))
            for out in outs:
                out[row] = mine
            wide, other = mine.astype(jnp.float32), other.astype(jnp.float32)
            delta, size = jnp.sum(jnp.square(wide - other)), jnp.sum(jnp.square(other))
            folds = delta <= jnp.square(ref["tau"][0]) * size  # NaN exceeds
            flags_out[row] = ((needed == ALWAYS) | ((needed == GATED) & ~folds)).astype(jnp.int32)

    flags = jax.ShapeDtypeStruct((-(-rows // LANES) * LANES,), jnp.int32)
    outs = (flags,) if sums is None else (jax.ShapeDtypeStruct(x.shape, x.dtype), flags)
    found = launch("gate", body, outs, {"row": flags.shape[0]}, *(given[name] for name in names))
    return (x if sums is None else found[0]), found[-1]


def _require_sums(x: Array, sums: Array | None, slot: Array | None, row_count: Array) -> None:
    _require(x)
    require("row_count", row_count, (1,), jnp.int32)
    if sums is not None:
        require("sums", sums, (*sums.shape[:2], x.shape[1]), jnp.float32)
        if slot is None and sums.shape[1] != x.shape[0]:
            raise ValueError(f"sums of {sums.shape[1]} rows need a slot for each of the {x.shape[0]} rows")
    if slot is not None:
        require("slot", slot, x.shape[:1], jnp.int32)


def _require(x: Array) -> None:
    require_main("x", x, "rows width")
    if x.shape[1] % LANES:
        raise NotImplementedError(f"x has {x.shape[1]} columns; the kernels take multiples of {LANES}")
