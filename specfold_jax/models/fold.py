"""Folding (SpecFold, arXiv 2610.04875): a layer evaluates some of its (branch, position) rows, and the others inherit.

A branch repeats most of its parent's work. In every layer, a gate looks at the relative residual of each position and decides whether it
is computed. A folded position inherits from its source, the branch that computed it. Every branch keeps its own residual stream.
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
    """A gate's decision on every position of every branch.

    Attributes:
        computed [batch, branch, block]: whether the position is computed. The others are folded.
        source [batch, branch, block]: the branch that computes the position: its own, or the end of a chain of parents.

    Branch 0 is computed, branch 1 descends from it and branch 2 from branch 1. Each of the two computes one position of 4. Position 1 of
    branch 2 is folded onto branch 1, and everything else onto the main branch:

    >>> computed = jnp.array([[[True, True, True, True], [False, True, False, False], [False, False, True, False]]])
    >>> gate = Gate(computed, resolve(computed, parent=jnp.array([[0, 0, 1]])))
    >>> gate.source.tolist()
    [[[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 2, 0]]]
    """

    computed: Bool[Array, "batch branch block"]
    source: Int[Array, "batch branch block"]


def take_branch(
    x: Float[Array, "batch branch block ..."], source: Int[Array, "batch branch block"]
) -> Float[Array, "batch branch block ..."]:
    """x[b, source[b, n, i], i]."""
    return jnp.take_along_axis(x, source.reshape(source.shape + (1,) * (x.ndim - 3)), axis=1)


def residual_exceeds(x: Float[Array, "... dim"], reference: Float[Array, "... dim"], tau: Float[Array, ""] | float) -> Bool[Array, "..."]:
    """not (||x - ref||^2 <= tau^2 ||ref||^2) in fp32. NaN counts as exceeding, and nothing is divided by 0."""
    x, reference = x.astype(jnp.float32), reference.astype(jnp.float32)
    delta = jnp.sum(jnp.square(x - reference), axis=-1)
    return ~(delta <= jnp.square(jnp.asarray(tau, jnp.float32)) * jnp.sum(jnp.square(reference), axis=-1))


def resolve(computed: Bool[Array, "batch branch block"], parent: Int[Array, "batch branch"]) -> Int[Array, "batch branch block"]:
    """Follows parents to the branch that computed each position.

    A computed position points to its own branch, and a folded one to its parent. In each round every pointer jumps to where its target
    points. This doubles the distance, so a chain of n branches takes about log2(n) rounds. One position of four branches, of which only
    the first computes it:

        at first     0 0 1 2
        one round    0 0 0 1
        two rounds   0 0 0 0
    """
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
    """Decides from the residual stream which positions are computed. `FoldConfig` has the options.

    `revealed`: positions revealed in a branch and not in its parent. Parents come before children. Roots are always computed.
    """
    roots = parent == jnp.arange(x.shape[1], dtype=jnp.int32)
    forced = roots[..., None] | revealed if fold.force_revealed else jnp.broadcast_to(roots[..., None], revealed.shape)
    match fold.reference:
        case "parent":
            reference = jnp.take_along_axis(x, parent[..., None, None], axis=1)
            computed = (residual_exceeds(x, reference, fold.tau) | forced) & valid[..., None]
            return Gate(computed, resolve(computed, parent))
        case "source":
            return _gate_by_source(x, parent, forced, valid, fold.tau)


def _gate_by_source(
    x: Float[Array, "batch branch block dim"],
    parent: Int[Array, "batch branch"],
    forced: Bool[Array, "batch branch block"],
    valid: Bool[Array, "batch branch"],
    tau: Float[Array, ""] | float,
) -> Gate:
    """Compares a position with the branch that it would be folded onto, its parent's source.

    That source must be decided first. So branches are visited one by one, parents before children, and each fills in its part of the
    gate.
    """

    def visit(branch: Int[Array, ""], so_far: Gate) -> Gate:
        above = jnp.take_along_axis(so_far.source, parent[:, branch][:, None, None], axis=1)  # the parent's source [batch, 1, block]
        exceeds = residual_exceeds(x[:, branch], take_branch(x, above)[:, 0], tau)
        computed = (exceeds | forced[:, branch]) & valid[:, branch][:, None]
        source = jnp.where(computed, branch, above[:, 0])
        return Gate(so_far.computed.at[:, branch].set(computed), so_far.source.at[:, branch].set(source))

    nothing = Gate(jnp.zeros(forced.shape, bool), jnp.zeros(forced.shape, jnp.int32))
    return lax.fori_loop(0, x.shape[1], visit, nothing)


def buckets(rows: int) -> tuple[int, ...]:
    """Capacities that a packed operation is compiled for: a quarter, a half and all of the rows. Small calls have one."""
    return (rows,) if rows <= 32 else (-(-rows // 4), -(-rows // 2), rows)


def packed(function: Callable[..., Any], computed: Bool[Array, "batch branch block"], *inputs: Array) -> Any:
    """Applies a row-wise function to the computed rows only, in the smallest bucket that holds them.

    `inputs` and outputs have leading axes [batch, branch, block]. Output rows that were not computed are unspecified.
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

    With `fold=None` every position of a valid branch is computed. `pack=False` evaluates all rows, which is the reference.
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
        """The gate on the state after attention. With one gate, the first decision holds."""
        if self.fold is None or (self.fold.gates == 1 and self.fold.scope == "layer"):
            return first
        return gate(y, self.parent, self.revealed, self.valid, self.fold)

    def apply(self, function: Callable[..., Any], where: Gate, *inputs: Array) -> Any:
        """Applies a row-wise function to the computed rows."""
        if self.pack:
            return packed(function, where.computed, *inputs)
        return function(*inputs)

    def inherit(self, x: Float[Array, "batch branch block ..."], where: Gate) -> Float[Array, "batch branch block ..."]:
        """Takes each position's value from the branch that computed it."""
        return x if self.fold is None else take_branch(x, where.source)
