"""Decoding on the Torch side is decoding on the JAX side: tokens, forwards, accepted drafts and folded positions, step by step."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import specfold_jax as sf
from parity_tests.harness.torch_twin import tensor, twin
from parity_tests.lockstep.follow import follow, same_result
from specfold_jax.diffusion.decoding import Decoding
from specfold_jax.methods import METHODS
from specfold_torch_ref.diffusion.loop import specfold_decode, spiffy_decode, vanilla_decode

INF = float("inf")
STOPS = (92, 132, 172, 245, 305, 319)
LENGTHS = np.array([17, 1, 15, 16], np.int32)
SEEDS = np.array([3, -1, 2**31 - 1, 5], np.int32)
GRAPH = sf.DraftGraph.from_sets(
    [frozenset({(0, 0)}), frozenset({(0, 0), (1, 0)}), frozenset({(0, 1)}), frozenset({(0, 0), (1, 0), (2, 0)})],
    [1, 2, 1, 3],
    thetas=((1.0, 0), (-1.0, 1), (-30.0, 1)),
    run_on=True,
)
FOLDS = {
    "fast_dllm_v2": sf.FoldConfig(tau=0.2),
    "nld": sf.FoldConfig(tau=0.2, reference="source", guard=0.2),
    "sdar": sf.FoldConfig(tau=0.2, gates=1, force_revealed=False),
}
OPTIONS = {"fast_dllm_v2": {}, "nld": {"steps": 5}, "sdar": {"order": "left", "steps": 3, "threshold": 0.2}}
"""Options differ by family, so that few programs are compiled for all of them."""


def prompts() -> np.ndarray:
    return np.random.default_rng(20).integers(101, 300, (4, 20)).astype(np.int32)


def config(**changes) -> sf.DecodeConfig:
    return sf.DecodeConfig(**(dict(max_new_tokens=20, block_size=8, sub_block=4, stop_ids=STOPS, seed=SEEDS, threshold=0.3) | changes))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_and_family_step_by_step(method, checkpoint):
    small = checkpoint.first_layers(2 if method == "specfold" else 1)  # one compiles sooner; folds of folded states need two
    how = Decoding.of(method, small.model, config(), GRAPH, FOLDS[small.family])
    accepted = 0
    for temperature in (0.0, 1.0):
        decode = config(temperature=temperature, pack=False, **OPTIONS[small.family])  # unpacked, the JAX side compiles sooner
        out = follow(small, twin(small), prompts(), LENGTHS, decode, how.graph, how.fold)
        same_result(out)
        accepted += int(out.torch.stats.accepted.sum())
        if how.fold is not None:
            assert 0 < out.folded < out.positions
            assert out.ties <= 1e-3 * out.positions
    assert (accepted > 0) == how.method.drafts


def test_speculation_is_lossless(small):
    """Spiffy always, SpecFold with an infinite guard: vanilla's tokens, and a forward saved by each accepted draft."""
    params = twin(small)
    for temperature in (0.0, 1.0):
        arguments = params, tensor(prompts()), tensor(LENGTHS), small.model, config(temperature=temperature)
        vanilla, spiffy = vanilla_decode(*arguments), spiffy_decode(*arguments, GRAPH)
        guarded = specfold_decode(*arguments, GRAPH, sf.FoldConfig(tau=0.2, guard=INF))
        for out in (spiffy, guarded):
            assert torch.equal(out.tokens, vanilla.tokens)
            assert torch.equal(out.lengths, vanilla.lengths)
            assert torch.equal(vanilla.stats.nfe - out.stats.nfe, out.stats.accepted)
        assert guarded.stats.guard_stops.sum() > 0
        trusting = sf.FoldConfig(tau=INF, guard=INF)  # an infinite guard trusts no folded commit
        apart = params, tensor(prompts()), tensor(LENGTHS), small.model, config(temperature=temperature, share=False)
        assert torch.equal(specfold_decode(*apart, GRAPH, trusting).tokens, vanilla.tokens)


def test_no_folded_commit_is_trusted_without_a_guard_either(checkpoints):
    """Apart from the next block's check, every commit whose keys and values are a folded branch's is computed again."""
    small = checkpoints["sdar"].first_layers(2)
    out = follow(
        small, twin(small), prompts(), LENGTHS, config(pack=False, share=False, temperature=1.0), GRAPH, sf.FoldConfig(tau=0.5, guard=0)
    )
    same_result(out)
    assert out.torch.stats.guard_stops.sum() > 0  # with a guard of 0 only a commit ends a chain


def test_what_is_returned_are_ordinary_tensors(fast):
    out = vanilla_decode(twin(fast), prompts(), LENGTHS, fast.model, config())
    assert not any(x.is_inference() for x in (out.tokens, out.lengths, *out.stats))
    out.tokens[0, 0] = 5


def test_a_row_does_not_depend_on_its_batch(fast):
    params = twin(fast)
    decode = replace(config(temperature=1.0), seed=7)
    together = specfold_decode(params, prompts(), LENGTHS, fast.model, decode, GRAPH, sf.FoldConfig(tau=0.2))
    for row in range(4):
        alone = specfold_decode(params, prompts()[row : row + 1], LENGTHS[row : row + 1], fast.model, decode, GRAPH, sf.FoldConfig(tau=0.2))
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert alone.stats.nfe[0] == together.stats.nfe[row]


def test_arguments_that_are_not_for_this_side_are_named(fast):
    params, given = twin(fast), (prompts(), LENGTHS, fast.model)
    with pytest.raises(
        ValueError, match=r"DecodeConfig\(impl='xla'\) is for JAX; here impl is an argument of the decode functions: 'torch'"
    ):
        vanilla_decode(params, *given, config(impl="xla"))
    with pytest.raises(
        TypeError, match=r"params.embed is a \w+, must be a tensor; specfold_torch_ref.models.convert.to_torch\(params, model\)"
    ):
        vanilla_decode(fast.params, *given, config())
    with pytest.raises(TypeError, match=r"graph must be a DraftGraph, not str; DraftGraph.load\(path\) reads one"):
        spiffy_decode(params, *given, config(), "graph.json")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda params: params["layers"][1].pop("qkv_bias"), "missing layers.1.qkv_bias"),
        (lambda params: params["layers"][0].update(q_norm=torch.ones(16)), "unexpected layers.0.q_norm"),
        (lambda params: params.update(embed=params["embed"][:100]), r"embed has shape \[100, 64\], the configuration says \[320, 64\]"),
        (lambda params: params["layers"].pop(), "missing layers.1.attn_norm"),
        (lambda params: params.update(norm=params["norm"].to(torch.int8)), "norm has dtype torch.int8, needs one of float32"),
        (lambda params: params.update(norm=params["norm"].half()), "params have dtypes torch.float16, torch.float32, must have one"),
    ],
)
def test_parameters_that_do_not_fit_the_model_are_named(fast, change, message):
    params = twin(fast)
    change(params)
    with pytest.raises(ValueError, match=message):
        vanilla_decode(params, prompts(), LENGTHS, fast.model, config())
