"""Decoded tokens and numbers of forwards of the authors' code, case by case."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import specfold_jax as sf
from parity_tests.harness.checkpoints import FAMILIES
from parity_tests.harness.golden_cases import EXCLUDED, VOCAB, Case, bugs, in_scope, names
from parity_tests.harness.golden_runs import EVERY, Rows, assert_the_authors, results_of

ROWS, CAPACITY, MAX_NEW, STOP = 4, 130, 90, 311
"""One shape and one stop id for all cases, so that they share programs."""


quick = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # many programs, each run a few times


@quick
def decoded(params, prompts, lengths, budgets, model, decode) -> sf.Decoded:
    """Vanilla decoding with a budget of new tokens per row, through the public loop; rows without a budget are not decoded."""
    graph = sf.DraftGraph.empty(width=0, token_ranks=1)
    state = sf.begin(params, prompts, lengths, model, decode, graph, (budgets < 1).astype(jnp.int32))
    state = state.replace(row=state.row.replace(limit=lengths + budgets))
    state = lax.while_loop(sf.unfinished, lambda state: sf.decode_step(state, params, model, decode, graph), state)
    return sf.finish(state, model, decode)


def run(checkpoint, cases: Sequence[Case]) -> Rows:
    """Tokens and forwards of every row of the cases (which share their decode arguments), in order."""
    (stop_ids,) = {case.stop_ids for case in cases}
    if stop_ids:
        return run_with_stop(checkpoint, cases, *stop_ids)
    met = {100, 310} | {token for case in cases for row in (*case.prompts, *case.outputs) for token in row}
    for token in set(range(VOCAB)) - met:
        out = run_with_stop(checkpoint, cases, token)
        if not any(token in tokens for tokens, _ in out):  # nothing was stopped
            return out
    raise AssertionError("every token occurs")


def run_with_stop(checkpoint, cases: Sequence[Case], token: int) -> Rows:
    """The same, stopping at `token`, which is given the name `STOP`.

    Ids are names: swapping two rows of the embedding and of the head swaps two ids and changes nothing else.
    """
    names = np.arange(VOCAB, dtype=np.int32)
    names[[token, STOP]] = STOP, token
    params = checkpoint.params | {name: checkpoint.params[name][names] for name in ("embed", "head")}
    rows = [(prompt, budget, case) for case in cases for prompt, budget in zip(case.prompts, case.budgets, strict=True)]
    decode = sf.DecodeConfig(max_new_tokens=MAX_NEW, stop_ids=(STOP,), threshold=cases[0].threshold, **dict(cases[0].static))
    out = []
    for i in range(0, len(rows), ROWS):
        prompts, lengths, budgets = np.ones((ROWS, CAPACITY), np.int32), np.ones(ROWS, np.int32), np.zeros(ROWS, np.int32)
        for n, (prompt, budget, _) in enumerate(rows[i : i + ROWS]):
            prompts[n, : len(prompt)], lengths[n], budgets[n] = names[list(prompt)], len(prompt), budget
        result = decoded(params, prompts, lengths, budgets, checkpoint.model, decode)
        for n, (_, _, case) in enumerate(rows[i : i + ROWS]):
            forwards = int(result.stats.nfe[n]) + (int(result.stats.prefills[n]) if case.counts_prefill else 0)
            out.append((names[np.asarray(result.tokens[n, : int(result.lengths[n])])].tolist(), forwards))
    return out


@pytest.fixture(scope="module")
def results(checkpoints):
    """The result of a case: its rows' tokens and forwards."""
    return results_of(run, checkpoints)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_is_in_scope_or_excluded_by_name(family):
    scope = [case.name for case in in_scope(family)]
    assert sorted(scope + list(EXCLUDED[family])) == sorted(names(family))
    assert len(set(names(family))) == len(names(family))


@pytest.mark.parametrize("case", EVERY)
def test_tokens_and_forwards_are_the_authors(case, results):
    assert_the_authors(case, results(case))


@pytest.mark.parametrize("name", ["n5_t0.9_s32_nc", "n5_t0.9_b32", "n5_dyn_t0.5_b4"])
def test_public_spiffy_decode_gives_the_authors_tokens(name, checkpoints):
    case = next(case for family in FAMILIES for case in in_scope(family) if case.name == name)
    checkpoint, budget = checkpoints[case.family], case.budgets[0]
    decode = sf.DecodeConfig(max_new_tokens=budget, **case.decode_arguments())
    graph = sf.DraftGraph.from_sets([frozenset({(0, 0)}), frozenset({(0, 0), (1, 0)})], [1, 2], thetas=[(0.0, 0)])
    prompts = np.array(case.prompts, np.int32)
    out = quick(sf.spiffy_decode)(checkpoint.params, prompts, np.int32([prompts.shape[1]]), checkpoint.model, decode, graph)
    assert out.tokens[0].tolist() == list(case.outputs[0])
    assert int(out.lengths[0]) == len(case.outputs[0])
    prefill = int(out.stats.prefills[0]) if case.counts_prefill else 0
    assert int(out.stats.nfe[0]) + prefill == case.nfe - int(out.stats.accepted[0]) < case.nfe


def test_a_prompt_of_exactly_one_block_is_seen(checkpoints):
    """The authors' code never prefills it: its output is the same for every prompt."""
    first, *_ = bugs("fast_dllm_v2", "len32")
    other = Case(**vars(first) | {"prompts": (tuple(reversed(first.prompts[0])),)})
    (tokens, _), (others, _) = run(checkpoints["fast_dllm_v2"], [first]) + run(checkpoints["fast_dllm_v2"], [other])
    assert tokens[:32] == list(first.prompts[0])
    assert tokens[32:] != others[32:]
    assert tokens[32:] != list(first.outputs[0][32:])


@pytest.mark.parametrize(
    ("family", "case"),
    [(family, case) for family, file in (("fast_dllm_v2", "batch"), ("nld", "batch_eos")) for case in bugs(family, file)],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_rows_of_a_batch_do_not_disturb_each_other(family, case, checkpoints):
    """The authors' batches overwrite prompt tokens, lose seeds, and end with the first row that stops."""
    together = run(checkpoints[family], [case])
    for row, (tokens, forwards) in enumerate(together):
        alone = Case(**vars(case) | {name: (getattr(case, name)[row],) for name in ("prompts", "outputs", "budgets", "compared")})
        assert run(checkpoints[family], [alone]) == [(tokens, forwards)]
        assert tokens[: len(case.prompts[row])] == list(case.prompts[row])
        assert checkpoints[family].model.mask_id not in tokens
        ended = bool(case.stop_ids) and tokens[-1] in case.stop_ids
        assert ended or len(tokens) == len(case.prompts[row]) + case.budgets[row]
        if family == "fast_dllm_v2" and case.compared[row]:
            assert tokens == list(case.outputs[row])[: len(tokens)]
    if family == "nld":  # the authors' rows that did not stop kept masks
        assert any(checkpoints[family].model.mask_id in output for output in case.outputs)


def test_known_tokens_are_never_overwritten(checkpoints):
    """The authors' top-k reveals more positions than are masked, and so rewrites the prompt."""
    (case,) = bugs("sdar", "overwrite")
    ((tokens, _),) = run(checkpoints["sdar"], [case])
    assert tokens[:70] == list(case.prompts[0])
    assert list(case.outputs[0][:70]) != tokens[:70]
    assert len(tokens) == len(case.outputs[0])
    assert 310 not in tokens
