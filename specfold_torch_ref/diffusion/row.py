"""One row of a batch as vanilla decoding sees it: where it stands, and the transition that one evaluation of its canvas makes.

Speculation is lossless because it makes the same transition on its branches. Rows are kept on the host.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specfold_jax.config import DecodeConfig, ModelConfig
from specfold_torch_ref.diffusion import reveal
from specfold_torch_ref.diffusion.arrays import where_row

DENOISE, COMMIT, DONE = 0, 1, 2
"""A row's phase: its canvas has masks to reveal, its canvas is complete and waits for the commit, or the row has ended."""


class Row(NamedTuple):
    """Where each row of the batch stands.

    Attributes:
        start [batch]: absolute position of the canvas.
        canvas [batch, block]: the block's tokens, MASK where hidden.
        step [batch]: vanilla reveal steps made in this block.
        phase [batch]: DENOISE, COMMIT or DONE.
        stopped [batch]: whether a stop token was revealed. Such a row may still have a commit to make.
        lengths [batch]: tokens of the prompt.
        limit [batch]: the position at which the row ends at the latest.
        seed [batch]: seed of the sampling noise.
    """

    start: Int[Tensor, " batch"]
    canvas: Int[Tensor, "batch block"]
    step: Int[Tensor, " batch"]
    phase: Int[Tensor, " batch"]
    stopped: Bool[Tensor, " batch"]
    lengths: Int[Tensor, " batch"]
    limit: Int[Tensor, " batch"]
    seed: Int[Tensor, " batch"]

    @property
    def positions(self) -> Int[Tensor, "batch block"]:
        """Absolute positions of the canvas."""
        return self.start[:, None] + torch.arange(self.canvas.shape[1])


def stops(row: Row, model: ModelConfig, decode: DecodeConfig) -> Bool[Tensor, " batch"]:
    """Whether a generated stop token stands in the canvas with no MASK before it."""
    return reveal.shows_stop(row.canvas, row.positions >= row.lengths[:, None], decode.stop_tokens(model), model.mask_id)


def ends(row: Row, model: ModelConfig, decode: DecodeConfig) -> Bool[Tensor, " batch"]:
    """Whether a row is over with this canvas: it stops, or no MASK is left before its limit."""
    open_before_limit = torch.any((row.canvas == model.mask_id) & (row.positions < row.limit[:, None]), dim=1)
    reached = row.limit <= row.start + row.canvas.shape[1]
    return (reached & ~open_before_limit) | stops(row, model, decode)


def revealed(
    row: Row, reveal: Bool[Tensor, "batch block"], tokens: Int[Tensor, "batch block"], model: ModelConfig, decode: DecodeConfig
) -> Row:
    """The row after one vanilla step."""
    after = row._replace(canvas=torch.where(reveal, tokens, row.canvas), step=row.step + 1)
    full = torch.all(after.canvas != model.mask_id, dim=1)
    match model.stop_rule:
        case "reveal":
            over = ends(after, model, decode)
            return after._replace(phase=torch.where(over, DONE, torch.where(full, COMMIT, DENOISE)))
        case "reveal_commit":
            stopped = stops(after, model, decode)
            return after._replace(stopped=stopped, phase=torch.where(full | stopped, COMMIT, DENOISE))
        case "commit":
            return after._replace(phase=torch.where(full, COMMIT, DENOISE))


def committed(row: Row, following: Int[Tensor, " batch"], model: ModelConfig, decode: DecodeConfig) -> Row:
    """The row after its block's commit, either done or at its next block. `following`: the token drawn for that block's start."""
    block = row.canvas.shape[1]
    stopped = row.stopped | stops(row, model, decode) if model.stop_rule == "commit" else row.stopped
    after = row._replace(start=row.start + block, canvas=first_canvas(following, block, model), step=torch.zeros_like(row.step))
    # The first token of a block can end the row before any forward is spent on it.
    over = ends(after, model, decode) if model.stop_rule == "reveal" else torch.zeros_like(stopped)
    after = after._replace(phase=torch.where(over, DONE, DENOISE))
    stays = stopped | (after.start >= row.limit)
    return where_row(stays, row._replace(stopped=stopped, phase=torch.full_like(row.phase, DONE)), after)


def first_canvas(following: Int[Tensor, " batch"], block: int, model: ModelConfig) -> Int[Tensor, "batch block"]:
    """A new block's canvas. All of it is MASK, except the first token in families that draw it."""
    canvas = torch.full((following.shape[0], block), model.mask_id)
    if model.draws_first_token:
        canvas[:, 0] = following
    return canvas
