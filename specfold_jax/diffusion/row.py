"""One row of a batch as vanilla decoding sees it: where it stands, and the transition that one evaluation of its canvas makes.

Speculation is lossless because it makes the same transition on its branches.
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from specfold_jax.config import DecodeConfig, ModelConfig
from specfold_jax.diffusion import reveal
from specfold_jax.diffusion.arrays import where_row

DENOISE, COMMIT, DONE = 0, 1, 2
"""A row's phase: its canvas has masks to reveal, its canvas is complete and waits for the commit, or the row has ended."""


class Row(struct.PyTreeNode):
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

    start: Int[Array, " batch"]
    canvas: Int[Array, "batch block"]
    step: Int[Array, " batch"]
    phase: Int[Array, " batch"]
    stopped: Bool[Array, " batch"]
    lengths: Int[Array, " batch"]
    limit: Int[Array, " batch"]
    seed: Int[Array, " batch"]

    @property
    def positions(self) -> Int[Array, "batch block"]:
        """Absolute positions of the canvas."""
        return self.start[:, None] + jnp.arange(self.canvas.shape[1], dtype=jnp.int32)


def stops(row: Row, model: ModelConfig, decode: DecodeConfig) -> Bool[Array, " batch"]:
    """Whether a generated stop token stands in the canvas with no MASK before it."""
    return reveal.shows_stop(row.canvas, row.positions >= row.lengths[:, None], decode.stop_tokens(model), model.mask_id)


def ends(row: Row, model: ModelConfig, decode: DecodeConfig) -> Bool[Array, " batch"]:
    """Whether a row is over with this canvas: it stops, or no MASK is left before its limit."""
    open_before_limit = jnp.any((row.canvas == model.mask_id) & (row.positions < row.limit[:, None]), axis=1)
    reached = row.limit <= row.start + row.canvas.shape[1]
    return (reached & ~open_before_limit) | stops(row, model, decode)


def revealed(
    row: Row, reveal: Bool[Array, "batch block"], tokens: Int[Array, "batch block"], model: ModelConfig, decode: DecodeConfig
) -> Row:
    """The row after one vanilla step."""
    after = row.replace(canvas=jnp.where(reveal, tokens, row.canvas), step=row.step + 1)
    full = jnp.all(after.canvas != model.mask_id, axis=1)
    match model.stop_rule:
        case "reveal":
            over = ends(after, model, decode)
            return after.replace(phase=jnp.where(over, DONE, jnp.where(full, COMMIT, DENOISE)))
        case "reveal_commit":
            stopped = stops(after, model, decode)
            return after.replace(stopped=stopped, phase=jnp.where(full | stopped, COMMIT, DENOISE))
        case "commit":
            return after.replace(phase=jnp.where(full, COMMIT, DENOISE))


def committed(row: Row, following: Int[Array, " batch"], model: ModelConfig, decode: DecodeConfig) -> Row:
    """The row after its block's commit, either done or at its next block. `following`: the token drawn for that block's start."""
    block = row.canvas.shape[1]
    stopped = row.stopped | stops(row, model, decode) if model.stop_rule == "commit" else row.stopped
    after = row.replace(start=row.start + block, canvas=first_canvas(following, block, model), step=jnp.zeros_like(row.step))
    # The first token of a block can end the row before any forward is spent on it.
    over = ends(after, model, decode) if model.stop_rule == "reveal" else jnp.zeros_like(stopped)
    after = after.replace(phase=jnp.where(over, DONE, DENOISE))
    stays = stopped | (after.start >= row.limit)
    return where_row(stays, row.replace(stopped=stopped, phase=jnp.full_like(row.phase, DONE)), after)


def first_canvas(following: Int[Array, " batch"], block: int, model: ModelConfig) -> Int[Array, "batch block"]:
    """A new block's canvas. All of it is MASK, except the first token in families that draw it."""
    canvas = jnp.full((following.shape[0], block), model.mask_id, jnp.int32)
    return canvas.at[:, 0].set(following) if model.draws_first_token else canvas
