"""Files of results: what goes on, what is refused, and programs that fill one side by side."""

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from absl import app

from benchmarks.common.environment import RESULTS, ROOT
from benchmarks.common.results_file import ResultsFile, read

HERE = {"device": "made up", "versions": {"jax": "1"}, "commit": "abc"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.json"


def test_results_go_on_where_they_stopped(path):
    file = ResultsFile.named(path, "speed", HERE, model="tiny")
    assert file.results == []
    assert not path.exists()
    assert file.add({"ms": 1}) == [{"ms": 1}]
    assert file.add({"ms": 3}, {"ms": 2}) == [{"ms": 1}, {"ms": 3}, {"ms": 2}]
    file.change(lambda found: found[1:], remaining=7)
    record = json.loads(path.read_text())
    assert list(record) == ["benchmark", "environment", "model", "date", "results", "remaining"]
    path.write_text(json.dumps(record | {"date": "2026-01-01"}))
    again = ResultsFile.named(path, "speed", HERE, model="tiny")  # on another day
    assert again.results == [{"ms": 3}, {"ms": 2}]
    again.add({"ms": 4})
    assert json.loads(path.read_text()) == record | {"date": "2026-01-01", "results": [{"ms": 3}, {"ms": 2}, {"ms": 4}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": HERE | {"commit": "abd"}}, r"was measured with environment.commit='abd' \(here 'abc'\); move it away"),
        ({"environment": HERE | {"device": "b", "versions": {}}}, r"environment.device='b' .*, environment.versions.jax=None \(here '1'\)"),
        ({"model": "large"}, r"model='large' \(here 'tiny'\)"),
        ({"benchmark": "width"}, "must be results of speed, is of width"),
        ({"results": [1]}, "must be results of speed: every result an object"),
        ({"results": {}}, "must be results of speed: an object with benchmark, environment, date, results"),
    ],
)
def test_what_something_else_measured_does_not_go_on(path, changes, message):
    ResultsFile.named(path, "speed", HERE, model="tiny").add({"ms": 1})
    path.write_text(text := json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(app.UsageError, match=f"--out={path}.*{message}"):
        ResultsFile.named(path, "speed", HERE, model="tiny")
    assert path.read_text() == text


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", "null", "\xff"])
def test_what_is_no_results_is_refused(path, text):
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(app.UsageError, match=r"results.json.*must be results of speed"):
        ResultsFile.named(path, "speed", HERE)
    with pytest.raises(ValueError, match="must be results of a benchmark"):
        read(path)


@pytest.mark.parametrize(
    ("name", "message"), [("", "is a folder, must be a file"), ("none/a.json", "must be a folder that can be written to")]
)
def test_where_nothing_can_be_written_is_refused(tmp_path, name, message):
    with pytest.raises(app.UsageError, match=message):
        ResultsFile.named(tmp_path / name, "speed", HERE)


def test_programs_side_by_side_lose_no_result(path):
    code = f"""
from benchmarks.common.results_file import ResultsFile
file = ResultsFile.named({str(path)!r}, "speed", {HERE!r})
for n in range(40):
    with file.alone():
        file.add({{"n": n}})
"""
    programs = [subprocess.Popen((sys.executable, "-c", code), cwd=ROOT) for _ in range(3)]
    assert [program.wait(timeout=120) for program in programs] == [0, 0, 0]
    assert sorted(result["n"] for result in read(path)["results"]) == sorted(3 * list(range(40)))
    assert list(path.parent.iterdir()) == [path]


def test_programs_prepare_together_and_measure_alone(path):
    file, together, order = ResultsFile.named(path, "speed", HERE), threading.Barrier(3, timeout=60), []

    def program(n):
        with file.preparing():
            together.wait()  # all three are in here at once
            order.append("prepared")
        with file.alone():
            order.append(n)
            time.sleep(0.01)
            order.append(n)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(program, range(3)))
    assert order[:3] == ["prepared"] * 3  # who had prepared first waited for the others
    assert order[3::2] == order[4::2]
    assert sorted(order[3::2]) == [0, 1, 2]


@pytest.mark.parametrize("path", [path for path in sorted(RESULTS.glob("*.json")) if ".graph" not in path.name], ids=lambda path: path.stem)
def test_committed_results_are_results(path):
    assert read(path)["environment"]["commit"]
