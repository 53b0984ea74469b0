"""The token distributions of a check's branches: the language-model head, evaluated for the rows that can matter."""

from dataclasses import dataclass
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specfold_jax.backends.choice import Backend
from specfold_jax.config import DecodeConfig, ModelConfig
from specfold_jax.diffusion import reveal
from specfold_jax.diffusion.arrays import of_branch
from specfold_jax.diffusion.draft import Known
from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.diffusion.row import Row
from specfold_jax.models.check import Branches, Checked
from specfold_jax.models.sampling import Ranked, drawn_or_greedy
from specfold_jax.models.transformer import Params


class HeadRows(NamedTuple):
    """Rows that the head may be evaluated for: [batch, branch, head row], or [batch, head row] if each batch row has chosen a branch.

    Attributes:
        hidden [*rows, dim]: final hidden states.
        position [*rows]: the absolute position that each predicts.
        wanted [*rows]: whether anything reads the result. It is unspecified if not.
    """

    hidden: Float[Array, "*rows dim"]
    position: Int[Array, "*rows"]
    wanted: Bool[Array, "*rows"]

    def of_branch(self, branch: Int[Array, " batch"], rows: slice) -> "HeadRows":
        """Some rows of one branch a batch row."""
        return HeadRows(*(of_branch(x, branch)[:, rows] for x in self))


class Head(NamedTuple):
    """The head of one decode. `seed` [batch] is that of the sampling noise, `ranks` the number of tokens kept for each row."""

    backend: Backend
    params: Params
    model: ModelConfig
    decode: DecodeConfig
    seed: Int[Array, " batch"]
    ranks: int

    def rank(self, rows: HeadRows, step: Int[Array, "*rows"]) -> Ranked:
        """Evaluates the head for these rows, drawn as these vanilla steps."""
        seed = jnp.broadcast_to(self.seed.reshape(-1, *(1,) * (step.ndim - 1)), step.shape)
        return self.backend.rank(self.params, rows.hidden, seed, rows.position, step, rows.wanted, self.model, self.decode, self.ranks)


@dataclass(frozen=True)
class Distributions:
    """The token distributions of a check's branches. `of` makes it from the check's result.

    The head is evaluated for a window of each branch: its active sub-block and those after it, `graph.reach` in all. Families that draw a
    block's first token have one more row, the block's last one, which predicts the next block's first token. A block of 8 positions with
    sub-blocks of 2, a reach of 2, and `_` for MASK:

        canvas   1 2 3 _ _ _ _ _
        window       2 3 4 5          first = 2, width = 4, and position 2 is not wanted

    At temperature 0, all rows are ranked at once. Above it, noise depends on the vanilla step. So a branch is ranked when acceptance has
    reached it and its step is known.

    Attributes:
        head: ranks rows.
        block: positions of a block.
        width: positions of a window.
        first [batch, branch]: where in the block the window begins.
        rows [batch, branch, head row]: the rows of all branches, a window of each, and then the block's last row if there is one.
        greedy [batch, branch, head row]: these rows ranked at temperature 0. Zeros above it, where nothing reads them.
    """

    head: Head
    block: int
    width: int
    first: Int[Array, "batch branch"]
    rows: HeadRows
    greedy: Ranked

    @classmethod
    def of(
        cls,
        backend: Backend,
        params: Params,
        branches: Branches,
        checked: Checked,
        row: Row,
        model: ModelConfig,
        decode: DecodeConfig,
        graph: DraftGraph,
    ) -> Self:
        """Gathers the rows that can matter, and ranks them if the temperature is 0."""
        head = Head(backend, params, model, decode, row.seed, graph.token_ranks)
        block, sub_block = branches.tokens.shape[2], decode.window(model)
        width = min(block, graph.reach * sub_block)
        first = jnp.minimum(reveal.active_window(branches.tokens, model.mask_id, sub_block), block - width)
        rows = head_rows(branches, checked, first, width, model)

        def nothing_yet() -> Ranked:
            shape = rows.position.shape
            return Ranked(jnp.zeros((*shape, head.ranks), jnp.int32), jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))

        def all_at_once() -> Ranked:
            return head.rank(rows, jnp.zeros_like(rows.position))

        return cls(head, block, width, first, rows, drawn_or_greedy(decode.sampling_temperature, nothing_yet, all_at_once))

    @property
    def hidden(self) -> Float[Array, "batch branch head_row dim"]:
        """The hidden states of the rows that the head may be evaluated for."""
        return self.rows.hidden

    def at(self, branch: Int[Array, " batch"], step: Int[Array, " batch"]) -> Ranked:
        """A branch's distribution over the block's positions, drawn as vanilla step `step`. Outside its window, odds are -inf."""
        ranked = self._drawn(branch, step, slice(self.width))
        offset = jnp.arange(self.block, dtype=jnp.int32) - of_branch(self.first, branch)[:, None]
        index = jnp.clip(offset, 0, self.width - 1)
        tokens, odds, gap = (jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1) for x in ranked)
        return Ranked(tokens, jnp.where((offset >= 0) & (offset < self.width), odds, -jnp.inf), gap)

    def following(self, branch: Int[Array, " batch"]) -> Int[Array, " batch"]:
        """The next block's first token, predicted by a branch's last row as step 0 of that block. 0 if blocks start masked."""
        if not self.head.model.draws_first_token:
            return jnp.zeros_like(branch)
        return self._drawn(branch, jnp.zeros_like(branch), slice(-1, None)).tokens[:, 0, 0]

    def known(self, branch: Int[Array, " batch"], step: Int[Array, " batch"], width: int) -> Known:
        """The distribution that drafts are made from: a branch's tokens as drawn at the steps `step`, `step` + 1, .., `width` of them."""
        now = self.at(branch, step)

        def drawn() -> Array:
            by_step = lax.map(lambda ahead: self.at(branch, step + ahead).tokens, jnp.arange(width, dtype=jnp.int32))
            return jnp.moveaxis(by_step, 0, 1)

        def greedy() -> Array:  # all steps are alike
            return jnp.broadcast_to(now.tokens[:, None], (now.tokens.shape[0], width, *now.tokens.shape[1:]))

        return Known(drawn_or_greedy(self.head.decode.sampling_temperature, drawn, greedy), now.odds)

    def _drawn(self, branch: Int[Array, " batch"], step: Int[Array, " batch"], rows: slice) -> Ranked:
        """Some rows of one branch a batch row, drawn as vanilla step `step`."""

        def drawn() -> Ranked:
            some = self.rows.of_branch(branch, rows)
            return self.head.rank(some, jnp.broadcast_to(step[:, None], some.position.shape))

        def greedy() -> Ranked:
            return jax.tree.map(lambda x: of_branch(x, branch)[:, rows], self.greedy)

        return drawn_or_greedy(self.head.decode.sampling_temperature, drawn, greedy)


def head_rows(branches: Branches, checked: Checked, first: Int[Array, "batch branch"], width: int, model: ModelConfig) -> HeadRows:
    """Of each branch, the rows that predict its window, which begins at `first`. Then its last row, if the family draws first tokens."""
    block, start = branches.tokens.shape[2], branches.starts()[..., None]
    within = first[..., None] + jnp.arange(width, dtype=jnp.int32)  # positions of the window, counted from the block's start
    row, position = jnp.maximum(within - int(model.shift), 0), start + within
    masked = jnp.take_along_axis(branches.tokens, within, axis=2) == model.mask_id
    if model.draws_first_token:
        row = jnp.concatenate([row, jnp.full_like(row[..., :1], block - 1)], axis=-1)
        position = jnp.concatenate([position, start + block], axis=-1)
        masked = jnp.pad(masked, ((0, 0), (0, 0), (0, 1)), constant_values=True)
    hidden = checked.hidden.reshape(-1, model.dim)[checked.entry[..., None] * block + row]
    return HeadRows(hidden, position, branches.valid[..., None] & masked)
