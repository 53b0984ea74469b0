"""Choosing draft nodes of any kind so that the expected accepted depth is greatest: a covering problem, solved as an integer program.

Each record of the calibration is a row of levels; a level is covered when one of the chosen nodes drafts that very state, and a record
counts its covered levels up to the first gap. Generalises the choice among rank nodes alone, whose levels have one possible node each.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from specfold_jax.calibration.integer_program import Need, choose

Pattern = tuple[frozenset[int], ...]


def patterns(hits: np.ndarray) -> Counter[Pattern]:
    """How often each row of levels occurs, from bool [records, nodes, levels]; a row ends before the first level nobody drafts."""
    found: Counter[Pattern] = Counter()
    for record in hits:
        row = []
        for level in record.T:
            nodes = frozenset(np.flatnonzero(level).tolist())
            if not nodes:
                break
            row.append(nodes)
        found[tuple(row)] += 1
    return found


def depth(rows: Counter[Pattern], chosen: frozenset[int]) -> int:
    """Covered levels before the first gap, summed over the records."""
    total = 0
    for row, times in rows.items():
        for nodes in row:
            if not nodes & chosen:
                break
            total += times
    return total


def uses(rows: Counter[Pattern], chosen: frozenset[int], count: int) -> np.ndarray:
    """float [count]: share of the records in which each chosen node covers a counted level."""
    use = np.zeros(count)
    for row, times in rows.items():
        for nodes in row:
            if not (inside := nodes & chosen):
                break
            use[list(inside)] += times
    return use / max(rows.total(), 1)


def cover(rows: Counter[Pattern], count: int, size: int, parents: Sequence[Sequence[int] | None], seconds: float = 10.0) -> frozenset[int]:
    """The best `size` of `count` nodes. `parents[n]`: the nodes of which one must be chosen too (None: n needs none).

    Solved exactly; a program that takes longer than `seconds` gives the best solution found by then.
    """
    tree: dict[Pattern, int] = {}
    for row, times in sorted(rows.items(), key=lambda item: sorted(map(sorted, item[0]))):
        for end in range(1, len(row) + 1):
            tree[row[:end]] = tree.get(row[:end], 0) + times
    place = {prefix: count + i for i, prefix in enumerate(tree)}
    needs: list[Need] = [(variable, sorted(prefix[-1])) for prefix, variable in place.items()]
    needs += [(variable, (place[prefix[:-1]],)) for prefix, variable in place.items() if len(prefix) > 1]
    needs += [(n, allowed) for n, allowed in enumerate(parents) if allowed is not None]
    return choose(size, [0] * count, list(tree.values()), needs, seconds)
