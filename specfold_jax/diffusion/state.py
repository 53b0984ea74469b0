"""The loop's state: what it holds, how it begins from prompts, and what comes out."""

from typing import NamedTuple

from flax import struct
from jaxtyping import Array, Int

from specfold_jax.diffusion.draft import Known
from specfold_jax.diffusion.row import Row
from specfold_jax.models.transformer import Cache


class Stats(struct.PyTreeNode):
    """Counts per row, int32 [batch] unless said.

    `nfe` = `checks` (forwards whose canvas had masks) + `commits` (forwards on a finished canvas); `prefills` apart. `steps`: vanilla
    reveal steps made. `drafting`: checks that had a draft; `drafted`: draft branches evaluated; `accepted`: branches whose evaluation
    was used, each of which saved a forward; `saved_commits`: those that served as a commit; `shared`: those that were a next block's
    first check. `guard_stops`: chains ended at a folded branch (a narrow decision, or a commit). `computed_rows` [batch, layers, 2]:
    rows of draft branches computed before attention and before the feed-forward network, of `total_rows`. `status`: 0, or why a row
    was not decoded (`validate.STATUS`).
    """

    nfe: Array
    prefills: Array
    checks: Array
    commits: Array
    steps: Array
    drafting: Array
    drafted: Array
    accepted: Array
    saved_commits: Array
    shared: Array
    guard_stops: Array
    computed_rows: Array
    total_rows: Array
    status: Array


COUNTED = tuple(name for name in Stats.__dataclass_fields__ if name != "computed_rows")
"""The statistics that are one number a row."""


class DecodeState(struct.PyTreeNode):
    """`row`: where each row stands; its `start` is also the number of cache entries that count. `tokens` [batch, span]: prompt and
    finished blocks; `cache`: keys and values of capacity span; `known`: the distribution drafts are made from; `following`: the token
    that distribution draws for the next block's start; `counts`: `COUNTED`, in one array so that one operation adds to all."""

    row: Row
    tokens: Int[Array, "batch span"]
    cache: Cache
    known: Known
    following: Int[Array, " batch"]
    counts: Int[Array, "batch counted"]
    computed_rows: Int[Array, "batch layers 2"]

    @property
    def stats(self) -> Stats:
        """What was counted so far."""
        return Stats(**dict(zip(COUNTED, self.counts.T, strict=True)), computed_rows=self.computed_rows)


class Decoded(NamedTuple):
    """`tokens` int32 [batch, capacity + max_new_tokens] prompt then generation, padded; `lengths` int32 [batch]; `stats`."""

    tokens: Int[Array, "batch total"]
    lengths: Int[Array, " batch"]
    stats: Stats
