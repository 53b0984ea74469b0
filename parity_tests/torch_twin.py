"""The PyTorch twin beside the JAX side: parameters and arrays of one as the other's, and decoding in lock-step with ties shown."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
import torch

import specfold_jax as sf
from specfold_jax import fold as jax_fold
from specfold_torch_ref import decode as torch_decode
from specfold_torch_ref import fold as torch_fold
from specfold_torch_ref import reveal as torch_reveal
from specfold_torch_ref import state as torch_state
from specfold_torch_ref.convert import to_torch
from specfold_torch_ref.model import Params
from specfold_torch_ref.ops import Gate, gate
from specfold_torch_ref.reference import take_branch
from specfold_torch_ref.row import DONE

# Tests run side by side; more threads than cores would wait for each other in every small product.
torch.set_num_threads(1)
TIE = 1e-4
"""What counts as a tie: |relative residual - tau| below this share of tau, or a decision's margin below this many log-odds."""
FAST = {"xla_backend_optimization_level": 0}  # for programs that run a few times only


def twin(checkpoint) -> Params:
    """A checkpoint's parameters on the Torch side."""
    return to_torch(checkpoint.params, checkpoint.model)


def tensor(x: Any) -> torch.Tensor:
    """An array as a tensor, whole numbers as int64."""
    out = torch.from_numpy(np.array(x))
    return out.long() if out.dtype == torch.int32 else out


@partial(jax.jit, compiler_options=FAST)
def jax_step(state, params, model, decode, graph, fold):
    """One step of the JAX loop, and the decisions of all its gates in order."""
    gates, plain = [], jax_fold.gate

    def recorded(*arguments):
        gates.append(plain(*arguments))
        return gates[-1]

    with mock.patch.object(jax_fold, "gate", recorded):
        after = sf.decode_step(state, params, model, decode, graph, fold)
    return after, tuple(gates)


_decide = torch_reveal.decide
jax_begin = jax.jit(sf.begin, compiler_options=FAST)


class Followed(NamedTuple):
    """Two decodes compared step by step. `positions`: gate decisions compared, `folded` of them inherited, `ties` of them ties.

    `apart`: rows that parted at a token tie and were not compared from there on.
    """

    jax: sf.Decoded
    torch: torch_state.Decoded
    positions: int
    folded: int
    ties: int
    apart: set[int]


class Replay:
    """The Torch side's gate, held to the JAX side's decisions of the same check: only ties may differ, and then theirs is taken."""

    def __init__(self):
        self.wanted, self.positions, self.folded, self.ties = iter(()), 0, 0, 0

    def __call__(self, x, parent, revealed, valid, tau, *, reference, force_revealed, impl) -> Gate:
        ours = gate(x, parent, revealed, valid, tau, reference=reference, force_revealed=force_revealed, impl=impl)
        theirs = Gate(*(tensor(part) for part in next(self.wanted)))
        above = parent[..., None].expand(revealed.shape)
        other = take_branch(x, above if reference == "parent" else take_branch(theirs.source, above))
        rel = torch.linalg.vector_norm(x - other, dim=-1) / torch.linalg.vector_norm(other, dim=-1)
        differ = ours.computed != theirs.computed
        assert torch.all((rel[differ] - tau).abs() < TIE * tau), f"folded positions differ at relative residuals {rel[differ]}, {tau=}"
        self.positions += int(valid.sum()) * x.shape[2]
        self.folded += int((valid[..., None] & ~theirs.computed).sum())
        self.ties += int(differ.sum())
        if not differ.any():
            assert torch.equal(ours.source[valid].long(), theirs.source[valid])
        return Gate(theirs.computed, theirs.source.int())


@torch.inference_mode()
def follow(checkpoint, prompts, lengths, decode, graph, fold=None) -> Followed:
    """Decodes on both sides, step by step, and compares every row's whole state and statistics after each step.

    A row may part only where a decision had a margin below `TIE`.
    """
    params, apart, replay = twin(checkpoint), set(), Replay()
    dense = dataclasses.replace(decode, pack=False)  # compiles sooner
    status = np.zeros(len(lengths), np.int32)
    theirs = jax_begin(checkpoint.params, prompts, lengths, checkpoint.model, decode, graph, status)
    ours = torch_state.begin(params, tensor(prompts), tensor(lengths), checkpoint.model, decode, graph)
    same_state(theirs, ours, apart, torch.full((len(lengths),), torch.inf))
    while torch_state.unfinished(ours) or bool(sf.unfinished(theirs)):
        ended = ours.row.phase == DONE
        theirs, gates = jax_step(theirs, checkpoint.params, checkpoint.model, dense, graph, fold)
        replay.wanted, margins = iter(gates), []

        def decide(*arguments, margins=margins):
            decision = _decide(*arguments)
            margins.append(decision.margin)
            return decision

        with mock.patch.object(torch_fold, "gate", replay), mock.patch.object(torch_reveal, "decide", decide):
            ours = torch_decode.decode_step(ours, params, checkpoint.model, decode, graph, fold)
        assert next(replay.wanted, None) is None
        closest = torch.stack(margins)
        closest[:, ended] = torch.inf  # nothing is decided there
        if fold is not None:
            closest = torch.minimum(closest, (closest - float(fold.guard)).abs())
        same_state(theirs, ours, apart, closest.amin(dim=0))
    decoded = sf.finish(theirs, checkpoint.model, decode), torch_state.finish(ours, checkpoint.model, decode)
    return Followed(*decoded, replay.positions, replay.folded, replay.ties, apart)


def same_state(theirs, ours, apart: set[int], margin: torch.Tensor) -> None:
    """Every row's place, canvas, tokens and statistics are the same, or the row parts at a tie."""
    pairs = [(f"row.{name}", getattr(theirs.row, name), getattr(ours.row, name)) for name in ours.row._fields]
    pairs += [(f"stats.{name}", getattr(theirs.stats, name), getattr(ours.stats, name)) for name in ours.stats._fields]
    pairs += [("tokens", theirs.tokens, ours.tokens)]
    pairs += [("following", np.where(ours.row.phase != DONE, theirs.following, 0), torch.where(ours.row.phase != DONE, ours.following, 0))]
    for name, want, got in pairs:
        differ = (np.asarray(want) != got.numpy()).reshape(len(margin), -1).any(axis=1)
        for row in set(np.flatnonzero(differ).tolist()) - apart:
            shown = f"{name} of row {row}: {np.asarray(want)[row]} on the JAX side, {got[row]}; margin {margin[row]}"
            assert margin[row] < TIE, shown
            apart.add(row)


def same_result(followed: Followed) -> None:
    """The same tokens, lengths and statistics; at most one row may have parted at a tie."""
    assert len(followed.apart) <= 1
    kept = [row for row in range(len(followed.torch.lengths)) if row not in followed.apart]
    for want, got in ((followed.jax.tokens, followed.torch.tokens), (followed.jax.lengths, followed.torch.lengths)):
        np.testing.assert_array_equal(np.asarray(want)[kept], got.numpy()[kept])
        assert got.dtype == torch.int32
