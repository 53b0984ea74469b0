"""Decoding on both sides in lock-step: every row's whole state is compared after each step, and every difference is shown a tie.

The Torch side's gates are held to the JAX side's decisions, so that one tie does not become many. A row that parts at a token's tie is
followed no further.
"""

import dataclasses
from collections.abc import Collection
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np
import torch

import specfold_jax as sf
from parity_tests.harness.torch_twin import FAST, tensor
from parity_tests.lockstep.decisions import Decisions
from parity_tests.lockstep.drafts import Numbers, draft_flips
from parity_tests.lockstep.flip import TIE, Flip
from parity_tests.lockstep.gates import Replay, recorded_gates
from specfold_jax.diffusion import loop as jax_decode
from specfold_torch_ref.diffusion import loop as torch_decode
from specfold_torch_ref.diffusion import loop as torch_loop
from specfold_torch_ref.diffusion.draft import Known
from specfold_torch_ref.diffusion.row import DONE
from specfold_torch_ref.diffusion.state import Decoded
from specfold_torch_ref.models import fold as torch_fold
from specfold_torch_ref.models.ops import Implementation
from specfold_torch_ref.models.transformer import Params


def _jax_step(state, params, model, decode, graph, fold):
    """One step of the JAX loop, its gates' decisions, and the ranked tokens of all branches (of no meaning at T > 0)."""
    seen, plain = [], jax_decode.Distributions.of

    def distributions(*arguments):
        seen.append(plain(*arguments))
        return seen[-1]

    with recorded_gates() as gates, mock.patch.object(jax_decode.Distributions, "of", distributions):
        after = sf.decode_step(state, params, model, decode, graph, fold)
    return after, tuple(gates), seen[0].greedy


QUICK, AS_DECODED = (tuple(jax.jit(part, compiler_options=options) for part in (sf.begin, _jax_step)) for options in (FAST, {}))
"""Beginning and step of the JAX side: soon compiled, or compiled as a decode is, so that bfloat16 is rounded as it is there."""


class Followed(NamedTuple):
    """Two decodes compared step by step. `positions`: gate decisions compared, `folded` of them inherited, `ties` of them decided
    otherwise; `free`: those of them that a residual decides; `forwards`: forwards whose drafts were compared.

    `apart`: rows that parted, which were not compared from there on, and why; `gates` and `drafts`: what rows decided otherwise before
    that. `differences`: |log-odds of one side - the other's| of every position that could be revealed; `gate_differences`: the same of
    the relative residuals of all free positions, as shares of tau; `draft_differences`: of every forward whose drafts were compared the
    largest |log-odds of one side - the other's| of the masked positions that both sides know, if there are any.
    """

    jax: sf.Decoded
    torch: Decoded
    positions: int
    folded: int
    ties: int
    free: int
    forwards: int
    apart: dict[int, Flip]
    gates: dict[int, list[Flip]]
    drafts: dict[int, list[Flip]]
    differences: torch.Tensor
    gate_differences: torch.Tensor
    draft_differences: torch.Tensor

    def of(self, row: int) -> list[Flip]:
        """Everything on which the two sides differ in a row, in order."""
        parting = [self.apart[row]] if row in self.apart else []
        return sorted(self.gates.get(row, []) + parting + self.drafts.get(row, []), key=lambda flip: flip.step)  # stable


@torch.inference_mode()
def follow(
    checkpoint,
    params: Params,
    prompts: np.ndarray,
    lengths: np.ndarray,
    decode: sf.DecodeConfig,
    graph: sf.DraftGraph,
    fold: sf.FoldConfig | None = None,
    *,
    impl: Implementation = "torch",
    tie: float = TIE,
    hold_drafts: bool = False,
    only: Collection[int] | None = None,
    quick: bool = True,
) -> Followed:
    """Decodes on both sides, step by step, and compares every row's whole state and statistics after each step.

    A row may part only where a decision had a margin below `tie`. `hold_drafts`: the Torch side drafts from the JAX side's numbers;
    where its own would lead to other drafts is found out at T = 0. `only`: ends as soon as these rows have parted or ended.
    `quick`: compiles the JAX side soon, else as in a decode. The JAX side packs as `decode` says, the Torch side always.
    """
    jax_begin, jax_step = QUICK if quick else AS_DECODED
    replay, decisions = Replay(tie), Decisions(None if fold is None else float(np.asarray(fold.guard)))
    packed, apart = dataclasses.replace(decode, pack=True), {}
    wanted = torch.tensor([only is None or row in only for row in range(len(lengths))])
    status = np.zeros(len(lengths), np.int32)
    theirs = jax_begin(checkpoint.params, prompts, lengths, checkpoint.model, decode, graph, status)
    ours = torch_loop.begin(params, tensor(prompts), tensor(lengths), checkpoint.model, decode, graph, impl=impl)
    same_state(theirs, ours, apart, torch.full((len(lengths),), torch.inf), {}, tie, hold_drafts)
    drafts, draft_differences, forwards, step = {}, [], 0, 0
    while torch.any((ours.row.phase != DONE) & wanted):
        live = ours.row.phase != DONE
        theirs, gates, greedy = jax_step(theirs, checkpoint.params, checkpoint.model, decode, graph, fold)
        replay.expect(gates, step)
        replay.live = live
        with mock.patch.object(torch_fold, "gate", replay), decisions.watched(greedy, live, step):
            ours = torch_decode.decode_step(ours, params, checkpoint.model, packed, graph, fold, impl=impl)
        assert next(replay.wanted, None) is None
        same_state(theirs, ours, apart, decisions.margin, decisions.flips, tie, hold_drafts, step)
        phase = ours.row.phase.clone()
        phase[list(apart)] = DONE
        ours = ours._replace(row=ours.row._replace(phase=phase))
        if hold_drafts:
            held = Numbers(Known(tensor(theirs.known.tokens), tensor(theirs.known.odds)), tensor(theirs.following))
            if decisions.source is not None and decisions.source[0].greedy is not None:
                found, compared, largest = draft_flips(ours, held, decisions.source, checkpoint.model, packed, graph, step)
                forwards += compared
                draft_differences.append(largest)
                for row, flip in found.items():
                    drafts.setdefault(row, []).append(flip)
            ours = ours._replace(known=held.known, following=held.following)
        step += 1
    decoded = sf.finish(theirs, checkpoint.model, decode), torch_loop.finish(ours, checkpoint.model, decode)
    counts = replay.positions, replay.folded, replay.ties, replay.free, forwards
    apart_by = (torch.cat([torch.zeros(0), *parts]) for parts in (decisions.differences, replay.differences, draft_differences))
    return Followed(*decoded, *counts, apart, replay.flips, drafts, *apart_by)


def same_state(
    theirs, ours, apart: dict[int, Flip], margin: torch.Tensor, flips: dict[int, Flip], tie: float, drafts_held: bool, step: int = 0
) -> None:
    """Every row's place, canvas, tokens and statistics are the same, or the row parts at a tie."""
    row, stats, tokens, following = jax.device_get((theirs.row, theirs.stats, theirs.tokens, theirs.following))
    pairs = [(f"row.{name}", getattr(row, name), getattr(ours.row, name)) for name in ours.row._fields]
    pairs += [(f"stats.{name}", getattr(stats, name), getattr(ours.stats, name)) for name in ours.stats._fields]
    pairs += [("tokens", tokens, ours.tokens)]
    if not drafts_held:
        pairs += [("following", np.where(row.phase != DONE, following, 0), torch.where(ours.row.phase != DONE, ours.following, 0))]
    for name, want, got in pairs:
        differ = (want != got.numpy()).reshape(len(margin), -1).any(axis=1)
        for index in set(np.flatnonzero(differ).tolist()) - set(apart):
            shown = f"{name} of row {index}: {want[index]} on the JAX side, {got[index]}; margin {margin[index]}, {flips.get(index)}"
            assert margin[index] < tie or tie == torch.inf, shown
            apart[index] = flips.get(index, Flip(name, float(margin[index]), float("nan"), step))


def same_result(followed: Followed) -> None:
    """The same tokens, lengths and statistics; at most one row may have parted at a tie."""
    assert len(followed.apart) <= 1
    kept = [row for row in range(len(followed.torch.lengths)) if row not in followed.apart]
    for want, got in ((followed.jax.tokens, followed.torch.tokens), (followed.jax.lengths, followed.torch.lengths)):
        np.testing.assert_array_equal(np.asarray(want)[kept], got.numpy()[kept])
        assert got.dtype == torch.int32
