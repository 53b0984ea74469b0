"""The texts of a tune run: the plan that it follows, its profile, and notes in plain words."""

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specfold_jax.methods import METHODS
from specfold_jax.running.memory import implementation
from specfold_jax.tuning.comparison import Comparison
from specfold_jax.tuning.gates import GateShares
from specfold_jax.tuning.graphs import Candidate
from specfold_jax.tuning.measure import Outcome, Subject
from specfold_jax.tuning.profile import Profile, made_for
from specfold_jax.tuning.timing_table import TimingTable, device_name
from specfold_jax.values import to_json


def plan(subject: Subject, ids: Sequence[Sequence[int]], search: dict[str, Any], timing: TimingTable | None) -> dict[str, Any]:
    """All that decides a run's results, as a JSON value. Two runs with equal plans measure the same things."""
    return {
        "made_for": made_for(subject.name, subject.model, subject.decode),
        "model_sha256": _fingerprint(subject),
        "dtype": str(subject.params["embed"].dtype),
        "decode": to_json(asdict(subject.decode)),
        "batch": subject.batch,
        "prompts": len(ids),
        "prompts_sha256": hashlib.sha256(repr([list(row) for row in ids]).encode()).hexdigest(),
        "search": to_json(search),
        "timing_sha256": timing and hashlib.sha256(repr(sorted(timing.milliseconds.items())).encode()).hexdigest(),
        "device": device_name(),
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "specfold": _version()},
    }


def _fingerprint(subject: Subject) -> str:
    """Tells models of one name apart, by their configurations and by the sum of each weight's magnitudes."""
    sums = [float(jnp.sum(jnp.abs(leaf), dtype=jnp.float32)) for leaf in jax.tree.leaves(subject.params)]
    return hashlib.sha256(repr((subject.model, sums)).encode()).hexdigest()


def _version() -> str:
    try:
        return version("specfold")
    except Exception:  # run from a source tree that is not installed
        return "source"


def profile_of(
    compared: Comparison,
    chosen: Outcome,
    found: list[Candidate],
    gates: GateShares | None,
    plan: dict[str, Any],
    calibration_prompts: int,
) -> Profile:
    """The profile of the chosen outcome."""
    batch, seed = compared.subject.batch, compared.seed
    setting = chosen.setting
    how = setting.decoding(compared.subject, compared.graphs[setting])
    rivals = {method: best.figures(batch, seed) for method in METHODS if (best := compared.best(method)) is not None}
    measured = {
        "chosen": chosen.figures(batch, seed),
        "best_of_each_method": rivals,
        "calibration_prompts": calibration_prompts,
        "held_out_prompts": len(chosen.same),
        "draft_diversity": {f"{c.source} drafts={c.drafts} reach={c.reach}": c.diversity for c in found},
        "collapsed_drafts": gates and {name: getattr(gates, name) for name in ("setting", "prompts", "drafts", "collapsed")},
        "seed": seed,
        "batch": batch,
        "dtype": plan["dtype"],
        "device": plan["device"],
        "impl": implementation(compared.subject.params, how),
        "versions": plan["versions"],
    }
    return Profile(setting.method, how.decode, how.graph, how.fold, plan["made_for"], measured, tuple(notes(compared, chosen)))


def notes(compared: Comparison, chosen: Outcome) -> list[str]:
    """The verdict, and what the sample cannot tell."""
    batch, target = compared.subject.batch, compared.target
    low, high = compared.interval(chosen)
    where = f"on {device_name()} at batch {batch}"
    rate = f"{chosen.rate(batch):.1f} tokens/s (95 % interval {low:.1f} to {high:.1f})"
    vanilla, spiffy = compared.best("vanilla"), compared.best("spiffy")
    assert vanilla is not None  # it agrees with itself
    title = METHODS[chosen.setting.method].title
    lines = [f"{title[0].upper()}{title[1:]} is the better choice {where}: {rate}."]
    if chosen is not vanilla:
        lines[0] = lines[0][:-1] + f", {chosen.rate(batch) / vanilla.rate(batch):.2f} times vanilla."
    elif spiffy is not None:
        lines[0] = lines[0][:-1] + f"; Spiffy reaches {spiffy.rate(batch) / vanilla.rate(batch):.2f} of it in {_forwards(spiffy, vanilla)}."
    simpler = [o for o in (vanilla, spiffy) if o is not None and o is not chosen and _rank(o) < _rank(chosen)]
    for other in simpler:
        if compared.interval(other)[1] >= low:
            lines.append(f"Its interval overlaps that of {other.setting.method}, which may be as fast.")
    folded = compared.of("specfold")
    if folded and compared.best("specfold") is None:
        top = max(folded, key=lambda o: o.agreement)
        best = f"{top.setting.key} comes closest with {top.agreement:.2%}"
        lines.append(f"No SpecFold setting reaches the target of {target:.2%} identical answers; {best}. The choice is among the others.")
    if not compared.of("spiffy"):
        lines.append("The calibration prompts offer nothing to draft, so only vanilla was measured.")
    elif spiffy is None:
        dtype = compared.subject.params["embed"].dtype
        lines.append(f"Spiffy, lossless by construction, misses {target:.2%} here: in {dtype} ties break both ways.")
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
    """How many prompts without a difference have a Wilson interval that begins at the target: its lower end is n / (n + z^2)."""
    return "infinitely many" if target >= 1 else f"{int(np.ceil(z * z * target / (1 - target))):,}"
