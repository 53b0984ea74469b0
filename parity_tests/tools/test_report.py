"""The report of the parity matrix: what it goes on from, and processes that die."""

import json
import subprocess
import sys
from concurrent.futures import Future

from benchmarks.common.environment import ROOT
from parity_tests.harness.processes import each
from parity_tests.reports import operations as report


def test_only_cases_that_are_missing_are_run(tmp_path, monkeypatch, capsys):
    """One fails: the others are written down, it counts as remaining, and the same command runs it and nothing else."""
    path, asked, failing = tmp_path / "parity.json", [], True
    report.FLAGS(["report", f"--out={path}", "--commit=abc", "--op=pack"])

    def name(number, dtype):
        return f"{report.CASES[number].name} {dtype}"

    def each(function, cells, jobs, configure):
        asked.append([name(*cell) for cell in cells])
        for number, dtype in cells:
            future = Future()
            labels = {"op": "pack", "case": report.CASES[number].name, "dtype": str(dtype).removeprefix("torch.")}
            future.set_result([labels | {"implementation": "jnp", "error": 0.0, "tolerance": 0.0, "passed": True}])
            if failing and number == cells[1][0]:
                future = Future()
                future.set_exception(RuntimeError("died"))
            yield (number, dtype), future

    monkeypatch.setattr(report, "each", each)
    assert report.main() == 1
    every = asked.pop()
    record = json.loads(path.read_text())
    assert len(record["results"]) == len(every) - 1 > 2
    assert f"{every[1]}: died" in capsys.readouterr().out
    failing = False
    remaining = record["remaining"]
    assert report.main() == 0
    assert asked.pop() == [every[1]]
    record = json.loads(path.read_text())
    assert [len(record["results"]), record["remaining"]] == [len(every), remaining - 1]
    assert report.main() == 0
    assert asked.pop() == []
    report.FLAGS.unparse_flags()


def test_a_process_that_dies_takes_no_other_case_with_it():
    cells = [(f"{n}; __import__('os')._exit(3)",) if n in (0, 3) else (str(n),) for n in range(6)]
    done = {cells.index(cell): future.exception() for cell, future in each(exec, cells, 2)}
    assert sorted(done) == [0, 1, 2, 3, 4, 5]
    assert {n for n, error in done.items() if error} == {0, 3}


def test_processes_end_with_the_program_that_started_them():
    code = "from parity_tests.harness.processes import each; "
    code += "list(each(exec, [(\"print('begun', flush=True); import time; time.sleep(600)\",)] * 2, 2))"
    words = (sys.executable, "-c", f"if __name__ == '__main__': {code}")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as program:
        assert [program.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
        program.terminate()
        assert program.communicate(timeout=60) == ("", None)  # nobody holds the other end any more
