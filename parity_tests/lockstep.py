"""Decoding on both sides in lock-step: every row's whole state is compared after each step, and every difference is shown a tie.

The Torch side's gates are held to the JAX side's decisions, so that one tie does not become many. A row that parts at a token's tie is
followed no further.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch

import specfold_jax as sf
from specfold_jax import decode as jax_decode
from specfold_jax import fold as jax_fold
from specfold_torch_ref import decode as torch_decode
from specfold_torch_ref import fold as torch_fold
from specfold_torch_ref import reveal as torch_reveal
from specfold_torch_ref import state as torch_state
from specfold_torch_ref.distribution import Distributions
from specfold_torch_ref.draft import Known
from specfold_torch_ref.model import Params
from specfold_torch_ref.ops import Gate, Implementation, gate
from specfold_torch_ref.reference import take_branch
from specfold_torch_ref.reveal import Ranked
from specfold_torch_ref.row import DONE
from torch_twin import FAST, tensor

TIE = 1e-4
"""What counts as a tie in fp32: |relative residual - tau| below this share of tau, or a decision's margin below this many log-odds."""


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


@partial(jax.jit, compiler_options=FAST)
def jax_step(state, params, model, decode, graph, fold):
    """One step of the JAX loop, its gates' decisions, and the ranked tokens of all branches (of no meaning at T > 0)."""
    seen, plain = [], jax_decode.Distributions

    def distributions(*arguments):
        seen.append(plain(*arguments))
        return seen[-1]

    with recorded_gates() as gates, mock.patch.object(jax_decode, "Distributions", distributions):
        after = sf.decode_step(state, params, model, decode, graph, fold)
    return after, tuple(gates), seen[0].greedy


jax_begin = jax.jit(sf.begin, compiler_options=FAST)


class Flip(NamedTuple):
    """A decision on which the two sides differ. `what`: "gate", "reveal", "guard" or "first token" (of the next block), or what of a
    row's state differs where none of these did.

    `margin`: how far the Torch side was from the other decision, `difference`: how far apart the two sides' numbers are there; in
    log-odds, a gate's as shares of tau.
    """

    what: str
    margin: float
    difference: float


class Replay:
    """The Torch side's gate, held to the JAX side's decisions of the same check. Only ties of `live` rows (None: all) may differ."""

    def __init__(self, tie: float = TIE):
        self.tie, self.live, self.wanted = tie, None, iter(())
        self.positions, self.folded, self.ties, self.flips = 0, 0, 0, {}

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
        margin, apart = (rel - tau).abs() / tau, (rel - tensor(residual).to(x.device)).abs() / tau
        assert self.tie == torch.inf or torch.all(margin[differ] < self.tie), f"folded positions differ at residuals {rel[differ]}, {tau=}"
        for row in torch.nonzero(differ.flatten(1).any(dim=1)).flatten().tolist():
            worst = torch.where(differ[row], margin[row], -1).argmax()
            flip = Flip("gate", float(margin[row].flatten()[worst]), float(apart[row].flatten()[worst]))
            self.flips.setdefault(row, []).append(flip)
        self.positions += int(valid.sum()) * x.shape[2]
        self.folded += int((valid[..., None] & ~theirs.computed).sum())
        self.ties += int(differ.sum())
        if not differ.any():
            assert torch.equal(ours.source[valid].long(), theirs.source[valid])
        return Gate(theirs.computed, theirs.source.int())


class Decisions:
    """The Torch side's decisions of a step, and what they would be on the JAX side's numbers (at T = 0, which are all known)."""

    def __init__(self, guard: float | None):
        self.guard, self.differences = guard, []
        self.plain = torch_reveal.decide, Distributions.at, Distributions.following

    @contextlib.contextmanager
    def watched(self, greedy: Any, live: torch.Tensor) -> Iterator[None]:
        """One step: `greedy` are the JAX side's ranked tokens, `live` [batch] the rows that are compared."""
        self.theirs, self.live, self.complete = Ranked(*map(tensor, greedy)), live, None
        self.margin, self.flips = torch.full(live.shape, torch.inf), {}
        patches = [mock.patch.object(torch_reveal, "decide", self.decide)]
        for name in ("at", "following"):
            watch = getattr(self, name)
            patches.append(mock.patch.object(Distributions, name, lambda seen, *rest, watch=watch: watch(seen, *rest)))
        with patches[0], patches[1], patches[2]:
            yield

    def _other(self, seen: Distributions) -> Distributions:
        other = copy.copy(seen)
        if seen.greedy is not None:
            other.greedy = self.theirs
        return other

    def at(self, seen: Distributions, branch: torch.Tensor, step: torch.Tensor) -> Ranked:
        ours = self.plain[1](seen, branch, step)
        self.ranked = ours if seen.greedy is None else self.plain[1](self._other(seen), branch, step)
        return ours

    def following(self, seen: Distributions, branch: torch.Tensor) -> torch.Tensor:
        drawn = self.plain[2](seen, branch)
        if self.complete is not None and seen.greedy is not None and seen.starts_drawn:
            other = self._other(seen)
            gap, theirs = (side._drawn(branch, torch.zeros_like(branch), slice(-1, None)).gap[:, 0] for side in (seen, other))
            self.margin = torch.where(self.live & self.complete, torch.minimum(self.margin, gap), self.margin)
            self._add("first token", self.complete & (drawn != self.plain[2](other, branch)), gap, gap + theirs)
        self.complete = None
        return drawn

    def decide(self, canvas, ranked, step, model, decode) -> torch_reveal.Decision:
        ours, theirs = (self.plain[0](canvas, side, step, model, decode) for side in (ranked, self.ranked))
        self.complete = torch.all(canvas != model.mask_id, dim=1)
        candidate = torch_reveal.candidates(canvas, model.mask_id, decode.window(model)) & self.live[:, None]
        apart = torch.where(candidate, (ranked.odds - self.ranked.odds).abs(), 0)
        self.differences.append(apart[candidate & torch.isfinite(apart)])
        other = (ranked.tokens[..., 0] != self.ranked.tokens[..., 0]) & ours.reveal & theirs.reveal
        swapped = torch.where(other, ranked.gap + self.ranked.gap, 0)  # by so much the best token's lead over the second changed
        flipped = torch.any((ours.reveal != theirs.reveal) | other, dim=1)
        self._add("reveal", flipped, ours.margin, torch.maximum(apart, swapped).amax(dim=1))
        margin = ours.margin
        if self.guard is not None:
            to_guard = (ours.margin - self.guard).abs()
            margin = torch.minimum(margin, to_guard)
            trust = (ours.margin >= self.guard) != (theirs.margin >= self.guard)
            self._add("guard", trust, to_guard, (ours.margin - theirs.margin).abs())
        self.margin = torch.where(self.live, torch.minimum(self.margin, margin), self.margin)
        return ours

    def _add(self, what: str, flipped: torch.Tensor, margin: torch.Tensor, difference: torch.Tensor) -> None:
        for row in torch.nonzero(flipped & self.live).flatten().tolist():
            self.flips.setdefault(row, Flip(what, float(margin[row]), float(difference[row])))


class Followed(NamedTuple):
    """Two decodes compared step by step. `positions`: gate decisions compared, `folded` of them inherited, `ties` of them ties.

    `apart`: rows that parted, which were not compared from there on, and why; `gates`: rows with ties of gates before that;
    `differences`: |log-odds of one side - the other's| of every position that could be revealed.
    """

    jax: sf.Decoded
    torch: torch_state.Decoded
    positions: int
    folded: int
    ties: int
    apart: dict[int, Flip]
    gates: dict[int, list[Flip]]
    differences: torch.Tensor


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
) -> Followed:
    """Decodes on both sides, step by step, and compares every row's whole state and statistics after each step.

    A row may part only where a decision had a margin below `tie`. `hold_drafts`: the Torch side drafts from the JAX side's numbers,
    so that ties between drafts play no part. `only`: ends as soon as these rows have parted or ended. The JAX side packs as `decode`
    says, the Torch side always.
    """
    replay, decisions = Replay(tie), Decisions(None if fold is None else float(np.asarray(fold.guard)))
    packed, apart = dataclasses.replace(decode, pack=True), {}
    wanted = torch.tensor([only is None or row in only for row in range(len(lengths))])
    status = np.zeros(len(lengths), np.int32)
    theirs = jax_begin(checkpoint.params, prompts, lengths, checkpoint.model, decode, graph, status)
    ours = torch_state.begin(params, tensor(prompts), tensor(lengths), checkpoint.model, decode, graph, impl=impl)
    same_state(theirs, ours, apart, torch.full((len(lengths),), torch.inf), {}, tie, hold_drafts)
    while torch.any((ours.row.phase != DONE) & wanted):
        live = ours.row.phase != DONE
        theirs, gates, greedy = jax_step(theirs, checkpoint.params, checkpoint.model, decode, graph, fold)
        replay.wanted, replay.live = iter(gates), live
        with mock.patch.object(torch_fold, "gate", replay), decisions.watched(greedy, live):
            ours = torch_decode.decode_step(ours, params, checkpoint.model, packed, graph, fold, impl=impl)
        assert next(replay.wanted, None) is None
        same_state(theirs, ours, apart, decisions.margin, decisions.flips, tie, hold_drafts)
        phase = ours.row.phase.clone()
        phase[list(apart)] = DONE
        ours = ours._replace(row=ours.row._replace(phase=phase))
        if hold_drafts:
            known = Known(tensor(theirs.known.tokens), tensor(theirs.known.odds))
            ours = ours._replace(known=known, following=tensor(theirs.following))
    decoded = sf.finish(theirs, checkpoint.model, decode), torch_state.finish(ours, checkpoint.model, decode)
    differences = torch.cat([torch.zeros(0), *decisions.differences])
    return Followed(*decoded, replay.positions, replay.folded, replay.ties, apart, replay.flips, differences)


def same_state(theirs, ours, apart: dict[int, Flip], margin: torch.Tensor, flips: dict[int, Flip], tie: float, drafts_held: bool) -> None:
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
            apart[index] = flips.get(index, Flip(name, float(margin[index]), float("nan")))


def explained(followed: Followed, row: int, rounding: float | None = None) -> bool:
    """Whether a row differs for ties alone: there is one, and every one is within `TIE`.

    `rounding`: of narrow dtypes instead; decisions lie within that many log-odds, and gates have tau between the two sides' residuals.
    """
    parting, gates = followed.apart.get(row), followed.gates.get(row, [])
    if parting is not None and parting.difference != parting.difference:  # no decision differed where the rows parted
        return False
    decision = [] if parting is None else [parting.margin <= (TIE if rounding is None else rounding)]
    return all(decision + [flip.margin <= (TIE if rounding is None else flip.difference) for flip in gates]) and bool(decision or gates)


def same_result(followed: Followed) -> None:
    """The same tokens, lengths and statistics; at most one row may have parted at a tie."""
    assert len(followed.apart) <= 1
    kept = [row for row in range(len(followed.torch.lengths)) if row not in followed.apart]
    for want, got in ((followed.jax.tokens, followed.torch.tokens), (followed.jax.lengths, followed.torch.lengths)):
        np.testing.assert_array_equal(np.asarray(want)[kept], got.numpy()[kept])
        assert got.dtype == torch.int32
