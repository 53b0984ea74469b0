"""Confidence intervals of what is counted."""

import math


def wilson(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a proportion; z = 1.96 is 95 %."""
    if not 0 <= successes <= trials or not trials:
        raise ValueError(f"{successes=} must lie in 0..trials and {trials=} be at least 1")
    share, square = successes / trials, z * z
    middle = (share + square / (2 * trials)) / (1 + square / trials)
    half = z / (1 + square / trials) * math.sqrt(share * (1 - share) / trials + square / (4 * trials**2))
    return max(middle - half, 0.0), min(middle + half, 1.0)
