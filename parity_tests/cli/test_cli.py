"""The command line, in process on a golden checkpoint; prompts are token ids."""

import io
import json
import subprocess
import sys
import warnings
from dataclasses import fields
from pathlib import Path

import pytest
from rich.console import Console

import specfold_jax as sf
from specfold_jax.calibration import picture
from specfold_jax.cli import COMMANDS, inspect, setup
from specfold_jax.cli.tables import statistics
from specfold_jax.cli.train import HELP
from specfold_jax.methods import METHODS
from specfold_jax.running.summary import Summary
from specfold_jax.training.step import TrainConfig

GOLDEN = Path(__file__).parents[1] / "golden"
CASE = next(c for c in json.loads((GOLDEN / "fast_dllm_v2" / "cases_open.json").read_text()) if c["name"] == "n1_t0.9_s8_nc")
GOLDEN_MODEL, MODEL = (["--model", str(GOLDEN / name), "--mask_id", "310", "--token_ids"] for name in ("fast_dllm_v2", "fast_dllm_v2/tied"))
DECODE = ["--max_new_tokens", "24", "--stop_ids", "none"]
PROMPT = " ".join(map(str, CASE["prompt"]))
NEW = CASE["output"][len(CASE["prompt"]) :][:24]


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    sf.DraftGraph.from_sets([frozenset({(0, 0)}), frozenset({(0, 0), (1, 0)})], [1, 2], [0.8, 0.4]).save(path)
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text(f"{PROMPT}\n12 13 14\n")
    return path


@pytest.fixture
def no_progress(monkeypatch):
    """Without lines about progress, which a slow machine would print."""
    monkeypatch.setattr(setup, "EVERY", float("inf"))


def test_help_needs_no_jax():
    """The package itself is replaced by an empty one, so that only what the command line imports counts."""
    code = (
        "import sys, types; package = types.ModuleType('specfold_jax'); package.__path__ = [sys.argv[1]]\n"
        "sys.modules['specfold_jax'] = package\n"
        "from specfold_jax.cli import main\n"
        "try: main(['specfold', *sys.argv[2:]])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert not {'jax', 'numpy', 'transformers'} & set(sys.modules)"
    )
    folder = Path(sf.__file__).parent
    for words in (["--help"], ["generate", "--help"], ["verify", "--help"], ["calibrate", "--help"], ["tune", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, folder, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert f"specfold {words[0]} [flags]" in done.stdout or words == ["--help"]


@pytest.mark.parametrize("words", [["--version"], ["--version", "generate"]])
def test_version(specfold, words):
    assert specfold(*words) == (0, f"specfold {sf.__version__}\n", "")


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "specfold_jax", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"specfold {sf.__version__}\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(specfold, command):
    status, out, _ = specfold(command, "--help")
    assert status == 0
    assert f"usage: specfold {command} [flags]" in out
    assert f"examples:\n  specfold {command}" in out
    assert max(map(len, out.partition("examples:")[0].splitlines())) <= 100


def test_flags_match_the_library():
    assert set(HELP) == {field.name for field in fields(TrainConfig)}


def test_generate_json_is_the_golden_case(specfold):
    status, out, err = specfold("generate", *GOLDEN_MODEL, *DECODE, "--method", "vanilla", "--json", PROMPT)
    assert status == 0
    record = json.loads(out)
    assert record["tokens"] == NEW
    assert record["text"] == " ".join(map(str, NEW))
    assert (record["method"], record["prompt"], record["stats"]["status"]) == ("vanilla", PROMPT, "decoded")
    assert record["stats"]["nfe"] == record["stats"]["checks"] + record["stats"]["commits"]
    assert record["run"]["tokens_per_second"] > 0
    assert "tokens/s" in err


def test_compare(specfold, graph, prompts, no_progress):
    words = ("generate", *MODEL, *DECODE, "--compare", "--graph", graph, "--guard", "inf", "--file", prompts, "--batch", "1")
    status, out, err = specfold(*words)
    assert (status, err) == (0, "")
    assert "vanilla, spiffy, specfold:\n" in out
    assert out.count("all 2") == 2
    for name in ("tokens/s", "wall s", "compilation", "NFE = checks + commits", "forwards per generated", "drafted", "accepted"):
        assert name in out
    for name in ("mean accepted depth", "saved commits", "recompute ratio", "guard stops"):
        assert name in out
    status, out, _ = specfold(*words, "--json")
    first, second = map(json.loads, out.splitlines())
    assert first["methods"]["spiffy"]["tokens"] == first["methods"]["vanilla"]["tokens"]
    assert [m["identical"] for m in second["methods"].values()] == [True] * 3


def test_only_what_can_fold_has_a_recompute_ratio():
    counts = dict.fromkeys(("nfe", "checks", "commits", "prefills", "steps", "drafting", "drafted", "accepted"), 1)
    counts |= dict.fromkeys(("rows", "tokens", "seconds", "compile_seconds", "saved_commits", "shared", "guard_stops"), 1)
    table = statistics([Summary(method=method, **counts, recompute=((1.0, 0.5),)) for method in METHODS])
    row = list(table.columns[0].cells).index("recompute ratio")
    assert [list(column.cells)[row] for column in table.columns] == ["recompute ratio", "-", "-", "0.750"]


def test_live(specfold, graph):
    words = ("--live", "--pause", "0", "--graph", graph, "--drafts", "2", PROMPT)
    status, out, _ = specfold("generate", *MODEL, *DECODE, *words)
    assert status == 0
    assert "24 tokens" in out
    assert "drafts of this check" in out
    assert "accepted" in out


def test_verify(specfold, graph, prompts):
    words = ("verify", *MODEL, *DECODE, "--file", prompts, "--graph", graph, "--batch", "1")
    status, out, _ = specfold(*words, "--guard", "inf")
    assert status == 0
    assert "vanilla's tokens on 2 of 2 prompts: 100.00%" in out
    status, out, _ = specfold(*words, "--guard", "0", "--tau", "0.8", "--json")
    record = json.loads(out)
    assert status == 1
    assert record["equal"] < 2 == record["prompts"]
    assert set(record["differences"][0]) == {"prompt", "position", "token", "vanilla_token", "margin"}
    assert record["specfold"]["nfe_per_sample"] < record["vanilla"]["nfe_per_sample"]
    assert record["interval95"][0] <= record["agreement"] < record["interval95"][1]


def test_calibrate_then_inspect(specfold, tmp_path, prompts, no_progress):
    out, png = tmp_path / "graph.json", tmp_path / "graph.png"
    words = ("calibrate", *MODEL, *DECODE, "--file", prompts, "--drafts", "3", "--out", out)
    status, text, err = specfold(*words, "--png", png)
    assert (status, err) == (0, "only 2 prompts: their graph may suit others badly; give 16 or more\n")
    assert "drafts a check" in " ".join(text.split())  # as wide as the terminal, so wrapped anywhere
    assert sf.DraftGraph.load(out).made_for.model == "tied"
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert specfold(*words)[::2] == (1, f"specfold calibrate: {out} exists already; --force overwrites it\n")
    status, text, _ = specfold("inspect", out)
    assert status == 0
    assert "made for tied: vocabulary 320" in " ".join(text.split())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["graph.json", "graph.png"]
    other = ("generate", *MODEL, *DECODE, "--graph", out, "--sub_block", "4", PROMPT)
    assert "calibrated for sub_block=8 (here 4)" in specfold(*other)[2]


def test_inspect_a_checkpoint(specfold):
    status, out, _ = specfold("inspect", GOLDEN / "fast_dllm_v2", "--mask_id", "310")
    assert status == 0
    for text in ("Fast_dLLM_QwenForCausalLM", "152,384", "32 positions, sub-block 8", "310", "311", "F32"):
        assert text in out


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["bogus"], 2, "invalid choice: 'bogus'"),
        (["generate", "--bogus", "1"], 2, "specfold generate: unrecognized arguments: --bogus (see specfold generate --help)"),
        (["generate", "--threshold", "high"], 2, "specfold generate: argument --threshold: invalid float value: 'high'"),
        (["generate", "--batch", "0"], 2, "'0' must be a whole number of at least 1"),
        (["generate", "--stop_ids", "1;2"], 2, "'1;2' must be token ids separated by commas"),
        (["generate", "--method", "vanilla", "--tau", "0.1", "1"], 2, "--tau belongs to --method specfold, not to vanilla"),
        (["generate", "--method", "spiffy", "--guard", "1", "1"], 2, "--guard belongs to --method specfold"),
        (["generate", "--method", "vanilla", "--drafts", "1", "1"], 2, "--drafts belongs to --method spiffy or specfold"),
        (["generate", "--live", "--json", "1"], 2, "--live and --json do not go together"),
        (["generate", "--file", "a.txt", "1"], 2, "a prompt and --file do not go together"),
        (["generate", *MODEL, "--threshold", "2", "1"], 2, "threshold=2.0 must be a probability in [0, 1]"),
        (["generate", *MODEL, "--file", "nowhere.txt", "--tau", "-1"], 2, "tau=-1.0 must be a number of at least 0"),
        (["verify", *MODEL, "--file", "nowhere.txt", "--guard", "nan"], 2, "guard=nan must be a number of at least 0"),
        (["verify", "--samples", "9999"], 2, "--samples 9999 must be at most 2000"),
        (["calibrate", "--samples", "9999", "--out", "new.json"], 2, "--samples 9999 must be at most 2000"),
        (["calibrate", "--objective", "paper", "--out", "new.json"], 2, "it needs --source ranks, not union"),
        (["calibrate", *MODEL, "--temperature", "-1", "--out", "new.json"], 2, "temperature=-1.0 must be"),
        (["tune", *MODEL, "--seed", "-1", "--out", "new"], 2, "seed=-1 must be a whole number of at least 0"),
        (["generate", *MODEL, "--sub_block", "5", "1"], 1, "sub_block=5 must divide block_size=32"),
        (["generate", *MODEL, "--impl", "magic", "1"], 2, "impl='magic' must be one of"),
        (["generate", *MODEL, "--method", "vanilla", "1 x"], 1, "prompt 0: 'x' must be a token id"),
        (["generate", *MODEL, "--method", "vanilla", "1 310"], 1, "row 0: the mask token 310 at 1"),
        (["generate", *MODEL, "--method", "vanilla", " "], 1, "prompt 0 is empty"),
        (["generate", *MODEL, "1"], 1, "graph.json: no such draft graph; pass --graph FILE, or make one: specfold calibrate"),
        (["generate", *MODEL[:-1], "hello"], 1, "no tokenizer"),
        (["generate", "--model", "nowhere", "1"], 1, "'nowhere' is neither a checkpoint folder nor a model inside the package"),
        (["generate", *MODEL, "--file", "nowhere.txt"], 1, "specfold generate: nowhere.txt: no such file or directory"),
        (["inspect", "nowhere.json"], 1, "no graph file nowhere.json; specfold calibrate --out nowhere.json makes one"),
        (["verify", *MODEL, "--method", "vanilla"], 2, "name spiffy or specfold"),
        (["verify", *MODEL], 2, "no prompts: pass --file"),
        (["calibrate", *MODEL, "--out", "/nowhere/graph.json"], 1, "/nowhere/graph.json must be a file in an existing folder"),
        (["inspect", str(GOLDEN / "sdar"), "--png", "a.png"], 2, "--png draws a graph: name a graph file"),
        (["train", "--data", "d"], 2, "the following arguments are required: --out"),
        (["train", "--data", "d", "--out", "o", "--scan", "7"], 2, "scan=7 must divide steps=24000"),
    ],
)
def test_mistakes_get_one_clear_line(specfold, words, status, message):
    code, out, err = specfold(*words)
    assert (code, out) == (status, "")
    assert message in err
    assert err.count("\n") == 1
    assert err.startswith("specfold")


def test_edges_of_a_picture_lead_from_a_column_to_the_next():
    sets = [{(0, 0)}, {(1, 0)}, {(0, 1)}, {(0, 0), (1, 0)}, {(0, 1), (1, 0)}, {(0, 0), (2, 0)}, {(0, 0), (1, 0), (2, 0)}]
    graph = sf.DraftGraph.from_sets([frozenset(s) for s in sets], [1, 1, 1, 2, 2, 2, 3], thetas=[(3.5, 0), (1.0, 0), (0.0, 1)])
    lanes, edges = picture._lanes(graph), picture._edges(graph)
    boxes, _, _ = picture._lay_out(lanes, ["label"] * graph.nodes)
    assert len(edges) == 3 + 5 + 2 + 3
    starts, ends = picture._ports(edges, boxes, 0), picture._ports(edges, boxes, 1)
    assert all(ends[edge][0] - starts[edge][0] == pytest.approx(picture.BETWEEN) for edge in edges)
    assert picture._crossings([column for _, column in lanes[0]], graph.parent) == 0


def test_warnings_are_lines_without_code(specfold, monkeypatch):
    def run(args):
        warnings.simplefilter("always")
        warnings.warn("impl='auto' decodes with XLA", stacklevel=1)

    monkeypatch.setattr(inspect, "run", run)
    assert specfold("inspect", "tiny") == (0, "", "specfold inspect: impl='auto' decodes with XLA\n")


def test_progress_without_a_terminal_is_a_line_now_and_then(monkeypatch):
    out, clock = io.StringIO(), iter([0, 1, 21, 22, 50])
    monkeypatch.setattr(setup.time, "monotonic", lambda: next(clock))
    with setup.progress_bar(Console(file=out), "spiffy", 40) as done:
        for number in (1, 2, 3, 4):
            done(number)
    assert out.getvalue() == "spiffy 2 of 40 (21 s)\nspiffy 4 of 40 (50 s)\n"
