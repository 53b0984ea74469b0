"""The loop's state: what it holds, how it begins from prompts, and what comes out. All but the cache is kept on the host."""

from typing import NamedTuple

from jaxtyping import Int
from torch import Tensor

from specfold_torch_ref.diffusion.draft import Known
from specfold_torch_ref.diffusion.row import Row
from specfold_torch_ref.models.transformer import Cache


class Stats(NamedTuple):
    """Counts per row, [batch] unless said; `specfold_jax.diffusion.state.Stats` says what each one is.

    There is no `status`: a row that cannot be decoded raises a ValueError, as nothing is traced here.
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
    """`row`: where each row stands; its `start` is also the number of cache entries that count. `tokens` [batch, span]: prompt and
    finished blocks; `cache`: keys and values of capacity span, on the parameters' device, written in place; `known`: the distribution
    drafts are made from; `following`: the token that distribution draws for the next block's start."""

    row: Row
    tokens: Int[Tensor, "batch span"]
    cache: Cache
    known: Known
    following: Int[Tensor, " batch"]
    stats: Stats


class Decoded(NamedTuple):
    """`tokens` int32 [batch, capacity + max_new_tokens] prompt then generation, padded; `lengths` int32 [batch]; `stats`."""

    tokens: Int[Tensor, "batch total"]
    lengths: Int[Tensor, " batch"]
    stats: Stats
