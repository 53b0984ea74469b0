"""The PyTorch side of `benchmarks.speed.decode`: plain PyTorch and Triton, driven from the host as they are used."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch.profiler import ProfilerActivity, profile

from benchmarks.speed.timing import Part, timed
from specfold_jax.diffusion.decoding import Decoding
from specfold_torch_ref.diffusion.distribution import Distributions
from specfold_torch_ref.diffusion.layout import lay_out
from specfold_torch_ref.diffusion.loop import begin, decode_step, finish, unfinished
from specfold_torch_ref.diffusion.state import Decoded, DecodeState
from specfold_torch_ref.models.check import Branches, Checked, check
from specfold_torch_ref.models.ops import Implementation
from specfold_torch_ref.models.transformer import Params


@dataclass(frozen=True)
class TorchSide:
    """See `benchmarks.speed.timing.Side`. Times include what the host takes to launch: nothing hides it."""

    params: Params
    how: Decoding
    impl: Implementation

    @property
    def compile_seconds(self) -> None:
        """Triton compiles while the first batch warms up."""

    def _wait(self) -> None:
        if (device := self.params["embed"].device).type == "cuda":
            torch.cuda.synchronize(device)

    @torch.inference_mode()
    def begin(self, prompts: np.ndarray, lengths: np.ndarray) -> DecodeState:
        given = torch.from_numpy(prompts), torch.from_numpy(lengths)
        state = begin(self.params, *given, self.how.model, self.how.decode, self.how.graph, impl=self.impl)
        self._wait()
        return state

    @torch.inference_mode()
    def decode(self, prompts: np.ndarray, lengths: np.ndarray) -> Decoded:
        state = self.begin(prompts, lengths)
        while unfinished(state):
            state = self.step(state)
        return finish(state, self.how.model, self.how.decode)

    def unfinished(self, state: DecodeState) -> bool:
        return unfinished(state)

    @torch.inference_mode()
    def step(self, state: DecodeState) -> DecodeState:
        """The cache is written in place, past what counts for it: an earlier state may be taken up again."""
        return decode_step(state, self.params, *self.how, impl=self.impl)

    def lay_out(self, state: DecodeState) -> Branches:
        return lay_out(state, self.how.graph, self.how.model, self.how.decode)

    @torch.inference_mode()
    def _check(self, state: DecodeState, branches: Branches) -> Checked:
        model, decode, _, fold = self.how
        return check(self.params, branches, state.cache, state.row.start, model, fold, decode.pack, impl=self.impl)

    def computed_rows(self, state: DecodeState) -> Int[np.ndarray, "batch layers 2"]:
        return self._check(state, self.lay_out(state)).computed_rows.cpu().numpy()

    @torch.inference_mode()
    def rebase(self, state: DecodeState, index: Int[np.ndarray, "batch span"], shift: Int[np.ndarray, " batch"]) -> DecodeState:
        taken, further, each = torch.from_numpy(index), torch.from_numpy(shift).long(), torch.arange(len(index))[:, None]
        moved = {name: getattr(state.row, name) + further for name in ("start", "lengths", "limit")}

        def take(x: torch.Tensor) -> torch.Tensor:
            return x[each.to(x.device), taken.to(x.device)]

        cache = tuple((take(key), take(value)) for key, value in state.cache)
        return state._replace(row=state.row._replace(**moved), tokens=take(state.tokens), cache=cache)

    def _part(self, part: Part, state: DecodeState) -> Any:
        """A function without arguments that runs the part on this state."""
        branches = self.lay_out(state)
        match part:
            case "check":
                return partial(self._check, state, branches)
            case "head":
                model, decode, graph, _ = self.how
                given = self.params, branches, self._check(state, branches), state.row, model, decode, graph
                return torch.inference_mode()(partial(Distributions.of, *given, impl=self.impl))
            case "step":
                return partial(self.step, state)

    def seconds(self, part: Part, state: DecodeState, repetitions: int) -> list[float]:
        """Wall time with a wait for the device after each."""
        once = self._part(part, state)

        def run() -> None:
            once()
            self._wait()

        run()
        return [timed(run)[1] for _ in range(repetitions)]

    def kernels(self, part: Part, state: DecodeState) -> dict[str, float] | None:
        """By PyTorch's profiler; Triton's kernels have the names of their functions in `kernels_triton`."""
        if self.params["embed"].device.type != "cuda":
            return None
        once = self._part(part, state)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            once()
            self._wait()
        return {e.key: e.self_device_time_total / 1000 for e in profiled.key_averages() if e.self_device_time_total > 0}
