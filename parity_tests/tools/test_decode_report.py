"""The report on decodes of both sides: every prompt that differs is followed in lock-step, and only ties explain it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import specfold_jax as sf
from parity_tests.harness.torch_twin import twin
from parity_tests.lockstep import gates as lockstep_gates
from parity_tests.lockstep.drafts import Numbers, draft_flips
from parity_tests.lockstep.explain import MOST_ODDS, account, count, explained, rounding_of
from parity_tests.lockstep.flip import Flip, Rounding, is_tie
from parity_tests.lockstep.follow import Followed
from parity_tests.reports import decodes as decode_report
from parity_tests.reports.decodes import Both, Setting, compare
from specfold_torch_ref.diffusion.draft import Known
from specfold_torch_ref.diffusion.row import DENOISE, DONE, Row
from specfold_torch_ref.diffusion.state import DecodeState
from specfold_torch_ref.models import fold as torch_fold
from specfold_torch_ref.models.ops import gate

ROUNDING = Rounding(odds=0.05, gates=0.1, drafts=0.15)
NAN, INF = float("nan"), float("inf")


def followed(apart: list[Flip] = (), gates: list[Flip] = (), drafts: list[Flip] = (), odds=(), largest=()) -> Followed:
    """One row, as `follow` returns it; `odds` and `largest`: the differences in log-odds of decisions and the largest of forwards."""
    nothing, lists = torch.zeros(0), [{0: list(flips)} if flips else {} for flips in (gates, drafts)]
    return Followed(None, None, 0, 0, 0, 0, 0, dict(enumerate(apart)), *lists, torch.tensor(odds), nothing, torch.tensor(largest))


@pytest.mark.parametrize(
    ("flip", "exact", "rounded"),
    [
        (Flip("reveal", 5e-5, 6e-5), True, True),
        (Flip("reveal", 0.02, 0.03), False, True),
        (Flip("reveal", 0.1, 0.3), False, False),  # within the margin of drafts only
        (Flip("guard", 0.1, 0.3), False, False),
        (Flip("reveal", 0.2, 0.3), False, False),
        (Flip("row.canvas", 0.0, NAN), False, False),  # no decision differed
        (Flip("drafts", 5e-5, 6e-5), True, True),
        (Flip("drafts", 0.02, 0.3), False, True),
        (Flip("drafts", 0.1, 0.3), False, True),  # beyond the margin of decisions, within their own
        (Flip("drafts", 0.2, 0.3), False, False),
        (Flip("drafts", INF, INF), False, False),
        (Flip("gate", 5e-5, 6e-5), True, True),
        (Flip("gate", 0.02, 0.03), False, True),
        (Flip("gate", 0.02, 0.01), False, False),  # tau lies outside the two residuals
        (Flip("gate", 0.2, 0.3), False, False),  # further than rounding reaches
    ],
)
def test_only_ties_explain_a_difference(flip, exact, rounded):
    assert (is_tie(flip), is_tie(flip, ROUNDING)) == (exact, rounded)
    kind = {"gate": "gates", "drafts": "drafts"}.get(flip.what, "apart")
    found = followed(**{kind: [flip]})
    assert (explained(found, 0), explained(found, 0, ROUNDING)) == (exact, rounded)
    assert explained(found, 0, ROUNDING, parts=True) == (rounded and kind == "apart")
    assert count([flip, Flip("gate", 0.0, 0.0)], 9, ROUNDING)["unexplained"] == int(not rounded)
    both = followed(**({"gates": [Flip("gate", 0.0, 0.0)]} | {kind: [flip]}))  # one tie does not explain another difference
    assert explained(both, 0, ROUNDING) == rounded


def test_nothing_seen_explains_nothing_but_another_compilation():
    assert not explained(followed(), 0)
    assert not explained(followed(), 0, ROUNDING)
    for rounding, repeated, want in ((None, True, False), (ROUNDING, False, False), (ROUNDING, True, True)):
        assert account(followed(), 0, rounding, False, repeated)["explained"] == want
    first = account(followed([Flip("reveal", 0.0, 0.0, 3)], [Flip("gate", 0.0, 0.0, 2)]), 0, None, False, False)["first"]
    assert (first["what"], first["step"]) == ("gate", 2)


def test_margins_are_measured_each_on_its_own_up_to_a_cap():
    """Percentiles between the largest two of 1001 differences; a side that is off by more everywhere is no tie of its own making."""
    few, many = [0.0] * 500, [0.1] * 1000
    rounding = rounding_of([followed(odds=few, largest=many[:500]), followed(odds=[*few, 0.2], largest=[*many[500:], 0.4])], 0.1)
    assert rounding.odds == pytest.approx(0.0002, abs=0.0002)
    assert rounding.drafts == pytest.approx(0.1003, abs=0.0003)
    assert rounding_of([followed()], 0.1)[::2] == (0.0, 0.0)
    wrong = [Flip("drafts", 0.8, 3.0), Flip("drafts", INF, INF)]
    off = followed(drafts=wrong, odds=[3.0] * 1000, largest=[3.0] * 1000)
    rounding = rounding_of([off], 0.1)
    assert rounding.odds == rounding.drafts == MOST_ODDS < 0.8
    assert not explained(off, 0, rounding)
    assert count(wrong, 1000, rounding)["unexplained"] == 2


class Source:
    """Distributions over one sub-block of four positions, whose states are their logits."""

    def __init__(self, scores: torch.Tensor):
        self.head = SimpleNamespace(hidden=scores[None, None], weight=torch.eye(scores.shape[1]))
        self.rows = SimpleNamespace(row=torch.arange(5)[None, None])
        self.first, self.width = torch.zeros((1, 1), dtype=torch.long), 4


@pytest.mark.parametrize("what", ["same", "threshold", "order", "token", "first token", "masked"])
def test_drafts_that_differ_are_found_with_the_smallest_move_between_them(what, fast):
    """A canvas of four masks: the best position, those above log-odds of 1, all, and the next block behind the complete draft."""
    graph = sf.DraftGraph.from_sets([frozenset({(0, 0)})], [1], thetas=((1.0, 0), (-30.0, 0)), max_drafts=3)
    mask, decode = fast.model.mask_id, sf.DecodeConfig(max_new_tokens=20, block_size=4, sub_block=4, share=what == "first token")
    zero, canvas = torch.zeros(1, dtype=torch.long), torch.full((1, 4), mask)
    odds, scores = torch.tensor([[3.0, 2.0, 0.5, 0.4]]), torch.zeros((5, 20))
    tokens = torch.tensor([5, 6, 7, 8])[None, None, :, None].expand(1, graph.width, 4, graph.token_ranks).clone()
    following, other_tokens, other_odds, other_following, want = zero + 9, tokens.clone(), odds.clone(), zero + 9, None
    match what:
        case "threshold":  # the third position passes: half a log-odds more
            other_odds[0, 2], want = 1.2, 0.5
        case "order":  # the best two swap, as both move by half of what is between them
            other_odds[0, :2], want = torch.tensor([2.3, 2.9]), 0.5
        case "token":
            scores[0, 5], scores[0, 11], other_tokens[:, :, 0], want = 2.0, 1.75, 11, 0.25
        case "first token":
            scores[4, 9], scores[4, 12], other_following, want = 3.0, 2.0, zero + 12, 1.0
        case "masked":  # a position that is known already is never drafted
            canvas[0, 3], other_odds[0, 3], other_tokens[:, :, 3] = 8, 9.0, 11
    row = Row(zero, canvas, zero, zero + DENOISE, torch.zeros(1, dtype=torch.bool), zero, zero + 20, zero)
    state = DecodeState(row, canvas, (), Known(tokens, odds), following, None)
    theirs = Numbers(Known(other_tokens, other_odds), other_following)
    found, going, largest = draft_flips(state, theirs, (Source(scores), zero), fast.model, decode, graph, 7)
    assert going == 1
    torch.testing.assert_close(largest, torch.tensor([{"threshold": 0.7, "order": 0.9}.get(what, 0.0)]))
    assert [(flip.what, flip.step) for flip in found.values()] == ([] if want is None else [("drafts", 7)])
    if want is not None:
        assert found[0].margin == pytest.approx(want, abs=0.002)
        assert found[0].difference >= found[0].margin


def test_the_largest_difference_of_every_forward_is_of_masked_positions_that_both_sides_know(fast):
    """Of six rows one is done, one has no masked position, and one has none that both sides know: there is nothing to measure."""
    graph, decode = sf.DraftGraph.empty(), sf.DecodeConfig(max_new_tokens=20, block_size=4, sub_block=2)
    canvas = torch.full((6, 4), fast.model.mask_id)
    canvas[1, 0] = canvas[4] = 8
    odds, other_odds, zero = torch.ones((6, 4)), torch.ones((6, 4)), torch.zeros(6, dtype=torch.long)
    other_odds[0, 3] = 1.25  # in the second sub-block
    other_odds[1] = torch.tensor([9.0, 0.5, 1.25, 1.0])  # the first position is known already
    other_odds[2] = torch.tensor([-INF, 1.0, INF, 1.125])
    odds[3], other_odds[3] = -INF, torch.tensor([-INF, 2.0, -INF, INF])
    other_odds[4:] = 7.0
    row = Row(zero, canvas, zero, zero + DENOISE, torch.zeros(6, dtype=torch.bool), zero, zero + 20, zero)
    row.phase[5] = DONE
    tokens = torch.full((6, graph.width, 4, graph.token_ranks), 5)
    state = DecodeState(row, canvas, (), Known(tokens, odds), zero, None)
    source = Source(torch.zeros((5, 20))), zero
    found, going, largest = draft_flips(state, Numbers(Known(tokens, other_odds), zero), source, fast.model, decode, graph, 0)
    assert (found, going) == ({}, 5)
    assert largest.tolist() == [0.25, 0.5, 0.125]


@pytest.fixture
def flags():
    """Sets the program's flags."""
    yield lambda *words: decode_report.FLAGS(["decode_report", "--out=unused", "--impl=torch", "--batch=2", *words])
    decode_report.FLAGS.unparse_flags()


@pytest.mark.parametrize("what", ["gates", "weights"])
def test_a_side_that_computes_something_else_is_not_explained(what, fast, flags, monkeypatch):
    """Both sides agree, until one has another gate or another weight: every prompt that differs is replayed, and none is explained."""
    ids = np.random.default_rng(20).integers(101, 300, (3, 12)).tolist()
    decode = sf.DecodeConfig(max_new_tokens=16, block_size=8, sub_block=4, threshold=0.3, stop_ids=())
    graph = sf.DraftGraph.from_sets([frozenset({(0, 0)}), frozenset({(0, 0), (1, 0)})], [1, 2], thetas=((-1.0, 0),), run_on=True)
    setting, params = Setting("specfold", "float32", decode, graph, sf.FoldConfig(tau=0.3, guard=0.2)), twin(fast)
    flags()
    line = compare(Both(fast, params, ids), setting)
    assert (line["unexplained"], line["not_replayed"]) == (0, 0)
    if what == "gates":
        for module in (torch_fold, lockstep_gates):
            monkeypatch.setattr(
                module, "gate", lambda x, parent, revealed, valid, tau, **rest: gate(x, parent, revealed, valid, 2 * tau, **rest)
            )
    else:
        params["layers"][0]["down"] = params["layers"][0]["down"] * 1.2
    line = compare(Both(fast, params, ids), setting)
    differ = [each["prompt"] for each in line["differences"]]
    assert len(differ) == 3 - line["equal_computed_rows"] > 0
    assert not any(each["explained"] for each in line["differences"])
    if what == "gates":
        assert line["gates"]["compared"] > line["gates"]["differ"] == line["gates"]["unexplained"] > 0
        assert all(each["first"]["what"] == "gate" for each in line["differences"])
    flags("--replays=0")
    line = compare(Both(fast, params, ids), setting)
    assert line["unexplained"] == line["not_replayed"] == len(differ)
