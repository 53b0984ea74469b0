"""The token distributions of a check's branches: the language-model head, evaluated for the rows that can matter."""

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specfold_jax.config import DecodeConfig, ModelConfig
from specfold_jax.diffusion.graph import DraftGraph
from specfold_torch_ref.diffusion import reveal
from specfold_torch_ref.diffusion.arrays import of_branch
from specfold_torch_ref.diffusion.draft import Known
from specfold_torch_ref.diffusion.row import Row
from specfold_torch_ref.models import ops
from specfold_torch_ref.models.check import Branches, Checked
from specfold_torch_ref.models.ops import Implementation
from specfold_torch_ref.models.sampling import Ranked
from specfold_torch_ref.models.transformer import Params, head_weight


class HeadRows(NamedTuple):
    """Rows that the head may be evaluated for: [batch, branch, head row], or [some, head row] of some branches. On the host.

    Attributes:
        row [*rows]: where in its branch's block the row stands.
        position [*rows]: the absolute position that it predicts.
    """

    row: Int[Tensor, "*rows"]
    position: Int[Tensor, "*rows"]

    def of_branch(self, branch: Int[Tensor, " batch"], rows: slice) -> "HeadRows":
        """Some rows of one branch a batch row."""
        return HeadRows(*(of_branch(x, branch)[:, rows] for x in self))


class Head(NamedTuple):
    """The head of one decode, and a check's final hidden states.

    Attributes:
        hidden [batch, branch, block, dim]: the states, on their device.
        weight [vocab, dim]: the head's weight, on the same device.
        seed [batch]: seeds of the sampling noise.
        temperature, mask_id: as in the configurations.
        ranks: the number of tokens kept for each row.
        impl: the implementation that evaluates it.
    """

    hidden: Float[Tensor, "batch branch block dim"]
    weight: Float[Tensor, "vocab dim"]
    seed: Int[Tensor, " batch"]
    temperature: float
    mask_id: int
    ranks: int
    impl: Implementation

    def rank(self, batch: Int[Tensor, " some"], branch: Int[Tensor, " some"], rows: HeadRows, step: Int[Tensor, "some head_row"]) -> Ranked:
        """Evaluates the head for rows of some branches, drawn as these vanilla steps, and brings the results to the host."""
        device = self.hidden.device
        hidden = self.hidden[batch.to(device)[:, None], branch.to(device)[:, None], rows.row.to(device)]
        seed = self.seed[batch, None].expand(step.shape)
        seeds, positions, steps = (x.flatten().int().to(device) for x in (seed, rows.position, step))
        settings = self.temperature, self.mask_id, self.ranks
        ranked = ops.head(hidden.flatten(0, 1), self.weight, seeds, positions, steps, *settings, impl=self.impl)
        tokens, odds, gap = (x.cpu().unflatten(0, step.shape) for x in ranked)
        return Ranked(tokens.long(), odds, gap)


@dataclass(frozen=True)
class Distributions:
    """The token distributions of a check's branches. `of` makes it from the check's result. Only hidden states stay on the device.

    `specfold_jax.diffusion.distribution.Distributions` explains which rows the head is evaluated for.

    Attributes:
        head: ranks rows.
        draws_first_token: whether each branch has one more row, which predicts the next block's first token.
        block: positions of a block.
        width: positions of a window.
        first [batch, branch]: where in the block the window begins.
        rows [batch, branch, head row]: the rows of all branches, a window of each, and then the block's last row if there is one.
        greedy [batch, branch, head row]: these rows ranked at temperature 0. None above it.
    """

    head: Head
    draws_first_token: bool
    block: int
    width: int
    first: Int[Tensor, "batch branch"]
    rows: HeadRows
    greedy: Ranked | None

    @classmethod
    def of(
        cls,
        params: Params,
        branches: Branches,
        checked: Checked,
        row: Row,
        model: ModelConfig,
        decode: DecodeConfig,
        graph: DraftGraph,
        *,
        impl: Implementation,
    ) -> Self:
        """Finds the rows that can matter, and ranks them if the temperature is 0."""
        temperature = float(np.asarray(decode.temperature))
        head = Head(checked.hidden, head_weight(params), row.seed, temperature, model.mask_id, graph.token_ranks, impl)
        block, sub_block = branches.tokens.shape[2], decode.window(model)
        width = min(block, graph.reach * sub_block)
        first = reveal.active_window(branches.tokens, model.mask_id, sub_block).clamp(max=block - width)
        rows = head_rows(branches, first, width, model)
        greedy = None if temperature > 0 else _all_at_once(head, rows, branches.valid)
        return cls(head, model.draws_first_token, block, width, first, rows, greedy)

    def at(self, branch: Int[Tensor, " batch"], step: Int[Tensor, " batch"]) -> Ranked:
        """A branch's distribution over the block's positions, drawn as vanilla step `step`. Outside its window, odds are -inf."""
        ranked = self._drawn(branch, step, slice(self.width))
        offset = torch.arange(self.block) - of_branch(self.first, branch)[:, None]
        row, index = torch.arange(offset.shape[0])[:, None], offset.clamp(0, self.width - 1)
        tokens, odds, gap = (x[row, index] for x in ranked)
        return Ranked(tokens, torch.where((offset >= 0) & (offset < self.width), odds, -torch.inf), gap)

    def following(self, branch: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """The next block's first token, predicted by a branch's last row as step 0 of that block. 0 if blocks start masked."""
        if not self.draws_first_token:
            return torch.zeros_like(branch)
        return self._drawn(branch, torch.zeros_like(branch), slice(-1, None)).tokens[:, 0, 0]

    def known(self, branch: Int[Tensor, " batch"], step: Int[Tensor, " batch"], width: int) -> Known:
        """The distribution that drafts are made from: a branch's tokens as drawn at the steps `step`, `step` + 1, .., `width` of them."""
        now = self.at(branch, step)
        steps = [now.tokens if self.greedy is not None or not ahead else self.at(branch, step + ahead).tokens for ahead in range(width)]
        return Known(torch.stack(steps, dim=1), now.odds)

    def _drawn(self, branch: Int[Tensor, " batch"], step: Int[Tensor, " batch"], rows: slice) -> Ranked:
        """Some rows of one branch a batch row, drawn as vanilla step `step`."""
        if self.greedy is not None:
            return Ranked(*(of_branch(x, branch)[:, rows] for x in self.greedy))
        some = self.rows.of_branch(branch, rows)
        return self.head.rank(torch.arange(len(branch)), branch, some, step[:, None].expand(some.position.shape))


def head_rows(branches: Branches, first: Int[Tensor, "batch branch"], width: int, model: ModelConfig) -> HeadRows:
    """Of each branch, the rows that predict its window, which begins at `first`. Then its last row, if the family draws first tokens."""
    block, start = branches.tokens.shape[2], branches.starts()[..., None]
    within = first[..., None] + torch.arange(width)  # positions of the window, counted from the block's start
    row, position = (within - int(model.shift)).clamp(min=0), start + within
    if model.draws_first_token:
        row = torch.cat([row, torch.full_like(row[..., :1], block - 1)], dim=-1)
        position = torch.cat([position, start + block], dim=-1)
    return HeadRows(row, position)


def _all_at_once(head: Head, rows: HeadRows, valid: Bool[Tensor, "batch branch"]) -> Ranked:
    """The valid branches' rows ranked in one call, and zeros for the others."""
    batch, branch = torch.nonzero(valid, as_tuple=True)
    some = HeadRows(*(x[valid] for x in rows))
    ranked = head.rank(batch, branch, some, torch.zeros_like(some.position))
    everywhere = Ranked(*(x.new_zeros(*valid.shape, *x.shape[1:]) for x in ranked))
    for whole, part in zip(everywhere, ranked, strict=True):
        whole[valid] = part
    return everywhere
