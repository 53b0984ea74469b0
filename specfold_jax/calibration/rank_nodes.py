"""Choosing the nodes of a draft graph from recorded chains, as an integer program.

See specfold_jax/diffusion/README.md, "Choosing a draft graph".

A chain belongs to one state of the calibration run. It is q_1 < q_2 < ..., where q_l is the set of (position rank, token rank) pairs that
vanilla revealed within the next l steps. Both objectives are sums of terms "gain if all of these nodes are chosen":

    depth   sum over chains of the longest prefix q_1 .. q_l inside Q: expected accepted depth, up to a factor     (ours)
    paper   sum over q in Q of [count(q) + sum over parents p of q in Q of count(p)]                    (arXiv 2509.18085)
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from specfold_jax.calibration.integer_program import best_subset
from specfold_jax.calibration.options import Objective
from specfold_jax.diffusion.graph import Node, show
from specfold_jax.values import Size, conforming

NodeChain = tuple[Node, ...]


@dataclass(frozen=True)
class Selection:
    """Chosen nodes in a graph's order, as `DraftGraph.from_sets` takes them.

    `weights`: for each the share of the chains that accept it. `value`: the objective's sum over all chains.
    """

    sets: tuple[Node, ...]
    levels: tuple[int, ...]
    weights: tuple[float, ...]
    value: int


@dataclass(frozen=True)
class _Problem:
    """Candidates, most visited first. `parents`: for each those that may be its parents. `terms`: gains, by the candidates that must all
    be chosen."""

    nodes: tuple[Node, ...]
    levels: tuple[int, ...]
    parents: tuple[tuple[int, ...], ...]
    terms: dict[tuple[int, ...], int]

    def value(self, chosen: set[int]) -> int:
        return sum(gain for needed, gain in self.terms.items() if chosen.issuperset(needed))


def select(chains: Sequence[NodeChain], drafts: int, objective: Objective = "depth", candidates: int = 60) -> Selection:
    """The best `drafts` nodes among the `candidates` most visited sets, or fewer if the chains hold fewer. Solved exactly.

    A chosen node of a level above 1 has a chosen parent: a proper subset of the level below. The order of the chains does not matter. Of
    equally good choices the one with the more visited nodes is taken. Raises ValueError if an argument is out of range, a chain is not
    nested, or all chains are empty.
    """
    problem = _problem(chains, drafts, objective, candidates)
    count, terms = len(problem.nodes), [(needed, gain) for needed, gain in problem.terms.items() if len(needed) > 1]
    needs = [(n, parents) for n, parents in enumerate(problem.parents) if problem.levels[n] > 1]
    # A term's variable may be continuous: it is maximised, and what it needs is 0 or 1.
    needs += [(count + t, (n,)) for t, (needed, _) in enumerate(terms) for n in needed]
    gains = [problem.terms.get((n,), 0) for n in range(count)]
    return _selection(problem, set(best_subset(drafts, gains, [gain for _, gain in terms], needs)), chains)


def most_visited(chains: Sequence[NodeChain], candidates: int = 60) -> Selection:
    """All candidates, before any choice among them."""
    problem = _problem(chains, 1, "depth", candidates)
    return _selection(problem, set(range(len(problem.nodes))), chains)


def _accepted(sets: Sequence[Node], chains: Sequence[NodeChain]) -> Counter[Node]:
    """How many chains reach each of `sets` through `sets` alone."""
    inside, reached = frozenset(sets), Counter()
    for chain, times in Counter(chains).items():
        for node in chain:
            if node not in inside:
                break
            reached[node] += times
    return reached


def _order(node: Node) -> tuple[int, list[tuple[int, int]]]:
    return len(node), sorted(node)


def _selection(problem: _Problem, chosen: set[int], chains: Sequence[NodeChain]) -> Selection:
    rows = sorted(chosen, key=lambda n: _order(problem.nodes[n]))
    sets = tuple(problem.nodes[n] for n in rows)
    reached = _accepted(sets, chains)
    weights = tuple(reached[node] / len(chains) for node in sets)
    return Selection(sets, tuple(problem.levels[n] for n in rows), weights, problem.value(chosen))


def _problem(chains: Sequence[NodeChain], drafts: int, objective: Objective, candidates: int) -> _Problem:
    conforming("drafts", drafts, Size)
    conforming("objective", objective, Objective)
    if conforming("candidates", candidates, Size) < drafts:
        raise ValueError(f"candidates={candidates} must be at least drafts={drafts}")
    merged = Counter(chains)
    visits: dict[Node, Counter[int]] = {}
    for chain, times in merged.items():
        for step, node in enumerate(chain, start=1):
            if not (chain[step - 2] if step > 1 else frozenset()) < node:
                raise ValueError(f"chain {' -> '.join(map(show, chain))}: every set must be a proper superset of the one before")
            visits.setdefault(node, Counter())[step] += times
    if not visits:
        raise ValueError(
            f"none of the {len(chains)} recorded steps revealed only tokens inside the rank limits (Imax, Jmax), so there is nothing to "
            "draft; calibrate on more prompts or raise the limits"
        )
    level = {node: min(steps, key=lambda step: (-steps[step], step)) for node, steps in visits.items()}
    nodes = _candidates({node: steps.total() for node, steps in visits.items()}, level, candidates)
    index = {node: n for n, node in enumerate(nodes)}
    parents = tuple(tuple(index[p] for p in nodes if level[p] == level[q] - 1 and p < q) for q in nodes)
    terms: Counter[tuple[int, ...]] = Counter()
    if objective == "paper":
        terms.update({(n,): visits[q].total() for n, q in enumerate(nodes)})
        terms.update({(p, n): visits[nodes[p]].total() for n in index.values() for p in parents[n]})
    else:
        for chain, times in merged.items():
            for step in range(1, len(chain) + 1):
                if chain[step - 1] not in index:
                    break
                terms[tuple(index[node] for node in chain[:step])] += times
    return _Problem(nodes, tuple(level[q] for q in nodes), parents, dict(sorted(terms.items())))


def _candidates(count: dict[Node, int], level: dict[Node, int], limit: int) -> tuple[Node, ...]:
    """The most visited sets, each with a path to the root. A set that has no possible parent is dropped. A set whose possible parents
    are not chosen brings the most visited one along."""
    ranked = sorted(count, key=lambda node: (-count[node], *_order(node)))
    chosen: dict[Node, None] = {}
    dead: set[Node] = set()

    def path(node: Node) -> list[Node]:
        """The node and the parents it still needs, lowest first; empty if no path leads to it."""
        if node in dead:
            return []
        parents = [p for p in ranked if level[p] == level[node] - 1 and p < node]
        if level[node] == 1 or any(p in chosen for p in parents):
            return [node]
        for p in parents:
            if below := path(p):
                return [*below, node]
        dead.add(node)
        return []

    for node in ranked:
        if node not in chosen and len(chosen) + len(needed := path(node)) <= limit:
            chosen.update(dict.fromkeys(needed))
    return tuple(sorted(chosen, key=ranked.index))
