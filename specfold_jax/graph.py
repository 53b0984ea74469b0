"""The draft graph: which sets of (position rank, token rank) pairs a check evaluates beside the canvas (Spiffy, arXiv 2509.18085).

A node is a set of pairs to reveal on top of the current canvas; an edge leads from a node to a superset one recorded step further.
Nodes hold ranks, not tokens, so one calibrated graph serves every step. Its numbers are leaves: another graph of the same size never
recompiles a jitted decode.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Bool, Float32, Int32

from specfold_jax.config import concrete

Array = np.ndarray | jax.Array
Node = frozenset[tuple[int, int]]
LEAVES = {"pairs": np.int32, "level": np.int32, "parent": np.bool_, "weight": np.float32}


@dataclass(frozen=True)
class MadeFor:
    """What a graph was calibrated on. `vocab`: tokens; `block`, `sub_block`: positions; `threshold`: a probability."""

    model: str
    vocab: int
    block: int
    sub_block: int
    threshold: float
    temperature: float

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):
            raise ValueError(f"model={self.model!r} must be a name")
        for name in ("vocab", "block", "sub_block"):
            object.__setattr__(self, name, _whole(name, getattr(self, name), 1))
        for name, high in (("threshold", 1.0), ("temperature", np.finfo(np.float32).max)):
            try:  # by way of text: a float32 0.9 is saved as 0.9, not as 0.8999999762
                value = float(str(getattr(self, name)))
            except ValueError:
                value = np.nan
            if not 0 <= value <= high:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a number in [0, {high:.6g}]")
            object.__setattr__(self, name, value)
        if self.block % self.sub_block:
            raise ValueError(f"sub_block={self.sub_block} must divide block={self.block}")


@dataclass(frozen=True)
class _Uncompared:
    """Rides in the tree structure but not in its equality and hash, which are a jitted function's cache key."""

    value: MadeFor | None = field(compare=False)


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)  # eq=False: `==` on array fields has no truth value
class DraftGraph:
    """A draft graph; `from_sets` puts the nodes in the order (number of pairs, pairs).

    `pairs`: (position rank, token rank), -1 padding at the end. `level`: recorded steps from the root, at least 1.
    `parent[c, p]`: p is a parent of c. `weight`: expected use, for pruning. `max_drafts`: nodes kept per check.
    `token_ranks`: best tokens a position that the decoder has to keep, above every token rank in `pairs`.
    `made_for`: what the graph was calibrated on; None inside a traced function, which is shared by graphs of one size.
    """

    pairs: Int32[Array, "nodes width 2"]
    level: Int32[Array, " nodes"]
    parent: Bool[Array, "nodes nodes"]
    weight: Float32[Array, " nodes"]
    max_drafts: int
    token_ranks: int = 4
    made_for: MadeFor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_drafts", _whole("max_drafts", self.max_drafts, 0))
        object.__setattr__(self, "token_ranks", _whole("token_ranks", self.token_ranks, 1))
        self._check_static()
        if all(concrete(getattr(self, name)) is not None for name in LEAVES):
            self.validate()

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        keyed = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in LEAVES]
        return keyed, (self.max_drafts, self.token_ranks, _Uncompared(self.made_for))

    @classmethod
    def tree_unflatten(cls, aux: Any, leaves: Iterable[Any]) -> Self:
        # Past the constructor: leaves may be tracers or placeholders, and checking arrays here would wait for the device.
        graph, values = object.__new__(cls), tuple(leaves)
        # A trace serves many graphs, so it must not carry the first one's origin into its results.
        traced = any(isinstance(value, Tracer) for value in values)
        rest = (aux[0], aux[1], None if traced else aux[2].value)
        for entry, value in zip(fields(cls), values + rest, strict=True):
            object.__setattr__(graph, entry.name, value)
        return graph

    @property
    def nodes(self) -> int:
        return self.pairs.shape[0]

    @property
    def width(self) -> int:
        """Pairs of the largest node the graph has room for."""
        return self.pairs.shape[1]

    @property
    def sets(self) -> tuple[Node, ...]:
        """The nodes as Python sets, on the host."""
        return tuple(frozenset((int(i), int(j)) for i, j in node if i >= 0) for node in np.asarray(self.pairs))

    @classmethod
    def empty(cls, width: int = 1, token_ranks: int = 4) -> Self:
        """No drafts: decoding with it is vanilla. Calibration reads the distributions kept for `width` steps ahead; 0 keeps none."""
        pairs = np.zeros((0, _whole("width", width, 0), 2), np.int32)
        return cls(pairs, np.zeros(0, np.int32), np.zeros((0, 0), np.bool_), np.zeros(0, np.float32), 0, token_ranks)

    @classmethod
    def from_sets(
        cls,
        sets: Sequence[Node],
        levels: Sequence[int],
        weights: Sequence[float] | None = None,
        max_drafts: int | None = None,
        token_ranks: int | None = None,
        made_for: MadeFor | None = None,
    ) -> Self:
        """The graph of `sets`, each with every parent there is: all proper subsets exactly one level lower.

        `weights` default to 1, `max_drafts` to all nodes, `token_ranks` to 4. Raises ValueError as `validate` does.
        """
        weights = [1.0] * len(sets) if weights is None else weights
        if not len(sets) == len(levels) == len(weights):
            raise ValueError(f"{len(sets)} sets, {len(levels)} levels and {len(weights)} weights must be equally many")
        for node in sets:
            for pair in node:
                if len(pair) != 2 or not all(isinstance(rank, (int, np.integer)) and 0 <= rank < 2**31 for rank in pair):
                    raise ValueError(f"pair {pair} must be (position rank, token rank), whole numbers from 0")
        order = sorted(range(len(sets)), key=lambda n: (len(sets[n]), sorted(sets[n])))
        pairs = np.full((len(sets), max((len(node) for node in sets), default=1) or 1, 2), -1, np.int32)
        parent = np.zeros((len(sets), len(sets)), np.bool_)
        for row, n in enumerate(order):
            if sets[n]:
                pairs[row, : len(sets[n])] = sorted(sets[n])
            parent[row] = [levels[p] == levels[n] - 1 and sets[p] < sets[n] for p in order]
        level = np.array([_whole("level", levels[n], 1) for n in order], np.int32)
        kept = len(sets) if max_drafts is None else max_drafts
        weight = np.array([weights[n] for n in order], np.float32)
        return cls(pairs, level, parent, weight, kept, 4 if token_ranks is None else token_ranks, made_for)

    def _check_static(self) -> None:
        """Shapes, dtypes and sizes, which are known under a trace as well."""
        nodes = getattr(self.pairs, "shape", (0,))[0] if getattr(self.pairs, "ndim", 0) else 0
        shapes = {"pairs": (nodes, None, 2), "level": (nodes,), "parent": (nodes, nodes), "weight": (nodes,)}
        for name, dtype in LEAVES.items():
            leaf, shape = getattr(self, name), shapes[name]
            want = f"{np.dtype(dtype)} [{', '.join('width' if size is None else str(size) for size in shape)}]"
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                raise ValueError(f"{name} must be an array {want}, not a {type(leaf).__name__}")
            fits = len(leaf.shape) == len(shape) and all(size in (None, got) for size, got in zip(shape, leaf.shape, strict=True))
            if leaf.dtype != dtype or not fits:
                raise ValueError(f"{name} is {leaf.dtype} {list(leaf.shape)} and must be {want}")
        if nodes and not self.width:
            raise ValueError("pairs has width 0 and must have room for at least one pair a node")
        if not min(1, nodes) <= self.max_drafts <= nodes:
            raise ValueError(f"max_drafts={self.max_drafts} must lie in {min(1, nodes)}..{nodes}, as the graph has {nodes} nodes")
        if self.made_for is not None and not isinstance(self.made_for, MadeFor):
            raise ValueError(f"made_for={self.made_for!r} must be a MadeFor or None")

    def validate(self, block: int | None = None) -> None:
        """Checks every rule of a draft graph on the host, and with `block` that each position rank lies inside a block.

        Raises ValueError naming the node, what it has and what would be right.
        """
        self._check_static()
        pairs, level, parent, weight = (np.asarray(getattr(self, name)) for name in LEAVES)
        seen: dict[Node, int] = {}
        for n, node in enumerate(pairs.tolist()):
            real = [(i, j) for i, j in node if (i, j) != (-1, -1)]
            name = f"node {n} {show(real)}"
            if not real:
                raise ValueError(f"node {n} is empty and must reveal at least one (position rank, token rank) pair")
            for i, j in real:
                if i < 0 or j < 0:
                    raise ValueError(f"{name}: ranks must be at least 0, padding is (-1, -1)")
                if block is not None and i >= block:
                    raise ValueError(f"{name}: position rank {i} must be below the block of {block} positions")
                if j >= self.token_ranks:
                    raise ValueError(f"{name}: token rank {j} must be below token_ranks={self.token_ranks}")
            if node[len(real) :] != [[-1, -1]] * (len(node) - len(real)):
                raise ValueError(f"{name}: padding must stand at the end")
            if len({i for i, _ in real}) < len(real):
                raise ValueError(f"{name}: a position rank occurs twice, and a position takes one token")
            if frozenset(real) in seen:
                raise ValueError(f"{name} is a duplicate of node {seen[frozenset(real)]}; nodes must differ")
            seen[frozenset(real)] = n
            if level[n] < 1:
                raise ValueError(f"{name}: level {level[n]} must be at least 1 (the root is level 0)")
            if not 0 <= weight[n] < np.inf:
                raise ValueError(f"{name}: weight {weight[n]} must be a finite number of at least 0")
        self._check_edges(list(seen), level, parent)

    def _check_edges(self, sets: list[Node], level: np.ndarray, parent: np.ndarray) -> None:
        cyclic = np.ones(len(sets), np.bool_)
        while (free := cyclic & ~parent[:, cyclic].any(axis=1)).any():  # take away whatever has no parent left
            cyclic &= ~free
        if cyclic.any():
            raise ValueError(f"nodes {np.flatnonzero(cyclic).tolist()} hang on a cycle; edges must lead from a level to the next")
        for c, p in np.argwhere(parent).tolist():
            edge = f"edge from node {p} {show(sets[p])} to node {c} {show(sets[c])}"
            if level[c] != level[p] + 1:
                raise ValueError(f"{edge} leads from level {level[p]} to level {level[c]}; it must go up exactly one")
            if not sets[p] < sets[c]:
                raise ValueError(f"{edge}: the parent's pairs must be a proper subset of the child's")
        for n in np.flatnonzero((level > 1) & ~parent.any(axis=1)).tolist():
            raise ValueError(f"node {n} {show(sets[n])} of level {level[n]} is unreachable: it must have a parent of level {level[n] - 1}")

    def save(self, path: str | os.PathLike) -> None:
        """Writes the graph as JSON, one node a line, under the names of its fields; the file is whole or not there."""
        parts = {name: getattr(self, name) for name in ("max_drafts", "token_ranks")}
        parts["made_for"] = asdict(self.made_for) if self.made_for else None
        rows = {name: np.asarray(getattr(self, name)).astype(np.int32).tolist() for name in ("pairs", "parent")}
        text = {name: "[" + ",".join(f"\n    {json.dumps(row)}" for row in rows[name]) + "\n  ]" for name in rows}
        text["level"] = json.dumps(np.asarray(self.level).tolist())
        text["weight"] = json.dumps([float(str(w)) for w in np.asarray(self.weight)])  # float32's own digits
        text |= {name: json.dumps(value) for name, value in parts.items()}
        body = ",\n".join(f'  "{entry.name}": {text[entry.name]}' for entry in fields(self))
        path = Path(path)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            partial.write_text(f"{{\n{body}\n}}\n", encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Reads and validates a saved graph. Raises ValueError naming the file and the field."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:  # covers text that is not UTF-8
            raise ValueError(f"{path} must be a draft graph in JSON: {error}") from error
        _same_names(f"{path}", data, [entry.name for entry in fields(cls)])
        try:
            if data["made_for"] is not None:
                _same_names("made_for", data["made_for"], [entry.name for entry in fields(MadeFor)])
                data["made_for"] = MadeFor(**data["made_for"])
            return cls(**(data | {name: _leaf(name, data[name]) for name in LEAVES}))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def check_made_for(graph: DraftGraph, model_name: str, vocab: int, block: int, sub_block: int) -> None:
    """Raises ValueError naming what differs from the calibration; a graph without a record (made by hand) passes."""
    if graph.made_for is None:
        return
    here = {"model": model_name, "vocab": vocab, "block": block, "sub_block": sub_block}
    made = asdict(graph.made_for)
    if differ := [f"{name}={made[name]!r} (here {value!r})" for name, value in here.items() if made[name] != value]:
        raise ValueError(f"the draft graph was calibrated for {', '.join(differ)}; calibrate one for this model and decoding")


def show(node: Iterable[tuple[int, int]]) -> str:
    """A node's pairs, for messages and pictures."""
    return "{" + ", ".join(f"({i},{j})" for i, j in sorted(node)) + "}"


def _whole(name: str, value: Any, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {low}")
    return int(value)


def _same_names(where: str, data: Any, names: list[str]) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"{where} must be an object with the fields {names}, not a {type(data).__name__}")
    if missing := [name for name in names if name not in data]:
        raise ValueError(f"{where} lacks {missing}; the fields must be {names}")
    if unknown := [name for name in data if name not in names]:
        raise ValueError(f"{where} has unknown fields {unknown}; the fields must be {names}")


def _leaf(name: str, value: Any) -> np.ndarray:
    """A field of a file as an array; numbers that the field's dtype cannot hold are errors, not casts."""
    dtype = np.dtype(LEAVES[name])
    if value == [] and name in ("pairs", "parent"):
        return np.zeros((0, 1, 2) if name == "pairs" else (0, 0), dtype)
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(f"{name} must be a list of equally long rows") from None
    kinds, low, high = {"i": ("iu", -(2**31), 2**31 - 1), "b": ("biu", 0, 1), "f": ("iuf", -3.4e38, 3.4e38)}[dtype.kind]
    if array.size and (array.dtype.kind not in kinds or array.min() < low or array.max() > high):
        raise ValueError(f"{name} must hold {dtype} numbers, got {array.dtype} in {str(value)[:80]}")
    return array.astype(dtype)
