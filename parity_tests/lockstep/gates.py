"""The gates of two decodes in lock-step: the JAX side's decisions are recorded, the Torch side's are compared and held to them."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import torch

from parity_tests.harness.torch_twin import tensor
from parity_tests.lockstep.flip import TIE, Flip
from specfold_jax.models import fold as jax_fold
from specfold_torch_ref.models.ops import Gate, gate
from specfold_torch_ref.models.reference import take_branch


@contextlib.contextmanager
def recorded_gates() -> Iterator[list[tuple[jax_fold.Gate, jax.Array]]]:
    """Lists the decisions of all the JAX side's gates in order, each with its relative residuals [batch, branch, block]."""
    seen, plain = [], jax_fold.gate

    def recorded(x, parent, revealed, valid, fold):
        decided = plain(x, parent, revealed, valid, fold)
        above = jnp.broadcast_to(parent[..., None], revealed.shape)
        above = above if fold.reference == "parent" else jax_fold.take_branch(decided.source, above)
        wide, other = x.astype(jnp.float32), jax_fold.take_branch(x, above).astype(jnp.float32)
        seen.append((decided, jnp.linalg.norm(wide - other, axis=-1) / jnp.linalg.norm(other, axis=-1)))
        return decided

    with mock.patch.object(jax_fold, "gate", recorded):
        yield seen


class Replay:
    """The Torch side's gate, held to the JAX side's decisions of the same check. Only ties of `live` rows (None: all) may differ.

    `positions`: positions of the branches compared, `folded` of them inherited, `ties` of them decided otherwise; `free`: those of them
    whose residual decides. `flips`: every row's positions decided otherwise; `differences`: |relative residual on one side - on the
    other| of all free positions, as shares of tau.
    """

    def __init__(self, tie: float = TIE):
        self.tie, self.live = tie, None
        self.positions, self.folded, self.ties, self.free = 0, 0, 0, 0
        self.flips: dict[int, list[Flip]] = {}
        self.differences: list[torch.Tensor] = []
        self.expect((), 0)

    def expect(self, gates, step: int) -> None:
        """The JAX side's gates of the coming check, in order."""
        self.wanted, self.step, self.number = iter(gates), step, 0

    def __call__(self, x, parent, revealed, valid, tau, *, reference, force_revealed, impl) -> Gate:
        ours = gate(x, parent, revealed, valid, tau, reference=reference, force_revealed=force_revealed, impl=impl)
        decided, residual = next(self.wanted)
        theirs = Gate(*(tensor(part).to(x.device) for part in decided))
        above = parent[..., None].expand(revealed.shape)
        other = take_branch(x, above if reference == "parent" else take_branch(theirs.source, above)).float()
        rel = torch.linalg.vector_norm(x.float() - other, dim=-1) / torch.linalg.vector_norm(other, dim=-1)
        live = torch.ones(len(x), dtype=torch.bool) if self.live is None else self.live
        valid = valid & live[:, None].to(x.device)
        differ = (ours.computed != theirs.computed) & valid[..., None]
        scale = max(tau, torch.finfo(torch.float32).tiny)
        margin, apart = (rel - tau).abs() / scale, (rel - tensor(residual).to(x.device)).abs() / scale
        assert self.tie == torch.inf or torch.all(margin[differ] < self.tie), f"folded positions differ at residuals {rel[differ]}, {tau=}"
        at = torch.nonzero(differ)
        for (row, branch, position), *numbers in zip(at.tolist(), margin[differ].tolist(), apart[differ].tolist(), strict=True):
            flip = Flip("gate", *numbers, self.step, f"gate {self.number}, branch {branch}, position {position}")
            self.flips.setdefault(row, []).append(flip)
        forced = (parent == torch.arange(x.shape[1], device=x.device))[..., None] | (revealed & force_revealed)
        self.differences.append(apart[valid[..., None] & ~forced].cpu())
        self.free += len(self.differences[-1])
        self.positions += int(valid.sum()) * x.shape[2]
        self.folded += int((valid[..., None] & ~theirs.computed).sum())
        self.ties += len(at)
        self.number += 1
        if not len(at):
            assert torch.equal(ours.source[valid].long(), theirs.source[valid])
        return Gate(theirs.computed, theirs.source.int())
