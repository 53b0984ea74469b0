"""`specfold tune`: the fastest settings for a model, its prompts and this device that follow vanilla decoding as closely as asked.

Prompts are split into two halves. Draft graphs are chosen on the calibration half. Settings are measured on the held-out half.

A setting qualifies if vanilla's tokens come out on a large enough share of the held-out prompts. The share itself counts, not the lower
end of its interval: some 800 prompts would be needed to certify a target of 99.5 %. So the interval is printed, and a note says what the
sample can tell. Of the settings that qualify, the one whose tokens/s interval has the highest lower end is chosen.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np

from specfold_jax.calibration.options import SOURCES, Source
from specfold_jax.calibration.records import Records, record_vanilla
from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.running.batch import pad
from specfold_jax.tuning import report
from specfold_jax.tuning.comparison import Comparison
from specfold_jax.tuning.gates import GateShares, record_gates
from specfold_jax.tuning.graphs import Candidate, candidate, worth_decoding
from specfold_jax.tuning.journal import Journal, open_journal
from specfold_jax.tuning.measure import Outcome, Setting, Subject, measure, timed
from specfold_jax.tuning.profile import Profile
from specfold_jax.tuning.timing_table import TimingTable, device_name, require_times
from specfold_jax.values import Natural, NotNegative, Size, conform, conforming, same_names

FEWEST = 8
"""Prompts needed to tune on."""
WATCHED = 8
"""Prompts on which gates are recorded."""


@dataclass(frozen=True)
class Search:
    """What is tried. `agreement`: least share of held-out prompts with vanilla's tokens. `lossless`: only what is exact by construction.

    `reaches`: sub-blocks that drafts may lie in; empty: the block's. `guards`: the first one is used while tau is searched.
    """

    drafts: Annotated[tuple[Size, ...], 1] = (3, 5, 8)
    reaches: tuple[Size, ...] = ()
    taus: Annotated[tuple[NotNegative, ...], 1] = (0.05, 0.1, 0.2)
    guards: Annotated[tuple[NotNegative, ...], 1] = (0.5, 0.0)
    sources: Annotated[tuple[Source, ...], 1] = SOURCES
    agreement: Annotated[float, 0, 1] = 0.995
    lossless: bool = False
    seed: Natural = 0

    def __post_init__(self) -> None:
        conform(self)
        if self.agreement == 0:
            raise ValueError("agreement=0 must be a share above 0")

    @property
    def target(self) -> float:
        """The least agreement that qualifies: exact settings must follow vanilla on every prompt."""
        return 1.0 if self.lossless else self.agreement


@dataclass(frozen=True)
class Tuned:
    """The profile, and the candidates and outcomes it was chosen from. `gates`: those of one setting. `target`: the agreement asked for."""

    profile: Profile
    candidates: list[Candidate]
    outcomes: list[Outcome]
    gates: GateShares | None
    batch: int
    seed: int
    target: float


def split(ids: Sequence[Sequence[int]], seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Calibration prompts and held-out prompts: two halves of the different prompts, shuffled by the seed."""
    different = [list(row) for row in dict.fromkeys(map(tuple, ids))]
    order = np.random.default_rng(seed).permutation(len(different)).tolist()
    half = len(different) // 2
    return [different[n] for n in order[:half]], [different[n] for n in order[half:]]


class _Tuner:
    """A run: what it has measured, and the steps of the search. Each measurement is made once, and then looked up in the journal."""

    def __init__(
        self,
        subject: Subject,
        search: Search,
        halves: tuple[list[list[int]], list[list[int]]],
        journal: Journal,
        timing: TimingTable | None,
        note: Callable[[str], None],
    ) -> None:
        self.subject, self.search, self.journal, self.timing = subject, search, journal, timing
        self.calibration, self.held = halves
        begun = time.monotonic()
        self.note = lambda text: note(f"{time.monotonic() - begun:5.0f} s  {text}")
        self.compared = Comparison(subject, search.seed, search.target, search.lossless)
        self.vanilla: list[list[int]] | None = None  # its tokens on the held-out prompts
        self.records: dict[int, Records | None] = {}  # by reach

    def outcome(self, setting: Setting, graph: DraftGraph | None = None) -> Outcome:
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
        self.compared.add(found, graph)
        low, high = self.compared.interval(found)
        agreement = f"{sum(found.same)} of {len(found.same)} identical"
        self.note(f"{setting.key}: {found.forwards_per_sample:.2f} forwards a prompt, {low:.0f} to {high:.0f} tokens/s, {agreement}")
        return found

    def candidates(self) -> list[Candidate]:
        """Graphs of every source, budget and reach, compared on the calibration records."""
        subject, search = self.subject, self.search
        found: list[Candidate] = []
        longest = subject.decode.block(subject.model) // subject.decode.window(subject.model)
        for reach in sorted({min(r, longest) for r in search.reaches or (longest,)}, reverse=True):
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

    def _candidate(self, source: Source, drafts: int, reach: int) -> dict[str, Any] | None:
        subject = self.subject
        if reach not in self.records:
            tokens, lengths = (jnp.asarray(x) for x in pad(self.calibration))
            try:
                self.records[reach] = record_vanilla(subject.params, tokens, lengths, subject.model, subject.decode, reach=reach)
            except ValueError:  # every block was finished in one step: there is nothing to draft
                self.records[reach] = None
        records = self.records[reach]
        if records is None:
            return None
        found = candidate(records, len(self.calibration), subject, source, drafts, reach)
        return found and found.record()

    def search_drafts(self, found: list[Candidate], vanilla: Outcome) -> None:
        """Spiffy with the promising graphs of the longest reach, then with the best budget at the other reaches."""
        reaches = sorted({c.reach for c in found}, reverse=True)
        for c in worth_decoding([c for c in found if c.reach == reaches[0]], vanilla.forwards_per_sample):
            self.outcome(Setting("spiffy", c.source, c.drafts, c.reach), c.graph)
        drafts = self.compared.leading("spiffy").setting.drafts
        for reach in reaches[1:]:
            c = max((c for c in found if c.reach == reach and c.drafts == drafts), key=lambda c: c.saved, default=None)
            if c is not None:
                self.outcome(Setting("spiffy", c.source, c.drafts, c.reach), c.graph)

    def search_fold(self) -> None:
        """SpecFold: every tau with the best graph and with the largest one, then every guard with the best tau."""
        spiffy = [o.setting for o in self.compared.of("spiffy")]
        first, *others = [np.inf] if self.search.lossless else self.search.guards
        # If nothing may be lost, no decision is taken from a folded branch. Then every tau accepts the same, and one shows the cost.
        taus = self.search.taus[:1] if self.search.lossless else self.search.taus
        largest = max(spiffy, key=lambda s: (s.drafts, s.reach))
        for base in dict.fromkeys([self.compared.leading("spiffy").setting, largest]):
            for tau in taus:
                self.outcome(replace(base, method="specfold", tau=tau, guard=first), self.compared.graphs[base])
        lead = self.compared.leading("specfold").setting
        for guard in others:
            self.outcome(replace(lead, guard=guard), self.compared.graphs[lead])

    def retime(self, rounds: int = 2) -> None:
        """Times vanilla, the best Spiffy and the three best folds again. The choice is made among these.

        They take turns, so that other work on the device slows all of them alike.
        """
        compared = self.compared
        fit = sorted((o for o in compared.outcomes.values() if compared.qualifies(o)), key=compared.low, reverse=True)
        best = [o for m, n in (("vanilla", 1), ("spiffy", 1), ("specfold", 3)) for o in [o for o in fit if o.setting.method == m][:n]]
        compared.finalists = [o.setting for o in best]
        if len(best) < 2 or (self.timing and all(o.setting.key in self.timing.milliseconds for o in best)):
            return
        key = "timing " + ", ".join(o.setting.key for o in best)

        def make() -> dict[str, list[float]]:
            count = -(-min(len(self.held), 8) // self.subject.batch)
            samples: dict[str, list[float]] = {o.setting.key: [] for o in best}
            for _ in range(rounds):
                for o in best:
                    samples[o.setting.key] += timed(self.subject, self.held, o.setting, compared.graphs[o.setting], count)[1]
            return samples

        def read(value: Any) -> dict[str, list[float]]:
            same_names("it", value, [o.setting.key for o in best])
            found = conforming("milliseconds", value, dict[str, list[float]])
            for name, samples in found.items():
                require_times(name, samples)
            return found

        self.note("timing the best settings again, in turns")
        for name, samples in self.journal.once(key, make, read).items():
            for setting, outcome in compared.outcomes.items():
                if setting.key == name:
                    compared.outcomes[setting] = replace(outcome, milliseconds=samples)

    def gates(self) -> GateShares:
        """Where the leading fold recomputes, on the first prompts."""
        setting, subject, watched = self.compared.leading("specfold").setting, self.subject, self.held[:WATCHED]

        def make() -> dict[str, Any]:
            return record_gates(subject.params, watched, setting.decoding(subject, self.compared.graphs[setting]), setting.key).record()

        self.note(f"watching the gates of {setting.key}")
        return self.journal.once(f"gates {setting.key}", make, GateShares.of)


def tune(
    subject: Subject,
    ids: Sequence[Sequence[int]],
    search: Search,
    folder: Path,
    timing: TimingTable | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Tuned:
    """Measures and chooses, and writes `profile.json` and `timing.json` into `folder`. An interrupted run continues there.

    `timing`: a saved table whose times replace the clock's; settings that it lacks are timed. `note` is called with a line about each
    step. Raises ValueError for bad prompts, and for a folder that is in use, damaged or another run's.
    """
    if np.ndim(subject.decode.seed):
        raise ValueError(f"seed={subject.decode.seed} must be one number: prompts are split, so rows have no place of their own")
    plan = report.plan(subject, ids, asdict(search), timing)
    with open_journal(folder, plan) as journal:
        tuner = _Tuner(subject, search, split(ids, search.seed), journal, timing, note)
        tuned = _choose(tuner, plan)
        tuned.profile.save(folder / "profile.json")
        if tuned.outcomes:
            milliseconds = {o.setting.key: o.milliseconds for o in tuned.outcomes}
            TimingTable(subject.name, subject.batch, device_name(), milliseconds).save(folder / "timing.json")
    return tuned


def _choose(tuner: _Tuner, plan: dict[str, Any]) -> Tuned:
    """Measures what the search says, and chooses."""
    subject, search, prompts = tuner.subject, tuner.search, len(tuner.calibration) + len(tuner.held)
    if prompts < FEWEST:
        few = f"too few prompts to tune on: {prompts} different ones, at least {FEWEST} are needed; vanilla is the safe choice"
        made = Profile("vanilla", subject.decode, DraftGraph.empty(), None, plan["made_for"], {}, (few,))
        return Tuned(made, [], [], None, subject.batch, search.seed, search.agreement)
    vanilla, gates = tuner.outcome(Setting("vanilla")), None
    found = tuner.candidates()
    if found:
        tuner.search_drafts(found, vanilla)
        tuner.search_fold()
        tuner.retime()
        gates = tuner.gates()
    chosen = tuner.compared.best()
    assert chosen is not None  # vanilla agrees with itself
    made = report.profile_of(tuner.compared, chosen, found, gates, plan, len(tuner.calibration))
    return Tuned(made, found, list(tuner.compared.outcomes.values()), gates, subject.batch, search.seed, search.agreement)
