"""The host level: padding, batches, summaries, tokenizers, the live view, and agreement with vanilla."""

import dataclasses
import io
import json
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

import specfold_jax as sf
from specfold_jax.diffusion.decoding import Decoding
from specfold_jax.evaluation import agreement, intervals
from specfold_jax.methods import METHODS
from specfold_jax.running import batch as generate
from specfold_jax.running import live
from specfold_jax.running.summary import same_tokens, summarise
from specfold_jax.text import tokens
from specfold_jax.training.tokenizer import train_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
PROMPTS = [[7], list(range(20, 60)), list(range(100, 133))]
GRAPH = sf.DraftGraph.from_sets([frozenset({(0, 0)}), frozenset({(0, 0), (1, 0)})], [1, 2], [0.8, 0.4])
LOSSLESS = sf.FoldConfig(tau=0.1, guard=np.inf)
DECODE = sf.DecodeConfig(max_new_tokens=24, threshold=0.7, stop_ids=())


@pytest.fixture(scope="module")
def runs(fast):
    """The three methods on the same prompts, two a batch, so that the second batch has an empty row."""
    return {m: generate.run_all(fast.params, PROMPTS, Decoding.of(m, fast.model, DECODE, GRAPH, LOSSLESS), batch=2) for m in METHODS}


def test_pad():
    prompts, lengths = generate.pad([[5], list(range(33))])
    assert prompts.shape == (2, 64)
    assert lengths.tolist() == [1, 33]
    assert prompts[0].tolist() == [5] + [0] * 63
    assert prompts.dtype == lengths.dtype == np.int32
    assert generate.pad([[1, 2]], capacity=2)[0].tolist() == [[1, 2]]
    with pytest.raises(ValueError, match=r"capacity=2 must hold the longest prompt, which has 3"):
        generate.pad([[1, 2, 3]], capacity=2)


@pytest.mark.parametrize(
    "wrong", [[2**31], [-(2**31) - 1], [10**30], np.array([2**40]), [1.0], [True], ["12"], "12", [[1], [2, 3]], [[1]], [None]]
)
def test_only_int32_numbers_are_token_ids(wrong):
    with pytest.raises(ValueError, match="prompt 1 must "):
        generate.pad([[5], wrong])


@pytest.mark.parametrize("batch", [0, -1, 1.5, "8", True, None])
def test_a_batch_is_a_whole_number(batch):
    with pytest.raises(ValueError, match=r"batch=.* must be a whole number of at least 1"):
        generate.batches([[1]], batch)


@pytest.mark.parametrize("pause", [-1, np.nan, np.inf, 1e300, "1", None])
def test_a_pause_is_a_number_of_seconds(pause):
    with pytest.raises(ValueError, match=r"pause=.* must be a number in \[0, 3600\]"):
        live.play(iter(()), str, Console(file=io.StringIO()), "", 0, pause)


def test_the_last_batch_is_filled_up_with_empty_rows():
    shapes = [(p.shape, n.tolist()) for p, n in generate.batches([[1], [2], [3, 4]], 2)]
    assert shapes == [((2, 32), [1, 1]), ((2, 32), [2, 0])]


def test_lossless_methods_agree_and_summaries_add_up(runs):
    vanilla = runs["vanilla"]
    for method, run in runs.items():
        summary = run.summary
        assert all(same_tokens(run, vanilla))
        assert (summary.method, summary.rows, summary.tokens, summary.refused) == (method, 3, 72, ())
        assert summary.nfe == summary.checks + summary.commits
        assert summary.steps == vanilla.summary.steps
        assert summary.tokens_per_second == summary.tokens / summary.seconds > 0
        assert sum(run.only(row).nfe for row in range(3)) == summary.nfe
        assert json.loads(json.dumps(summary.record()))["nfe_per_token"] == summary.nfe / 72
    assert vanilla.summary.recompute_ratio is None
    assert vanilla.summary.accepted_depth is None
    assert runs["spiffy"].summary.recompute_ratio == 1.0
    assert runs["spiffy"].summary.nfe < vanilla.summary.nfe
    folded = runs["specfold"].summary
    assert 0 < folded.recompute_ratio < 1
    assert len(folded.recompute) == 2


def test_rows_that_were_not_decoded_are_named(fast, runs):
    decoded = runs["vanilla"].decoded
    refused = decoded._replace(stats=decoded.stats.replace(status=np.array([0, 3, 0], np.int32)))
    summary = summarise(refused, runs["vanilla"].prompt_lengths, 1.0)
    assert summary.refused == ((1, "a token id lies outside the vocabulary"),)
    assert (summary.rows, summary.tokens) == (2, 48)
    with pytest.raises(ValueError, match="row 1: token id 999"):
        generate.run_all(fast.params, [[1], [999]], Decoding.of("vanilla", fast.model, DECODE))


def test_wrong_methods_are_refused(fast):
    with pytest.raises(ValueError, match="method='greedy' must be one of"):
        Decoding.of("greedy", fast.model, DECODE)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="method='spiffy' needs a draft graph"):
        Decoding.of("spiffy", fast.model, DECODE)
    with pytest.raises(ValueError, match="method='specfold' needs a FoldConfig"):
        Decoding.of("specfold", fast.model, DECODE, GRAPH)


def test_live_frames_tell_the_same_story_as_the_decode(fast, runs):
    frames = list(live.frames(fast.params, PROMPTS[1], Decoding(fast.model, DECODE, GRAPH, LOSSLESS)))
    assert [f.decoded is None for f in frames] == [True] * (len(frames) - 1) + [False]
    decoded, alone = frames[-1].decoded, runs["specfold"].only(1)
    assert decoded.tokens[0, 40 : decoded.lengths[0]].tolist() == runs["vanilla"].generated(1)
    assert (frames[-1].forwards, frames[-1].saved) == (alone.nfe, alone.accepted)
    assert (frames[0].kind, frames[0].forwards) == ("prefill", 0)
    assert sum(f.accepted for f in frames[:-1]) == alone.accepted
    for before, after in pairwise(frames[:-1]):
        assert after.forwards == before.forwards + 1
        known = ~before.masked
        assert (after.tokens[: len(known)][known] == before.tokens[known]).all()
        assert not (after.fresh & after.masked).any()
        assert after.accepted <= sum(line.came_true for line in after.drafts)
        for line in after.drafts:
            here = all(p < len(after.tokens) and after.tokens[p] == token for p, token in line.reveals)
            assert line.came_true is here
    console = Console(record=True, width=80, file=io.StringIO())
    shown = live.play(iter(frames), lambda t: f"<{t}>", console, "spiffy", GRAPH.max_drafts, 0.0)
    text = console.export_text()
    assert shown is decoded
    assert f"forward {alone.nfe} (" in text
    assert "drafts of this check" in text


def test_wilson():
    assert intervals.wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert intervals.wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert intervals.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    with pytest.raises(ValueError, match="successes=3 must lie in"):
        intervals.wilson(3, 2)


def test_differences_name_the_first_position(runs):
    vanilla = runs["vanilla"]
    decoded = vanilla.decoded
    changed, lengths = decoded.tokens.copy(), decoded.lengths.copy()
    changed[0, 1 + 5] += 1
    lengths[2] -= 1
    found = agreement.differences(vanilla._replace(decoded=decoded._replace(tokens=changed, lengths=lengths)), vanilla)
    was = vanilla.generated(0)[5]
    assert found == [agreement.Difference(0, 5, was + 1, was), agreement.Difference(2, 23, None, vanilla.generated(2)[23])]
    assert agreement.differences(runs["spiffy"], vanilla) == []


def test_the_margin_is_the_decision_at_which_the_runs_part():
    mask = 9

    def visit(text, start, steps, margin=None):
        return agreement.Visited(np.array([mask if c == "." else int(c) for c in text]), start, steps, margin)

    vanilla = [visit("1...", 0, 0, 0.4), visit("12..", 0, 1, 0.3), visit("123.", 0, 2, 0.2), visit("1234", 0, 3)]
    part = agreement.margin_at_parting
    assert part(vanilla, vanilla, mask) is None
    assert part([vanilla[0], vanilla[3]], vanilla, mask) is None  # drafts skip states
    assert part([vanilla[0], visit("12.4", 0, 2)], vanilla, mask) == 0.3  # 4 came before 3
    assert part([vanilla[0], visit("1235", 0, 3)], vanilla, mask) == 0.2  # the last token differs
    assert part([vanilla[0], visit("12.5", 0, 1)], vanilla, mask) == 0.4  # one step revealed too much
    assert part([vanilla[0], visit("15..", 0, 1)], vanilla, mask) == 0.4
    blocks = [visit("1..", 0, 0, 0.4), visit("12.", 0, 1, 0.1), visit("123", 2, 1, 0.2)]
    assert part([blocks[0], visit("124", 2, 1)], blocks, mask) == 0.1  # the token drawn with the commit


def test_margins_of_a_loose_fold_are_found(fast, runs):
    how = Decoding(fast.model, DECODE, GRAPH, sf.FoldConfig(tau=0.8, guard=0.0))
    loose = generate.run_all(fast.params, PROMPTS, how, batch=2)
    found = agreement.differences(loose, runs["vanilla"])
    assert found
    batches = generate.batches(PROMPTS, 1)  # the size of the batches decides nothing, and this one is compiled already
    known = agreement.with_margins(found, fast.params, batches, how)
    assert [d[:4] for d in known] == [d[:4] for d in found]
    assert all(d.margin is not None and 0 <= d.margin < 10 for d in known)
    prompts, lengths = map(jax.numpy.asarray, batches[0])
    states = agreement.replay(fast.params, prompts, lengths, [0], how.reduced("vanilla"), margins_too=True)[0]
    assert states[-1].tokens[1:25].tolist() == runs["vanilla"].generated(0)
    assert states[-1].steps == runs["vanilla"].only(0).steps
    assert all(s.margin is not None for s in states[:-1])
    assert states[-1].margin is None


def test_tokenizers_are_loaded_and_missing_ones_named(tmp_path):
    texts = [f"{word} has {n} apples and {n + 3} pears" for n, word in enumerate(["Ann", "Bob", "Cleo", "Dan", "Eve", "Finn"] * 40)]
    train_tokenizer(texts, 280).save_pretrained(tmp_path, save_jinja_files=False)
    tokenizer = tokens.load_tokenizer(tmp_path)
    ids = tokens.encode(tokenizer, ["Ann has 12 apples"])
    assert tokenizer.decode(ids[0]) == "Ann has 12 apples<|answer|>"
    assert tokens.encode(tokenizer, ["Ann has 12 apples"], raw=True) == [ids[0][:-1]]
    assert tokens.decode_text(tokenizer, [*ids[0], tokenizer.eos_token_id]) == "Ann has 12 apples"
    assert tokens.decode_text(None, [4, 5]) == "4 5"
    assert tokens.parse_ids(["4 5", "6"]) == [[4, 5], [6]]
    with pytest.raises(ValueError, match="prompt 1: 'x' must be a token id"):
        tokens.parse_ids(["1", "2 x"])
    for word in ("9" * 5000, "-1", "1.5", "\ud800"):
        with pytest.raises(ValueError, match=r"prompt 0: .* must be a token id"):
            tokens.parse_ids([word])
    for prompt, message in (("", "is empty"), (" \n", "is empty"), ("a \ud800", "must be Unicode text"), (None, "must be Unicode text")):
        for raw in (False, True):
            with pytest.raises(ValueError, match=f"prompt 1.* {message}"):
                tokens.encode(tokenizer, ["Ann", prompt], raw=raw)
    with pytest.raises(ValueError, match="no tokenizer; the folder must hold"):
        tokens.load_tokenizer(GOLDEN / "sdar")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="the tokenizer cannot be loaded"):
        tokens.load_tokenizer(tmp_path)


def test_a_summary_without_tokens_divides_by_nothing(runs):
    nothing = dataclasses.replace(runs["vanilla"].summary, tokens=0, seconds=0.0, nfe=0)
    assert (nothing.tokens_per_second, nothing.nfe_per_token) == (0.0, 0.0)
