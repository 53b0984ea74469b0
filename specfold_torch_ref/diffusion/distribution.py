"""What one check says about its branches: ranked tokens and log-odds of the rows that can matter."""

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specfold_jax.config import DecodeConfig, ModelConfig
from specfold_jax.diffusion.graph import DraftGraph
from specfold_torch_ref.diffusion import reveal
from specfold_torch_ref.diffusion.arrays import of_branch
from specfold_torch_ref.diffusion.draft import Known
from specfold_torch_ref.diffusion.row import Row
from specfold_torch_ref.models.check import Branches, Checked
from specfold_torch_ref.models.ops import Implementation, head
from specfold_torch_ref.models.sampling import Ranked
from specfold_torch_ref.models.transformer import Params, head_weight


class Distributions:
    """What a check says about its branches, evaluated for the rows that can matter (and no others), and brought to the host.

    Of each branch: the rows that predict its active sub-block and those after it within the graph's reach, and the last row for
    families whose block starts with a drawn token. At T = 0 all are ranked at once; at T > 0 a branch is ranked when the vanilla step
    it stands for is known, because the noise depends on that step.
    """

    def __init__(
        self,
        params: Params,
        branches: Branches,
        checked: Checked,
        row: Row,
        model: ModelConfig,
        decode: DecodeConfig,
        graph: DraftGraph,
        *,
        impl: Implementation,
    ):
        block, sub_block = branches.tokens.shape[2], decode.window(model)
        self.block, self.width = block, min(block, graph.reach * sub_block)
        self.first = reveal.active_window(branches.tokens, model.mask_id, sub_block).clamp(max=block - self.width)
        offsets = torch.arange(self.width)
        rows = (self.first[..., None] + offsets - int(model.shift)).clamp(min=0)
        start = branches.starts()[..., None]
        self.position = start + self.first[..., None] + offsets
        if model.draws_first_token:
            rows = torch.cat([rows, torch.full_like(rows[..., :1], block - 1)], dim=-1)
            self.position = torch.cat([self.position, start + block], dim=-1)
        self.hidden, self.rows = checked.hidden, rows  # [batch, branch, block, dim], [batch, branch, head row]
        self.weight, self.seed, self.starts_drawn = head_weight(params), row.seed, model.draws_first_token
        self.mask_id, self.temperature, self.ranks, self.impl = (
            model.mask_id,
            float(np.asarray(decode.temperature)),
            graph.token_ranks,
            impl,
        )
        self.greedy = None if self.temperature > 0 else self._rank_all(branches.valid)

    def _rank_all(self, valid: Bool[Tensor, "batch branch"]) -> Ranked:
        """The valid branches' rows, all at once; zeros elsewhere."""
        batch, branch = torch.nonzero(valid, as_tuple=True)
        ranked = self._rank(batch, branch, self.rows[valid], self.position[valid], torch.zeros_like(self.position[valid]))
        whole = Ranked(*(x.new_zeros(*valid.shape, *x.shape[1:]) for x in ranked))
        for everywhere, some in zip(whole, ranked, strict=True):
            everywhere[valid] = some
        return whole

    def _rank(
        self,
        batch: Int[Tensor, " some"],
        branch: Int[Tensor, " some"],
        rows: Int[Tensor, "some rows"],
        position: Int[Tensor, "some rows"],
        step: Int[Tensor, "some rows"],
    ) -> Ranked:
        device = self.hidden.device
        hidden = self.hidden[batch.to(device)[:, None], branch.to(device)[:, None], rows.to(device)]
        numbers = (x.flatten().int().to(device) for x in (self.seed[batch, None].expand(rows.shape), position, step))
        ranked = head(hidden.flatten(0, 1), self.weight, *numbers, self.temperature, self.mask_id, self.ranks, impl=self.impl)
        tokens, odds, gap = (x.cpu().unflatten(0, rows.shape) for x in ranked)
        return Ranked(tokens.long(), odds, gap)

    def _drawn(self, branch: Int[Tensor, " batch"], step: Int[Tensor, " batch"], rows: slice) -> Ranked:
        if self.greedy is not None:
            return Ranked(*(of_branch(x, branch)[:, rows] for x in self.greedy))
        which, position = of_branch(self.rows, branch)[:, rows], of_branch(self.position, branch)[:, rows]
        return self._rank(torch.arange(len(branch)), branch, which, position, step[:, None].expand(position.shape))

    def at(self, branch: Int[Tensor, " batch"], step: Int[Tensor, " batch"]) -> Ranked:
        """A branch's distribution over the positions of the block, drawn as vanilla step `step`; odds -inf where not evaluated."""
        ranked = self._drawn(branch, step, slice(self.width))
        offset = torch.arange(self.block) - of_branch(self.first, branch)[:, None]
        row, index = torch.arange(offset.shape[0])[:, None], offset.clamp(0, self.width - 1)
        tokens, odds, gap = (x[row, index] for x in ranked)
        return Ranked(tokens, torch.where((offset >= 0) & (offset < self.width), odds, -torch.inf), gap)

    def following(self, branch: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """The token right after the block, drawn from a branch's last row as step 0 of its own block (0 where blocks start masked)."""
        if not self.starts_drawn:
            return torch.zeros_like(branch)
        return self._drawn(branch, torch.zeros_like(branch), slice(-1, None)).tokens[:, 0, 0]

    def known(self, branch: Int[Tensor, " batch"], step: Int[Tensor, " batch"], width: int) -> Known:
        """What drafts are made from: a branch's token ranks as drawn at `step`, `step` + 1, ..."""
        now = self.at(branch, step)
        steps = [now.tokens if self.greedy is not None or not ahead else self.at(branch, step + ahead).tokens for ahead in range(width)]
        return Known(torch.stack(steps, dim=1), now.odds)
