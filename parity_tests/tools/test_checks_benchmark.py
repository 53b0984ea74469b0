"""The benchmark of single checks: what it evaluates, what it writes, and what it refuses."""

import json

import numpy as np
import pytest
from absl import app

from benchmarks.speed import checks
from benchmarks.tables import plots
from benchmarks.tables.implementations import checks as markdown
from specfold_jax.models.checkpoint import load

ARGUMENTS = ["--shapes=tiny", "--impls=xla", "--dtype=float32", "--prefix=32", "--repetitions=1", "--taus=0,0.3"]


def flagged(*more: str) -> None:
    checks.FLAGS(["checks", *ARGUMENTS, *more])


def test_drafts_know_ever_more_of_the_same_text():
    model, params = load("tiny", "float32")
    branches, cache, starts = checks.inputs(params, model, 2, 3, 32)
    tokens = np.asarray(branches.tokens)
    known = tokens != model.mask_id
    assert (known.sum(axis=2) == [1, 11, 21, 32]).all()
    for branch in range(3):
        shared = known[:, branch]
        np.testing.assert_array_equal(tokens[:, branch][shared], tokens[:, branch + 1][shared])
    np.testing.assert_array_equal(branches.parent, [[0, 0, 1, 2]] * 2)
    assert np.asarray(branches.valid).all()
    assert cache.key.shape[:3] == (model.layers, 2, 64)
    assert (np.asarray(starts) == 32).all()
    assert (tokens[0, -1] != tokens[1, -1]).any()


def test_checks_are_measured_written_and_taken_up_again(tmp_path, capsys):
    path = tmp_path / "checks.json"
    flagged("--cases=1x0", f"--out={path}")
    assert checks.main() == 0
    flagged("--cases=1x0,1x1", f"--out={path}")
    assert checks.main() == 0
    record = json.loads(path.read_text())
    found = [(r["setting"]["drafts"], r["setting"]["tau"], r["measured"]["rows"]) for r in record["results"]]
    assert found == [(0, None, 32), (1, None, 64), (1, 0.0, 64), (1, 0.3, 64)]
    ratios = [r["measured"]["recompute"] for r in record["results"]]
    assert ratios[:2] == [None, None]
    assert all(0 < less <= more <= 1 for less, more in zip(ratios[3], ratios[2], strict=True))
    assert "0.3" in capsys.readouterr().out
    other = [r | {"setting": r["setting"] | {"impl": "pallas"}} for r in record["results"]]
    lines = markdown([*record["results"], *other]).splitlines()
    assert len(lines) == 2 + 4
    assert lines[2].endswith("| 1.00 | 1.00 | 1.00 |")
    groups = {"products": 0.1, "attention": 0.2, "gate": 0.0}
    record["results"][1]["measured"]["kernels"] = {"all": 0.3, "groups": groups}  # as where kernels have names of their own
    pictures = plots.draw_checks(record, tmp_path)
    assert [picture.name for picture in pictures] == ["checks-tiny.png", "check-parts-tiny.png", "check-regimes-tiny.png"]
    record["environment"] |= {"commit": "another"}
    path.write_text(json.dumps(record))
    assert checks.main() == 0  # the same code; nothing is left to do
    assert "later_commits" not in json.loads(path.read_text())
    record["results"].pop()
    path.write_text(json.dumps(record))
    assert checks.main() == 0
    record = json.loads(path.read_text())
    assert record["environment"]["commit"] == "another"
    assert record["later_commits"] == [checks.environment()["commit"]]
    record["environment"] |= {"code": "another"}
    path.write_text(json.dumps(record))
    with pytest.raises(app.UsageError, match=r"was measured with environment.commit='another' .*, environment.code='another'"):
        checks.main()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--cases=8", "--cases has '8', must be BATCHxDRAFTS"),
        ("--cases=1x32", "at most 31 drafts"),
        ("--taus=-1", "--taus has '-1'"),
        ("--shapes=9b", "--shapes has 9b, knows tiny"),
        ("--impls=pallas", "--impls=pallas: the Pallas kernels need a Hopper GPU .*, not cpu"),
        ("--prefix=33", "must be a multiple of the block of 32"),
        ("--cases=", "--cases is empty"),
        ("--impls=", "--impls is empty"),
        ("--out=/nowhere/checks.json", "/nowhere must be a folder that can be written to"),
        ("--out=/tmp", "is a folder, must be a file"),
    ],
)
def test_flags_that_name_nothing_are_refused(flag, message, tmp_path):
    flagged("--cases=1x0", f"--out={tmp_path / 'checks.json'}", flag)
    with pytest.raises(app.UsageError, match=message):
        checks.main()
    assert not list(tmp_path.iterdir())
