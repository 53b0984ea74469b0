"""The files of `specfold tune`: whole or not there, one run a folder, and damage is named."""

import json
from dataclasses import asdict

import pytest

from parity_tests.harness.laws import config
from specfold_jax import files
from specfold_jax.tuning import report
from specfold_jax.tuning.journal import open_journal
from specfold_jax.tuning.measure import Outcome, Setting, Subject
from specfold_jax.tuning.search import Search, tune
from specfold_jax.tuning.timing_table import TimingTable

SEARCH = Search(drafts=(2,), taus=(0.1,), guards=(0.0,), sources=("confidence",))
IDS = [[101 + n, 102] for n in range(8)]
HELD = 4
TABLE = {"model": "m", "batch": 2, "device": "d", "milliseconds": {"vanilla": [1.0]}}
OUTCOME = Outcome(Setting("vanilla"), [1] * HELD, [8] * HELD, [2] * HELD, 6, 2, 0, None, None, [10.0])
VANILLA = {"outcome": OUTCOME.record(), "generated": [[7] * 8] * HELD}


def line(key: str, value: object) -> str:
    return json.dumps({"key": key, "value": value})


@pytest.fixture(scope="module")
def subject(fast):
    return Subject("golden", fast.params, fast.model, config(seed=7), 2)


@pytest.fixture
def begun(subject, tmp_path):
    """The folder of a run that has measured nothing yet."""
    with open_journal(tmp_path / "run", report.plan(subject, IDS, asdict(SEARCH), None)):
        pass
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tune.json", '{"batch": ', "tune.json: must be the plan of a tune run in JSON: .*; name another folder"),
        ("tune.json", "[]", r"tune.json: must be the plan of a tune run, an object, not \[\]"),
        ("results.jsonl", "{\n", "results.jsonl, line 1: .*; delete the line, and what it held is measured again"),
        ("results.jsonl", f"{line('x', 1)}\n[]\n", r"results.jsonl, line 2: the line must be an object .* not a list"),
        ("results.jsonl", '{"key": 1, "value": 2}\n', "results.jsonl, line 1: key=1 must be text"),
        ("results.jsonl", '{"key": "vanilla"}\n', r"results.jsonl, line 1: the line lacks \['value'\]"),
        ("results.jsonl", line("vanilla", {}) + "\n", "results.jsonl: the value of 'vanilla' is damaged: lacks 'outcome'; delete its line"),
        ("results.jsonl", line("vanilla", 3) + "\n", "results.jsonl: the value of 'vanilla' is damaged"),
        ("results.jsonl", line("vanilla", VANILLA | {"generated": []}) + "\n", "it must be of vanilla on 4 prompts"),
        (
            "results.jsonl",
            line("vanilla", VANILLA | {"outcome": OUTCOME.record() | {"tokens": [8.5] * HELD}}) + "\n",
            "results.jsonl: the value of 'vanilla' is damaged: .*tokens.0.=8.5 must be a whole number",
        ),
        (
            "results.jsonl",
            line("vanilla", VANILLA) + "\n" + line("graph confidence drafts=2 reach=2", {"depth": 1}) + "\n",
            "results.jsonl: the value of 'graph confidence drafts=2 reach=2' is damaged: it lacks",
        ),
    ],
)
def test_damage_is_named(begun, subject, name, text, message):
    (begun / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        tune(subject, IDS, SEARCH, begun)
    assert (begun / name).read_text() == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "must be a timing table, such as specfold tune writes, in JSON"),
        ([], "the timing table must be an object"),
        ({"milliseconds": [1.0]}, r"milliseconds=\[1.0\] must be an object of named values"),
        ({"milliseconds": {"vanilla": 1.0}}, r"milliseconds\['vanilla'\]=1.0 must be a list"),
        ({"milliseconds": {"vanilla": ["1"]}}, r"milliseconds\['vanilla'\]\[0\]='1' must be a finite number"),
        ({"milliseconds": {"vanilla": []}}, "must hold at least one number, all above 0"),
        ({"milliseconds": {"vanilla": [1.0, 0]}}, "must hold at least one number, all above 0"),
        ({"batch": "2"}, "batch='2' must be a whole number"),
        ({"model": None}, "model=None must be Unicode text"),
        ({"more": 1}, "unknown fields"),
    ],
)
def test_a_timing_table_with_wrong_types_is_named(tmp_path, change, message):
    path = tmp_path / "timing.json"
    path.write_text(change if isinstance(change, str) else json.dumps(TABLE | change if isinstance(change, dict) else change))
    with pytest.raises(ValueError, match=f"timing.json: .*{message}"):
        TimingTable.load(path, "m", 2)


def test_a_folder_serves_one_run_at_a_time(begun, subject):
    plan = report.plan(subject, IDS, asdict(SEARCH), None)
    with open_journal(begun, plan), pytest.raises(ValueError, match="run is in use by another tune run; wait for its end"):
        tune(subject, IDS, SEARCH, begun)
    with open_journal(begun, plan):
        pass


def test_leftovers_of_a_run_without_a_plan_are_no_run(tmp_path):
    (tmp_path / ".tune.json.123.partial").write_text("{")
    with open_journal(tmp_path, {"batch": 1}) as journal:
        assert journal.once("a", lambda: 1, int) == 1
    (tmp_path / "results.jsonl").write_text(line("a", 1) + "\n" + '{"key": "cut sho')
    with open_journal(tmp_path, {"batch": 1}) as journal:
        assert journal.entries == {"a": 1}
    assert (tmp_path / "results.jsonl").read_text() == line("a", 1) + "\n"


def test_a_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, [1])
    with pytest.raises(UnicodeEncodeError):
        files.write_text(path, "half and \ud800")
    assert (json.loads(path.read_text()), list(tmp_path.iterdir())) == ([1], [path])
