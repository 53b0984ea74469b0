"""What `benchmarks.speed.decode` prints: its results in a table, and the ratios within a run that the project's bars are about."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

Setting = dict[str, Any]
Result = dict[str, Any]
ON_DEVICE = ("xla", "pallas")
"""Implementations that are timed in loops on the device; others wait for the host."""
EMBEDDED = "The tiny trained model, embedded function-preservingly in each shape."


def kin(setting: Setting) -> dict[str, Any]:
    """What a setting shares with the vanilla, Spiffy and SpecFold that it is compared with."""
    return {name: value for name, value in setting.items() if name not in ("method", "drafts", "tau", "guard")}


def title(setting: Setting) -> str:
    """What a setting is, in words."""
    match setting["method"], setting["tau"]:
        case "vanilla", _:
            return "vanilla"
        case "spiffy", _:
            return "Spiffy (control: folding off)"
        case _, 0.0:
            return "SpecFold, tau 0 (control: only exact copies folded)"
        case _, tau:
            return f"SpecFold, tau {tau:g}"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def spread_text(times: dict[str, float]) -> str:
    """Median and quartiles of milliseconds."""
    return f"{times['median_ms']:.2f} ({times['low_ms']:.2f} to {times['high_ms']:.2f})"


def line(result: Result) -> str:
    """A result in a line."""
    m, one = result["measured"], result["measured"]["one"]
    step, check, head = (one[part]["median_ms"] for part in ("step", "check", "head"))
    text = f"{m['tokens_per_second']:,.1f} tokens/s; {m['iterations']} iterations of {m['iteration']['median_ms']:.2f} ms; one of "
    return text + f"{one['rows']} rows {step:.2f} ms: check {check:.2f}, head {head:.2f}, overhead {one['overhead_ms']:.2f}"


def table(results: Sequence[Result]) -> Table:
    """All results; red where tokens differ that must not."""
    columns = ("shape", "impl", "batch", "method", "D", "vanilla's tokens", "tokens/s", "ms an iteration", "forwards", "depth", "recompute")
    single = ("step ms", "check ms (rows)", "head ms", "overhead ms", "kernels ms", "H200's floors ms: bytes / arithmetic", "compile s")
    out = Table(*columns, *single, caption=f"{EMBEDDED} From step ms on: one iteration on the state before the largest check.")
    for result in results:
        s, m = result["setting"], result["measured"]
        mean, one, kernels, compiled = m["iteration"], m["one"], m["one"]["check"]["kernels"], m["compile_seconds"]
        step, check, floors = one["step"], one["check"], one["floors"]
        same = f"{m['identical']} of {s['samples']}"
        out.add_row(
            *(s["shape"], s["impl"], str(s["batch"]), m["title"], str(s["drafts"] or "-"), f"[bold red]{same}[/]" if m["broken"] else same),
            *(_number(m["tokens_per_second"], 1), spread_text(mean)),
            *(str(m["nfe"]), _number(m["accepted_depth"]), _number(m["recompute_ratio"])),
            *(spread_text(step), f"{check['median_ms']:.2f} ({one['rows']})"),
            *(_number(one["head"]["median_ms"]), _number(one["overhead_ms"]), _number(kernels["all"] if kernels else None)),
            f"{floors['bytes_floor_ms']:.2f} / {floors['arithmetic_floor_ms']:.2f}",
            _number(sum(compiled.values()) if compiled else None, 0),
        )
    return out


def folding_ms(one: dict[str, Any], spiffy: dict[str, Any]) -> float | None:
    """Milliseconds of a check that folding takes: its kernels gate, pack and inherit, and what attention costs more than Spiffy's; less
    the row kernels that a check without folding has in their place, for "gate" and "pack" also add and norm.

    None where kernels are not told apart (xla, torch, no GPU).
    """
    groups, off = ((part["check"]["kernels"] or {}).get("groups") for part in (one, spiffy))
    if not groups or not off:
        return None
    return sum(groups.get(name, 0.0) for name in ("gate", "pack", "inherit", "attention", "rows")) - sum(
        off.get(name, 0.0) for name in ("attention", "rows")
    )


def ratios(results: Sequence[Result]) -> Iterator[dict[str, Any]]:
    """Of each shape, implementation, batch, D, and tau above 0: whole iterations over vanilla's, shares of one, rates of whole decodes."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(str(kin(result["setting"])), []).append(result)
    for group in groups.values():
        for result in group:
            s = result["setting"]
            vanilla = next((r["measured"] for r in group if r["setting"]["method"] == "vanilla"), None)
            plain = (r["measured"] for r in group if r["setting"]["method"] == "spiffy" and r["setting"]["drafts"] == s["drafts"])
            spiffy = next(plain, None)
            if s["method"] != "specfold" or not s["tau"] or vanilla is None or spiffy is None:
                continue
            runs = {"specfold": result["measured"], "spiffy": spiffy, "vanilla": vanilla}
            one = {name: run["one"] for name, run in runs.items()}
            step = {name: each["step"]["median_ms"] for name, each in one.items()}
            mine, folding = one["specfold"], folding_ms(one["specfold"], one["spiffy"])
            yield s | {
                "vanilla_ms": step["vanilla"],
                "vanilla_overhead": one["vanilla"]["overhead_ms"] / step["vanilla"],
                "spiffy_over_vanilla": step["spiffy"] / step["vanilla"],
                "spiffy_rows": one["spiffy"]["rows"],
                "specfold_over_vanilla": step["specfold"] / step["vanilla"],
                "specfold_over_spiffy": step["specfold"] / step["spiffy"],
                "recompute": sum(mine["recompute"]) / 2 if mine["recompute"] else None,
                "overhead": mine["overhead_ms"] / step["specfold"],
                "folding": folding / mine["check"]["median_ms"] if folding is not None else None,
                "recompute_ratio": result["measured"]["recompute_ratio"],
                "tokens_per_second": {name: run["tokens_per_second"] for name, run in runs.items()},
            }


def ratio_table(results: Sequence[Result]) -> Table:
    """The ratios of whole iterations."""
    columns = ("shape", "impl", "batch", "D", "tau", "vanilla step ms", "Spiffy / vanilla", "rows")
    rest = ("SpecFold / vanilla", "SpecFold / Spiffy", "recompute", "overhead: vanilla, SpecFold")
    out = Table(*columns, *rest, "folding's share of a check", caption=f"{EMBEDDED} Whole iterations on one state of a run.")
    for r in ratios(results):
        out.add_row(
            *(
                r["shape"],
                r["impl"],
                str(r["batch"]),
                str(r["drafts"]),
                f"{r['tau']:g}",
                _number(r["vanilla_ms"]),
                _number(r["spiffy_over_vanilla"]),
            ),
            *(str(r["spiffy_rows"]), _number(r["specfold_over_vanilla"]), _number(r["specfold_over_spiffy"]), _number(r["recompute"])),
            *(
                f"{r['vanilla_overhead']:.1%}, {r['overhead']:.1%}" if r["impl"] in ON_DEVICE else "-",
                "-" if r["folding"] is None else f"{r['folding']:.1%}",
            ),
        )
    return out


def ratios_of_checks(results: Sequence[Result]) -> Iterator[dict[str, Any]]:
    """Of each folded check of `benchmarks.speed.checks` with tau above 0: its time over those of the case unfolded, and of vanilla."""
    times = {str(result["setting"]): result["measured"]["median_ms"] for result in results}
    for result in results:
        setting, mine = result["setting"], result["measured"]["median_ms"]
        spiffy, vanilla = (times.get(str(setting | {"tau": None} | change)) for change in ({}, {"drafts": 0}))
        if setting["tau"] and spiffy and vanilla:
            yield setting | {"specfold_over_spiffy": mine / spiffy, "specfold_over_vanilla": mine / vanilla}
