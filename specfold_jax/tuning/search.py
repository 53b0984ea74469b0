"""`specfold tune`: the fastest settings for a model, its prompts and this device that follow vanilla decoding as closely as asked.

Prompts are split into a calibration half, from which draft graphs are chosen, and a held-out half, on which settings are measured.
A setting qualifies if the share of held-out prompts with vanilla's tokens is at least the target. The point estimate counts, not the
lower end of its interval: a target of 99.5 % could only be certified on some 800 prompts, so the interval is printed and a note says
what the sample can tell. Of those that qualify, the one with the highest lower end of its tokens/s interval is chosen.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specfold_jax.calibration.records import record
from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.running.batch import pad
from specfold_jax.tuning import profile as p
from specfold_jax.tuning import report
from specfold_jax.tuning.gates import record_gates
from specfold_jax.tuning.graphs import Candidate, candidate, worth_decoding
from specfold_jax.tuning.journal import Journal, open_journal
from specfold_jax.tuning.measure import Outcome, Setting, Subject, measure, timed
from specfold_jax.tuning.timing_table import TimingTable, device_name, require_times
from specfold_jax.values import conforming, same_names

FEWEST = 8
WATCHED = 8
SOURCES = ("ranks", "confidence", "union")


@dataclass(frozen=True)
class Search:
    """What is tried. `agreement`: least share of held-out prompts with vanilla's tokens; `lossless`: only what is exact by construction.

    `reaches`: sub-blocks, empty for the whole block. `guards`: the first is used while tau is searched.
    """

    drafts: tuple[int, ...] = (3, 5, 8)
    reaches: tuple[int, ...] = ()
    taus: tuple[float, ...] = (0.05, 0.1, 0.2)
    guards: tuple[float, ...] = (0.5, 0.0)
    sources: tuple[str, ...] = SOURCES
    agreement: float = 0.995
    lossless: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        rules = {
            "drafts": (lambda v: v >= 1, "whole numbers of at least 1"),
            "taus": (lambda v: v >= 0, "numbers of at least 0"),
            "guards": (lambda v: v >= 0, "numbers of at least 0"),
            "sources": (lambda v: v in SOURCES, f"some of {SOURCES}"),
        }
        for name, (valid, rule) in rules.items():
            if not getattr(self, name) or not all(valid(v) for v in getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must be {rule}")
        if not all(v >= 1 for v in self.reaches):
            raise ValueError(f"reaches={self.reaches} must be whole numbers of at least 1")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must be a whole number of at least 0")
        if not 0 < self.agreement <= 1:
            raise ValueError(f"agreement={self.agreement} must be a share in (0, 1]")


@dataclass(frozen=True)
class Tuned:
    """The profile; the candidates and outcomes it was chosen from, as plots show them. `gates`: `record_gates`' of one setting."""

    profile: p.Profile
    candidates: list[Candidate]
    outcomes: list[Outcome]
    gates: dict[str, Any] | None
    batch: int
    seed: int
    target: float


def split(ids: Sequence[Sequence[int]], seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Calibration and held-out prompts: two halves without a prompt in common (repeated prompts count once), shuffled by the seed."""
    different = [list(row) for row in dict.fromkeys(map(tuple, ids))]
    order = np.random.default_rng(seed).permutation(len(different)).tolist()
    half = len(different) // 2
    return [different[n] for n in order[:half]], [different[n] for n in order[half:]]


class _Tuner:
    """A run's state: measured once, looked up from then on."""

    def __init__(self, subject: Subject, search: Search, calibration: list, held: list, journal: Journal, timing: Any, note: Any) -> None:
        self.subject, self.search, self.journal, self.timing = subject, search, journal, timing
        begun = time.monotonic()
        self.note = lambda text: note(f"{time.monotonic() - begun:5.0f} s  {text}")
        self.calibration, self.held = calibration, held
        self.vanilla: list[list[int]] | None = None
        self.outcomes: dict[Setting, Outcome] = {}
        self.graphs: dict[Setting, Any] = {}
        self.records: dict[int, Any] = {}
        self.finalists: list[Setting] | None = None  # once there are some, only they are compared

    def outcome(self, setting: Setting, graph: Any = None) -> Outcome:
        """Measures a setting on the held-out prompts."""

        def make() -> dict[str, Any]:
            outcome, generated = measure(self.subject, self.held, setting, graph, self.vanilla)
            if self.timing and setting.key in self.timing.milliseconds:
                outcome = replace(outcome, milliseconds=self.timing.milliseconds[setting.key])
            return {"outcome": outcome.record()} | ({"generated": generated} if self.vanilla is None else {})

        def read(value: Any) -> tuple[Outcome, list[list[int]]]:
            found, generated = Outcome.of(value["outcome"]), value["generated"] if self.vanilla is None else self.vanilla
            if found.setting != setting or not len(found.same) == len(generated) == len(self.held):
                raise ValueError(f"it must be of {setting.key} on {len(self.held)} prompts")
            return found, generated

        found, self.vanilla = self.journal.once(setting.key, make, read)
        self.outcomes[setting], self.graphs[setting] = found, graph
        low, high = self.interval(found)
        agreement = f"{sum(found.same)} of {len(found.same)} identical"
        self.note(f"{setting.key}: {found.forwards_per_sample:.2f} forwards a prompt, {low:.0f} to {high:.0f} tokens/s, {agreement}")
        return found

    def interval(self, outcome: Outcome) -> tuple[float, float]:
        return outcome.rate_interval(self.subject.batch, self.search.seed)

    def low(self, outcome: Outcome) -> float:
        return self.interval(outcome)[0]

    def qualifies(self, outcome: Outcome) -> bool:
        """Whether a setting follows vanilla as closely as asked, as far as the sample can tell."""
        target = 1.0 if self.search.lossless else self.search.agreement
        return outcome.agreement >= target and (outcome.setting.lossless or not self.search.lossless)

    def best(self, method: str | None = None) -> Outcome | None:
        """The best qualifying outcome, of a method or of all."""
        rivals = self.outcomes if self.finalists is None else self.finalists
        fit = [self.outcomes[s] for s in rivals if method in (None, s.method) and self.qualifies(self.outcomes[s])]
        return max(fit, key=self.low, default=None)

    def candidates(self) -> list[Candidate]:
        """Graphs of every source, budget and reach, compared on the calibration records."""
        subject, search, found = self.subject, self.search, []
        whole = subject.decode.block(subject.model) // subject.decode.window(subject.model)
        for reach in sorted({min(r, whole) for r in search.reaches or (whole,)}, reverse=True):
            for source in search.sources:
                for drafts in search.drafts:
                    key = f"graph {source} drafts={drafts} reach={reach}"
                    make = partial(self._candidate, source, drafts, reach)
                    c = self.journal.once(key, make, lambda value: None if value is None else Candidate.of(value))
                    if c is None:
                        self.note(f"{key}: nothing to draft on these prompts")
                        continue
                    found.append(c)
                    self.note(f"{key}: accepted depth {c.depth:.2f}, saves {c.saved:.2f} forwards a prompt")
        return found

    def _candidate(self, source: Any, drafts: int, reach: int) -> dict[str, Any] | None:
        subject = self.subject
        if reach not in self.records:
            tokens, lengths = (jnp.asarray(x) for x in pad(self.calibration))
            try:
                self.records[reach] = record(subject.params, tokens, lengths, subject.model, subject.decode, reach=reach)
            except ValueError:  # nothing came after anything: no drafts for these prompts
                self.records[reach] = None
        records = self.records[reach]
        if records is None:
            return None
        found = candidate(records, len(self.calibration), subject.model, subject.decode, source, drafts, reach, subject.name)
        return found and found.record()

    def search_drafts(self, found: list[Candidate], vanilla: Outcome) -> None:
        """Spiffy with the graphs worth it at the longest reach, then the best budget at the other reaches."""
        reaches = sorted({c.reach for c in found}, reverse=True)
        for c in worth_decoding([c for c in found if c.reach == reaches[0]], vanilla.forwards_per_sample):
            self.outcome(Setting("spiffy", c.source, c.drafts, c.reach), c.graph)
        drafts = self.leading("spiffy").setting.drafts
        for reach in reaches[1:]:
            c = max((c for c in found if c.reach == reach and c.drafts == drafts), key=lambda c: c.saved, default=None)
            if c is not None:
                self.outcome(Setting("spiffy", c.source, c.drafts, c.reach), c.graph)

    def leading(self, method: str) -> Outcome:
        """The fastest of a method, if possible of those that qualify."""
        return self.best(method) or max((o for o in self.outcomes.values() if o.setting.method == method), key=self.low)

    def search_fold(self) -> None:
        """SpecFold over tau at the best graph and at the largest one decoded, then over guard at the best tau."""
        spiffy = [o.setting for o in self.outcomes.values() if o.setting.method == "spiffy"]
        first, *others = [np.inf] if self.search.lossless else self.search.guards
        # Without a loss nothing drawn from a folded branch counts, so one tau tells what folding costs.
        taus = self.search.taus[:1] if self.search.lossless else self.search.taus
        largest = max(spiffy, key=lambda s: (s.drafts, s.reach))
        for base in dict.fromkeys([self.leading("spiffy").setting, largest]):
            for tau in taus:
                self.outcome(replace(base, method="specfold", tau=tau, guard=first), self.graphs[base])
        lead = self.leading("specfold").setting
        for guard in others:
            self.outcome(replace(lead, guard=guard), self.graphs[lead])

    def retime(self, rounds: int = 2) -> None:
        """Times vanilla, the best Spiffy and the three best folds again, in turns, so that what else the device does meanwhile hits them
        alike; the choice is made among them."""
        fit = sorted((o for o in self.outcomes.values() if self.qualifies(o)), key=self.low, reverse=True)
        best = [o for m, n in (("vanilla", 1), ("spiffy", 1), ("specfold", 3)) for o in [o for o in fit if o.setting.method == m][:n]]
        self.finalists = [o.setting for o in best]
        if len(best) < 2 or (self.timing and all(o.setting.key in self.timing.milliseconds for o in best)):
            return
        key = "timing " + ", ".join(o.setting.key for o in best)

        def make() -> dict[str, list[float]]:
            count = -(-min(len(self.held), 8) // self.subject.batch)
            samples: dict[str, list[float]] = {o.setting.key: [] for o in best}
            for _ in range(rounds):
                for o in best:
                    samples[o.setting.key] += timed(self.subject, self.held, o.setting, self.graphs[o.setting], count)[1]
            return samples

        def read(value: Any) -> dict[str, list[float]]:
            same_names("it", value, [o.setting.key for o in best])
            found = conforming("milliseconds", value, dict[str, list[float]])
            for name, samples in found.items():
                require_times(name, samples)
            return found

        self.note("timing the best settings again, in turns")
        for name, samples in self.journal.once(key, make, read).items():
            for setting in self.outcomes:
                if setting.key == name:
                    self.outcomes[setting] = replace(self.outcomes[setting], milliseconds=samples)

    def gates(self) -> dict[str, Any]:
        """Where the leading fold recomputes, on the first prompts."""
        setting, subject = self.leading("specfold").setting, self.subject

        def make() -> dict[str, Any]:
            seen = record_gates(subject.params, self.held[:WATCHED], setting.decoding(subject, self.graphs[setting]))
            return seen | {"setting": setting.key, "prompts": len(self.held[:WATCHED])}

        def read(value: Any) -> dict[str, Any]:
            same_names("it", value, ["share", "drafts", "collapsed", "setting", "prompts"])
            conforming("share", value["share"], list[list[float]])
            return value

        self.note(f"watching the gates of {setting.key}")
        return self.journal.once(f"gates {setting.key}", make, read)


def tune(
    subject: Subject,
    ids: Sequence[Sequence[int]],
    search: Search,
    folder: Path,
    timing: TimingTable | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Tuned:
    """Measures and chooses; writes `profile.json` and `timing.json` into `folder`, where an interrupted run continues.

    `timing`: a saved table whose times are used instead of the clock's; settings it lacks are timed. `note` is called with a line
    about each step. Raises ValueError for bad prompts, or a folder that is in use, damaged or another run's.
    """
    if np.ndim(subject.decode.seed):
        raise ValueError(f"seed={subject.decode.seed} must be one number: prompts are split, so rows have no place of their own")
    calibration, held = split(ids, search.seed)
    plan = report.plan(subject, ids, asdict(search), timing)
    with open_journal(folder, plan) as journal:
        tuner = _Tuner(subject, search, calibration, held, journal, timing, note)
        tuned = _choose(tuner, plan)
        tuned.profile.save(folder / "profile.json")
        if tuned.outcomes:
            milliseconds = {o.setting.key: o.milliseconds for o in tuned.outcomes}
            TimingTable(subject.name, subject.batch, device_name(), milliseconds).save(folder / "timing.json")
    return tuned


def _choose(tuner: _Tuner, plan: dict[str, Any]) -> Tuned:
    """Measures what the search says, and chooses."""
    subject, search, calibration, held = tuner.subject, tuner.search, tuner.calibration, tuner.held
    if len(calibration) + len(held) < FEWEST:
        few = f"too few prompts to tune on: {len(calibration) + len(held)} different ones, at least {FEWEST} are needed"
        made = p.Profile("vanilla", subject.decode, DraftGraph.empty(), None, plan["made_for"], {}, (f"{few}; vanilla is the safe choice",))
        return Tuned(made, [], [], None, subject.batch, search.seed, search.agreement)
    vanilla, gates = tuner.outcome(Setting("vanilla")), None
    found = tuner.candidates()
    if found:
        tuner.search_drafts(found, vanilla)
        tuner.search_fold()
        tuner.retime()
        gates = tuner.gates()
    chosen = tuner.best()
    assert chosen is not None  # vanilla agrees with itself
    made = report.profile_of(tuner, chosen, found, gates, plan)
    return Tuned(made, found, list(tuner.outcomes.values()), gates, subject.batch, search.seed, search.agreement)
