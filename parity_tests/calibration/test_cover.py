"""Choosing nodes that cover what came: the integer program against brute force, and the figures it is judged by."""

from collections import Counter
from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specfold_jax.calibration.cover import cover, depth, patterns, uses

NODES = 6
levels = st.frozensets(st.integers(0, NODES - 1), min_size=1, max_size=3)
rows = st.dictionaries(st.lists(levels, max_size=3).map(tuple), st.integers(1, 9), min_size=1, max_size=8).map(Counter)


@settings(max_examples=40, deadline=None)
@given(rows, st.integers(1, 3))
def test_the_program_is_as_good_as_trying_everything(rows, size):
    chosen = cover(rows, NODES, size, [None] * NODES)
    best = max(depth(rows, frozenset(choice)) for choice in combinations(range(NODES), size))
    assert len(chosen) <= size
    assert depth(rows, chosen) == best


@settings(max_examples=25, deadline=None)
@given(rows, st.integers(1, 3))
def test_a_node_comes_with_one_of_its_parents(rows, size):
    parents = [None, [0], [0], [1, 2], [3], None]
    chosen = cover(rows, NODES, size, parents)
    allowed = [frozenset(c) for c in combinations(range(NODES), size) if all(parents[n] is None or set(parents[n]) & set(c) for n in c)]
    assert all(parents[n] is None or set(parents[n]) & chosen for n in chosen)
    assert depth(rows, chosen) >= max((depth(rows, c) for c in allowed), default=0)


def test_patterns_end_before_the_first_gap():
    hits = np.zeros((2, 3, 3), bool)  # [record, node, level]
    hits[0, 0, 0] = hits[0, 1, 0] = hits[0, 2, 2] = True  # level 1 is nobody's
    hits[1, 2, 0] = hits[1, 2, 1] = True
    found = patterns(hits)
    assert found == Counter({(frozenset({0, 1}),): 1, (frozenset({2}), frozenset({2})): 1})
    assert depth(found, frozenset({2})) == 2
    np.testing.assert_allclose(uses(found, frozenset({0, 2}), 3), [0.5, 0, 1.0])
