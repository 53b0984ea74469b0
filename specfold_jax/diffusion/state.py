"""The types of the decode loop: the state that it carries, the statistics, and the result."""

from typing import NamedTuple

from flax import struct
from jaxtyping import Array, Int

from specfold_jax.diffusion.draft import Known
from specfold_jax.diffusion.row import Row
from specfold_jax.models.transformer import Cache


class Stats(struct.PyTreeNode):
    """Counts of each row, int32 [batch] but for `computed_rows`.

    Attributes:
        nfe: forward passes in the loop, `checks` + `commits`.
        prefills: 1 if the prompt has a finished block.
        checks: forward passes whose canvas had masks.
        commits: forward passes on a finished canvas.
        steps: vanilla reveal steps made.
        drafting: checks that had a draft.
        drafted: draft branches evaluated.
        accepted: branches whose evaluation was used. Each of them saved a forward pass.
        saved_commits: accepted branches that served as a commit.
        shared: accepted branches that were the next block's first check.
        guard_stops: chains that ended at a folded branch, because a decision was narrow or the branch was complete.
        computed_rows [batch, layers, 2]: rows of draft branches computed before attention, and before the feed-forward network.
        total_rows: rows that draft branches had.
        status: 0, or the index in `validate.STATUS` of the reason why the row was not decoded.
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
"""The statistics that have one number a row."""


class DecodeState(struct.PyTreeNode):
    """What the loop carries.

    Attributes:
        row: where each row stands. Its `start` is also the number of cache entries that are valid.
        tokens [batch, span]: the prompt and the finished blocks.
        cache: keys and values, at least `span` entries a row.
        known: the distribution that drafts are made from.
        following [batch]: the token that this distribution draws for the start of the next block.
        counts [batch, counted]: the statistics named in `COUNTED`, in one array because one operation then adds to all.
        computed_rows [batch, layers, 2]: the remaining one.
    """

    row: Row
    tokens: Int[Array, "batch span"]
    cache: Cache
    known: Known
    following: Int[Array, " batch"]
    counts: Int[Array, "batch counted"]
    computed_rows: Int[Array, "batch layers 2"]

    @property
    def stats(self) -> Stats:
        """The counts up to now."""
        return Stats(**dict(zip(COUNTED, self.counts.T, strict=True)), computed_rows=self.computed_rows)


class Decoded(NamedTuple):
    """The result of a decode.

    Attributes:
        tokens [batch, capacity + max_new_tokens]: prompt and generation, padded at the end.
        lengths [batch]: tokens of both together.
        stats: the counts of each row.
    """

    tokens: Int[Array, "batch total"]
    lengths: Int[Array, " batch"]
    stats: Stats
