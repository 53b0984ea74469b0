"""What one check says about its branches: ranked tokens and log-odds of the rows that can matter."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from specfold_jax.backends.choice import Backend
from specfold_jax.config import DecodeConfig, ModelConfig
from specfold_jax.diffusion import reveal
from specfold_jax.diffusion.arrays import of_branch
from specfold_jax.diffusion.draft import Known
from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.diffusion.row import Row
from specfold_jax.models import sampling
from specfold_jax.models.check import Branches, Checked
from specfold_jax.models.sampling import Ranked
from specfold_jax.models.transformer import Params


class Distributions:
    """What a check says about its branches, evaluated for the rows that can matter (and no others).

    Of each valid branch: the rows that predict masked positions of its active sub-block and of those after it within the graph's reach,
    and the last row for families whose block starts with a drawn token. At T = 0 all are ranked at once; at T > 0 a branch is ranked
    when the vanilla step it stands for is known, because the noise depends on that step.
    """

    def __init__(
        self,
        backend: Backend,
        params: Params,
        branches: Branches,
        checked: Checked,
        row: Row,
        model: ModelConfig,
        decode: DecodeConfig,
        graph: DraftGraph,
    ):
        block, sub_block, ranks = branches.tokens.shape[2], decode.window(model), graph.token_ranks
        self.block, self.width = block, min(block, graph.reach * sub_block)
        self.first = jnp.minimum(reveal.active_window(branches.tokens, model.mask_id, sub_block), block - self.width)
        within = self.first[..., None] + jnp.arange(self.width, dtype=jnp.int32)
        rows, start = jnp.maximum(within - int(model.shift), 0), branches.starts()[..., None]
        position, known = start + within, jnp.take_along_axis(branches.tokens, within, axis=2) != model.mask_id
        if model.draws_first_token:
            rows = jnp.concatenate([rows, jnp.full_like(rows[..., :1], block - 1)], axis=-1)
            position = jnp.concatenate([position, start + block], axis=-1)
            known = jnp.pad(known, ((0, 0), (0, 0), (0, 1)))
        self.hidden = checked.hidden.reshape(-1, model.dim)[checked.place[..., None] * block + rows]  # [batch, branch, head row, dim]
        self.wanted = branches.valid[..., None] & ~known
        self.position, self.seed, self.starts_drawn = position, row.seed, model.draws_first_token
        self.ranked = lambda hidden, seed, position, step, wanted: backend.rank(
            params, hidden, seed, position, step, wanted, model, decode, ranks
        )
        self.either = partial(sampling.drawn_or_greedy, decode.sampling_temperature)
        shape = rows.shape
        nothing = Ranked(jnp.zeros((*shape, ranks), jnp.int32), jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))
        self.greedy = self.either(lambda: nothing, lambda: self._rank(self.hidden, position, jnp.zeros_like(position), self.wanted))

    def _rank(self, hidden: Array, position: Array, step: Array, wanted: Array) -> Ranked:
        seed = jnp.broadcast_to(self.seed.reshape(-1, *(1,) * (position.ndim - 1)), position.shape)
        return self.ranked(hidden, seed, position, step, wanted)

    def _drawn(self, branch: Int[Array, " batch"], step: Int[Array, " batch"], rows: slice) -> Ranked:
        def sample() -> Ranked:
            hidden, position, wanted = (of_branch(x, branch)[:, rows] for x in (self.hidden, self.position, self.wanted))
            return self._rank(hidden, position, jnp.broadcast_to(step[:, None], position.shape), wanted)

        return self.either(sample, lambda: jax.tree.map(lambda x: of_branch(x, branch)[:, rows], self.greedy))

    def at(self, branch: Int[Array, " batch"], step: Int[Array, " batch"]) -> Ranked:
        """A branch's distribution over the positions of the block, drawn as vanilla step `step`; odds -inf where not evaluated."""
        ranked = self._drawn(branch, step, slice(self.width))
        offset = jnp.arange(self.block, dtype=jnp.int32) - of_branch(self.first, branch)[:, None]
        index = jnp.clip(offset, 0, self.width - 1)
        tokens, odds, gap = (jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1) for x in ranked)
        return Ranked(tokens, jnp.where((offset >= 0) & (offset < self.width), odds, -jnp.inf), gap)

    def following(self, branch: Int[Array, " batch"]) -> Int[Array, " batch"]:
        """The token right after the block, drawn from a branch's last row as step 0 of its own block (0 where blocks start masked)."""
        if not self.starts_drawn:
            return jnp.zeros_like(branch)
        return self._drawn(branch, jnp.zeros_like(branch), slice(-1, None)).tokens[:, 0, 0]

    def known(self, branch: Int[Array, " batch"], step: Int[Array, " batch"], width: int) -> Known:
        """What drafts are made from: a branch's token ranks as drawn at `step`, `step` + 1, ..."""
        now = self.at(branch, step)

        def later() -> Array:
            return jnp.moveaxis(lax.map(lambda ahead: self.at(branch, step + ahead).tokens, jnp.arange(width, dtype=jnp.int32)), 0, 1)

        def alike() -> Array:
            return jnp.broadcast_to(now.tokens[:, None], (now.tokens.shape[0], width, *now.tokens.shape[1:]))

        return Known(self.either(later, alike), now.odds)
