"""The types of the decode loop: the state that it carries, the statistics, and the result. All but the cache is kept on the host."""

from typing import NamedTuple

from jaxtyping import Int
from torch import Tensor

from specfold_torch_ref.diffusion.draft import Known
from specfold_torch_ref.diffusion.row import Row
from specfold_torch_ref.models.transformer import Cache


class Stats(NamedTuple):
    """Counts of each row. `specfold_jax.diffusion.state.Stats` explains them one by one.

    There is no `status`. Nothing is traced here, so a row that cannot be decoded raises a ValueError.
    """

    nfe: Tensor
    prefills: Tensor
    checks: Tensor
    commits: Tensor
    steps: Tensor
    drafting: Tensor
    drafted: Tensor
    accepted: Tensor
    saved_commits: Tensor
    shared: Tensor
    guard_stops: Tensor
    computed_rows: Tensor
    total_rows: Tensor


class DecodeState(NamedTuple):
    """What the loop carries.

    Attributes:
        row: where each row stands. Its `start` is also the number of cache entries that are valid.
        tokens [batch, span]: the prompt and the finished blocks.
        cache: keys and values, `span` entries a row, on the parameters' device. It is written in place.
        known: the distribution that drafts are made from.
        following [batch]: the token that this distribution draws for the start of the next block.
        stats: the counts up to now.
    """

    row: Row
    tokens: Int[Tensor, "batch span"]
    cache: Cache
    known: Known
    following: Int[Tensor, " batch"]
    stats: Stats


class Decoded(NamedTuple):
    """The result of a decode.

    Attributes:
        tokens [batch, capacity + max_new_tokens]: prompt and generation, padded at the end.
        lengths [batch]: tokens of both together.
        stats: the counts of each row.
    """

    tokens: Int[Tensor, "batch total"]
    lengths: Int[Tensor, " batch"]
    stats: Stats
