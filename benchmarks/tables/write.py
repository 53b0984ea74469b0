"""Writes the measured tables of README.md and of the documents in benchmarks/results from the committed results.

python -m benchmarks.tables.write           rewrites what stands between <!-- table:NAME --> and <!-- /table:NAME -->
python -m benchmarks.tables.write --check   changes nothing; exit status 1 if a document is stale
"""

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks.common.command import as_usage, start
from benchmarks.common.environment import RESULTS, ROOT
from benchmarks.common.results_file import commits, read
from benchmarks.tables.bars import bars
from benchmarks.tables.implementations import both_sides, checks, decode, ops, parity, profile, ratio, tiles, tokens
from benchmarks.tables.markdown import NOT_YET, Column, Result, Results, number, proportion, table, where
from specfold_jax.files import write_text
from specfold_jax.methods import METHODS

DOCUMENTS = ROOT / "README.md", *(RESULTS / name for name in ("README.md", "quality.md", "speed.md", "operations.md"))

FLAGS = flags.FlagValues()
flags.DEFINE_boolean("check", False, "change nothing; exit status 1 if a document is stale", flag_values=FLAGS)
_MARKED = re.compile(r"(<!-- table:([\w-]+) -->\n).*?(<!-- /table:\2 -->)", re.DOTALL)
_MARK = re.compile(r"<!-- /?table:.*?-->")
MAIN = {"dtype": "float32", "threshold": 0.9, "sub_block": 8, "temperature": 0.0, "max_new_tokens": 256}


def _recompute(row: Result) -> str:
    attention, ffn = row["measured"]["recompute_attention"], row["measured"]["recompute_ffn"]
    return "-" if row["setting"]["method"] != "specfold" or attention is None else f"{attention:.2f} / {ffn:.2f}"


def _method(row: Result) -> str:
    s = row["setting"]
    words = [METHODS[s["method"]].title]
    if s["drafts"]:
        words.append(f"{s['source']}, D = {s['drafts']}")
    if s["share"] is False:
        words.append("no sharing")
    if s["tau"] is not None:
        words.append(f"tau {s['tau']:g}, guard {s['guard']}")
    if s.get("ablation"):
        words.append(s["ablation"])
    return ", ".join(words)


METHOD: Column = ("method", _method)
ACCURACY: Column = ("right answers", proportion("correct"))
SAME: Column = ("vanilla's tokens", proportion("identical"))
CHECKS: Column = ("checks", number("checks"))
COMMITS: Column = ("commits", number("commits"))
FORWARDS: Column = ("forwards a sample", number("forwards"))
OF_VANILLA: Column = ("of vanilla's", number("of_vanilla"))
PER_TOKEN: Column = ("forwards a token", number("forwards_per_token", 3))
DEPTH: Column = ("accepted depth", number("accepted_depth"))
RECOMPUTE: Column = ("recompute attention / FFN", _recompute)
GUARDED: Column = ("guard stops", number("guard_stops"))
SPEED: Column = ("tokens/s", number("tokens_per_second", 0))
LATENCY: Column = ("ms a sample", lambda row: f"{1000 * row['measured']['seconds'] / row['measured']['samples']:,.1f}")
DISTINCT: Column = ("distinct drafts", lambda row: f"{row['measured'].get('distinct_drafts', math.nan):.0%}".replace("nan%", "-"))
DRAFTED: Column = ("drafts a check", number("drafted_per_check", 1))


def _large(rows: Results) -> Results:
    """The results of the largest number of samples, which leaves out latency runs."""
    most = max((row["setting"]["samples"] for row in rows), default=0)
    return where(rows, samples=most)


def _methods(rows: Results) -> str:
    rows = _large(where(rows, **MAIN))
    found = where(rows, method="vanilla")
    found += where(rows, method="spiffy", source="confidence", drafts=(3, 8), share=True)
    found += where(rows, method="specfold", source="confidence", tau=(0.05, 0.1, 0.2), guard=(0, 0.5))
    return table(found, METHOD, ACCURACY, SAME, FORWARDS, OF_VANILLA, PER_TOKEN, DEPTH, RECOMPUTE)


def _drafts(rows: Results) -> str:
    rows = _large(where(rows, **MAIN))
    found = where(rows, method="vanilla") + where(rows, method="spiffy") + where(rows, method="specfold", tau=0.1, guard=0.5)
    return table(found, METHOD, SAME, CHECKS, COMMITS, FORWARDS, OF_VANILLA, DEPTH, DRAFTED, DISTINCT, RECOMPUTE)


def _three(rows: Results) -> str:
    kind: Column = ("type", lambda row: row["setting"]["dtype"])
    return table(rows, METHOD, kind, ACCURACY, SAME, FORWARDS, OF_VANILLA, DEPTH, RECOMPUTE)


def _folding(rows: Results) -> str:
    rows = _large(where(rows, **MAIN))
    found = where(rows, method="specfold")
    return table(found, METHOD, ACCURACY, SAME, FORWARDS, OF_VANILLA, DEPTH, GUARDED, RECOMPUTE)


def _decoding(rows: Results) -> str:
    """Other thresholds, sub-blocks and temperatures."""
    rows = [row for row in _large(where(rows, dtype="float32", max_new_tokens=256)) if where([row], **MAIN) == []]

    def at(row: Result) -> str:
        s = row["setting"]
        return f"threshold {s['threshold']:g}, sub-block {s['sub_block']}" + (f", T = {s['temperature']:g}" if s["temperature"] else "")

    return table(rows, ("decoding", at), METHOD, ACCURACY, SAME, CHECKS, COMMITS, OF_VANILLA, PER_TOKEN, RECOMPUTE)


def _bfloat16(rows: Results) -> str:
    return table(_large(where(rows, **MAIN | {"dtype": "bfloat16"})), METHOD, ACCURACY, SAME, FORWARDS, OF_VANILLA, RECOMPUTE)


def _speed(rows: Results) -> str:
    rows = where(rows, **MAIN | {"dtype": "bfloat16"}, tau=(None, 0.1), guard=(None, 0.5))
    batch: Column = ("batch", lambda row: str(row["setting"]["batch"]))
    samples: Column = ("samples", lambda row: str(row["setting"]["samples"]))
    return table(rows, batch, samples, METHOD, FORWARDS, SPEED, LATENCY, samples=False)


def _lengths(rows: Results) -> str:
    """Short outputs beside long ones: by vanilla's length, and all answers capped."""
    found: Results = []
    rows = where(rows, dtype="float32", threshold=0.9, sub_block=8, temperature=0.0, share=(None, True), source=(None, "confidence"))
    rows = where(rows, drafts=(None, 8), tau=(None, 0.1), guard=(None, 0.5))
    for row in where(rows, max_new_tokens=256):
        short = row["setting"]["short"]
        for name, text in (("short", f"up to {short} tokens"), ("long", f"more than {short} tokens")):
            if row["measured"][name]["samples"]:
                found.append({"setting": row["setting"] | {"outputs": text}, "measured": row["measured"][name]})
    for row in rows:
        if row["setting"]["max_new_tokens"] != 256:
            text = f"cut at {row['setting']['max_new_tokens']} tokens"
            found.append({"setting": row["setting"] | {"outputs": text}, "measured": row["measured"]})
    found.sort(key=lambda row: row["setting"]["outputs"])
    outputs: Column = ("outputs", lambda row: row["setting"]["outputs"])
    count: Column = ("samples", lambda row: f"{row['measured']['samples']:,}")
    return table(found, outputs, count, METHOD, ("tokens", number("tokens", 1)), CHECKS, COMMITS, PER_TOKEN, samples=False)


def _lossless(rows: Results) -> str:
    columns: tuple[Column, ...] = (
        ("method", lambda row: str(row["method"]).replace("specfold", "SpecFold").replace("spiffy", "Spiffy")),
        ("drafts", lambda row: row["source"]),
        ("type", lambda row: row["dtype"]),
        ("batch", lambda row: str(row["batch"])),
        ("temperature", lambda row: f"{row['temperature']:g}"),
        ("vanilla's tokens", lambda row: f"{row['equal']} of {row['samples']}"),
        ("forwards, of vanilla's", lambda row: f"{row['nfe'] / row['vanilla_nfe']:.2f}"),
    )
    return table(rows, *columns, samples=False)


def _promises(rows: Results) -> str:
    """What tune promised beside what unseen problems gave."""

    def interval(side: str, name: str, form: str) -> Callable[[Result], str]:
        return lambda row: " to ".join(format(end, form) for end in row[side][f"{name}_interval95"])

    columns: list[Column] = [("setting", lambda row: row["promised"]["setting"])]
    for title, name, form in (("tokens/s", "tokens_per_second", ".0f"), ("vanilla's tokens", "agreement", ".1%")):
        for side, words in (("promised", "promised"), ("measured", "on unseen problems")):
            columns.append((f"{title}, {words}", interval(side, name, form)))
    return table(rows, *columns, samples=False)


def _origin(record: dict[str, Any], name: str = "Device") -> str:
    """A line on what the figures were measured with."""
    e = record["environment"]
    versions = ", ".join(f"{name} {value}" for name, value in e["versions"].items())
    rest = f" {record['remaining']} cases are still missing." if record.get("remaining") else ""
    return f"{name}: {e['device']}; {versions}; commit {commits(record)}; {record['date']}.{rest}\n"


_METHODS, _DECODE, _CHECKS = "methods-h200.json", "decode-h200.json", "checks-h200.json"
TABLES: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {
    "lossless": (("lossless-h200.json",), _lossless),
    "lossless-pallas": (("lossless-pallas-h200.json",), _lossless),
    "promises": (("promises-cpu.json",), _promises),
    "methods": ((_METHODS,), _methods),
    "drafts": ((_METHODS,), _drafts),
    "five": (("methods-five-h200.json",), _drafts),
    "three": (("methods-three-h200.json",), _three),
    "ablations": (("methods-ablations-cpu.json",), _folding),
    "folding": ((_METHODS,), _folding),
    "decoding": ((_METHODS,), _decoding),
    "bfloat16": ((_METHODS,), _bfloat16),
    "speed": ((_METHODS,), _speed),
    "lengths": ((_METHODS,), _lengths),
    "checks": ((_CHECKS,), checks),
    "decode": ((_DECODE,), decode),
    "ratios": ((_DECODE,), ratio),
    "ops": (("ops-h200.json",), ops),
    "tiles": (("tiles-h200.json",), tiles),
    "parity": (("parity-h200.json",), parity),
    "both-sides": (("decode-parity-h200.json",), both_sides),
    "tokens": ((_DECODE,), tokens),
    "gains": ((_DECODE,), lambda rows: tokens(where(rows, impl=("pallas", "xla")))),
    "bars": ((_DECODE, _CHECKS), bars),
    "profile": ((_DECODE,), profile),
}


def render(text: str, results: Path) -> str:
    """A document with its tables filled from a folder of results. Raises ValueError for a marker that is unknown or has no partner."""
    if strays := _MARK.findall(_MARKED.sub("", text)):
        raise ValueError(f"{strays[0]} has no partner; a table stands between <!-- table:NAME --> and <!-- /table:NAME -->")

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name not in TABLES:
            raise ValueError(f"table:{name} is unknown; there are {', '.join(TABLES)}")
        files, make = TABLES[name]
        body = NOT_YET
        if all((results / file).is_file() for file in files):
            records = [read(results / file) for file in files]
            body = make(*(record["results"] for record in records))
            body += "" if body == NOT_YET else "\n" + "\n".join(map(_origin, records, ("Device",) if len(records) == 1 else files))
        return f"{match[1]}{body}{match[3]}"

    return _MARKED.sub(fill, text)


def main() -> int:
    """Rewrites or checks the documents; 1 if one is stale and was not to be rewritten."""
    stale = 0
    for document in DOCUMENTS:
        before, name = document.read_text(encoding="utf-8"), document.relative_to(ROOT)
        with as_usage():
            after = render(before, RESULTS)
        if before != after and FLAGS.check:
            print(f"{name} is stale; run: python -m benchmarks.tables.write", file=sys.stderr)
            stale = 1
        elif before != after:
            write_text(document, after)
            print(f"{name} rewritten")
    return stale


if __name__ == "__main__":
    start(main, FLAGS)
