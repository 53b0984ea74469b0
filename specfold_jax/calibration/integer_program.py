"""Choosing some of many things by an integer program. `rank_nodes` and `cover` each write one."""

from collections.abc import Iterable, Sequence

import numpy as np

Need = tuple[int, Sequence[int]]
"""A variable, and others. It is at most their sum: it needs one of them."""


def best_subset(size: int, gains: Sequence[int], more: Sequence[int], needs: Iterable[Need], seconds: float = np.inf) -> frozenset[int]:
    """At most `size` things whose summed gain is greatest; of equal sums the one with earlier things.

    Variable n < len(gains) is thing n: 1 if it is chosen, else 0. It gains `gains[n]`, a whole number. The variables after these lie
    between 0 and 1 and gain `more`. `needs` ties all of them together. Solved exactly, or as well as `seconds` allow. Raises
    RuntimeError if there is no solution by then.
    """
    from scipy.optimize import Bounds, milp  # takes a quarter of a second, and decoding does without
    from scipy.sparse import coo_array

    count, total = len(gains), len(gains) + len(more)
    entries = [(0, n, 1) for n in range(count)]  # (sum, variable, coefficient): the first is at most `size`, others at most 0
    for row, (variable, others) in enumerate(needs, start=1):
        entries += [(row, variable, 1), *((row, n, -1) for n in others)]
    rows = entries[-1][0] + 1
    row, column, coefficient = np.array(entries).T
    matrix = coo_array((coefficient.astype(float), (row, column)), (rows, total)).tocsr()
    # These sum to one half. So they decide between equal gains only, and fill up to `size`.
    bonus = (count - np.arange(count)) / (count * (count + 1))
    result = milp(
        -np.concatenate([bonus + gains, more]),
        integrality=np.arange(total) < count,
        bounds=Bounds(0, 1),
        constraints=(matrix, np.full(rows, -np.inf), np.where(np.arange(rows) == 0, size, 0)),
        options={"mip_rel_gap": 0.0, "time_limit": seconds},
    )
    if result.x is None or (result.status != 0 and np.isinf(seconds)):
        raise RuntimeError(f"the integer program of {count} candidates was not solved: {result.message}")
    return frozenset(np.flatnonzero(result.x[:count] > 0.5).tolist())
