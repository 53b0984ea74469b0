"""The reveal rule as its definition reads, one position at a time.

The definition: specfold_jax/diffusion/README.md, "Scores"; specfold_jax/diffusion/README.md, "Reveal"; and for margins
specfold_jax/diffusion/README.md, "Guard".
"""

import numpy as np

BLOCK, MASK = 8, 310


def slow(canvas, odds, gap, step, threshold, strict, sub_block, steps, order) -> tuple[set[int], float]:
    """Positions to reveal and the smallest margin."""
    first = int(np.flatnonzero(canvas == MASK)[0]) // sub_block * sub_block
    masked = [i for i in range(first, first + sub_block) if canvas[i] == MASK]
    bar = (
        np.inf if threshold == 1 else -np.inf if threshold == 0 else float(np.log(np.float32(threshold)) - np.log1p(-np.float32(threshold)))
    )
    passing = {i for i in masked if (odds[i] > bar if strict else odds[i] >= bar) and bar < np.inf}
    least = 1 if steps is None else BLOCK // steps + (step < BLOCK % steps)
    best = sorted(masked, key=lambda i: (-odds[i], i))
    always = set((best if order == "confidence" else masked)[:least])
    shown = passing | always
    margins = [gap[i] for i in shown]
    if np.isfinite(bar):
        margins += [abs(odds[i] - bar) for i in masked if i not in always]
    if order == "confidence" and len(passing) < least < len(masked):
        margins.append(odds[best[least - 1]] - odds[best[least]])
    return shown, min(margins)
