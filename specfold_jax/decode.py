"""The decode loop: vanilla, Spiffy and SpecFold are one loop, which differs by its draft graph and its fold.

One iteration evaluates, for every row of the batch, the canvas and its drafts in a single forward pass, follows the vanilla reveal
rule through the branches as long as a branch equals the state it leads to, and commits finished blocks. Rows are independent: each has
its own block, phase, length and stop. The whole loop is one `lax.while_loop` on the device.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from specfold_jax.accept import Chain, accept
from specfold_jax.branches import lay_out
from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.distribution import Distributions
from specfold_jax.draft import nothing_known
from specfold_jax.graph import DraftGraph
from specfold_jax.implementations import check, settled
from specfold_jax.model import Branches, Cache, Params
from specfold_jax.row import COMMIT, DENOISE, DONE, Row, where_row
from specfold_jax.state import COUNTED, Decoded, DecodeState, begin, finish, unfinished, write
from specfold_jax.validate import row_status, validate


def decode_step(
    state: DecodeState, params: Params, model: ModelConfig, decode: DecodeConfig, graph: DraftGraph, fold: FoldConfig | None = None
) -> DecodeState:
    """One iteration: one forward pass for all rows, with whatever it allows each of them to reveal, accept and commit."""
    row, decode = state.row, settled(decode, params, model, fold, graph.token_ranks)
    branches = lay_out(state, graph, model, decode)
    checked = check(params, branches, state.cache, row.start, model, decode, fold)
    seen = Distributions(params, branches, checked, row, model, decode, graph)
    chain = accept(row, branches, checked.folded, seen, model, decode, fold)

    kept = jnp.maximum(chain.commit, 0)
    # Entries from `start` on do not count until the block is committed, so writing them early needs no condition.
    new = Cache.of(jax.tree.map(lambda x: checked.block_of(x, kept), checked.kv))
    cache = jax.tree.map(lambda old, new: jax.vmap(write, (0, 0, None))(old, new, row.start), state.cache, new)
    left_behind = jnp.where(chain.commit[:, None] >= 0, chain.finished, chain.row.canvas)
    known, following = state.known, state.following
    if graph.width:
        source = chain.branch if fold is not None and fold.draft_from == "own" else chain.last
        nothing = nothing_known(row.canvas.shape[0], row.canvas.shape[1], graph)
        known = where_row(chain.fresh, nothing, seen.known(source, chain.row.step, graph.width))
        following = seen.following(source)
    return DecodeState(
        row=chain.row,
        tokens=write(state.tokens, left_behind, row.start),
        cache=cache,
        known=known,
        following=following,
        counts=state.counts + _counts(row, branches, chain),
        computed_rows=state.computed_rows + checked.computed_rows,
    )


def _counts(row: Row, branches: Branches, chain: Chain) -> Int[Array, "batch counted"]:
    """What one check adds to the statistics."""
    block = row.canvas.shape[1]
    drafted = jnp.sum(branches.drafts(), axis=1, dtype=jnp.int32)
    counts = {
        "nfe": row.phase != DONE,
        "checks": row.phase == DENOISE,
        "commits": row.phase == COMMIT,
        "steps": chain.reveals,
        "drafting": drafted > 0,
        "drafted": drafted,
        "accepted": jnp.maximum(chain.moves - 1, 0),
        "saved_commits": chain.commit > 0,
        "shared": chain.crossed,
        "guard_stops": chain.guarded,
        "total_rows": drafted * block,
    }
    return jnp.stack([counts.get(name, jnp.zeros_like(drafted)).astype(jnp.int32) for name in COUNTED], axis=1)


def _decode(
    params: Params,
    prompts: Int[Array, "batch capacity"],
    lengths: Int[Array, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    graph: DraftGraph,
    fold: FoldConfig | None,
) -> Decoded:
    validate(params, prompts, lengths, model, decode, graph, fold)
    prompts, lengths = jnp.asarray(prompts, jnp.int32), jnp.asarray(lengths, jnp.int32)
    state = begin(params, prompts, lengths, model, decode, graph, row_status(prompts, lengths, model, decode, fold))
    state = lax.while_loop(unfinished, lambda state: decode_step(state, params, model, decode, graph, fold), state)
    decoded = finish(state, model, decode)
    return decoded._replace(lengths=jnp.where(decoded.stats.status == 0, decoded.lengths, lengths))


def vanilla_decode(
    params: Params, prompts: Int[Array, "batch capacity"], lengths: Int[Array, " batch"], model: ModelConfig, decode: DecodeConfig
) -> Decoded:
    """Block-diffusion decoding, one state a forward pass: the loop with an empty graph.

    `prompts` int32 [batch, capacity] right-padded, `lengths` int32 [batch]. Raises ValueError for bad values when nothing is traced;
    under `jit` a row with bad values is not decoded and `stats.status` says why.
    """
    return _decode(params, prompts, lengths, model, decode, DraftGraph.empty(), None)


def spiffy_decode(
    params: Params,
    prompts: Int[Array, "batch capacity"],
    lengths: Int[Array, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    graph: DraftGraph,
) -> Decoded:
    """Lossless speculation with a draft graph (Spiffy, arXiv 2509.18085): the tokens of `vanilla_decode`, in fewer forward passes."""
    return _decode(params, prompts, lengths, model, decode, graph, None)


def specfold_decode(
    params: Params,
    prompts: Int[Array, "batch capacity"],
    lengths: Int[Array, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    graph: DraftGraph,
    fold: FoldConfig,
) -> Decoded:
    """Speculation whose branches are folded onto the work they share (SpecFold, arXiv 2610.04875).

    Lossless when `fold.guard` is infinite; otherwise `fold.tau` and `fold.guard` set how closely it follows vanilla decoding.
    """
    return _decode(params, prompts, lengths, model, decode, graph, fold)
