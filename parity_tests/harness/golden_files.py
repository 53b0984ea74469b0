"""Recorded outputs of the authors' code on the golden checkpoints."""

import numpy as np

from parity_tests.harness.golden_cases import GOLDEN

TOLERANCE = 2e-4


def read(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / name / "forward.npz") as file:
        return dict(file)
