"""The decode benchmark measures the same thing on both sides: states, tokens and counts agree, and a timed part is what a decode runs."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import torch
from absl import app

import specfold_jax as sf
from benchmarks.common.environment import ROOT
from benchmarks.common.results_file import ResultsFile
from benchmarks.quality import lossless
from benchmarks.speed import decode, timing_jax
from benchmarks.speed.ratios import folding_ms, line, ratio_table, ratios, table
from benchmarks.speed.timing import PARTS, at_prefix, decode_all, grouped, largest, span, time_parts
from benchmarks.speed.timing_jax import JaxSide, compile_programs
from benchmarks.speed.timing_torch import TorchSide
from benchmarks.tables import plots
from parity_tests.reports import decodes as decode_report
from specfold_jax.diffusion.decoding import Decoding
from specfold_jax.models.checkpoint import resolve_folder
from specfold_jax.running.batch import batches

ENTRIES = 160
IDS = [list(range(5, 45)), list(range(100, 170)), list(range(30, 75))]
BATCH, PREFIX = 2, 96
CONFIG = sf.DecodeConfig(8, impl="xla")


@pytest.fixture(scope="module")
def both():
    """SpecFold on two layers of the tiny model, by JAX and by PyTorch."""
    model, params = sf.load("tiny", dtype="float32")
    model, params = dataclasses.replace(model, layers=2), params | {"layers": params["layers"][:2]}
    graph = sf.DraftGraph.load(resolve_folder("tiny") / "graph.json")
    how = Decoding(model, CONFIG, graph, sf.FoldConfig(0.2))
    prompts, lengths = batches(IDS, BATCH)[0]
    assert span(prompts.shape[1], how, PREFIX) == ENTRIES
    programs = compile_programs(params, prompts, lengths, ENTRIES, {"specfold": how})
    there = jax.tree.map(lambda x: torch.from_numpy(np.array(x)), params)
    return JaxSide(params, how, programs["specfold"]), TorchSide(there, how, "torch")


def state_of(side, prefix):
    """Before the first batch's largest check."""
    return at_prefix(side, largest(side, *batches(IDS, BATCH)[0], ENTRIES), prefix)


def test_whole_decodes_agree(both):
    here, there = (decode_all(side, IDS, BATCH, 2) for side in both)
    assert here.generated == there.generated
    assert min(map(len, here.generated)) > 0
    assert (here.stats, here.gates, here.iterations) == (there.stats, there.gates, there.iterations)
    assert len(here.seconds) == len(here.prefill_seconds) == 2
    assert len(here.iteration_seconds) == 4
    assert here.stats["nfe"] <= BATCH * here.iterations


@pytest.mark.parametrize("prefix", [0, PREFIX])
def test_the_largest_check_is_the_same_on_both_sides(both, prefix):
    here, there = (state_of(side, prefix) for side in both)
    for name in ("start", "canvas", "lengths", "limit", "phase"):
        np.testing.assert_array_equal(getattr(here.row, name), getattr(there.row, name))
    if prefix:
        assert set(np.asarray(here.row.start)) == {prefix}
    np.testing.assert_array_equal(*(side.computed_rows(state) for side, state in zip(both, (here, there), strict=True)))


def test_a_longer_prefix_repeats_the_rows_own_entries(both):
    before, after = (state_of(both[0], prefix) for prefix in (0, PREFIX))
    for old, new in zip(jax.tree.leaves(before.cache), jax.tree.leaves(after.cache), strict=True):
        for row, start in enumerate(np.asarray(before.row.start)):
            once, moved = (np.moveaxis(np.asarray(x), -4, 0)[row] for x in (old, new))  # [..., span, kv_heads, head_dim]
            repeated = np.take(once, np.arange(PREFIX) % start, axis=-3)
            np.testing.assert_array_equal(moved[..., :PREFIX, :, :], repeated)


def test_a_prefix_is_whole_blocks(both):
    with pytest.raises(ValueError, match="prefix=100 must be a multiple of the block of 32"):
        state_of(both[0], 100)


def test_every_turn_of_a_timed_loop_is_the_same_iteration(both):
    side = both[0]
    state = state_of(side, PREFIX)
    for part in PARTS:
        program, given = side.programs.compiled[part], side._given(part, state)
        once, often = program(*given, np.int32(1)), program(*given, np.int32(4))
        jax.tree.map(np.testing.assert_array_equal, once, often)


def test_no_turn_is_computed_before_the_loop(both):
    """A program whose loop does nothing is one that XLA emptied: all products of the check are inside."""
    side = both[0]
    text = side.programs.compiled["check"].as_text()
    entry = text[text.index("\nENTRY") :]
    assert " while(" in entry
    assert " dot(" not in entry
    assert "custom-call" not in entry.split(" while(")[0]


@pytest.mark.parametrize("number", [0, 1], ids=["xla", "torch"])
def test_parts_of_an_iteration(both, number):
    side = both[number]
    state = state_of(side, PREFIX)
    one = time_parts(side, state, ("xla", "torch")[number], 2)
    assert all(one[part]["repetitions"] == 2 and one[part]["kernels"] is None for part in PARTS)
    assert one["step"]["median_ms"] - one["check"]["median_ms"] - one["head"]["median_ms"] == pytest.approx(one["overhead_ms"])
    assert one["draft_rows"] + BATCH * 32 <= one["rows"] <= 4 * BATCH * 32
    assert all(0 < share <= 1 for share in one["recompute"])
    assert one["prefix"] == [PREFIX] * BATCH
    json.dumps(one)


def test_times_are_kept_where_a_profiler_fails(both, monkeypatch):
    def kernels(*_):
        raise RuntimeError("multiple subscribers")

    monkeypatch.setattr(TorchSide, "kernels", kernels)
    one = time_parts(both[1], state_of(both[1], PREFIX), "torch", 2)
    assert (one["check"]["kernels"], one["check"]["kernels_error"]) == (None, "RuntimeError: multiple subscribers")


def test_kernels_by_group():
    found = {"gate": 1.0, "pack": 2.0, "attention": 4.0, "linear": 8.0, "silu_pair": 16.0, "loop_add_fusion": 32.0}
    assert grouped(found, "pallas") == {
        "all": 63.0,
        "groups": {"gate": 1.0, "pack": 2.0, "attention": 4.0, "products": 24.0, "rows": 0, "head": 0, "rest": 32.0},
        "most": found,
    }
    assert grouped(found, "xla") == {"all": 63.0, "groups": None, "most": found}
    assert grouped({"body": 1.0}, "pallas") == {"all": 1.0, "groups": None, "most": {"body": 1.0}}
    assert grouped({}, "pallas") is None
    assert grouped(None, "triton") is None


def result(method: str, tau: float | None, step: float, groups: dict[str, float] | None, impl: str = "pallas", drafts: int = 8) -> dict:
    """A row of results with these milliseconds."""
    setting = {"shape": "1.5b", "impl": impl, "batch": 1, "method": method, "tau": tau, "guard": None, "samples": 2}
    setting["drafts"] = None if method == "vanilla" else drafts
    spread = {"median_ms": step, "low_ms": step, "high_ms": step, "repetitions": 10}
    kernels = {"all": step, "groups": groups, "most": {}} if groups else None
    part = spread | {"kernels": kernels}
    one = {
        "step": part,
        "check": part | dict.fromkeys(("median_ms", "low_ms", "high_ms"), 0.8 * step),
        "head": part,
        "overhead_ms": 0.1 * step,
        "rows": 288,
    }
    one |= {"recompute": [0.2, 0.3] if method == "specfold" else None, "floors": {"bytes_floor_ms": 0.7, "arithmetic_floor_ms": 0.1}}
    measured = {"title": method, "tokens_per_second": 1.0, "iteration": spread, "iterations": 3, "nfe": 3, "accepted_depth": None}
    measured |= {"recompute_ratio": None, "compile_seconds": None, "one": one, "outputs": ["a", "b"], "tokens": 2}
    return {"setting": setting, "measured": measured}


def test_ratios_of_a_run():
    spiffy, folded = {"attention": 0.2, "gate": 0.0}, {"attention": 0.3, "gate": 0.02, "pack": 0.01}
    results = [result("vanilla", None, 2.0, spiffy), result("spiffy", None, 4.0, spiffy), result("specfold", 0.0, 9.0, folded)]
    results += [result("specfold", 0.1, 3.0, folded), result("specfold", 0.1, 3.0, None, impl="xla")]
    results += [result("specfold", 0.1, 3.0, folded, drafts=3)]  # compared with the Spiffy of as many drafts, which there is not
    (only,) = ratios(results)
    assert (only["spiffy_over_vanilla"], only["specfold_over_vanilla"], only["specfold_over_spiffy"]) == (2.0, 1.5, 0.75)
    assert only["folding"] == pytest.approx((0.03 + 0.1) / 2.4)
    assert (only["recompute"], only["spiffy_rows"]) == (0.25, 288)
    assert folding_ms(results[4]["measured"]["one"], results[1]["measured"]["one"]) is None
    for one in results:
        one["measured"] |= {"identical": 2, "broken": False}
        assert "tokens/s" in line(one)
    assert table(results).row_count == 6
    assert ratio_table(results).row_count == 1


def test_pictures_of_decodes(tmp_path):
    results = [result("vanilla", None, 2.0, None), result("spiffy", None, 4.0, None), result("specfold", 0.1, 3.0, None)]
    results += [result("spiffy", None, 3.0, None, drafts=3), result("specfold", 0.1, 2.5, None, drafts=3)]
    results.append({"setting": results[0]["setting"] | {"shape": "7b"}, "measured": results[0]["measured"]})
    files = plots.draw_decodes({"environment": {"device": "made up", "commit": "abc"}, "results": results}, tmp_path)
    assert [path.name for path in files] == ["regimes-1.5b.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)


def test_tokens_are_compared_with_vanillas_of_the_same_implementation():
    vanilla, other, spiffy = (
        result("vanilla", None, 2.0, None),
        result("vanilla", None, 2.0, None, "xla"),
        result("spiffy", None, 2.0, None),
    )
    other["measured"]["outputs"] = ["x", "y"]
    spiffy["measured"]["outputs"] = ["a", "x"]
    decode.compare(spiffy, [other, vanilla])
    assert (spiffy["measured"]["identical"], spiffy["measured"]["broken"]) == (1, True)


@pytest.fixture
def flags(tmp_path):
    decode.FLAGS(["decode", f"--out={tmp_path / 'decode.json'}", "--shapes=tiny", "--impls=torch,xla", "--batch=1,2", "--drafts=3,8"])
    yield decode.FLAGS
    decode.FLAGS.unparse_flags()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--batch=0", "--batch has 0, must be whole numbers from 1 on"),
        ("--batch=one", "--batch has one"),
        ("--drafts=0", "--drafts has 0"),
        ("--taus=-1", "--taus has '-1'"),
        ("--taus=a", "--taus has 'a'"),
        ("--shapes=9b", "--shapes has 9b, knows tiny"),
        ("--impls=cuda", "--impls has cuda, knows xla"),
        ("--shapes=", "--shapes is empty"),
        ("--samples=99999", "--samples and --batch must be at most 2000, the packaged problems, not 99999"),
        ("--batch=1,9999", "not 9999"),
        ("--prefix=7", "--prefix=7 must be a multiple of the block of 32"),
        ("--guard=nan", "--guard: guard=nan"),
        ("--graph=x", "--graph is a graph of one number of drafts"),
    ],
)
def test_flags_that_name_nothing_are_refused_before_anything_runs(flags, flag, message):
    decode.FLAGS(["decode", f"--out={flags.out}", "--drafts=3,8", flag])
    with pytest.raises(app.UsageError, match=message):
        decode.require_sane_flags()


def test_a_run_goes_on_past_what_fails_and_where_it_stopped(flags, monkeypatch):
    monkeypatch.setattr(decode, "in_shape", lambda shape, dtype: (None, None))
    asked, failing = [], {"xla": True}

    def sides(group, *_):
        if failing.get(group[0]["impl"]) and group[0]["batch"] == 2:
            raise RuntimeError("out of memory")
        yield from ((setting, None) for setting in group)

    def measure(setting, *_):
        asked.append((setting["impl"], setting["batch"], setting["method"], setting["drafts"], setting["tau"]))
        return {}

    monkeypatch.setattr(decode, "sides", sides)
    monkeypatch.setattr(decode, "measure", measure)
    monkeypatch.setattr(decode, "compare", lambda result, others: None)
    monkeypatch.setattr(decode, "line", lambda result: "")
    file = ResultsFile.named(flags.out, "decode", {})
    failed = decode.run(file, [], None, lambda text: None)
    assert failed == ["tiny xla batch 2: RuntimeError: out of memory"]
    assert [one[:2] for one in asked[::7]] == [("xla", 1), ("torch", 1), ("torch", 2)]
    drafting = [("spiffy", None), ("specfold", 0.0), ("specfold", 0.1)]
    assert [one[2:] for one in asked[:7]] == [("vanilla", None, None), *((m, d, tau) for d in (3, 8) for m, tau in drafting)]
    asked.clear()
    failing["xla"] = False
    assert decode.run(file, [], None, lambda text: None) == []
    assert {one[:2] for one in asked} == {("xla", 2)}
    assert len(file.results) == 28


def test_an_empty_turn_is_short():
    assert timing_jax.empty_turn() < 0.01


def test_a_graph_that_cannot_be_is_refused_before_one_is_chosen(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    for path, message in ((tmp_path / "none" / "graph.json", "must be a folder"), (tmp_path / "broken.json", "broken.json")):
        with pytest.raises(app.UsageError, match=message):
            decode.draft_graph(path, [], sf.DecodeConfig(), 8)


def test_a_file_is_of_one_graph_which_the_first_command_may_choose(tmp_path, monkeypatch):
    shipped, files = sf.DraftGraph.load(resolve_folder("tiny") / "graph.json"), []
    monkeypatch.setattr(decode, "draft_graph", lambda path, *_: path.exists() or shipped.save(path))
    monkeypatch.setattr(decode, "run", lambda file, *_: (files.append(file), file.change(list), [])[-1])

    def command(graph):
        decode.FLAGS(["decode", f"--out={tmp_path / 'decode.json'}", "--drafts=3", "--impls=xla", *graph])
        try:
            return decode.main()
        finally:
            decode.FLAGS.unparse_flags()

    one, other = ([f"--graph={tmp_path / name}"] for name in ("one.json", "other.json"))
    assert [command(one), command(one)] == [0, 0]  # the same command goes on with what the first has chosen
    (tmp_path / "other.json").write_text("another")
    for graph in (other, []):
        with pytest.raises(app.UsageError, match=r"was measured with graph='\w+' \(here "):
            command(graph)
    assert len(files) == 2


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (plots, ["--decode=README.md", "--out=OUT"], "README.md"),
        (plots, ["--out=README.md"], "--out: .*README.md"),
        (lossless, ["--samples=2001", "--out=OUT/x.json"], "--samples=2001 must be at most 2000"),
        (lossless, ["--temperature=nan", "--out=OUT/x.json"], "--temperature: temperature=nan"),
        (decode_report, ["--sub_block=5", "--out=OUT/x.json"], "sub_block=5"),
        (decode_report, ["--guard=nan", "--out=OUT/x.json"], "guard=nan"),
        (decode_report, ["--methods=", "--out=OUT/x.json"], "--methods is empty, knows vanilla"),
    ],
)
def test_what_a_command_line_names_is_refused_before_anything_runs(module, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    module.FLAGS(["program", *(argument.replace("OUT", str(tmp_path)) for argument in arguments)])
    with pytest.raises(app.UsageError, match=message):
        module.main()
    module.FLAGS.unparse_flags()
    assert not list(tmp_path.iterdir())
