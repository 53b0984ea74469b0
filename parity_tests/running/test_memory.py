"""What a decode is said to hold, against the arrays of its program; and the error where a device has not so much."""

from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specfold_jax as sf
from specfold_jax.backends.choice import XLA
from specfold_jax.calibration import records
from specfold_jax.cli import setup
from specfold_jax.diffusion.decoding import Decoding
from specfold_jax.diffusion.distribution import Distributions
from specfold_jax.diffusion.layout import lay_out
from specfold_jax.diffusion.loop import begin
from specfold_jax.evaluation import agreement as verify
from specfold_jax.models import check as check_module
from specfold_jax.models import ops, transformer
from specfold_jax.models.check import check
from specfold_jax.running import batch as generate
from specfold_jax.running import live, memory, stepping
from specfold_jax.running.batch import run_all
from specfold_jax.running.memory import OutOfDeviceMemory, explained, levers, message, peak, sizes_of, table
from specfold_jax.tuning import gates as tune_gates
from specfold_jax.tuning import measure as tune_measure

DECODE = sf.DecodeConfig(max_new_tokens=24)
GRAPH = sf.DraftGraph.from_sets([((0, 0),), ((0, 0), (1, 0))], [1, 2], max_drafts=2)
FULL = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes.\nmore")


def size(tree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def layer_scores(function, *given) -> int:
    """Bytes of the fp32 attention scores of one layer, as a program asks for them."""
    found = []

    def watched(q, segments):
        keys = sum(segment.key.shape[-3] for segment in segments)
        found.append(int(np.prod(q.shape[:4])) * keys * 4)  # [batch, branch, query, heads] x keys
        return ops.attention(q, segments)

    with mock.patch.object(transformer, "attention", watched), mock.patch.object(check_module, "attention", watched):
        jax.eval_shape(lambda *given: function(*given), *given)  # anew: what was traced before is not traced again
    return max(found)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("graph", [None, GRAPH, replace(GRAPH, reach=2)], ids=["vanilla", "spiffy", "two sub-blocks"])
def test_the_table_counts_the_arrays_of_the_program(small, graph, share):
    params, model, decode = small.params, small.model, replace(DECODE, share=share)
    used = sf.DraftGraph.empty() if graph is None else graph
    sizes = sizes_of(params, Decoding(model, decode, used), 3, 32)
    found = table(model, sizes)
    prompts, lengths, status = jnp.zeros((3, 32), jnp.int32), jnp.full(3, 32), jnp.zeros(3, jnp.int32)

    def start(params):
        return begin(params, prompts, lengths, model, decode, used, status)

    state = jax.eval_shape(start, params)
    branches = jax.eval_shape(lambda state: lay_out(state, used, model, decode), state)

    def evaluate(params, branches, state):
        return check(params, branches, state.cache, state.row.start, model, None, False)

    checked = jax.eval_shape(evaluate, params, branches, state)
    assert found["parameters"] == size(params)
    assert found["K/V cache"] == size(state.cache)
    assert sizes.rows == branches.tokens.size

    assert found["prefill"] == layer_scores(start, params)
    itemsize = params["embed"].dtype.itemsize
    row, widest = model.dim * itemsize, max(params["layers"][0]["qkv"].shape[0], 3 * model.ffn_dim) * itemsize
    held = size(checked.kv) + branches.tokens.size * (row + widest)
    assert found["activations of a check"] == held + layer_scores(evaluate, params, branches, state)
    assert size(checked.hidden) == branches.tokens.size * row
    seen = jax.eval_shape(
        lambda params, b, c, s: Distributions.of(XLA, params, b, c, s.row, model, decode, used).hidden, params, branches, checked, state
    )
    assert found["logits"] == seen.size // model.dim * model.vocab * 4
    assert peak(found) < sum(found.values())


def test_kernels_hold_neither_logits_nor_scores(fast):
    plain = sizes_of(fast.params, Decoding(fast.model, DECODE, GRAPH), 3, 32)
    kernels = table(fast.model, replace(plain, impl="pallas"))
    assert kernels["logits"] == 0
    assert kernels["activations of a check"] < table(fast.model, plain)["activations of a check"]
    assert table(fast.model, replace(plain, greedy=False))["logits"] * 3 == table(fast.model, plain)["logits"]


def test_the_error_names_first_what_saves_most(fast):
    given = fast.params, Decoding(fast.model, DECODE, GRAPH)
    wide, long = sizes_of(*given, 64, 32), sizes_of(*given, 2, 8192)
    assert next(iter(levers(fast.model, wide))) == "batch"
    assert set(levers(fast.model, wide)) == {"batch", "capacity", "max_new_tokens", "drafts"}
    assert next(iter(levers(fast.model, long))) == "capacity"
    assert "drafts" not in levers(fast.model, sizes_of(given[0], given[1].reduced("vanilla"), 2, 32))
    words = message(fast.model, long, 2**30)
    for part in (
        "batch=2, capacity=8192 + max_new_tokens=24, D=2 drafts",
        "of the device's 1.0 GiB",
        "K/V cache",
        "lower the prompts' cap",
    ):
        assert part in words


def test_levers_save_of_the_peak(fast):
    """What else the table holds is not there at the time: less of it helps nobody. Nor does a lever that saves next to nothing."""
    given = fast.params, Decoding(fast.model, DECODE, GRAPH)
    for sizes in (sizes_of(*given, 64, 32), sizes_of(*given, 2, 8192)):
        whole = peak(table(fast.model, sizes))
        for name, saved in levers(fast.model, sizes).items():
            assert saved == whole - peak(table(fast.model, replace(sizes, **{name: getattr(sizes, name) // 2})))
            assert whole / 100 <= saved < whole
    assert "drafts" not in levers(fast.model, sizes)  # a prefill is what is largest there
    assert "the largest of prefill 2.0 GiB" in message(fast.model, sizes)
    heavy = replace(sizes, capacity=32, parameters=2**40)
    assert list(levers(fast.model, heavy)) == ["batch"]
    assert "lowering none of these helps" in message(fast.model, replace(heavy, batch=1, capacity=1, max_new_tokens=1, drafts=0))


def test_a_full_device_is_explained_and_other_errors_pass(fast):
    given = fast.params, Decoding(fast.model, DECODE, GRAPH), (3, 32)
    with (
        pytest.raises(OutOfDeviceMemory, match=r"batch=3, capacity=32 .*\(RESOURCE_EXHAUSTED: .* 99 bytes.\)$") as caught,
        explained(*given),
    ):
        raise FULL
    assert caught.value.__cause__ is FULL
    with pytest.raises(OutOfDeviceMemory, match=r"\(RESOURCE_EXHAUSTED: so it is\)$"), explained(*given):
        raise jax.errors.JaxRuntimeError("\nRESOURCE_EXHAUSTED: so it is")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), explained(*given):
        raise jax.errors.JaxRuntimeError("INTERNAL: no")
    with pytest.raises(OutOfDeviceMemory), explained(*given):
        jax.jit(lambda: jnp.zeros(1 << 46))().block_until_ready()  # a real one


def test_everything_that_decodes_explains_it(fast):
    ids, params, model = [[5, 6, 7]] * 2, fast.params, fast.model
    prompts, lengths = map(jnp.asarray, generate.pad(ids))
    subject = tune_measure.Subject("it", params, model, DECODE, 2)
    full, plain = mock.Mock(side_effect=FULL), Decoding.of("vanilla", model, DECODE)
    for module, name, call in (
        (generate, "run", lambda: run_all(params, ids, Decoding(model, DECODE, GRAPH))),
        (tune_measure, "run", lambda: tune_measure.timed(subject, ids, tune_measure.Setting("vanilla"), None)),
        (stepping, "_begin", lambda: records.record_vanilla(params, prompts, lengths, model, DECODE)),
        (stepping, "_step", lambda: tune_gates.record_gates(params, ids, Decoding(model, DECODE, GRAPH, sf.FoldConfig()))),
        (stepping, "_begin", lambda: verify.replay(params, prompts, lengths, [0], plain)),
        (stepping, "_step", lambda: list(live.frames(params, ids[0], plain))),
    ):
        with mock.patch.object(module, name, full), pytest.raises(OutOfDeviceMemory, match="lower "):
            call()


def test_the_command_line_says_it_in_a_line(specfold):
    with mock.patch.object(generate, "run", side_effect=FULL):
        status, out, err = specfold("generate", "--method", "vanilla", "1 + 1?")
    assert (status, out) == (1, "")
    assert err.startswith("specfold generate: out of device memory with batch=1, capacity=")
    assert err.count("\n") == 1
    with mock.patch.object(setup, "load", side_effect=FULL):
        status, out, err = specfold("generate", "1 + 1?")
    assert (status, out) == (1, "")
    assert "the parameters, 19.7 MiB in files, do not fit the device; --dtype bfloat16 takes the least\n" in err


def test_sizes_are_readable():
    assert [memory.readable(n) for n in (0, 1023, 1024, 3 * 2**29, 2**50)] == ["0 B", "1023 B", "1.0 KiB", "1.5 GiB", "1024.0 TiB"]
