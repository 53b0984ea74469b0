"""A stable partition: flagged entries first, so that kernels need one number to know where to stop."""

from typing import NamedTuple, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped


class Partition(NamedTuple):
    """A permutation that puts flagged entries first.

    `order`: the entry at each place; `inverse`: each entry's place; `count`: the number of flagged entries.
    """

    order: Int[Array, " entries"]
    inverse: Int[Array, " entries"]
    count: Int[Array, "1"]

    @classmethod
    def of(cls, flags: Bool[Array, " entries"]) -> Self:
        """Flagged entries first, both kinds in the order they have.

        Flags 0 1 1 0 give order 1 2 0 3, inverse 2 0 1 3 and count 2.
        """
        number = flags.shape[0]
        upto = jnp.cumsum(flags, dtype=jnp.int32)
        entry, count = jnp.arange(number, dtype=jnp.int32), upto[-1:]
        inverse = jnp.where(flags, upto - 1, count + entry - upto)
        order = jnp.zeros(number, jnp.int32).at[inverse].set(entry, unique_indices=True, mode="promise_in_bounds")
        return cls(order, inverse, count)

    def apply(self, x: Shaped[Array, "entries ..."]) -> Shaped[Array, "entries ..."]:
        """Entries, flagged ones first."""
        return x.at[self.order].get(mode="promise_in_bounds")

    def invert(self, x: Shaped[Array, "entries ..."]) -> Shaped[Array, "entries ..."]:
        """Partitioned entries back where they were."""
        return x.at[self.inverse].get(mode="promise_in_bounds")
