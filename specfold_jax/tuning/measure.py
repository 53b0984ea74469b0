"""One setting measured on held-out prompts: agreement with vanilla, forwards, recompute ratios and time, and their intervals."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specfold_jax.calibration.options import Source
from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.diffusion.decoding import Decoding
from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.diffusion.state import Decoded
from specfold_jax.evaluation.intervals import wilson
from specfold_jax.methods import METHODS, MethodName
from specfold_jax.models.transformer import Params
from specfold_jax.running.batch import batches, pad, run
from specfold_jax.running.memory import explained
from specfold_jax.running.summary import Run, summarise
from specfold_jax.tuning.timing_table import median, require_times
from specfold_jax.values import Natural, NotNegative, Size, conform, of_record, same_names, show, to_json

DRAWS = 2000


class Subject(NamedTuple):
    """What is tuned: a model under a decoding, `batch` prompts at a time. `name`: as graphs record it."""

    name: str
    params: Params
    model: ModelConfig
    decode: DecodeConfig
    batch: int


@dataclass(frozen=True)
class Setting:
    """A method with its settings. A setting that the method does not have is None."""

    method: MethodName
    source: Source | None = None
    drafts: Size | None = None
    reach: Size | None = None
    tau: NotNegative | None = None
    guard: NotNegative | None = None

    def __post_init__(self) -> None:
        conform(self)

    @property
    def key(self) -> str:
        """Its name in files and tables."""
        named = ("drafts", "reach", "tau", "guard")
        values = [f"{name}={getattr(self, name):g}" for name in named if getattr(self, name) is not None]
        return " ".join([self.method, *([self.source] if self.source else []), *values])

    @property
    def lossless(self) -> bool:
        """Whether it follows vanilla by construction (in exact arithmetic)."""
        return METHODS[self.method].lossless or self.guard == np.inf

    def fold(self) -> FoldConfig | None:
        """Its fold, if it has one."""
        return FoldConfig(tau=self.tau, guard=self.guard) if self.tau is not None and self.guard is not None else None

    def decoding(self, subject: Subject, graph: DraftGraph | None) -> Decoding:
        """What decodes with it."""
        return Decoding.of(self.method, subject.model, subject.decode, graph, self.fold())

    def record(self) -> dict[str, Any]:
        """The setting as a JSON value."""
        return to_json(asdict(self))

    @classmethod
    def of(cls, record: Any) -> "Setting":
        """The setting of `record`'s value. Raises ValueError naming the field."""
        return of_record(cls, "setting", record)


@dataclass(frozen=True)
class Outcome:
    """A setting on the held-out prompts.

    One number a prompt: `same` (1 if the tokens are vanilla's, else 0), `tokens` generated, `forwards`. Sums: `checks`, `commits`,
    `guard_stops`. `depth`: accepted drafts a drafting check. `recompute`: for each layer the shares of draft rows that were computed
    before attention and before the feed-forward network. `milliseconds`: of a loop iteration, one sample a batch.
    """

    setting: Setting
    same: list[Natural]
    tokens: list[Natural]
    forwards: list[Natural]
    checks: Natural
    commits: Natural
    guard_stops: Natural
    depth: float | None
    recompute: list[list[float]] | None
    milliseconds: list[float]

    def __post_init__(self) -> None:
        conform(self)
        require_times("milliseconds", self.milliseconds)
        if not 0 < len(self.same) == len(self.tokens) == len(self.forwards):
            raise ValueError("same, tokens and forwards must have one number a prompt")
        if self.recompute is not None and not all(len(pair) == 2 for pair in self.recompute):
            raise ValueError(f"recompute={show(self.recompute)} must have two shares a layer")

    @property
    def agreement(self) -> float:
        """Share of the prompts with vanilla's tokens."""
        return sum(self.same) / len(self.same)

    @property
    def agreement_interval(self) -> tuple[float, float]:
        """Its Wilson score interval, 95 %."""
        return wilson(sum(self.same), len(self.same))

    @property
    def forwards_per_sample(self) -> float:
        """Checks and commits a prompt."""
        return float(np.mean(self.forwards))

    @property
    def recompute_ratio(self) -> float | None:
        """Mean over layers and gates."""
        return None if self.recompute is None else float(np.mean(self.recompute))

    def rate(self, batch: int) -> float:
        """Tokens a second: all tokens, over the loop iterations times the median time of one."""
        count = iterations(np.array(self.forwards)[None], batch)[0]
        return float(sum(self.tokens) / (count * median(self.milliseconds) / 1000))

    def rate_interval(self, batch: int, seed: int) -> tuple[float, float]:
        """95 % bootstrap interval of `rate` over prompts and time samples. The same seed gives the same interval."""
        rng = np.random.default_rng(seed)
        tokens, forwards, samples = np.array(self.tokens), np.array(self.forwards), np.array(self.milliseconds)
        rows = rng.integers(len(tokens), size=(DRAWS, len(tokens)))
        times = np.median(rng.choice(samples, (DRAWS, len(samples))), axis=1)
        rates = tokens[rows].sum(axis=1) / (iterations(forwards[rows], batch) * times / 1000)
        low, high = np.percentile(rates, (2.5, 97.5))
        return float(low), float(high)

    def record(self) -> dict[str, Any]:
        """The outcome as a JSON value."""
        return to_json(asdict(self)) | {"setting": self.setting.record()}

    @classmethod
    def of(cls, record: Any) -> "Outcome":
        """The outcome of `record`'s value. Raises ValueError naming the field."""
        same_names("it", record, [field.name for field in fields(cls)])
        return cls(**record | {"setting": Setting.of(record["setting"])})

    def figures(self, batch: int, seed: int) -> dict[str, Any]:
        """The figures and intervals a profile quotes."""
        return {
            "setting": self.setting.key,
            "prompts": len(self.same),
            "tokens_per_second": round(self.rate(batch), 3),
            "tokens_per_second_interval95": [round(x, 3) for x in self.rate_interval(batch, seed)],
            "agreement": self.agreement,
            "agreement_interval95": list(self.agreement_interval),
            "forwards_per_sample": self.forwards_per_sample,
            "forwards_per_token": sum(self.forwards) / max(sum(self.tokens), 1),
            "checks": self.checks,
            "commits": self.commits,
            "accepted_depth": self.depth,
            "recompute_ratio": self.recompute_ratio,
            "guard_stops": self.guard_stops,
            "milliseconds_per_iteration": median(self.milliseconds),
            "time_samples": len(self.milliseconds),
        }


def iterations(forwards: np.ndarray, batch: int) -> np.ndarray:
    """Loop iterations [draws] of prompts decoded in order, `batch` together. A batch takes as many as its slowest row.

    `forwards`: [draws, prompts].
    """
    missing = -forwards.shape[1] % batch
    padded = np.pad(forwards, ((0, 0), (0, missing)))
    return padded.reshape(len(forwards), -1, batch).max(axis=2).sum(axis=1)


def timed(
    subject: Subject, ids: Sequence[Sequence[int]], setting: Setting, graph: DraftGraph | None, first: int | None = None
) -> tuple[list[Decoded], list[float]]:
    """The decoded batches on the host, and milliseconds of a loop iteration in each. `first`: only so many batches."""
    params, how = subject.params, setting.decoding(subject, graph)

    def decode(tokens: jax.Array, lengths: jax.Array) -> Decoded:
        return jax.block_until_ready(run(params, tokens, lengths, how))

    parts = [(jnp.asarray(tokens), jnp.asarray(lengths)) for tokens, lengths in batches(ids, subject.batch)[:first]]
    with explained(params, how, parts[0][0].shape):
        decode(*parts[0])  # compiles and warms up
        done, milliseconds = [], []
        for tokens, lengths in parts:
            begun = time.perf_counter()
            decoded = decode(tokens, lengths)
            seconds = time.perf_counter() - begun
            done.append(jax.device_get(decoded))
            milliseconds.append(1000 * seconds / max(int(done[-1].stats.nfe.max()), 1))
    return done, milliseconds


def measure(
    subject: Subject, ids: Sequence[Sequence[int]], setting: Setting, graph: DraftGraph | None, vanilla: Sequence[Sequence[int]] | None
) -> tuple[Outcome, list[list[int]]]:
    """Decodes the prompts with a setting. Also returns the generated tokens. `vanilla`: vanilla's tokens (None: this is vanilla)."""
    done, milliseconds = timed(subject, ids, setting, graph)
    decoded = jax.tree.map(lambda *rows: np.concatenate(rows)[: len(ids)], *done)
    prompt_lengths = pad(ids)[1]
    result = Run(decoded, prompt_lengths, summarise(decoded, prompt_lengths, 0.0, setting.method))
    if result.summary.refused:
        row, reason = result.summary.refused[0]
        raise ValueError(f"held-out prompt {row} was not decoded: {reason}")
    generated, total = [result.generated(row) for row in range(len(ids))], result.summary
    outcome = Outcome(
        setting,
        same=[1] * len(ids) if vanilla is None else [int(a == list(b)) for a, b in zip(generated, vanilla, strict=True)],
        tokens=[len(row) for row in generated],
        forwards=decoded.stats.nfe.tolist(),
        checks=total.checks,
        commits=total.commits,
        guard_stops=total.guard_stops,
        depth=total.accepted_depth,
        recompute=None if total.recompute is None else [list(pair) for pair in total.recompute],
        milliseconds=milliseconds,
    )
    return outcome, generated
