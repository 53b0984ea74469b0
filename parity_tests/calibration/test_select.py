"""Selection of draft nodes: the integer program against brute force and greedy, and its invariances."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specfold_jax.calibration.rank_nodes import Selection, most_visited, select
from specfold_jax.diffusion.graph import DraftGraph

A, B, C = (frozenset({(i, 0)}) for i in range(3))


@st.composite
def recorded(draw, positions: int = 3, most: int = 12):
    """Chains as a calibration run records them: each step reveals one or more further positions; at least one chain is not empty."""

    def chain(least: int):
        free, node, out = draw(st.permutations(range(positions))), frozenset(), []
        for _ in range(draw(st.integers(least, positions))):
            reveal = draw(st.integers(1, 2))
            if not free:
                break
            node |= {(i, draw(st.sampled_from((0, 0, 1)))) for i in free[:reveal]}
            free = free[reveal:]
            out.append(node)
        return tuple(out)

    return [chain(1), *(chain(0) for _ in range(draw(st.integers(0, most - 1))))]


def counts(chains):
    count, level = Counter(), {}
    for chain in chains:
        count.update(chain)
    for node in count:
        steps = Counter(chain.index(node) + 1 for chain in chains if node in chain)
        level[node] = min(steps, key=lambda step: (-steps[step], step))
    return count, level


def scorer(chains, objective):
    """Both objectives, straight from their definitions: a function from chosen nodes to their value."""
    merged, (count, level) = Counter(chains), counts(chains)

    def depth(chosen):
        prefix = {chain: next((n for n, node in enumerate(chain) if node not in chosen), len(chain)) for chain in merged}
        return sum(times * prefix[chain] for chain, times in merged.items())

    def paper(chosen):
        return sum(count[q] + sum(count[p] for p in chosen if p < q and level[p] == level[q] - 1) for q in chosen)

    return {"depth": depth, "paper": paper}[objective]


def connected(chosen, level):
    return all(level[q] == 1 or any(p < q and level[p] == level[q] - 1 for p in chosen) for q in chosen)


def greedy(chains, drafts, objective="depth", candidates=60):
    """Of the same candidates the one of the highest gain, one at a time, each with a parent; and the value of them all."""
    (_, level), value, chosen = counts(chains), scorer(chains, objective), frozenset()
    for _ in range(drafts):
        fresh = [q for q in most_visited(chains, candidates).sets if q not in chosen and connected(chosen | {q}, level)]
        if fresh:
            chosen |= {max(fresh, key=lambda q: value(chosen | {q}))}
    return chosen, value(chosen)


def expected_depth(chains, sets):
    """Accepted drafts a check, before pruning."""
    return scorer(chains, "depth")(frozenset(sets)) / len(chains)


objectives = pytest.mark.parametrize("objective", ["depth", "paper"])


@objectives
@settings(deadline=None, max_examples=40)
@given(chains=recorded(), drafts=st.integers(1, 4))
def test_the_program_finds_what_brute_force_finds(objective, chains, drafts):
    (_, level), value = counts(chains), scorer(chains, objective)
    found = select(chains, drafts, objective)
    subsets = (
        [s for k in range(drafts + 1) for s in combinations(sorted(level, key=sorted), k) if connected(s, level)] if len(level) < 13 else []
    )
    if subsets:
        assert found.value == max(value(frozenset(s)) for s in subsets)
    assert found.value == value(frozenset(found.sets))
    assert found.value >= greedy(chains, drafts, objective)[1]


@objectives
@settings(deadline=None, max_examples=30)
@given(chains=recorded(positions=5, most=30), drafts=st.integers(1, 8), data=st.data())
def test_a_selection_makes_a_valid_graph_and_ignores_the_order_of_chains(objective, chains, drafts, data):
    found = select(chains, drafts, objective, candidates=12)
    assert found == select(data.draw(st.permutations(chains)), drafts, objective, candidates=12)
    graph = DraftGraph.from_sets(found.sets, found.levels, found.weights)
    assert graph.sets == found.sets
    assert graph.nodes <= drafts
    assert found.value == scorer(chains, objective)(frozenset(found.sets))
    assert sum(found.weights) == pytest.approx(expected_depth(chains, found.sets))
    _, level = counts(chains)
    assert found.levels == tuple(level[node] for node in found.sets)


def test_depth_prefers_a_long_chain_where_the_paper_prefers_a_frequent_parent():
    left, right = A | B | {(3, 0)}, A | B | {(3, 1)}
    chains = [(A, left, left | C)] * 5 + [(A, right)] * 5 + [(B,)] * 4 + [()] * 6
    depth = select(chains, 4)
    assert depth == Selection((A, left, right, left | C), (1, 2, 2, 3), (0.5, 0.25, 0.25, 0.25), 10 + 5 + 5 + 5)
    assert expected_depth(chains, depth.sets) == pytest.approx(25 / 20)
    # Counts 10 + 4 + 5 + 5, and both level-2 nodes count A and B again as their parents.
    assert select(chains, 4, "paper") == Selection((A, B, left, right), (1, 1, 2, 2), (0.5, 0.2, 0.25, 0.25), 24 + 2 * (10 + 4))


def test_greedy_can_be_beaten():
    # A and B pay less than the three single steps one by one, but both lead to the same second step.
    chains = [(A, A | B)] * 4 + [(B, A | B)] * 4 + [(frozenset({(i, 1)}),) for i in range(3)] * 5
    assert greedy(chains, 3)[1] == 15
    assert select(chains, 3) == Selection((A, B, A | B), (1, 1, 2), (4 / 23, 4 / 23, 8 / 23), 16)


def test_the_level_is_the_most_frequent_step_and_the_lowest_on_ties():
    chains = [(A, A | B), (A | B,), (A, A | C), (A | C,), (A, A | C)]
    found = select(chains, 3)
    assert dict(zip(found.sets, found.levels, strict=True)) == {A: 1, A | B: 1, A | C: 2}


@objectives
def test_a_node_without_any_possible_parent_is_not_a_candidate(objective):
    # A | B is a first step more often than a second one, so nothing of level 2 lies inside the third step.
    chains = [(A, A | B, A | B | C), (A | B,), (A | B,)]
    assert select(chains, 10, objective).sets == (A, A | B)


def test_candidates_bring_their_parents_along():
    # Each first step is rare, the set they lead to is frequent: with two candidates it comes with one of its parents.
    chains = [(frozenset({(i, 0)}), frozenset({(0, 0), (1, 0), (2, 0)})) for i in range(3)]
    found = select(chains, 2, candidates=2)
    assert found.sets == (A, A | B | C)
    assert found.value == 2


def test_fewer_sets_than_drafts():
    assert select([(A, A | B), ()], 10).sets == (A, A | B)
    assert greedy([(A, A | B), ()], 10)[0] == {A, A | B}


def test_ties_fall_to_the_more_visited_then_the_smaller_node():
    assert select([(C,), (B,), (A,)], 2).sets == (A, B)
    assert select([(C, C | B), (A, A | B)], 1).sets == (A,)


def test_refusals():
    with pytest.raises(ValueError, match=r"none of the 2 recorded steps revealed only tokens inside the rank limits \(Imax, Jmax\)"):
        select([(), ()], 3)
    with pytest.raises(ValueError, match="none of the 0 recorded steps"):
        select([], 3)
    with pytest.raises(ValueError, match="drafts=0 must be a whole number of at least 1"):
        select([(A,)], 0)
    with pytest.raises(ValueError, match="candidates=5 must be at least drafts=8"):
        select([(A,)], 8, candidates=5)
    with pytest.raises(ValueError, match=r"objective='width' must be one of \('depth', 'paper'\)"):
        select([(A,)], 8, "width")
    for chain in ((A, B), (A, A), (frozenset(),)):
        with pytest.raises(ValueError, match="every set must be a proper superset of the one before"):
            select([chain], 8)


def test_weights_are_shares_of_the_chains():
    chains = [(A, A | B), (B, A | B), ()]
    assert select(chains, 2) == Selection((A, A | B), (1, 2), (1 / 3, 1 / 3), 2)
    assert expected_depth(chains, [A, A | B]) == pytest.approx(2 / 3)
    assert expected_depth(chains, []) == 0


def test_a_calibration_sized_instance_is_solved_exactly_and_repeatably():
    rng = np.random.default_rng(0)

    def chain():
        node, free, out = frozenset(), list(range(10)), []
        for _ in range(rng.integers(0, 5)):
            for _ in range(1 + (rng.random() < 0.4)):
                if free:
                    node |= {(free.pop(min(int(rng.geometric(0.6)) - 1, len(free) - 1)), int(min(3, rng.geometric(0.85) - 1)))}
            out.append(node)
        return tuple(out)

    chains = [chain() for _ in range(2000)]
    for objective in ("depth", "paper"):
        found = select(chains, 10, objective)
        assert len(found.sets) == 10
        assert found.value >= greedy(chains, 10, objective)[1]
        assert found == select(chains[::-1], 10, objective)
    assert expected_depth(chains, select(chains, 10).sets) >= expected_depth(chains, select(chains, 10, "paper").sets)
