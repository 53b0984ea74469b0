"""Benchmarks: what they measure, that they go on where they stopped, and that the README shows what was measured."""

import importlib
import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from absl import flags

from benchmarks import environment, methods
from benchmarks.environment import RESULTS, ROOT
from benchmarks.grid import PRESETS, Group, Setting
from benchmarks.tables import NOT_YET, TABLES, render
from specfold_jax import files

README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = sorted((ROOT / "benchmarks").glob("[a-z]*.py"))
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
    path, calls = tmp_path_factory.mktemp("results") / "methods-h200.json", []

    def load_once(group: Group) -> methods.Subject:
        calls.append(group)
        return subject

    class Interrupted(Exception):
        pass

    def write_json(target: Path, record: dict) -> None:
        files.write_json(target, record)
        if len(record["results"]) == 2 and len(calls) == 1:
            raise Interrupted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "fingerprint", lambda: "code")  # files may change while tests run
        patch.setattr(methods, "write_json", write_json)
        with pytest.raises(Interrupted):
            methods.run_groups([SMALL], path, "golden", "abc", load_once)
        assert len(json.loads(path.read_text())["results"]) == 2
        methods.run_groups([SMALL], path, "golden", "abc", load_once)
        methods.run_groups([SMALL], path, "golden", "abc", load_once)  # nothing is left to do
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


def test_other_code_is_not_mixed_in(measured, subject):
    with pytest.raises(ValueError, match="commit='abc' \\(here 'abd'\\)"):
        methods.run_groups([SMALL], measured, "golden", "abd", lambda group: subject)


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


def test_readme_is_fresh():
    assert render(README, RESULTS) == README, "run: python -m benchmarks.tables"
    assert set(re.findall(r"<!-- table:([\w-]+) -->", README)) == set(TABLES)


def test_readme_names_every_option():
    from specfold_jax.config import DecodeConfig, FoldConfig
    from specfold_jax.graph import DraftGraph

    shown = set(re.findall(r"`(\w+)`", README.partition("## Options")[2].partition("## Statistics")[0]))
    for config in (DecodeConfig, FoldConfig, DraftGraph):
        assert set(config.__dataclass_fields__) <= shown


@pytest.mark.parametrize("module", [*(f"benchmarks.{path.stem}" for path in PROGRAMS), "report", "decode_report"])
def test_a_program_keeps_its_flags_to_itself_until_it_runs(module):
    before = set(flags.FLAGS)
    importlib.import_module(module)
    assert set(flags.FLAGS) == before


def test_a_program_refuses_words_that_are_no_flags():
    done = subprocess.run(
        (sys.executable, "-m", "benchmarks.tables", "--check", "x"), capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 1
    assert "unexpected arguments: x" in done.stdout + done.stderr


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
