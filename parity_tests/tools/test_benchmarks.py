"""Benchmarks: what they measure, that they go on where they stopped, and that documents show what was measured."""

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from absl import app, flags

from benchmarks.common import environment
from benchmarks.common.environment import RESULTS, ROOT
from benchmarks.common.results_file import ResultsFile, read
from benchmarks.common.shapes import SHAPES
from benchmarks.operations import cases, kernels, tiles
from benchmarks.operations import run as ops
from benchmarks.quality import methods
from benchmarks.quality.grid import PRESETS, Group, Setting
from benchmarks.tables import plots
from benchmarks.tables import write as tables
from benchmarks.tables.write import DOCUMENTS, NOT_YET, TABLES, render
from kernels_pallas.tiles import SHARED_BYTES
from parity_tests.harness.close import TOLERANCE
from parity_tests.harness.devices import DEVICE  # noqa: F401  (sets what Triton reads once)
from parity_tests.harness.pallas_ops import on_kernels

PROGRAMS = sorted(path for path in (ROOT / "benchmarks").glob("*/[a-z]*.py"))
RANKS = {"sources": ("ranks",), "fold_sources": ("ranks",), "drafts": (2,), "fold_drafts": (2,)}
SMALL = Group(samples=4, batch=4, calibration=4, max_new_tokens=24, short=16, guards=(0.5, float("inf")), **RANKS)


@pytest.fixture(scope="module")
def subject(fast, ragged) -> methods.Subject:
    """Two layers that answer prompts of the other tests; an answer is right when its first token is even."""
    ids = [tokens[:length].tolist() for tokens, length in zip(*ragged, strict=True)]
    return methods.Subject("golden", fast.model, fast.params, ids[:4], ids[4:], lambda row, tokens: tokens[0] % 2 == 0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, subject) -> Path:
    """A file of results, interrupted after the first two settings and taken up again."""
    path, calls, written = tmp_path_factory.mktemp("results") / "methods-h200.json", [], ResultsFile.add

    def load_once(group: Group) -> methods.Subject:
        calls.append(group)
        return subject

    class Interrupted(Exception):
        pass

    def add(self, result: dict) -> None:
        if len(written(self, result)) == 2 and len(calls) == 1:
            raise Interrupted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "fingerprint", lambda: "code")  # files may change while tests run
        patch.setattr(ResultsFile, "add", add)
        file = ResultsFile.named(path, "methods", environment.environment("abc"), model="golden")
        with pytest.raises(Interrupted):
            methods.run_groups([SMALL], file, load_once)
        assert len(json.loads(path.read_text())["results"]) == 2
        methods.run_groups([SMALL], file, load_once)
        methods.run_groups([SMALL], file, load_once)  # nothing is left to do
    assert len(calls) == 2
    return path


def test_results(measured):
    record = json.loads(measured.read_text())
    assert record["environment"]["commit"] == "abc"
    assert [Setting(**result["setting"]) for result in record["results"]] == SMALL.settings()
    vanilla, spiffy, folded, lossless = (result["measured"] for result in record["results"])
    assert vanilla["of_vanilla"] == 1
    for run in (vanilla, spiffy, lossless):
        assert run["identical"] == 4
        assert run["correct"] == vanilla["correct"]
    for run in (vanilla, spiffy, folded, lossless):
        assert run["forwards"] == run["checks"] + run["commits"]
        assert run["short"]["samples"] + run["long"]["samples"] == 4
        assert run["tokens_per_second"] > 0
    assert spiffy["forwards"] < vanilla["forwards"]
    assert 0 < spiffy["distinct_drafts"] <= 1
    assert 0 < folded["recompute_attention"] < 1
    assert spiffy["recompute_attention"] == 1


def test_tables(measured, tmp_path):
    record = json.loads(measured.read_text())
    for result in record["results"]:
        result["setting"] |= {"max_new_tokens": 256}
    (tmp_path / measured.name).write_text(json.dumps(record))
    text = render("a\n<!-- table:folding -->\nstale figures\n<!-- /table:folding -->\nb\n", tmp_path)
    assert "| SpecFold, ranks, D = 2, tau 0.1, guard inf | " in text
    assert "4 samples" in text
    assert "commit abc" in text
    assert "stale figures" not in text
    assert render(text, tmp_path) == text
    every = "".join(f"<!-- table:{name} -->\n<!-- /table:{name} -->\n" for name in TABLES)
    assert render(every, tmp_path / "none").count(NOT_YET) == len(TABLES)
    for wrong, message in (("<!-- table:x -->\n<!-- /table:x -->", "table:x is unknown"), ("<!-- table:folding -->\n", "no partner")):
        with pytest.raises(ValueError, match=message):
            render(wrong, tmp_path)


@pytest.mark.parametrize("name", ["checks", "decode", "ratios", "tokens", "bars", "profile", "both-sides", "tiles"])
def test_the_order_in_which_results_came_does_not_show(name):
    files, make = TABLES[name]
    records = [read(RESULTS / file)["results"] for file in files]
    assert make(*records) == make(*(results[::-1] for results in records))


def test_documents_are_fresh():
    texts = [document.read_text(encoding="utf-8") for document in DOCUMENTS]
    assert [render(text, RESULTS) for text in texts] == texts, "run: python -m benchmarks.tables.write"
    assert {name for text in texts for name in re.findall(r"<!-- table:([\w-]+) -->", text)} == set(TABLES)


def test_a_stale_document_is_told_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "DOCUMENTS", (tmp_path / "a.md", tmp_path / "b.md"))
    for path in tables.DOCUMENTS:
        path.write_text("<!-- table:methods -->\nstale\n<!-- /table:methods -->\n")
    tables.FLAGS(["tables", "--check"])
    assert tables.main() == 1
    assert "a.md is stale" in capsys.readouterr().err
    tables.FLAGS(["tables", "--nocheck"])
    assert tables.main() == 0
    assert all("| vanilla |" in path.read_text() for path in tables.DOCUMENTS)
    tables.FLAGS(["tables", "--check"])
    assert tables.main() == 0
    tables.FLAGS.unparse_flags()


@pytest.mark.parametrize(
    "module",
    [
        *(f"benchmarks.{path.parent.name}.{path.stem}" for path in PROGRAMS),
        "parity_tests.reports.operations",
        "parity_tests.reports.decodes",
    ],
)
def test_a_program_keeps_its_flags_to_itself_until_it_runs(module):
    before = set(flags.FLAGS)
    importlib.import_module(module)
    assert set(flags.FLAGS) == before


def test_a_program_refuses_words_that_are_no_flags_and_shows_those_it_has():
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            (sys.executable, "-m", "benchmarks.tables.write", *words), capture_output=True, text=True, cwd=ROOT, check=False
        )

    wrong, shown, unknown = run("--check", "x"), run("--help"), run("--chek")
    assert (unknown.returncode, unknown.stderr.splitlines()[0]) == (
        2,
        "benchmarks.tables.write: Unknown command line flag 'chek'. Did you mean: check ?",
    )
    assert (wrong.returncode, wrong.stderr.splitlines()[0]) == (2, "benchmarks.tables.write: unexpected arguments: x")
    assert shown.returncode == 0
    assert "--[no]check: change nothing" in shown.stdout


def test_an_interrupted_program_says_so():
    lines = ("from absl import flags", "from benchmarks.common.command import start", "def main(): raise KeyboardInterrupt")
    code = "\n".join((*lines, "start(main, flags.FlagValues())"))
    run = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 130
    assert run.stderr.endswith("interrupted; results written so far are whole, and the same command goes on from there\n")
    assert "Traceback" not in run.stderr


def test_flags():
    values = flags.FlagValues()
    methods.define_flags(values)
    values(["methods", "--out=x", "--samples=4", "--threshold=0.9,1", "--share=off,on", "--guards=0,inf"])
    wanted = replace(PRESETS["quick"][0], samples=4, share=(False, True), guards=(0.0, float("inf")))
    assert methods.groups_from(values) == [wanted, replace(wanted, threshold=1.0)]
    values(["methods", "--taus=a"])
    with pytest.raises(ValueError, match="--taus=a must be numbers"):
        methods.groups_from(values)
    for groups in PRESETS.values():
        settings = [setting for group in groups for setting in group.settings()]
        assert all(Setting(**json.loads(json.dumps(asdict(setting)))) == setting for setting in settings)


@pytest.fixture
def op_flags(tmp_path, monkeypatch) -> Callable[..., Path]:
    """Sets the flags of `benchmarks.operations.run` for a few small operations; returns where results go."""
    monkeypatch.setattr(environment, "fingerprint", lambda: "code")  # files may change while tests run

    def given(*more: str) -> Path:
        path = tmp_path / "ops.json"
        small = (
            "--shapes=toy",
            "--rows=64,96:40",
            "--impls=xla",
            "--ops=o,gate",
            "--prefix=40",
            "--repetitions=2",
            "--links=2",
            "--copies=2",
        )
        ops.FLAGS(["ops", f"--out={path}", "--commit=abc", *small, *more])
        return path

    return given


def test_floors_of_operations():
    """Those of the feasibility study at 32 rows, microseconds; and a product that multiplying limits."""
    found = {op: 1e6 * cases.floor(cases.Case(op, cases.OP_SHAPES["1.5b"], 32, 32, 512)) for op in cases.OPS}
    for op, want in {"qkv": 1.5, "o": 1.1, "gate_up": 13.0, "down": 6.6, "head": 108.6}.items():
        assert found[op] == pytest.approx(want, rel=0.05)
    assert found["gate"] == pytest.approx(1e6 * 3 * 32 * 1536 * 2 / 4.3e12)
    large = cases.Case("head", cases.OP_SHAPES["7b"], 1024, 1024, 512)
    assert cases.floor(large) == cases.floors(large)[1] == pytest.approx(2 * 1024 * 3584 * 152064 / 770e12)
    few = cases.Case("down", cases.OP_SHAPES["7b"], 1024, 80, 512)
    assert cases.floor(few) == cases.floor(few._replace(rows=80)) < cases.floor(few._replace(count=1024))


def test_operations_are_bounded_as_in_the_parity_matrix():
    same = {"qkv": "packed_linear", "o": "packed_linear", "down": "packed_linear", "gate_up": "packed_silu_pair", "head": "head"}
    same |= {"attention": "branch_attention", "attention_inputs": "packed_qkv", "norm_qkv": "packed_qkv"}
    same |= {"norm_gate_up": "packed_silu_pair", "gate": "add_inherited", "pack": "add_inherited", "advance_norm": "add_inherited"}
    assert {op: TOLERANCE[name][torch.bfloat16] for op, name in same.items()} == cases.TOLERANCE


@pytest.mark.parametrize("op", cases.OPS)
def test_every_implementation_of_an_operation_is_right_where_it_is_timed(op):
    case = cases.Case(op, cases.OP_SHAPES["toy"], *((96, 40) if op in cases.PACKED else (64, 64)), 40)
    arrays = cases.inputs(case)
    want = kernels.reference(case, arrays)
    for impl, functions in kernels.IMPLEMENTATIONS.items():
        if op in functions:
            with on_kernels(races=False):
                got = ops.outputs(case, impl, functions[op], arrays)
            assert got, impl
            found = cases.errors(case, got, want)
            assert all(error <= cases.allowed(op, name, want[name]) for name, error in found.items()), (impl, found)


def test_operations_are_timed_and_taken_up_again(op_flags, monkeypatch):
    path = op_flags()
    assert ops.main() == 0
    results = json.loads(path.read_text())["results"]
    assert [(r["setting"]["op"], r["setting"]["rows"], r["setting"]["count"]) for r in results] == [
        ("o", 64, 64),
        ("gate", 64, 64),
        ("o", 96, 40),
    ]
    for result in results:
        assert result["measured"]["over_xla"] == 1
        assert result["measured"]["repetitions"] == 2
        assert result["measured"]["links"] == 2
    monkeypatch.setattr(ops, "measure", None)  # nothing is left to do
    assert ops.main() == 0
    op_flags("--repetitions=3")
    with pytest.raises(app.UsageError, match=r"was measured with timing.repetitions=2 \(here 3\)"):
        ops.main()
    for wrong in ("--rows=40", "--rows=64:65", "--rows=64:", "--ops=x", "--shapes=x", "--impls=x"):
        op_flags(wrong)
        with pytest.raises(app.UsageError, match=wrong.partition("=")[0]):
            ops.main()


def test_wrong_operations_are_not_timed(op_flags, monkeypatch):
    right = dict(kernels.XLA)

    def halved(case, x, weight, computed):
        return {"y": right["o"](case, x, weight, computed)["y"] / 2}

    def broken(case, x):
        raise RuntimeError("out of [red]")

    monkeypatch.setitem(ops.IMPLEMENTATIONS, "xla", right | {"o": halved, "gate": broken})
    path = op_flags("--rows=64")
    assert ops.main() == 1
    refused, failed = (result["measured"] for result in json.loads(path.read_text())["results"])
    assert refused["refused"]["y"] == pytest.approx(0.5, rel=0.01)
    assert failed == {"failed": "RuntimeError: out of [red]"}
    monkeypatch.setitem(ops.IMPLEMENTATIONS, "xla", right)
    assert ops.main() == 1  # what failed is measured again, what was refused is not
    refused, measured = (result["measured"] for result in json.loads(path.read_text())["results"])
    assert "refused" in refused
    assert measured["repetitions"] == 2


def test_table_and_pictures_of_operations(tmp_path):
    results: list[dict[str, Any]] = []
    for op, impl, rows, count in [
        ("o", "xla", 64, 64),
        ("o", "xla", 288, 288),
        ("o", "pallas", 64, 64),
        ("o", "xla", 288, 80),
        ("pack", "triton", 64, 64),
    ]:
        setting = {"shape": "7b", "op": op, "impl": impl, "rows": rows, "count": count, "prefix": 512}
        results.append(
            {"setting": setting, "measured": {"median_us": 9.0, "low_us": 8.0, "high_us": 11.0, "floor_us": 0.5, "over_xla": 1.25}}
        )
    results.append({"setting": results[0]["setting"] | {"shape": "1.5b"}, "measured": {"unsupported": "no"}})
    time = "9.0 (8.0 to 11.0)"
    assert TABLES["ops"][1](results).splitlines() == [
        "| shape | operation | rows | floor, us | pallas, us | xla, us | triton, us | pallas / xla |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        f"| 7b | o | 64 | 0.5 | {time} | {time} | - | 1.25 |",
        f"| 7b | o | 288 | 0.5 | - | {time} | - | - |",
        f"| 7b | o | 80 of 288 | 0.5 | - | {time} | - | - |",
        f"| 7b | pack | 64 | 0.5 | - | - | {time} | - |",
        "| 1.5b | o | 64 | - | - | - | - | - |",
    ]
    (path,) = plots.draw_ops({"environment": {"device": "made up", "commit": "abc"}, "results": results}, tmp_path)
    assert path.name == "ops-7b.png"
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("op", tiles.OPS)
@pytest.mark.parametrize("rows", [32, 288, 2304])
def test_tiles_that_are_timed_fit_and_keep_a_row_s_bits(op, rows):
    """The default first; all within shared memory, and with its splits."""
    case = tiles.Case("1.5b", op, rows, rows, *tiles.sizes(SHAPES["1.5b"], op))
    found = tiles.candidates(case)
    assert found[0] == case.usual
    assert len(set(found)) == len(found) > 3
    for tile in found:
        assert tile.splits == case.usual.splits
        assert tile.shared_bytes(rows, 1 + case.pair, 2 if case.pair else 4) <= SHARED_BYTES
