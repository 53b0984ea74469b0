"""The decisions of two decodes in lock-step: what the Torch side decides, and what it would decide on the JAX side's numbers."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from parity_tests.harness.torch_twin import tensor
from parity_tests.lockstep.flip import Flip
from specfold_torch_ref.diffusion import loop as torch_decode
from specfold_torch_ref.diffusion import reveal as torch_reveal
from specfold_torch_ref.diffusion.arrays import of_branch
from specfold_torch_ref.diffusion.distribution import Distributions
from specfold_torch_ref.diffusion.draft import Known
from specfold_torch_ref.models.sampling import Ranked


class Decisions:
    """The Torch side's decisions of a step, and what they would be on the JAX side's numbers (at T = 0, which are all known).

    After a step: `margin` [batch]: the smallest one of each row's decisions; `flips`: each row's decision that differs, of several the
    one with the largest margin; `source`: the distributions and the branches that the next drafts are made from, if any.
    `differences`: |log-odds on one side - on the other| of every position that could be revealed, of all steps.
    """

    def __init__(self, guard: float | None):
        self.guard, self.differences = guard, []
        self.plain = torch_reveal.decide, Distributions.at, Distributions.following, Distributions.known, torch_decode.lay_out

    @contextlib.contextmanager
    def watched(self, greedy: Any, live: torch.Tensor, step: int) -> Iterator[None]:
        """One step: `greedy` are the JAX side's ranked tokens, `live` [batch] the rows that are compared."""
        self.theirs, self.live, self.step, self.complete = Ranked(*map(tensor, greedy)), live, step, None
        self.margin, self.flips, self.source = torch.full(live.shape, torch.inf), {}, None
        with contextlib.ExitStack() as patches:
            patches.enter_context(mock.patch.object(torch_reveal, "decide", self.decide))
            patches.enter_context(mock.patch.object(torch_decode, "lay_out", self.lay_out))
            for name in ("at", "following", "known"):
                watch = getattr(self, name)
                patched = mock.patch.object(Distributions, name, lambda seen, *rest, watch=watch: watch(seen, *rest))
                patches.enter_context(patched)
            yield

    def lay_out(self, *arguments):
        branches = self.plain[4](*arguments)
        self.tokens = branches.tokens
        return branches

    def _other(self, seen: Distributions) -> Distributions:
        return seen if seen.greedy is None else dataclasses.replace(seen, greedy=self.theirs)

    def at(self, seen: Distributions, branch: torch.Tensor, step: torch.Tensor) -> Ranked:
        ours = self.plain[1](seen, branch, step)
        self.branch, self.ranked = branch, ours if seen.greedy is None else self.plain[1](self._other(seen), branch, step)
        return ours

    def following(self, seen: Distributions, branch: torch.Tensor) -> torch.Tensor:
        drawn = self.plain[2](seen, branch)
        if self.complete is not None and seen.greedy is not None and seen.draws_first_token:
            other = self._other(seen)
            gap, theirs = (side._drawn(branch, torch.zeros_like(branch), slice(-1, None)).gap[:, 0] for side in (seen, other))
            self.margin = torch.where(self.live & self.complete, torch.minimum(self.margin, gap), self.margin)
            self._add("first token", self.complete & (drawn != self.plain[2](other, branch)), gap, gap + theirs)
        self.complete = None
        return drawn

    def known(self, seen: Distributions, branch: torch.Tensor, step: torch.Tensor, width: int) -> Known:
        self.source = seen, branch
        return self.plain[3](seen, branch, step, width)

    def decide(self, canvas, ranked, step, model, decode) -> torch_reveal.Decision:
        ours, theirs = (self.plain[0](canvas, side, step, model, decode) for side in (ranked, self.ranked))
        # A row whose chain is over waits for the others' with a canvas that its branch did not evaluate: that decides nothing.
        running = self.live & torch.all(of_branch(self.tokens, self.branch) == canvas, dim=1)
        self.complete = torch.all(canvas != model.mask_id, dim=1) & running
        candidate = torch_reveal.candidates(canvas, model.mask_id, decode.window(model)) & running[:, None]
        apart = torch.where(candidate, (ranked.odds - self.ranked.odds).abs(), 0)
        self.differences.append(apart[candidate & torch.isfinite(apart)])
        other = (ranked.tokens[..., 0] != self.ranked.tokens[..., 0]) & ours.reveal & theirs.reveal
        swapped = torch.where(other, ranked.gap + self.ranked.gap, 0)  # by so much the best token's lead over the second changed
        flipped = torch.any((ours.reveal != theirs.reveal) | other, dim=1)
        self._add("reveal", flipped & running, ours.margin, torch.maximum(apart, swapped).amax(dim=1))
        margin = ours.margin
        if self.guard is not None:
            to_guard = (ours.margin - self.guard).abs()
            margin = torch.minimum(margin, to_guard)
            trust = (ours.margin >= self.guard) != (theirs.margin >= self.guard)
            self._add("guard", trust & running, to_guard, (ours.margin - theirs.margin).abs())
        self.margin = torch.where(running, torch.minimum(self.margin, margin), self.margin)
        return ours

    def _add(self, what: str, flipped: torch.Tensor, margin: torch.Tensor, difference: torch.Tensor) -> None:
        for row in torch.nonzero(flipped & self.live).flatten().tolist():
            flip = Flip(what, float(margin[row]), float(difference[row]), self.step, f"branch {int(self.branch[row])}")
            self.flips[row] = max(self.flips.get(row, flip), flip, key=lambda each: each.margin)
