"""Where in a block folding recomputes, layer by layer, and how often folded drafts collapse onto the branch they descend from."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from specfold_jax.backends.choice import check, settled
from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.diffusion.layout import lay_out
from specfold_jax.diffusion.loop import begin, decode_step, unfinished
from specfold_jax.diffusion.state import DecodeState
from specfold_jax.diffusion.validate import row_status
from specfold_jax.models.transformer import Params
from specfold_jax.running.batch import pad
from specfold_jax.running.memory import explained


def record_gates(
    params: Params, ids: Sequence[Sequence[int]], model: ModelConfig, decode: DecodeConfig, graph: DraftGraph, fold: FoldConfig
) -> dict[str, Any]:
    """Decodes the prompts check by check. `share` [layers][block]: share of drafts whose position was computed before attention;
    `drafts`: how many drafts that is; `collapsed`: share of them computed nowhere but at the tokens they reveal."""
    prompts, lengths = (jnp.asarray(x) for x in pad(ids))
    step = jax.jit(_look_and_step)
    total, count, collapsed = np.zeros((model.layers, decode.block(model))), 0, 0
    with explained(params, model, decode, prompts.shape, graph, fold):
        state = jax.jit(begin)(params, prompts, lengths, model, decode, graph, row_status(prompts, lengths, model, decode, fold))
        while bool(unfinished(state)):
            state, computed, revealed, drafts = step(state, params, model, decode, graph, fold)
            computed, revealed, drafts = (np.asarray(x) for x in (computed, revealed, drafts))
            total += computed[:, drafts].sum(axis=1)
            count += int(drafts.sum())
            collapsed += int((~(computed & ~revealed).any(axis=(0, 3)) & drafts).sum())
    return {"share": (total / max(count, 1)).tolist(), "drafts": count, "collapsed": collapsed / max(count, 1)}


def _look_and_step(
    state: DecodeState, params: Params, model: ModelConfig, decode: DecodeConfig, graph: DraftGraph, fold: FoldConfig
) -> tuple[DecodeState, Bool[Array, "layers batch branch block"], Bool[Array, "batch branch block"], Bool[Array, "batch branch"]]:
    """The next state; and of this check the computed positions, those newly revealed, and which branches are drafts."""
    decode = settled(decode, params, model, fold, graph.token_ranks)
    branches = lay_out(state, graph, model, decode)
    checked = check(params, branches, state.cache, state.row.start, model, decode, fold)

    def of_parent(x: Array) -> Array:
        return jnp.take_along_axis(x, branches.parent.reshape(*branches.parent.shape, *(1,) * (x.ndim - 2)), axis=1)

    # A folded position has its source's very keys, which are its parent's; a computed one has its own.
    keys = [checked.ordered(key) for key, _ in checked.kv]
    computed = jnp.stack([jnp.any(key != of_parent(key), axis=(3, 4)) for key in keys])
    following = decode_step(state, params, model, decode, graph, fold)
    return following, computed, branches.tokens != of_parent(branches.tokens), branches.drafts()
