"""One row of a batch as vanilla decoding sees it: where it stands, and what one evaluation of its canvas leads to.

Speculation replays this very transition on its branches; that is what makes it lossless. Rows are kept on the host.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specfold_jax.config import DecodeConfig, ModelConfig
from specfold_torch_ref.diffusion import reveal
from specfold_torch_ref.diffusion.arrays import where_row

DENOISE, COMMIT, DONE = 0, 1, 2
"""A row's phase: its canvas has masks to reveal, is to be committed, or the row has ended."""


class Row(NamedTuple):
    """`start`: the canvas' first position. `step`: vanilla reveal steps made in this block. `stopped`: a stop token was revealed (the
    row still commits). `lengths`: the prompt's; `limit`: the position a row may not pass; `seed`: of the sampling noise."""

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
    """The row after its block's commit: at its next block, or done. `following`: the token drawn for the next block's start."""
    block = row.canvas.shape[1]
    stopped = row.stopped | stops(row, model, decode) if model.stop_rule == "commit" else row.stopped
    after = row._replace(start=row.start + block, canvas=first_canvas(following, block, model), step=torch.zeros_like(row.step))
    # The first token of a block can end the row before any forward is spent on it.
    over = ends(after, model, decode) if model.stop_rule == "reveal" else torch.zeros_like(stopped)
    after = after._replace(phase=torch.where(over, DONE, DENOISE))
    stays = stopped | (after.start >= row.limit)
    return where_row(stays, row._replace(stopped=stopped, phase=torch.full_like(row.phase, DONE)), after)


def first_canvas(following: Int[Tensor, " batch"], block: int, model: ModelConfig) -> Int[Tensor, "batch block"]:
    """A new block's canvas: all MASK, but the drawn first token of families that have one."""
    canvas = torch.full((following.shape[0], block), model.mask_id)
    if model.draws_first_token:
        canvas[:, 0] = following
    return canvas
