"""The draft graph: what a check evaluates beside the canvas (Spiffy, arXiv 2509.18085).

A rank node is a set of (position rank, token rank) pairs to reveal on top of the current canvas; an edge leads from a node to a superset
one recorded step further. A confidence node (this project's) reveals every masked position of the active sub-block whose log-odds exceed
theta, and the best one always; with hop h all of the active sub-block and the h - 1 after it, and those positions of the h-th.
Nodes hold ranks and log-odds, not tokens, so one calibrated graph serves every step. Its numbers are leaves: another graph of the same
size never recompiles a jitted decode.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Self

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Bool, Float32, Int32

from specfold_jax import values as graph_json_values
from specfold_jax.config import LARGEST, concrete
from specfold_jax.diffusion import graph_file
from specfold_jax.files import read_json, write_text
from specfold_jax.models.checkpoint import resolve_folder
from specfold_jax.values import Natural, Size, conform, conforming

Array = np.ndarray | jax.Array
Node = frozenset[tuple[int, int]]
LEAVES = {
    "pairs": np.int32,
    "level": np.int32,
    "parent": np.bool_,
    "weight": np.float32,
    "theta": np.float32,
    "hop": np.int32,
    "theta_weight": np.float32,
}


@dataclass(frozen=True)
class MadeFor:
    """What a graph was calibrated on. `vocab`: tokens; `block`, `sub_block`: positions; `threshold`: a probability."""

    model: str
    vocab: Size
    block: Size
    sub_block: Size
    threshold: Annotated[float, 0, 1]
    temperature: Annotated[float, 0, LARGEST]

    def __post_init__(self) -> None:
        for name in ("threshold", "temperature"):  # may lie on a device
            object.__setattr__(self, name, np.asarray(getattr(self, name))[()])
        conform(self)
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
    `parent[c, p]`: p is a parent of c. `weight`: expected use, for pruning. `theta` (log-odds), `hop` (sub-blocks), `theta_weight`: the
    confidence nodes, from the smallest set to the largest. `max_drafts`: nodes of both kinds kept per check. `run_on`: position ranks
    go on into the next sub-blocks after the last masked position of the active one. `reach`: sub-blocks, from a canvas' active one
    on, whose distributions are evaluated and kept for drafting.
    `token_ranks`: best tokens a position that the decoder has to keep, above every token rank in `pairs`.
    `made_for`: what the graph was calibrated on; None inside a traced function, which is shared by graphs of one size.
    """

    pairs: Int32[Array, "ranked width 2"]
    level: Int32[Array, " ranked"]
    parent: Bool[Array, "ranked ranked"]
    weight: Float32[Array, " ranked"]
    theta: Float32[Array, " thetas"]
    hop: Int32[Array, " thetas"]
    theta_weight: Float32[Array, " thetas"]
    max_drafts: Natural
    token_ranks: Size = 4
    run_on: bool = False
    reach: Size = 2
    made_for: MadeFor | None = None

    def __post_init__(self) -> None:
        conform(self, LEAVES)
        self._validate_static()
        if all(concrete(getattr(self, name)) is not None for name in LEAVES):
            self.validate()

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        keyed = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in LEAVES]
        return keyed, (self.max_drafts, self.token_ranks, self.run_on, self.reach, _Uncompared(self.made_for))

    @classmethod
    def tree_unflatten(cls, aux: Any, leaves: Iterable[Any]) -> Self:
        # Past the constructor: leaves may be tracers or placeholders, and checking arrays here would wait for the device.
        graph, values = object.__new__(cls), tuple(leaves)
        # A trace serves many graphs, so it must not carry the first one's origin into its results.
        traced = any(isinstance(value, Tracer) for value in values)
        rest = (*aux[:4], None if traced else aux[4].value)
        for entry, value in zip(fields(cls), values + rest, strict=True):
            object.__setattr__(graph, entry.name, value)
        return graph

    @property
    def nodes(self) -> int:
        """Rank nodes and confidence nodes."""
        return self.pairs.shape[0] + self.theta.shape[0]

    @property
    def width(self) -> int:
        """Pairs of the largest node the graph has room for."""
        return self.pairs.shape[1]

    @property
    def sets(self) -> tuple[Node, ...]:
        """The rank nodes as Python sets, on the host."""
        return tuple(frozenset((int(i), int(j)) for i, j in node if i >= 0) for node in np.asarray(self.pairs))

    @classmethod
    def empty(cls, width: int = 0, token_ranks: int = 1, reach: int = 1) -> Self:
        """No drafts: decoding with it is vanilla. Calibration reads the distributions kept for `width` steps ahead; 0 keeps none."""
        shapes = {"pairs": (0, conforming("width", width, Natural), 2), "parent": (0, 0)}
        leaves = {name: np.zeros(shapes.get(name, 0), dtype) for name, dtype in LEAVES.items()}
        return cls(*leaves.values(), max_drafts=0, token_ranks=token_ranks, reach=reach)

    @classmethod
    def from_sets(
        cls,
        sets: Sequence[Node],
        levels: Sequence[int],
        weights: Sequence[float] | None = None,
        max_drafts: int | None = None,
        token_ranks: int | None = None,
        made_for: MadeFor | None = None,
        thetas: Sequence[tuple[float, int]] = (),
        theta_weights: Sequence[float] | None = None,
        run_on: bool = False,
        width: int = 1,
        reach: int = 2,
    ) -> Self:
        """The graph of `sets`, each with every parent there is: all proper subsets exactly one level lower.

        `thetas`: confidence nodes as (theta, hop). Weights default to 1, `max_drafts` to all nodes, `token_ranks` to 4. `width`: steps
        ahead for which token ranks are kept at least. Raises ValueError as `validate` does.
        """
        weights = [1.0] * len(sets) if weights is None else weights
        if not len(sets) == len(levels) == len(weights):
            raise ValueError(f"{len(sets)} sets, {len(levels)} levels and {len(weights)} weights must be equally many")
        for node in sets:
            for pair in node:
                if len(pair) != 2 or not all(isinstance(rank, (int, np.integer)) and 0 <= rank < 2**31 for rank in pair):
                    raise ValueError(f"pair {pair} must be (position rank, token rank), whole numbers from 0")
        order = sorted(range(len(sets)), key=lambda n: (len(sets[n]), sorted(sets[n])))
        pairs = np.full((len(sets), max(width, *(len(node) for node in sets), 1), 2), -1, np.int32)
        parent = np.zeros((len(sets), len(sets)), np.bool_)
        for row, n in enumerate(order):
            if sets[n]:
                pairs[row, : len(sets[n])] = sorted(sets[n])
            parent[row] = [levels[p] == levels[n] - 1 and sets[p] < sets[n] for p in order]
        level = np.array([conforming("level", levels[n], Size) for n in order], np.int32)
        theta_weights = [1.0] * len(thetas) if theta_weights is None else theta_weights
        if len(theta_weights) != len(thetas):
            raise ValueError(f"{len(thetas)} thetas and {len(theta_weights)} theta_weights must be equally many")
        steps = sorted(range(len(thetas)), key=lambda k: (thetas[k][1], -thetas[k][0]))
        return cls(
            pairs=pairs,
            level=level,
            parent=parent,
            weight=np.array([weights[n] for n in order], np.float32),
            theta=np.array([thetas[k][0] for k in steps], np.float32),
            hop=np.array([thetas[k][1] for k in steps], np.int32),
            theta_weight=np.array([theta_weights[k] for k in steps], np.float32),
            max_drafts=len(sets) + len(thetas) if max_drafts is None else max_drafts,
            token_ranks=4 if token_ranks is None else token_ranks,
            run_on=run_on,
            reach=reach,
            made_for=made_for,
        )

    def _validate_static(self) -> None:
        """Shapes, dtypes and sizes, which are known under a trace as well."""
        ranked, thetas = (getattr(x, "shape", (0,))[0] if getattr(x, "ndim", 0) else 0 for x in (self.pairs, self.theta))
        shapes = {"pairs": (ranked, None, 2), "level": (ranked,), "parent": (ranked, ranked), "weight": (ranked,)}
        shapes |= dict.fromkeys(("theta", "hop", "theta_weight"), (thetas,))
        for name, dtype in LEAVES.items():
            leaf, shape = getattr(self, name), shapes[name]
            want = f"{np.dtype(dtype)} [{', '.join('width' if size is None else str(size) for size in shape)}]"
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                raise ValueError(f"{name} must be an array {want}, not a {type(leaf).__name__}")
            fits = len(leaf.shape) == len(shape) and all(size in (None, got) for size, got in zip(shape, leaf.shape, strict=True))
            if leaf.dtype != dtype or not fits:
                raise ValueError(f"{name} is {leaf.dtype} {list(leaf.shape)} and must be {want}")
        nodes = ranked + thetas
        if nodes and not self.width:
            raise ValueError("pairs has width 0 and must have room for at least one pair a node")
        if not min(1, nodes) <= self.max_drafts <= nodes:
            raise ValueError(f"max_drafts={self.max_drafts} must lie in {min(1, nodes)}..{nodes}, as the graph has {nodes} nodes")

    def text(self) -> str:
        """The graph as JSON."""
        arrays = {name: np.asarray(getattr(self, name)) for name in LEAVES}
        values = {name: getattr(self, name) for name in ("max_drafts", "token_ranks", "run_on", "reach")}
        return graph_file.text(arrays, values | {"made_for": asdict(self.made_for) if self.made_for else None})

    @classmethod
    def parse(cls, data: Any) -> Self:
        """The graph of the JSON value that `text` stands for. Raises ValueError naming the field."""
        plain = [entry.name for entry in fields(cls) if entry.name not in LEAVES]
        data = graph_file.parse(data, "the draft graph", LEAVES, plain, unbounded="theta")
        for name, shape in (("pairs", (0, 1, 2)), ("parent", (0, 0))):
            data[name] = data[name] if data[name].size else data[name].reshape(shape)
        if data["made_for"] is not None:
            graph_json_values.same_names("made_for", data["made_for"], [entry.name for entry in fields(MadeFor)])
            data["made_for"] = MadeFor(**data["made_for"])
        return cls(**data)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the graph as JSON; the file is whole or not there."""
        write_text(path, self.text())

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Reads and validates a saved graph. Raises ValueError naming the file and the field."""
        data = read_json(path, "a draft graph")
        try:
            return cls.parse(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def validate(self, block: int | None = None) -> None:
        """Checks every rule of a draft graph on the host, and with `block` that each position rank lies inside a block.

        Raises ValueError naming the node, what it has and what would be right.
        """
        self._validate_static()
        pairs, level, parent, weight, theta, hop, theta_weight = (np.asarray(getattr(self, name)) for name in LEAVES)
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
        self._validate_edges(list(seen), level, parent)
        for k, (odds, step, use) in enumerate(zip(theta.tolist(), hop.tolist(), theta_weight.tolist(), strict=True)):
            name = f"confidence node {k} (theta {odds}, hop {step})"
            if np.isnan(odds) or odds == np.inf or not 0 <= step < self.reach:
                raise ValueError(f"{name}: theta must be a number below infinity, hop at least 0 and below reach={self.reach}")
            if not 0 <= use < np.inf:
                raise ValueError(f"{name}: weight {use} must be a finite number of at least 0")
            if k and not (hop[k - 1], -theta[k - 1]) < (step, -odds):
                raise ValueError(f"{name} must differ from the one before it and reveal more: hops rise, thetas fall within a hop")

    def _validate_edges(self, sets: list[Node], level: np.ndarray, parent: np.ndarray) -> None:
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


def load_graph(model: str | os.PathLike) -> DraftGraph:
    """The draft graph in a model's folder; "tiny" is the packaged model. Raises ValueError if it has none or a damaged one."""
    path = resolve_folder(model) / "graph.json"
    if not path.is_file():
        raise ValueError(
            f"{path}: no such draft graph; calibrate one (`specfold_jax.calibrate`) or read one from elsewhere (DraftGraph.load)"
        )
    return DraftGraph.load(path)


def differing(made_for: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """What a graph or profile was made for and differs here, in words; "" if nothing does. None here is not compared."""
    differ = {name: value for name, value in here.items() if value is not None and made_for[name] != value}
    return ", ".join(f"{name}={made_for[name]!r} (here {value!r})" for name, value in differ.items())


def require_made_for(graph: DraftGraph, model_name: str | None, vocab: int, block: int, sub_block: int) -> None:
    """Raises ValueError naming what differs from the calibration; a graph without a record (made by hand) passes.

    Sizes must be equal; a graph serves any threshold and temperature. A name of None is not compared.
    """
    here = {"model": model_name, "vocab": vocab, "block": block, "sub_block": sub_block}
    if graph.made_for is not None and (differ := differing(asdict(graph.made_for), here)):
        raise ValueError(f"the draft graph was calibrated for {differ}; calibrate one for this model and decoding")


def show(node: Iterable[tuple[int, int]]) -> str:
    """A node's pairs, for messages and pictures."""
    return "{" + ", ".join(f"({i},{j})" for i, j in sorted(node)) + "}"
