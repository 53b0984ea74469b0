"""Which settings `benchmarks.quality.methods` measures: grids, in groups that share a vanilla run."""

import dataclasses
import itertools
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from specfold_jax.calibration.options import SOURCES, Source
from specfold_jax.config import DecodeConfig, FoldConfig
from specfold_jax.methods import MethodName

ABLATIONS: dict[str, dict[str, Any]] = {
    "one gate": {"gates": 1},
    "reference: source": {"reference": "source"},
    "no correction": {"correction": False},
    "revealed not forced": {"force_revealed": False},
    "feed-forward only": {"scope": "ffn"},
}
"""Changes of `FoldConfig`'s switches, one at a time."""


@dataclass(frozen=True)
class Shared:
    """What all settings of a group have in common. `sub_block` None: the family's. `calibration`: problems that graphs come from.
    `short`: outputs of at most so many tokens, by vanilla's length, are counted apart. `pack`: see `DecodeConfig`."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    threshold: float = 0.9
    sub_block: int | None = 8
    temperature: float = 0.0
    max_new_tokens: int = 256
    samples: int = 500
    batch: int = 125
    calibration: int = 64
    short: int = 50
    pack: bool = True

    def decode(self, share: bool = True) -> DecodeConfig:
        """The decoding configuration."""
        return DecodeConfig(self.max_new_tokens, self.threshold, self.sub_block, temperature=self.temperature, pack=self.pack, share=share)


@dataclass(frozen=True)
class Setting(Shared):
    """One row of a table. `guard` is "inf" in text, as JSON has no infinity. `ablation`: a name of `ABLATIONS`; None: folding as it is."""

    method: MethodName = "vanilla"
    source: Source | None = None
    drafts: int | None = None
    share: bool | None = None
    tau: float | None = None
    guard: float | Literal["inf"] | None = None
    ablation: str | None = None

    def fold(self) -> FoldConfig | None:
        """The folding configuration; None where nothing is folded."""
        if self.tau is None:
            return None
        return FoldConfig(self.tau, float(self.guard or 0), **ABLATIONS.get(self.ablation or "", {}))

    def title(self) -> str:
        """The setting in a line."""
        head = f"{self.dtype} threshold {self.threshold:g} sub-block {self.sub_block} T {self.temperature:g}"
        words = [f"{head} {self.max_new_tokens} tokens x {self.samples} by {self.batch}: {self.method}"]
        words += [f"{name}={value}" for name, value in list(asdict(self).items())[-6:] if value is not None]
        return " ".join(words)


@dataclass(frozen=True)
class Group(Shared):
    """A grid: Spiffy over sources x drafts x share; SpecFold over fold_sources x fold_drafts x taus x guards x ablations.

    SpecFold shares commits if `share` has it.
    """

    sources: tuple[Source, ...] = ("union",)
    drafts: tuple[int, ...] = (8,)
    share: tuple[bool, ...] = (True,)
    fold_sources: tuple[Source, ...] = ("union",)
    fold_drafts: tuple[int, ...] = (8,)
    taus: tuple[float, ...] = (0.1,)
    guards: tuple[float, ...] = (0.5,)
    ablations: tuple[str | None, ...] = (None,)

    def settings(self) -> list[Setting]:
        """Vanilla, then the grid."""
        vanilla = Setting(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Shared)})
        found = [vanilla]
        for source, drafts, share in itertools.product(self.sources, self.drafts, self.share):
            found.append(replace(vanilla, method="spiffy", source=source, drafts=drafts, share=share))
        grid = itertools.product(self.fold_sources, self.fold_drafts, self.taus, self.guards, self.ablations)
        for source, drafts, tau, guard, ablation in grid:
            fold: dict[str, Any] = {"tau": tau, "guard": "inf" if guard == _INF else guard, "ablation": ablation}
            found.append(replace(vanilla, method="specfold", source=source, drafts=drafts, share=max(self.share), **fold))
        return found


_INF = float("inf")
_BOTH = (False, True)
_CONFIDENCE: tuple[Source, ...] = ("confidence",)
_BASE = Group(pack=False, fold_sources=_CONFIDENCE)
_FEW = replace(_BASE, sources=_CONFIDENCE, drafts=(8,))
PRESETS: dict[str, tuple[Group, ...]] = {
    "quick": (Group(samples=8, batch=8, calibration=8),),
    "readme": (
        replace(_BASE, sources=SOURCES, drafts=(3, 8), share=_BOTH, taus=(0.05, 0.1, 0.2), guards=(0, 0.5, _INF)),
        replace(_FEW, dtype="bfloat16", guards=(0, 0.5)),
        replace(_FEW, threshold=1.0, sources=("ranks",), fold_sources=("ranks",), guards=(0, 0.5)),
        replace(_FEW, sub_block=32, sources=("ranks", "confidence"), fold_sources=("ranks",), guards=(0, 0.5)),
    ),
    "five": (replace(_BASE, sources=SOURCES, drafts=(5,), share=_BOTH, fold_drafts=(5,)),),
    "ablations": (replace(_FEW, guards=(0, 0.5), ablations=(None, *ABLATIONS)),),
}
