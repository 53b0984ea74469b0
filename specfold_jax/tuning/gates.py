"""Where in a block folding recomputes, layer by layer, and how many folded drafts are computed at the tokens they reveal alone."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from specfold_jax.backends.choice import backend_of
from specfold_jax.diffusion.decoding import Decoding
from specfold_jax.diffusion.layout import lay_out
from specfold_jax.diffusion.state import DecodeState
from specfold_jax.models.transformer import Params
from specfold_jax.running.batch import pad
from specfold_jax.running.memory import explained
from specfold_jax.running.stepping import states
from specfold_jax.values import Natural, conform, of_record


@dataclass(frozen=True)
class GateShares:
    """`share` [layers][block]: share of drafts whose position was computed before attention. `drafts`: how many drafts that is.

    `collapsed`: share of the drafts that were computed nowhere but at the tokens they reveal. `setting`, `prompts`: what was decoded.
    """

    share: list[list[float]]
    drafts: Natural
    collapsed: float
    setting: str
    prompts: Natural

    def __post_init__(self) -> None:
        conform(self)

    def record(self) -> dict[str, Any]:
        """The shares as a JSON value."""
        return asdict(self)

    @classmethod
    def of(cls, record: Any) -> "GateShares":
        """The shares of `record`'s value. Raises ValueError naming the field."""
        return of_record(cls, "it", record)


def record_gates(params: Params, ids: Sequence[Sequence[int]], how: Decoding, setting: str = "") -> GateShares:
    """Decodes the prompts check by check, and looks at what the gates decide. `setting`: its name to record."""
    prompts, lengths = (jnp.asarray(x) for x in pad(ids))
    look = jax.jit(_gates)
    total, count, collapsed = np.zeros((how.model.layers, how.decode.block(how.model))), 0, 0
    with explained(params, how, prompts.shape):
        for state in states(params, prompts, lengths, how):
            computed, revealed, drafts = (np.asarray(x) for x in look(state, params, how))
            total += computed[:, drafts].sum(axis=1)
            count += int(drafts.sum())
            collapsed += int((~(computed & ~revealed).any(axis=(0, 3)) & drafts).sum())
    share = (total / max(count, 1)).tolist()
    return GateShares(share, drafts=count, collapsed=collapsed / max(count, 1), setting=setting, prompts=len(ids))


def _gates(
    state: DecodeState, params: Params, how: Decoding
) -> tuple[Bool[Array, "layers batch branch block"], Bool[Array, "batch branch block"], Bool[Array, "batch branch"]]:
    """Of the state's check: computed positions, newly revealed positions, and which branches are drafts."""
    model, decode, graph, fold = how
    branches = lay_out(state, graph, model, decode)
    backend = backend_of(decode, params, model, fold, graph.token_ranks)
    checked = backend.check(params, branches, state.cache, state.row.start, model, decode, fold)

    def of_parent(x: Array) -> Array:
        return jnp.take_along_axis(x, branches.parent.reshape(*branches.parent.shape, *(1,) * (x.ndim - 2)), axis=1)

    # A folded position has the keys of its source, and so has its parent. A computed position has keys of its own.
    keys = [checked.ordered(key) for key, _ in checked.kv]
    computed = jnp.stack([jnp.any(key != of_parent(key), axis=(3, 4)) for key in keys])
    return computed, branches.tokens != of_parent(branches.tokens), branches.drafts()
