"""`specfold tune`: what it measures adds up, what it chooses can be used, and a run can be interrupted, repeated and refused."""

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

import specfold_jax as sf
from benchmarks.quality import promises
from parity_tests.harness.golden_cases import GOLDEN
from parity_tests.harness.laws import config
from specfold_jax.diffusion.decoding import Decoding
from specfold_jax.running.batch import batches, run
from specfold_jax.tuning import report
from specfold_jax.tuning.graphs import Candidate, candidate, worth_decoding
from specfold_jax.tuning.measure import Outcome, Setting, Subject, iterations
from specfold_jax.tuning.plots import draw_all
from specfold_jax.tuning.profile import Profile, made_for
from specfold_jax.tuning.search import Search, split, tune
from specfold_jax.tuning.timing_table import TimingTable

SMALL = Search(drafts=(2,), taus=(0.1, 0.8), guards=(0.0, 0.5), sources=("confidence",))


@pytest.fixture(scope="module", autouse=True)
def remembered():
    """All runs here calibrate on the same prompts: graphs are chosen once."""
    known = {}

    def once(records, prompts, subject, *settings):
        if settings not in known:
            known[settings] = candidate(records, prompts, subject, *settings)
        return known[settings]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specfold_jax.tuning.search.candidate", once)
        yield


@pytest.fixture(scope="module")
def ids(ragged):
    return [row[:length].tolist() for row, length in zip(*ragged, strict=True)]


@pytest.fixture(scope="module")
def subject(fast):
    return Subject("golden", fast.params, fast.model, config(seed=7), 2)


@pytest.fixture(scope="module")
def tuned(subject, ids, tmp_path_factory):
    """A run that is interrupted after its first measurements and continued; its lines and its folder beside it."""
    folder, lines = tmp_path_factory.mktemp("tune") / "run", []

    def interrupt(text):
        lines.append(text)
        if len(lines) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(subject, ids, SMALL, folder, note=interrupt)
    before = (folder / "results.jsonl").read_text()
    with (folder / "results.jsonl").open("a") as file:
        file.write('{"key": "cut sho')
    result = tune(subject, ids, SMALL, folder, note=lines.append)
    assert (folder / "results.jsonl").read_text().startswith(before)
    return result, folder, lines


def test_split_is_disjoint_and_seeded():
    ids = [[n % 7, n % 5] for n in range(40)]
    calibration, held = split(ids, 3)
    both = list(map(tuple, calibration + held))
    assert (len(calibration), len(held)) == (17, 18)
    assert len(set(both)) == 35
    assert split(ids, 3) == (calibration, held)
    assert split(ids, 4) != (calibration, held)


def test_iterations_are_those_of_the_slowest_row():
    forwards = np.array([[3, 1, 4, 1, 5], [1, 1, 1, 1, 1]])
    assert iterations(forwards, 1).tolist() == [14, 5]
    assert iterations(forwards, 2).tolist() == [3 + 4 + 5, 3]
    assert iterations(forwards, 8).tolist() == [5, 1]


def outcome(**changes):
    base = Outcome(Setting("spiffy", "union", 3, 4), [1] * 6, [20] * 6, [5, 6, 7, 5, 6, 7], 30, 6, 0, 1.0, [[1.0, 1.0]], [10.0, 12.0, 11.0])
    return replace(base, **changes)


def test_rates_and_their_intervals():
    assert outcome().rate(1) == pytest.approx(120 / (36 * 0.011))
    low, high = outcome().rate_interval(1, 0)
    assert low < outcome().rate(1) < high
    assert outcome().rate_interval(1, 0) == (low, high)
    exact = outcome(forwards=[6] * 6, milliseconds=[10.0] * 3)
    assert exact.rate_interval(1, 0) == pytest.approx((exact.rate(1), exact.rate(1)))
    infinite = outcome(setting=Setting("specfold", "union", 3, 4, 0.1, np.inf))
    assert Outcome.of(json.loads(json.dumps(infinite.record()))) == infinite
    assert (infinite.setting.lossless, infinite.setting.key) == (True, "specfold union drafts=3 reach=4 tau=0.1 guard=inf")


def test_graphs_that_cannot_pay_are_left_out():
    def found_by(source, drafts, saved):
        return Candidate(source, drafts, 1, sf.DraftGraph.empty(), 1.0, saved, 1.0)

    found = [found_by("ranks", 3, 5.0), found_by("union", 3, 6.0), found_by("union", 5, 6.1), found_by("ranks", 8, 8.0)]
    assert [(c.source, c.drafts) for c in worth_decoding(found, 20.0)] == [("union", 3), ("ranks", 8)]


def test_a_run_measures_and_chooses(tuned, subject, fast, ids):
    result, folder, lines = tuned
    by_key = {o.setting.key: o for o in result.outcomes}
    assert {o.setting.method for o in result.outcomes} == {"vanilla", "spiffy", "specfold"}
    calibration, held = split(ids, 0)
    assert len(by_key["vanilla"].forwards) == len(held) == len(calibration) == 4
    share = np.array(result.gates.share)
    assert share.shape == (2, 16)
    assert result.gates.drafts > 10
    assert 0 < share.mean() < 1
    # What was measured is what decoding these prompts does.
    parts = batches(held, 2)

    def forwards(*method):
        return [n for part in parts for n in run(fast.params, *part, Decoding.of(method[0], fast.model, *method[1:])).stats.nfe.tolist()]

    assert by_key["vanilla"].forwards == forwards("vanilla", subject.decode)
    spiffy = [o for o in result.outcomes if o.setting.method == "spiffy"]
    assert all(o.agreement == 1 for o in spiffy)
    assert min(o.forwards_per_sample for o in spiffy) < by_key["vanilla"].forwards_per_sample
    assert {(o.setting.tau, o.setting.guard) for o in result.outcomes if o.setting.method == "specfold"} >= {(0.1, 0.0), (0.8, 0.0)}
    assert any("forwards a prompt" in line for line in lines)
    assert all(0 < c.diversity <= 1 and c.saved > 0 for c in result.candidates)
    chosen = by_key[result.profile.measured["chosen"]["setting"]]
    low = {key: o.rate_interval(2, 0)[0] for key, o in by_key.items() if o.agreement >= 0.995}
    assert low[chosen.setting.key] == max(low.values())
    saved = Profile.load(folder / "profile.json", "golden", fast.model)
    assert forwards(saved.method, saved.decode, saved.graph, saved.fold) == chosen.forwards


def test_a_saved_timing_table_makes_it_deterministic(tuned, subject, ids, tmp_path):
    _, folder, _ = tuned
    table = TimingTable.load(folder / "timing.json", "golden", 2)
    again = tune(subject, ids, SMALL, tmp_path / "again", table)
    assert (again.profile.measured, again.profile.notes) == (tuned[0].profile.measured, tuned[0].profile.notes)
    for key in ("model", "batch"):
        with pytest.raises(ValueError, match=f"timing.json: was measured with {key}="):
            TimingTable.load(folder / "timing.json", **{"model": "golden", "batch": 2, key: "other"})


def test_vanilla_wins_where_it_is_faster(tuned, subject, ids, tmp_path):
    """The same measurements but for vanilla's time."""
    shutil.copytree(tuned[1], tmp_path / "run")
    path = tmp_path / "run" / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["key"] == "vanilla":
            line["value"]["outcome"]["milliseconds"] = [1e-6]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines if not line["key"].startswith("timing")))
    result = tune(subject, ids, SMALL, tmp_path / "run", note=print)
    assert result.profile.method == "vanilla"
    assert "Vanilla is the better choice" in result.profile.notes[0]
    assert "of its forwards" in result.profile.notes[0]


def test_another_run_in_the_same_folder_is_refused(tuned, subject, ids, tmp_path):
    _, folder, _ = tuned
    with pytest.raises(ValueError, match=r"holds a run with seed=0 \(now 1\); use another"):
        tune(subject, ids, replace(SMALL, seed=1), folder)
    with pytest.raises(ValueError, match=r"holds a run with batch=2 \(now 1\)"):
        tune(subject._replace(batch=1), ids, SMALL, folder)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists already and holds no tune run"):
        tune(subject, ids, SMALL, tmp_path)
    repeated = tune(subject, ids, SMALL, folder)
    assert repeated.profile.measured == tuned[0].profile.measured


def test_another_model_of_the_same_name_is_another_plan(subject, ids):
    def model_of(subject):
        return report.plan(subject, ids, {}, None)["model_sha256"]

    weights = subject.params | {"norm": subject.params["norm"] * 2}
    models = [replace(subject.model, mask_id=5), replace(subject.model, stop_ids=(7,))]
    others = [subject._replace(params=weights), *(subject._replace(model=model) for model in models)]
    assert model_of(subject) == model_of(subject._replace(params=dict(subject.params)))
    assert len({model_of(subject), *map(model_of, others)}) == 4


def test_targets_and_prompts_that_are_out_of_reach(subject, ids, tmp_path):
    few = tune(subject, ids[:5], SMALL, tmp_path / "few")
    assert (few.profile.method, few.outcomes) == ("vanilla", [])
    assert "too few prompts" in few.profile.notes[0]
    assert Profile.load(tmp_path / "few" / "profile.json").method == "vanilla"
    loose = replace(SMALL, taus=(0.8,), guards=(0.0,), agreement=1.0)
    result = tune(subject, ids, loose, tmp_path / "loose")
    assert max(o.agreement for o in result.outcomes if o.setting.method == "specfold") < 1
    assert result.profile.method in ("vanilla", "spiffy")
    assert any("No SpecFold setting reaches the target of 100.00%" in note for note in result.profile.notes)
    exact = tune(subject, ids, replace(loose, lossless=True), tmp_path / "exact")
    assert [o.setting.guard for o in exact.outcomes if o.setting.method == "specfold"] == [np.inf]
    assert all(o.agreement == 1 for o in exact.outcomes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"drafts": (0,)}, r"drafts\[0\]=0 must be a whole number of at least 1"),
        ({"taus": ()}, r"taus=\(\) must be a list of at least 1 value$"),
        ({"taus": (np.nan,)}, r"taus\[0\]=nan must be a number of at least 0"),
        ({"guards": (0.5, -1.0)}, r"guards\[1\]=-1.0 must be a number of at least 0"),
        ({"sources": ("magic",)}, r"sources\[0\]='magic' must be one of \('ranks', 'confidence', 'union'\)"),
        ({"reaches": (0,)}, r"reaches\[0\]=0 must be a whole number of at least 1"),
        ({"agreement": 1.5}, r"agreement=1.5 must be a number in \[0, 1\]"),
        ({"agreement": 0}, "agreement=0 must be a share above 0"),
        ({"seed": -1}, "seed=-1 must be a whole number of at least 0"),
    ],
)
def test_search_errors(values, message):
    with pytest.raises(ValueError, match=message):
        Search(**values)


GRAPH = sf.DraftGraph.from_sets([frozenset({(0, 0)})], [1], thetas=[(-np.inf, 0)])


@pytest.mark.parametrize(
    ("method", "graph", "fold"),
    [
        ("vanilla", sf.DraftGraph.empty(), None),
        ("spiffy", GRAPH, None),
        ("specfold", GRAPH, sf.FoldConfig(guard=np.inf, tau=0.3, gates=1)),
    ],
)
def test_profiles_survive_a_file(method, graph, fold, fast, tmp_path):
    decode = sf.DecodeConfig(threshold=0.8, seed=5, share=False, stop_ids=(1, 2))
    made = Profile(method, decode, graph, fold, made_for("m", fast.model, decode), {"x": 1}, ("note",))
    made.save(tmp_path / "p.json")
    back = Profile.load(tmp_path / "p.json", "m", fast.model)
    assert (back.method, back.decode, back.fold, back.notes, back.measured) == (method, decode, fold, ("note",), {"x": 1})
    assert jax.tree.structure(back.graph) == jax.tree.structure(graph)
    jax.tree.map(np.testing.assert_array_equal, back.graph, graph)


def test_profiles_made_for_something_else_are_refused(fast, tmp_path):
    decode, path = config(), tmp_path / "p.json"
    Profile("spiffy", decode, GRAPH, None, made_for("m", fast.model, decode), {}).save(path)
    with pytest.raises(ValueError, match=r"p.json: the profile was made for model='m' \(here 'n'\)"):
        Profile.load(path, "n", fast.model)
    with pytest.raises(ValueError, match=r"vocab=320 \(here 400\)"):
        Profile.load(path, "m", replace(fast.model, vocab=400))
    with pytest.raises(ValueError, match=r"block=16 \(here 32\), sub_block=8 \(here 4\)"):
        Profile.load(path).require_made_for("m", fast.model, 32, 4)
    record = json.loads(path.read_text())
    for change, message in (
        ({"method": "magic"}, "method='magic'"),
        ({"fold": {}}, "fold lacks"),
        ({"graph": None}, "does not go with a graph"),
        ({"decode": record["decode"] | {"threshold": 2}}, "threshold=2"),
        ({"graph": record["graph"] | {"max_drafts": 9}}, "graph: max_drafts=9"),
        ({"extra": 1}, "unknown fields"),
    ):
        path.write_text(json.dumps(record | change))
        with pytest.raises(ValueError, match=f"p.json: .*{message}"):
            Profile.load(path)


def words_of(prompts, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("".join(" ".join(map(str, row)) + "\n" for row in prompts))
    return path


def test_the_command_line_tunes_and_uses_a_profile(specfold, ids, tmp_path):
    """Too few prompts, so that nothing is compiled to measure; and a profile written by hand."""
    model = ["--model", GOLDEN / "fast_dllm_v2", "--mask_id", "310", "--token_ids"]
    file, out = words_of(ids[:3], tmp_path), tmp_path / "run"
    status, text, _ = specfold("tune", *model, "--file", file, "--out", out, "--max_new_tokens", "16")
    assert (status, "too few prompts to tune on: 3" in text) == (0, True)
    assert specfold("tune", *model, "--file", file, "--out", out)[2].startswith(f"specfold tune: {out} holds a run with max_new_tokens=16")
    use = ("generate", *model, "--profile", out / "profile.json")
    status, text, err = specfold(*use, "--json", "12 13 14")
    assert (status, json.loads(text)["method"], len(json.loads(text)["tokens"])) == (0, "vanilla", 16)
    status, text, _ = specfold("verify", *use[1:], "--file", file, "--json")
    assert (status, json.loads(text)["equal"], json.loads(text)["prompts"]) == (0, 3, 3)
    for flags, code, message in (
        (["--tau", "0.1"], 2, "--profile sets tau; leave --tau out"),
        (["--method", "spiffy"], 2, "--profile sets method"),
        (["--no_share"], 2, "--profile sets share"),
        (["--sub_block", "4"], 1, "profile.json: the profile was made for sub_block=8 (here 4)"),
    ):
        status, _, err = specfold(*use, *flags, "12 13 14")
        assert (status, message in err) == (code, True), err
    for text, message in ((None, "none.json: no such profile"), ("{", "none.json: "), ("{}", "none.json: ")):
        if text:
            (tmp_path / "none.json").write_text(text)
        status, _, err = specfold("generate", *model, "--profile", tmp_path / "none.json", "12 13 14")
        assert (status, message in err, "specfold tune" in err.partition("none.json")[2]) == (1, True, True), err
    for flags, message in (
        (["--drafts", "a"], "'a' must be numbers separated by commas"),
        (["--agreement", "2"], "agreement=2.0"),
        (["--sources", "magic"], "sources[0]='magic'"),
    ):
        status, _, err = specfold("tune", *model, "--file", file, "--out", tmp_path / "new", *flags)
        assert (status, message in err) == (2, True), err


def test_promises_are_held_against_other_prompts(tuned, subject, ids):
    lines = promises.hold(tuned[0], subject, ids[:4])
    best = tuned[0].profile.measured["best_of_each_method"]
    assert [line["promised"]["setting"] for line in lines] == [figures["setting"] for figures in best.values()]
    for line in lines:
        assert line["measured"]["setting"] == line["promised"]["setting"]
        assert line["measured"]["prompts"] == 4
        assert line["agreement"] == promises.overlap(*(line[of]["agreement_interval95"] for of in ("promised", "measured")))
    assert (promises.overlap([1, 2], [2, 3]), promises.overlap([1, 2], [2.1, 3]), promises.overlap([1, 9], [2, 3])) == (True, False, True)


def test_pictures(tuned, tmp_path):
    files = draw_all(tuned[0], tmp_path)
    assert sorted(file.name for file in files) == ["forwards.png", "graph.png", "positions.png", "recompute.png", "speed.png"]
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in files)
    assert sorted(tmp_path.iterdir()) == sorted(files)
