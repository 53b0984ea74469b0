"""What a tune run says: the plan it follows, the profile it ends in, and notes in plain words."""

import hashlib
import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specfold_jax.methods import METHODS
from specfold_jax.running.memory import implementation
from specfold_jax.tuning import profile as p
from specfold_jax.tuning.graphs import Candidate
from specfold_jax.tuning.measure import Outcome, Subject
from specfold_jax.tuning.timing_table import TimingTable, device_name


def plan(subject: Subject, ids: Sequence[Sequence[int]], search: dict[str, Any], timing: TimingTable | None) -> dict[str, Any]:
    """All that decides a run's results. Two runs with equal plans measure the same things."""
    grid = {name: ["inf" if v == np.inf else v for v in value] if isinstance(value, tuple) else value for name, value in search.items()}
    return {
        "made_for": p.made_for(subject.name, subject.model, subject.decode),
        "model_sha256": _fingerprint(subject),
        "dtype": str(subject.params["embed"].dtype),
        "decode": p.config_record(subject.decode),
        "batch": subject.batch,
        "prompts": len(ids),
        "prompts_sha256": hashlib.sha256(repr([list(row) for row in ids]).encode()).hexdigest(),
        "search": grid,
        "timing_sha256": timing and hashlib.sha256(repr(sorted(timing.milliseconds.items())).encode()).hexdigest(),
        "device": device_name(),
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "specfold": _version()},
    }


def _fingerprint(subject: Subject) -> str:
    """Tells apart models of one name: by configuration and by the sum of every weight's magnitudes."""
    sums = [float(jnp.sum(jnp.abs(leaf), dtype=jnp.float32)) for leaf in jax.tree.leaves(subject.params)]
    return hashlib.sha256(repr((subject.model, sums)).encode()).hexdigest()


def _version() -> str:
    try:
        return version("specfold")
    except Exception:  # run from a source tree that is not installed
        return "source"


def profile_of(tuner: Any, chosen: Outcome, found: list[Candidate], gates: dict[str, Any] | None, plan: dict[str, Any]) -> p.Profile:
    """The profile of the chosen outcome."""
    batch, seed = tuner.subject.batch, tuner.search.seed
    setting = chosen.setting
    how = setting.decoding(tuner.subject, tuner.graphs[setting])
    rivals = {method: best.figures(batch, seed) for method in METHODS if (best := tuner.best(method)) is not None}
    measured = {
        "chosen": chosen.figures(batch, seed),
        "best_of_each_method": rivals,
        "calibration_prompts": len(tuner.calibration),
        "held_out_prompts": len(tuner.held),
        "draft_diversity": {f"{c.source} drafts={c.drafts} reach={c.reach}": c.diversity for c in found},
        "collapsed_drafts": gates and {name: gates[name] for name in ("setting", "prompts", "drafts", "collapsed")},
        "seed": seed,
        "batch": batch,
        "dtype": plan["dtype"],
        "device": plan["device"],
        "impl": implementation(tuner.subject.params, how),
        "versions": plan["versions"],
    }
    return p.Profile(setting.method, how.decode, how.graph, how.fold, plan["made_for"], measured, tuple(notes(tuner, chosen)))


def notes(tuner: Any, chosen: Outcome) -> list[str]:
    """The verdict, and what the sample cannot tell."""
    batch, search = tuner.subject.batch, tuner.search
    target = 1.0 if search.lossless else search.agreement
    low, high = tuner.interval(chosen)
    where = f"on {device_name()} at batch {batch}"
    rate = f"{chosen.rate(batch):.1f} tokens/s (95 % interval {low:.1f} to {high:.1f})"
    vanilla, spiffy = tuner.best("vanilla"), tuner.best("spiffy")
    title = METHODS[chosen.setting.method].title
    lines = [f"{title[0].upper()}{title[1:]} is the better choice {where}: {rate}."]
    if chosen is not vanilla:
        lines[0] = lines[0][:-1] + f", {chosen.rate(batch) / vanilla.rate(batch):.2f} times vanilla."
    elif spiffy is not None:
        lines[0] = lines[0][:-1] + f"; Spiffy reaches {spiffy.rate(batch) / vanilla.rate(batch):.2f} of it in {_forwards(spiffy, vanilla)}."
    simpler = [o for o in (vanilla, spiffy) if o is not None and o is not chosen and _rank(o) < _rank(chosen)]
    for other in simpler:
        if tuner.interval(other)[1] >= low:
            lines.append(f"Its interval overlaps that of {other.setting.method}, which may be as fast.")
    folded = [o for o in tuner.outcomes.values() if o.setting.method == "specfold"]
    if folded and tuner.best("specfold") is None:
        top = max(folded, key=lambda o: o.agreement)
        best = f"{top.setting.key} comes closest with {top.agreement:.2%}"
        lines.append(f"No SpecFold setting reaches the target of {target:.2%} identical answers; {best}. The choice is among the others.")
    if any(o.setting.method == "spiffy" for o in tuner.outcomes.values()) and spiffy is None:
        dtype = tuner.subject.params["embed"].dtype
        lines.append(f"Spiffy, lossless by construction, misses {target:.2%} here: in {dtype} ties break both ways.")
    if not any(o.setting.method == "spiffy" for o in tuner.outcomes.values()):
        lines.append("The calibration prompts offer nothing to draft, so only vanilla was measured.")
    (least, most), count = chosen.agreement_interval, len(chosen.same)
    if chosen.setting.method != "vanilla":
        lines.append(f"{sum(chosen.same)} of {count} held-out answers were vanilla's (95 % interval {least:.1%} to {most:.1%}).")
    if not chosen.setting.lossless and least < target:
        lines.append(f"So few cannot certify {target:.2%}; that takes about {_needed(target)} prompts without a difference.")
    return lines


def _rank(outcome: Outcome) -> int:
    return list(METHODS).index(outcome.setting.method)


def _forwards(outcome: Outcome, vanilla: Outcome) -> str:
    return f"{outcome.forwards_per_sample / vanilla.forwards_per_sample:.2f} of its forwards"


def _needed(target: float, z: float = 1.959964) -> str:
    """Prompts without a difference whose Wilson lower end is the target: n / (n + z^2)."""
    return "infinitely many" if target >= 1 else f"{int(np.ceil(z * z * target / (1 - target))):,}"
