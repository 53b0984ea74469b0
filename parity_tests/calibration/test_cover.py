"""Choosing nodes that cover later states: the integer program against brute force, and the expected use of its nodes."""

from collections import Counter
from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specfold_jax.calibration.cover import best_cover, expected_use, patterns

NODES = 6
levels = st.frozensets(st.integers(0, NODES - 1), min_size=1, max_size=3)
rows = st.dictionaries(st.lists(levels, max_size=3).map(tuple), st.integers(1, 9), min_size=1, max_size=8).map(Counter)


def depth(found, chosen) -> int:
    """Covered levels before the first gap, summed over the records."""
    return sum(times * next((n for n, nodes in enumerate(row) if not nodes & chosen), len(row)) for row, times in found.items())


@settings(max_examples=40, deadline=None)
@given(rows, st.integers(1, 3))
def test_the_program_is_as_good_as_trying_everything(rows, size):
    chosen = best_cover(rows, NODES, size, [None] * NODES)
    best = max(depth(rows, frozenset(choice)) for choice in combinations(range(NODES), size))
    assert len(chosen) <= size
    assert depth(rows, chosen) == best


@settings(max_examples=25, deadline=None)
@given(rows, st.integers(1, 3))
def test_a_node_comes_with_one_of_its_parents(rows, size):
    parents = [None, [0], [0], [1, 2], [3], None]
    chosen = best_cover(rows, NODES, size, parents)
    allowed = [frozenset(c) for c in combinations(range(NODES), size) if all(parents[n] is None or set(parents[n]) & set(c) for n in c)]
    assert all(parents[n] is None or set(parents[n]) & chosen for n in chosen)
    assert depth(rows, chosen) >= max((depth(rows, c) for c in allowed), default=0)


def test_the_example_in_the_docstring():
    found = Counter({(frozenset({0}),): 5, (frozenset({0}), frozenset({1, 2})): 4})
    chosen = best_cover(found, 3, 2, [None] * 3)
    assert (chosen, depth(found, chosen)) == ({0, 1}, 13)


def test_patterns_end_before_the_first_gap():
    hits = np.zeros((2, 3, 3), bool)  # [record, node, level]
    hits[0, 0, 0] = hits[0, 1, 0] = hits[0, 2, 2] = True  # level 1 is nobody's
    hits[1, 2, 0] = hits[1, 2, 1] = True
    found = patterns(hits)
    assert found == Counter({(frozenset({0, 1}),): 1, (frozenset({2}), frozenset({2})): 1})
    assert depth(found, frozenset({2})) == 2
    np.testing.assert_allclose(expected_use(found, frozenset({0, 2}), 3), [0.5, 0, 1.0])
