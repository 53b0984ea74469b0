"""The authors' decoded tokens and numbers of forwards, case by case, on the Torch side."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

import specfold_jax as sf
from parity_tests.harness.checkpoints import FAMILIES
from parity_tests.harness.golden_cases import Case, bugs, in_scope
from parity_tests.harness.golden_runs import EVERY, Rows, assert_the_authors, results_of
from parity_tests.harness.torch_twin import tensor, twin
from specfold_torch_ref.diffusion.loop import begin, decode_step, finish, spiffy_decode, unfinished


@torch.inference_mode()
def run(checkpoint, cases: Sequence[Case]) -> Rows:
    """Tokens and forwards of every row of the cases (which share their decode arguments), in order: one batch of ragged rows."""
    params, graph = twin(checkpoint), sf.DraftGraph.empty()
    rows = [(prompt, budget, case) for case in cases for prompt, budget in zip(case.prompts, case.budgets, strict=True)]
    lengths, budgets = torch.tensor([len(prompt) for prompt, _, _ in rows]), torch.tensor([budget for _, budget, _ in rows])
    prompts = torch.ones(len(rows), int(lengths.max()), dtype=torch.long)
    for line, (prompt, _, _) in zip(prompts, rows, strict=True):
        line[: len(prompt)] = torch.tensor(prompt)
    decode = sf.DecodeConfig(max_new_tokens=int(budgets.max()), **cases[0].decode_arguments())
    state = begin(params, prompts, lengths, checkpoint.model, decode, graph)
    state = state._replace(row=state.row._replace(limit=lengths + budgets))
    while unfinished(state):
        state = decode_step(state, params, checkpoint.model, decode, graph)
    out = finish(state, checkpoint.model, decode)
    forwards = out.stats.nfe + out.stats.prefills * torch.tensor([case.counts_prefill for _, _, case in rows])
    return [(out.tokens[n, : out.lengths[n]].tolist(), int(forwards[n])) for n in range(len(rows))]


@pytest.fixture(scope="module")
def results(checkpoints):
    """The result of a case: its rows' tokens and forwards."""
    return results_of(run, checkpoints)


@pytest.mark.parametrize("case", EVERY)
def test_tokens_and_forwards_are_the_authors(case, results):
    assert_the_authors(case, results(case))


@pytest.mark.parametrize("name", ["n5_t0.9_s32_nc", "n5_t0.9_b32", "n5_dyn_t0.5_b4"])
def test_public_spiffy_decode_gives_the_authors_tokens(name, checkpoints):
    case = next(case for family in FAMILIES for case in in_scope(family) if case.name == name)
    checkpoint = checkpoints[case.family]
    decode = sf.DecodeConfig(max_new_tokens=case.budgets[0], **case.decode_arguments())
    graph = sf.DraftGraph.from_sets([frozenset({(0, 0)}), frozenset({(0, 0), (1, 0)})], [1, 2], thetas=[(0.0, 0)])
    prompts = np.array(case.prompts, np.int32)
    out = spiffy_decode(twin(checkpoint), prompts, np.int32([prompts.shape[1]]), checkpoint.model, decode, graph)
    assert out.tokens[0].tolist() == list(case.outputs[0])
    prefill = int(out.stats.prefills[0]) if case.counts_prefill else 0
    assert int(out.stats.nfe[0]) + prefill == case.nfe - int(out.stats.accepted[0]) < case.nfe


def test_known_tokens_are_never_overwritten(checkpoints):
    """The authors' top-k reveals more positions than are masked, and so rewrites the prompt."""
    (case,) = bugs("sdar", "overwrite")
    ((tokens, _),) = run(checkpoints["sdar"], [case])
    assert tokens[:70] == list(case.prompts[0])
    assert len(tokens) == len(case.outputs[0])
    assert tensor(tokens).ne(checkpoints["sdar"].model.mask_id).all()
