"""Draft graphs compared by recorded vanilla runs alone. Decoding with each of them would compile each of them."""

from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from specfold_jax.calibration.calibrate import choose_graph
from specfold_jax.calibration.options import Source
from specfold_jax.calibration.records import Records, hits
from specfold_jax.diffusion.draft import Known, distinct, every_draft
from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.tuning.measure import Subject
from specfold_jax.tuning.profile import graph_of
from specfold_jax.values import Size, conform, same_names


@dataclass(frozen=True)
class Candidate:
    """A graph and what the records say of it.

    `depth`: mean accepted depth. `saved`: forwards saved a prompt, without shared commits. `diversity`: distinct drafts over all drafts of
    the graph's nodes, mean over the recorded checks (1: no two nodes draft the same).
    """

    source: Source
    drafts: Size
    reach: Size
    graph: DraftGraph
    depth: float
    saved: float
    diversity: float

    def __post_init__(self) -> None:
        conform(self)

    def record(self) -> dict[str, Any]:
        """The candidate as a JSON value."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"graph": self.graph.record()}

    @classmethod
    def of(cls, record: Any) -> "Candidate":
        """The candidate of `record`'s value. Raises ValueError naming the field."""
        same_names("it", record, [field.name for field in fields(cls)])
        return cls(**record | {"graph": graph_of(record["graph"])})


def candidate(records: Records, prompts: int, subject: Subject, source: Source, drafts: int, reach: int) -> Candidate | None:
    """The best graph of a source under a budget of drafts. None if the source offers nothing on these records of `prompts` prompts."""
    model, decode = subject.model, subject.decode
    try:
        graph = choose_graph(records, model, decode, drafts, source, reach=reach, name=subject.name)
    except ValueError:
        return None
    if not graph.nodes:
        return None
    sub_block = decode.window(model)
    covered = hits(records, graph, model.mask_id, sub_block).any(axis=1)
    depth = np.cumprod(covered, axis=1).sum(axis=1)
    return Candidate(
        source,
        drafts,
        reach,
        graph,
        depth=float(depth.mean()),
        saved=saved_forwards(records, depth) / prompts,
        diversity=diversity(records, graph, model.mask_id, sub_block),
    )


def saved_forwards(records: Records, depth: np.ndarray) -> int:
    """Forwards that accepted drafts save on the recorded runs. `depth`: drafts accepted at each record.

    A check that accepts n drafts skips the next n states, or the rest of its block and the commit.
    """
    saved = r = 0
    while r < len(depth):
        saved += int(depth[r])
        for _ in range(int(depth[r])):  # stops at the block's last record: the complete canvas has no record
            if r + 1 < len(depth) and _follows(records, r):
                r += 1
        r += 1
    return saved


def _follows(records: Records, r: int) -> bool:
    """Whether the next record is the state after this one."""
    return bool((records.canvas[r + 1] == records.after[r, 0]).all())


def diversity(records: Records, graph: DraftGraph, mask_id: int, sub_block: int) -> float:
    """Distinct valid drafts over valid drafts, mean over the records that have drafts."""

    @jax.jit
    def count(canvas: Array, known: Known) -> tuple[Array, Array]:
        drafts = every_draft(canvas, known, graph, mask_id, sub_block)
        return jnp.sum(drafts.valid, axis=1), jnp.sum(distinct(drafts).valid, axis=1)

    every, different = (np.asarray(x) for x in count(jnp.asarray(records.canvas), jax.tree.map(jnp.asarray, records.known)))
    return float((different[every > 0] / every[every > 0]).mean()) if every.any() else 0.0


def worth_decoding(found: list[Candidate], forwards: float, least: float = 0.02) -> list[Candidate]:
    """For each number of drafts the source that saves most, smallest first, without graphs that cannot pay.

    More drafts never make a check cheaper. So a larger graph is left out unless it lowers the forwards that remain, of `forwards` a prompt,
    by more than a share `least`.
    """
    kept: list[Candidate] = []
    for drafts in sorted({c.drafts for c in found}):
        best = max((c for c in found if c.drafts == drafts), key=lambda c: c.saved)
        if not kept or forwards - best.saved < (1 - least) * (forwards - kept[-1].saved):
            kept.append(best)
    return kept
