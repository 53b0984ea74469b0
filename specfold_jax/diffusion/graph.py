"""The draft graph: the nodes that say which drafts a check evaluates beside the canvas (Spiffy, arXiv 2509.18085).

A rank node is a set of (position rank, token rank) pairs, which are revealed on top of the current canvas. An edge leads from a node to a
superset one recorded step further.

A confidence node (this project's) has a threshold, theta, and a number of sub-blocks, hop. It reveals the masked positions of the sub-block
`hop` ahead whose log-odds exceed theta, and all masked positions of the sub-blocks before it. With hop 0, the active sub-block, it also
reveals the best position in any case.

Nodes hold ranks and log-odds, not tokens, so one calibrated graph serves every step. Its numbers are leaves of a pytree. Another graph of
the same size does not compile a jitted decode again.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Self

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Bool, Float32, Int32

from specfold_jax.config import LARGEST, concrete
from specfold_jax.diffusion import graph_file
from specfold_jax.files import read_json, write_text
from specfold_jax.models.checkpoint import resolve_folder
from specfold_jax.values import Natural, Size, conform, conforming, of_record

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
MATRICES = {"pairs": (0, 1, 2), "parent": (0, 0)}
"""Leaves of more than one axis, and their shape where there are no rank nodes."""


@dataclass(frozen=True)
class MadeFor:
    """What a graph was calibrated on.

    Attributes:
        model: its name.
        vocab: tokens of its vocabulary.
        block, sub_block: positions of each.
        threshold, temperature: as in `DecodeConfig`.
    """

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
    """A part of the tree's structure that its equality and hash leave out, because these are a jitted function's cache key."""

    value: MadeFor | None = field(compare=False)


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)  # eq=False: `==` on array fields has no truth value
class DraftGraph:
    """A draft graph. `from_sets` makes one, with nodes in the order (number of pairs, pairs).

    Attributes:
        pairs [ranked, width, 2]: of each rank node, its (position rank, token rank) pairs, padded with -1 at the end.
        level [ranked]: recorded steps from the canvas to the node, at least 1.
        parent [ranked, ranked]: `parent[c, p]` says that node p is a parent of node c.
        weight [ranked]: expected use. The heaviest nodes are kept.
        theta [thetas]: log-odds thresholds of the confidence nodes, from the smallest set to the largest.
        hop [thetas]: how many sub-blocks ahead they reach.
        theta_weight [thetas]: their expected use.
        max_drafts: drafts of both kinds that a check evaluates at most.
        token_ranks: best tokens kept for each position. Every token rank in `pairs` is below it.
        run_on: position ranks go on into the next sub-blocks, after the last masked position of the active one.
        reach: sub-blocks, from the active one on, whose distributions are evaluated and kept for drafts.
        made_for: what the graph was calibrated on. None inside a traced function, because graphs of one size share it.

    Three nodes: the most confident position with its best token, the same position with its second token, and, one step further, the two
    most confident positions. All have room for two pairs:

    >>> nodes = [frozenset({(0, 0)}), frozenset({(0, 1)}), frozenset({(0, 0), (1, 0)})]
    >>> graph = DraftGraph.from_sets(nodes, levels=[1, 1, 2], token_ranks=2)
    >>> graph.pairs.tolist()
    [[[0, 0], [-1, -1]], [[0, 1], [-1, -1]], [[0, 0], [1, 0]]]
    >>> graph.parent.astype(int).tolist()  # node 2 descends from node 0
    [[0, 0, 0], [0, 0, 0], [1, 0, 0]]

    On the canvas 7 _ _ _, if position 2 is the most confident with tokens 12 and 22, and position 3 comes next with 13, the drafts are:

    >>> from specfold_jax.diffusion.draft import Known, propose
    >>> _ = 99  # MASK
    >>> tokens = np.array([[_, _], [11, 21], [12, 22], [13, 23]], np.int32)
    >>> known = Known(np.broadcast_to(tokens, (1, graph.width, 4, 2)), np.array([[-np.inf, 1, 3, 2]], np.float32))
    >>> propose(np.array([[7, _, _, _]], np.int32), known, graph, mask_id=_, sub_block=4).tokens.tolist()
    [[[7, 99, 12, 99], [7, 99, 22, 99], [7, 99, 12, 13]]]
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
        # Past the constructor, because leaves may be tracers or placeholders, and reading arrays here would wait for the device.
        graph, values = object.__new__(cls), tuple(leaves)
        # A trace serves many graphs, so it must not carry the first one's origin into its results.
        traced = any(isinstance(value, Tracer) for value in values)
        rest = (*aux[:4], None if traced else aux[4].value)
        for entry, value in zip(fields(cls), values + rest, strict=True):
            object.__setattr__(graph, entry.name, value)
        return graph

    @property
    def nodes(self) -> int:
        """How many rank nodes and confidence nodes there are."""
        return self.pairs.shape[0] + self.theta.shape[0]

    @property
    def width(self) -> int:
        """How many pairs a rank node has room for."""
        return self.pairs.shape[1]

    @property
    def sets(self) -> tuple[Node, ...]:
        """The rank nodes as Python sets, on the host."""
        return tuple(frozenset((int(i), int(j)) for i, j in node if i >= 0) for node in np.asarray(self.pairs))

    @classmethod
    def empty(cls, width: int = 0, token_ranks: int = 1, reach: int = 1) -> Self:
        """The graph without drafts. Decoding with it is vanilla. For calibration, it keeps the distributions of `width` steps ahead."""
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
        """The graph of these sets. Each has all possible parents: the proper subsets that are exactly one level lower.

        `thetas`: confidence nodes as (theta, hop). Weights default to 1, `max_drafts` to all nodes, `token_ranks` to 4. `width`: the least
        number of steps ahead for which tokens are kept. Raises ValueError as `validate` does.
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
        """Validates shapes, dtypes and sizes, which are also known while tracing."""
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

    def record(self) -> dict[str, Any]:
        """The graph as a JSON value."""
        arrays = {name: graph_file.numbers(np.asarray(getattr(self, name))) for name in LEAVES}
        plain = {name: getattr(self, name) for name in ("max_drafts", "token_ranks", "run_on", "reach")}
        return arrays | plain | {"made_for": asdict(self.made_for) if self.made_for else None}

    @classmethod
    def of(cls, record: Any) -> Self:
        """The graph of `record`'s value. Raises ValueError naming the field."""
        plain = [entry.name for entry in fields(cls) if entry.name not in LEAVES]
        data = graph_file.fields_of(record, "the draft graph", LEAVES, plain, unbounded="theta")
        for name, shape in MATRICES.items():
            data[name] = data[name] if data[name].size else data[name].reshape(shape)
        if data["made_for"] is not None:
            data["made_for"] = of_record(MadeFor, "made_for", data["made_for"])
        return cls(**data)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the graph as JSON."""
        write_text(path, graph_file.text(self.record(), MATRICES))

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Reads and validates a saved graph. Raises ValueError naming the file and the field."""
        data = read_json(path, "a draft graph")
        try:
            return cls.of(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def validate(self, block: int | None = None) -> None:
        """Validates every rule of a draft graph on the host. With `block`, also that each position rank lies inside a block.

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
    """The draft graph in a model's folder. "tiny" is the packaged model. Raises ValueError if it has none or a damaged one."""
    path = resolve_folder(model) / "graph.json"
    if not path.is_file():
        raise ValueError(
            f"{path}: no such draft graph; calibrate one (`specfold_jax.calibrate`) or read one from elsewhere (DraftGraph.load)"
        )
    return DraftGraph.load(path)


def differing(made_for: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Names what differs between the values that a graph or profile was made for and those here. "" if nothing does.

    None here is not compared.
    """
    differ = {name: value for name, value in here.items() if value is not None and made_for[name] != value}
    return ", ".join(f"{name}={made_for[name]!r} (here {value!r})" for name, value in differ.items())


def require_made_for(graph: DraftGraph, model_name: str | None, vocab: int, block: int, sub_block: int) -> None:
    """Raises ValueError naming what differs from the calibration. A graph made by hand has no `made_for`, and passes.

    Sizes must be equal. A graph serves any threshold and temperature. A name of None is not compared.
    """
    here = {"model": model_name, "vocab": vocab, "block": block, "sub_block": sub_block}
    if graph.made_for is not None and (differ := differing(asdict(graph.made_for), here)):
        raise ValueError(f"the draft graph was calibrated for {differ}; calibrate one for this model and decoding")


def show(node: Iterable[tuple[int, int]]) -> str:
    """A node's pairs, for messages and pictures."""
    return "{" + ", ".join(f"({i},{j})" for i, j in sorted(node)) + "}"
