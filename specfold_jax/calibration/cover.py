"""Choosing draft nodes of any kind so that the expected accepted depth is greatest.

A record of the calibration is a state of vanilla decoding. Its level l is the state l steps later. A node covers a level if it drafts that
very state. A record counts its covered levels up to the first gap, as a check accepts drafts. This generalises `rank_nodes`, where each
level has one possible node.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from specfold_jax.calibration.integer_program import Need, best_subset

Pattern = tuple[frozenset[int], ...]
"""The levels of a record: for each the nodes that cover it."""


def patterns(hits: np.ndarray) -> Counter[Pattern]:
    """How often each pattern occurs, from bool [records, nodes, levels]. A pattern ends before the first level that no node covers."""
    found: Counter[Pattern] = Counter()
    for record in hits:
        pattern = []
        for level in record.T:
            nodes = frozenset(np.flatnonzero(level).tolist())
            if not nodes:
                break
            pattern.append(nodes)
        found[tuple(pattern)] += 1
    return found


def expected_use(found: Counter[Pattern], chosen: frozenset[int], count: int) -> np.ndarray:
    """float [count]: of each chosen node the share of the records in which it covers a level before the first gap."""
    use = np.zeros(count)
    for pattern, times in found.items():
        for nodes in pattern:
            if not (inside := nodes & chosen):
                break
            use[list(inside)] += times
    return use / max(found.total(), 1)


def best_cover(
    found: Counter[Pattern], count: int, size: int, parents: Sequence[Sequence[int] | None], seconds: float = 10.0
) -> frozenset[int]:
    """The best `size` of `count` nodes. If n is chosen, so is one of the nodes `parents[n]`; None: n needs no other.

    The program has a variable for each node and one for each prefix of a pattern, which is 1 if the prefix is covered. Patterns share the
    prefixes with which they begin, as in a tree. An example with 3 nodes, so that prefixes begin at variable 3:

        found    ({0},) 5 times, ({0}, {1, 2}) 4 times         record 1 has one level, record 2 has two
        prefixes 3: ({0},) gains 5 + 4    4: ({0}, {1, 2}) gains 4
        needs    (3, {0}), (4, {1, 2}), (4, {3})               a prefix needs a node for its last level, and the prefix before it

    The best 2 nodes are {0, 1}: they cover both prefixes, which is 13 levels. Solved exactly, or as well as `seconds` allow.
    """
    prefixes: dict[Pattern, int] = {}  # and how many records begin with each
    for pattern, times in sorted(found.items(), key=lambda item: sorted(map(sorted, item[0]))):
        for end in range(1, len(pattern) + 1):
            prefixes[pattern[:end]] = prefixes.get(pattern[:end], 0) + times
    variable = {prefix: count + i for i, prefix in enumerate(prefixes)}
    needs: list[Need] = [(variable[prefix], sorted(prefix[-1])) for prefix in prefixes]
    needs += [(variable[prefix], (variable[prefix[:-1]],)) for prefix in prefixes if len(prefix) > 1]
    needs += [(n, allowed) for n, allowed in enumerate(parents) if allowed is not None]
    return best_subset(size, [0] * count, list(prefixes.values()), needs, seconds)
