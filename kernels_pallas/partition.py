"""What counts comes first: kernels then need one number to know where to stop."""

from typing import NamedTuple, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped


class Front(NamedTuple):
    """An order of entries, flagged ones first: `order` is the entry at each place, `place` each entry's place, `count` the flagged ones'
    number."""

    order: Int[Array, " entries"]
    place: Int[Array, " entries"]
    count: Int[Array, "1"]

    @classmethod
    def of(cls, flags: Bool[Array, " entries"]) -> Self:
        """Flagged entries first, both kinds in the order they have."""
        number = flags.shape[0]
        upto = jnp.cumsum(flags, dtype=jnp.int32)
        entry, count = jnp.arange(number, dtype=jnp.int32), upto[-1:]
        place = jnp.where(flags, upto - 1, count + entry - upto)
        order = jnp.zeros(number, jnp.int32).at[place].set(entry, unique_indices=True, mode="promise_in_bounds")
        return cls(order, place, count)

    def there(self, x: Shaped[Array, "entries ..."]) -> Shaped[Array, "entries ..."]:
        """Entries in this order."""
        return x.at[self.order].get(mode="promise_in_bounds")

    def back(self, x: Shaped[Array, "entries ..."]) -> Shaped[Array, "entries ..."]:
        """Entries in their own order."""
        return x.at[self.place].get(mode="promise_in_bounds")
