"""Folding (SpecFold, arXiv 2610.04875): a layer evaluates some of its (branch, position) rows, and the others inherit.

A branch repeats most of its parent's work. In every layer, a gate looks at the relative residual of each position and decides whether it
is computed. A folded position inherits from its source, the branch that computed it. Every branch keeps its own residual stream.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specfold_jax.config import FoldConfig
from specfold_torch_ref.models.ops import Gate, Implementation, Packed, gate, pack


class Decided(NamedTuple):
    """A gate's decision, and the list of computed rows that follows from it."""

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

    def _packed(self, gate: Gate) -> Decided:
        """The gate with its packed rows."""
        return Decided(gate, pack(gate.computed if self.pack else torch.ones_like(gate.computed), impl=self.impl))

    def all(self) -> Decided:
        """Nothing folded."""
        own = torch.arange(self.valid.shape[1], dtype=torch.int32, device=self.valid.device)[:, None]
        shape = self.revealed.shape
        return self._packed(Gate(self.valid[..., None].expand(shape).contiguous(), own.expand(shape).contiguous()))

    def _gated(self, x: Float[Tensor, "batch branch block dim"], fold: FoldConfig) -> Decided:
        return self._packed(
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

    def before_attention(self, x: Float[Tensor, "batch branch block dim"], dense: Decided) -> Decided:
        """The gate on a layer's input. `dense` is the result of `all`, and holds where nothing folds."""
        if self.fold is None or self.fold.scope == "ffn":
            return dense
        return self._gated(x, self.fold)

    def before_ffn(self, y: Float[Tensor, "batch branch block dim"], first: Decided) -> Decided:
        """The gate on the state after attention. With one gate, the first decision holds."""
        if self.fold is None or (self.fold.gates == 1 and self.fold.scope == "layer"):
            return first
        return self._gated(y, self.fold)
