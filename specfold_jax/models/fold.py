"""Folding: which (branch, position) rows a layer really evaluates, and where the others take their values from.

SpecFold (arXiv 2610.04875). Branches share most of their work with the branch they descend from; a gate on the relative residual
decides per layer and position what is computed, the rest is inherited from its source, and every branch keeps its own residual stream.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specfold_jax.config import FoldConfig


class Gate(NamedTuple):
    """`computed` bool and `source` int32, both [batch, branch, block]. `source` is the branch that computed a position."""

    computed: Bool[Array, "batch branch block"]
    source: Int[Array, "batch branch block"]


def take_branch(
    x: Float[Array, "batch branch block ..."], source: Int[Array, "batch branch block"]
) -> Float[Array, "batch branch block ..."]:
    """x[b, source[b, n, i], i]."""
    return jnp.take_along_axis(x, source.reshape(source.shape + (1,) * (x.ndim - 3)), axis=1)


def residual_exceeds(x: Float[Array, "... dim"], reference: Float[Array, "... dim"], tau: Float[Array, ""] | float) -> Bool[Array, "..."]:
    """not (||x - ref||^2 <= tau^2 ||ref||^2) in fp32: NaN counts as exceeding, and 0/0 never occurs."""
    x, reference = x.astype(jnp.float32), reference.astype(jnp.float32)
    delta = jnp.sum(jnp.square(x - reference), axis=-1)
    return ~(delta <= jnp.square(jnp.asarray(tau, jnp.float32)) * jnp.sum(jnp.square(reference), axis=-1))


def resolve(computed: Bool[Array, "batch branch block"], parent: Int[Array, "batch branch"]) -> Int[Array, "batch branch block"]:
    """Follows parents to the branch that computed each position. Pointer jumping: a chain of n branches takes log2(n) rounds."""
    branches = computed.shape[1]
    source = jnp.where(computed, jnp.arange(branches, dtype=jnp.int32)[:, None], parent[..., None])
    for _ in range(max(branches - 1, 1).bit_length()):
        source = jnp.take_along_axis(source, source, axis=1)
    return source


def gate(
    x: Float[Array, "batch branch block dim"],
    parent: Int[Array, "batch branch"],
    revealed: Bool[Array, "batch branch block"],
    valid: Bool[Array, "batch branch"],
    fold: FoldConfig,
) -> Gate:
    """Decides from the residual stream what to recompute; see `FoldConfig` for the options.

    `revealed`: positions revealed in a branch and not in its parent. Parents come before children, the main branch is always computed.
    """
    branches = x.shape[1]
    roots = parent == jnp.arange(branches, dtype=jnp.int32)
    forced = roots[..., None] | revealed if fold.force_revealed else jnp.broadcast_to(roots[..., None], revealed.shape)
    if fold.reference == "parent":
        reference = jnp.take_along_axis(x, parent[..., None, None], axis=1)
        computed = (residual_exceeds(x, reference, fold.tau) | forced) & valid[..., None]
        return Gate(computed, resolve(computed, parent))

    def visit(branch: Int[Array, ""], carry: Gate) -> Gate:
        inherited = jnp.take_along_axis(carry.source, parent[:, branch][:, None, None], axis=1)  # [batch, 1, block]
        exceeds = residual_exceeds(x[:, branch], take_branch(x, inherited)[:, 0], fold.tau)
        computed = (exceeds | forced[:, branch]) & valid[:, branch][:, None]
        source = jnp.where(computed, branch, inherited[:, 0])
        return Gate(carry.computed.at[:, branch].set(computed), carry.source.at[:, branch].set(source))

    start = Gate(jnp.zeros(revealed.shape, bool), jnp.zeros(revealed.shape, jnp.int32))
    return lax.fori_loop(0, branches, visit, start)


def buckets(rows: int) -> tuple[int, ...]:
    """Capacities a packed operation is compiled for: a quarter, a half, all rows (small calls have one)."""
    return (rows,) if rows <= 32 else (-(-rows // 4), -(-rows // 2), rows)


def packed(function: Callable[..., Any], computed: Bool[Array, "batch branch block"], *inputs: Array) -> Any:
    """Applies a row-wise function to the computed rows only, in the smallest bucket that holds them.

    `inputs` have leading axes [batch, branch, block]; so have the outputs, whose rows that were not computed are unspecified.
    """
    lead, rows = computed.shape, computed.size
    flat = [x.reshape(rows, *x.shape[3:]) for x in inputs]
    index = jnp.flatnonzero(computed, size=rows, fill_value=rows).astype(jnp.int32)

    def run(capacity: int) -> Callable[..., Any]:
        def some(index: Array, *flat: Array) -> Any:
            chosen = index[:capacity]
            out = function(*(x.at[chosen].get(mode="clip") for x in flat))
            return jax.tree.map(lambda y: jnp.zeros((rows, *y.shape[1:]), y.dtype).at[chosen].set(y, mode="drop"), out)

        def every(index: Array, *flat: Array) -> Any:
            return function(*flat)

        return every if capacity == rows else some

    sizes = buckets(rows)
    which = jnp.searchsorted(jnp.asarray(sizes, jnp.int32), jnp.sum(computed, dtype=jnp.int32))
    out = lax.switch(which, [run(capacity) for capacity in sizes], index, *flat)
    return jax.tree.map(lambda y: y.reshape(*lead, *y.shape[1:]), out)


@dataclass(frozen=True)
class Rows:
    """The rows of one check: which branches exist, how they descend, and whether they fold and pack.

    With `fold=None` every position of a valid branch is computed. `pack=False` evaluates all rows and selects: the reference.
    """

    valid: Bool[Array, "batch branch"]
    parent: Int[Array, "batch branch"]
    revealed: Bool[Array, "batch branch block"]
    fold: FoldConfig | None
    pack: bool

    def all(self) -> Gate:
        """Nothing folded."""
        computed = jnp.broadcast_to(self.valid[..., None], self.revealed.shape)
        own = jnp.arange(self.valid.shape[1], dtype=jnp.int32)[:, None]
        return Gate(computed, jnp.broadcast_to(own, self.revealed.shape))

    def before_attention(self, x: Float[Array, "batch branch block dim"]) -> Gate:
        """The gate on a layer's input."""
        if self.fold is None or self.fold.scope == "ffn":
            return self.all()
        return gate(x, self.parent, self.revealed, self.valid, self.fold)

    def before_ffn(self, y: Float[Array, "batch branch block dim"], first: Gate) -> Gate:
        """The gate on the state after attention: the second gate, or the first one's decision again."""
        if self.fold is None or (self.fold.gates == 1 and self.fold.scope == "layer"):
            return first
        return gate(y, self.parent, self.revealed, self.valid, self.fold)

    def apply(self, function: Callable[..., Any], where: Gate, *inputs: Array) -> Any:
        """A row-wise function on the computed rows."""
        if self.pack:
            return packed(function, where.computed, *inputs)
        return function(*inputs)

    def inherit(self, x: Float[Array, "batch branch block ..."], where: Gate) -> Float[Array, "batch branch block ..."]:
        """Each position's value from the branch that computed it."""
        return x if self.fold is None else take_branch(x, where.source)
