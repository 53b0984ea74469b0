"""The golden checkpoints, and prompts of uneven length."""

import dataclasses
from typing import NamedTuple

import numpy as np

import specfold_jax as sf
from parity_tests.harness.golden_cases import GOLDEN, MASK
from specfold_jax.models.transformer import Params

FAMILIES = ("fast_dllm_v2", "nld", "sdar")


class Checkpoint(NamedTuple):
    """A golden checkpoint in float32."""

    family: str
    model: sf.ModelConfig
    params: Params

    def first_layers(self, layers: int) -> "Checkpoint":
        """The checkpoint without its last layers: laws that hold for any weights need no more than two."""
        return Checkpoint(
            self.family, dataclasses.replace(self.model, layers=layers), self.params | {"layers": self.params["layers"][:layers]}
        )


def load(name: str) -> Checkpoint:
    """Loads a golden checkpoint folder."""
    model, params = sf.load(GOLDEN / name, dtype="float32", mask_id=MASK[name.split("/")[0]])
    return Checkpoint(name, model, params)


class Ragged(NamedTuple):
    """Right-padded prompts; `tokens` int32 [batch, capacity], `lengths` int32 [batch]."""

    tokens: np.ndarray
    lengths: np.ndarray
