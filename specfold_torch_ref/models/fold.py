"""Folding: which (branch, position) rows a layer really evaluates, and where the others take their values from.

SpecFold (arXiv 2610.04875). Branches share most of their work with the branch they descend from; a gate on the relative residual
decides per layer and position what is computed, the rest is inherited from its source, and every branch keeps its own residual stream.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specfold_jax.config import FoldConfig
from specfold_torch_ref.models.ops import Gate, Implementation, Packed, gate, pack


class Place(NamedTuple):
    """A gate's decision, and the list of rows to evaluate that follows from it."""

    gate: Gate
    packed: Packed


@dataclass(frozen=True)
class Rows:
    """The rows of one check: which branches exist, how they descend, and whether they fold and pack.

    With `fold=None` every position of a valid branch is computed. `pack=False` evaluates all rows and selects.
    """

    valid: Bool[Tensor, "batch branch"]
    parent: Int[Tensor, "batch branch"]
    revealed: Bool[Tensor, "batch branch block"]
    fold: FoldConfig | None
    pack: bool
    impl: Implementation

    def place(self, gate: Gate) -> Place:
        """The gate with its packed rows."""
        return Place(gate, pack(gate.computed if self.pack else torch.ones_like(gate.computed), impl=self.impl))

    def all(self) -> Place:
        """Nothing folded."""
        own = torch.arange(self.valid.shape[1], dtype=torch.int32, device=self.valid.device)[:, None]
        shape = self.revealed.shape
        return self.place(Gate(self.valid[..., None].expand(shape).contiguous(), own.expand(shape).contiguous()))

    def _gated(self, x: Float[Tensor, "batch branch block dim"], fold: FoldConfig) -> Place:
        return self.place(
            gate(
                x,
                self.parent,
                self.revealed,
                self.valid,
                float(np.asarray(fold.tau)),
                reference=fold.reference,
                force_revealed=fold.force_revealed,
                impl=self.impl,
            )
        )

    def before_attention(self, x: Float[Tensor, "batch branch block dim"], dense: Place) -> Place:
        """The gate on a layer's input; `dense` (of `all`) where nothing folds there."""
        if self.fold is None or self.fold.scope == "ffn":
            return dense
        return self._gated(x, self.fold)

    def before_ffn(self, y: Float[Tensor, "batch branch block dim"], first: Place) -> Place:
        """The gate on the state after attention: the second gate, or the first one's decision again."""
        if self.fold is None or (self.fold.gates == 1 and self.fold.scope == "layer"):
            return first
        return self._gated(y, self.fold)
