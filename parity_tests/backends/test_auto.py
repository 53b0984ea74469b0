"""What impl="auto" chooses, on machines that are made up: kernels where they can run, else XLA, and a word about why."""

import contextlib
import subprocess
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specfold_jax as sf
import specfold_jax.backends.pallas
from kernels_pallas import launch
from parity_tests.harness.cases import model
from parity_tests.harness.devices import DEVICE
from specfold_jax.backends import choice as implementations
from specfold_jax.backends.choice import XLA, backend_of, impl_name
from specfold_jax.backends.pallas_support import unmet_demand
from specfold_jax.models.parameters import shapes

CPU, HOPPER, AMPERE = (
    SimpleNamespace(platform="cpu", device_kind="cpu"),
    SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0"),
    SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0"),
)
MODEL = replace(
    model(2, 1, 64, qkv_bias=True),
    layers=1,
    dim=128,
    ffn_dim=64,
    vocab=64,
    mask_id=3,
    block_size=16,
    sub_block=8,
    shift=True,
    draws_first_token=True,
    stop_ids=(),
)
GRAPH = sf.DraftGraph.from_sets([((0, 0),), ((0, 0), (1, 0))], [1, 2], max_drafts=2)
AUTO = sf.DecodeConfig(max_new_tokens=8)


@contextlib.contextmanager
def machine(*devices: SimpleNamespace):
    """Where JAX sees these devices, and nothing has been said yet."""
    implementations._warn.cache_clear()
    with mock.patch.object(jax, "devices", return_value=list(devices)):
        yield
    implementations._warn.cache_clear()


def like(model: sf.ModelConfig, dtype=jnp.bfloat16) -> dict:
    """Shapes and types of a model's parameters."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, dtype), shapes(model), is_leaf=lambda leaf: isinstance(leaf, tuple))


def traced(params: dict, model: sf.ModelConfig, decode: sf.DecodeConfig, graph: sf.DraftGraph = GRAPH, fold: sf.FoldConfig | None = None):
    """A decode, traced anew."""
    given = (params, jax.ShapeDtypeStruct((2, 16), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32), model, decode, graph)
    if fold is None:
        return jax.jit(lambda *given: sf.spiffy_decode(*given)).trace(*given)
    return jax.jit(lambda *given: sf.specfold_decode(*given)).trace(*given, fold)


def on_platform(trace, platform: str) -> bool:
    """Whether a decode's program for a platform holds kernels."""
    return "mosaic_gpu" in trace.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("fold", [None, sf.FoldConfig()], ids=["spiffy", "specfold"])
def test_auto_is_the_kernels_on_hopper_and_xla_for_a_cpu_beside_it(fold):
    with machine(HOPPER, HOPPER):
        trace = traced(like(MODEL), MODEL, AUTO, fold=fold)
    text = trace.lower(lowering_platforms=("cuda",)).as_text()
    assert all(f"{name}_mosaic_gpu" in text for name in ("attention", "linear", "head"))
    assert not on_platform(trace, "cpu")


def test_checks_and_heads_choose_alike():
    """Of a decode that the kernels lack something for, be it the fold's or the graph's, no part is theirs."""
    with machine(HOPPER), warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for graph, fold in ((GRAPH, sf.FoldConfig(reference="source")), (replace(GRAPH, token_ranks=MODEL.vocab), None)):
            assert not on_platform(traced(like(MODEL), MODEL, AUTO, graph, fold), "cuda")


@pytest.mark.skipif(DEVICE.type != "cpu", reason="there is a GPU")
def test_a_program_that_may_use_kernels_decodes_the_same_on_a_cpu():
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) * 0.2, s.dtype), like(MODEL))
    given = params, jnp.asarray(rng.integers(4, 64, (2, 16)), jnp.int32), jnp.asarray([16, 9], jnp.int32), MODEL, AUTO
    decoded = []
    for device in (CPU, HOPPER):
        with machine(device):
            decoded.append(jax.jit(lambda *given: sf.vanilla_decode(*given))(*given))
            assert impl_name(backend_of(AUTO, params, MODEL), params) == "xla"  # parameters lie on the CPU
    jax.tree.map(np.testing.assert_array_equal, *decoded)


def test_without_a_gpu_auto_is_xla_in_silence_and_knows_no_kernels():
    with machine(CPU), mock.patch.object(implementations, "unsupported", side_effect=AssertionError("asked for the kernels")):
        traced(like(MODEL), MODEL, AUTO, fold=sf.FoldConfig())
        assert backend_of(AUTO, like(MODEL), MODEL) is XLA


@pytest.mark.skipif(DEVICE.type != "cpu", reason="there is a GPU")
def test_without_a_gpu_the_kernels_are_not_even_imported():
    code = (
        "import sys, jax, jax.numpy as jnp, specfold_jax as sf\n"
        "model, params = sf.load('tiny')\n"
        "given = (params, jnp.full((1, 8), 5), jnp.full(1, 8), model, sf.DecodeConfig(8))\n"
        "jax.eval_shape(sf.vanilla_decode, *given)\n"
        "assert not any(name.startswith('kernels_pallas') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("devices", "changes", "dtype", "fold", "reason"),
    [
        ([AMPERE], {}, jnp.bfloat16, None, r"need a Hopper GPU \(compute capability 9.0\), not NVIDIA A100 \(compute capability 8.0\)"),
        ([HOPPER, AMPERE], {}, jnp.bfloat16, None, "not NVIDIA A100"),
        ([HOPPER], {"head_dim": 96, "inv_freq": (1.0,) * 48}, jnp.bfloat16, None, "head_dim=96 is not supported"),
        ([HOPPER], {"block_size": 8}, jnp.bfloat16, None, "block=8 is not supported by the Pallas kernels, which take 16, 32, 64"),
        ([HOPPER], {}, jnp.float32, None, "parameters' dtype=float32 is not supported"),
        ([HOPPER], {"ffn_dim": 96}, jnp.bfloat16, None, "ffn_dim=96 is not supported"),
        ([HOPPER], {}, jnp.bfloat16, sf.FoldConfig(reference="source"), "fold.reference='source' is not supported"),
    ],
)
def test_auto_says_once_why_a_gpu_decodes_with_xla(devices, changes, dtype, fold, reason):
    like_this = replace(MODEL, **changes)
    with machine(*devices):
        with pytest.warns(UserWarning, match=f"impl='auto' decodes with XLA: .*{reason}") as said:
            trace = traced(like(like_this, dtype), like_this, AUTO, fold=fold)
        assert len(said) == 1
        assert backend_of(AUTO, like(like_this, dtype), like_this, fold) is XLA  # and not a word: warnings are errors here
        assert not on_platform(trace, "cuda")
        traced(like(like_this, dtype), like_this, replace(AUTO, impl="xla"), fold=fold)  # asked for: nothing to say
        with pytest.raises(NotImplementedError, match=f"impl='pallas': .*{reason}.*; use impl='xla'"):
            traced(like(like_this, dtype), like_this, replace(AUTO, impl="pallas"), fold=fold)


def mixed(model: sf.ModelConfig) -> dict:
    """Norms in float32, as some checkpoints hold them."""
    params = like(model)
    return params | {"norm": jax.ShapeDtypeStruct(params["norm"].shape, jnp.float32)}


@pytest.mark.parametrize(
    ("changes", "params", "ranks"),
    [
        *(({"block_size": block, "sub_block": None}, like, 2) for block in (4, 8, 16, 24, 32, 64, 128)),
        *(({"head_dim": wide, "inv_freq": (1.0,) * (wide // 2)}, like, 2) for wide in (32, 64, 96, 128, 192)),
        *(({"dim": dim}, like, 2) for dim in (64, 96, 192)),
        *(({"ffn_dim": hidden}, like, 2) for hidden in (8, 96, 320)),
        *(({"vocab": vocab}, like, ranks) for vocab, ranks in ((64, 64), (64, 63), (61, 2))),
        *(({"heads": heads, "kv_heads": kv_heads}, like, 2) for heads, kv_heads in ((5, 1), (3, 3), (16, 2))),
        ({"qk_norm": True, "qkv_bias": False, "tied": True, "query_scale_beta": 0.1}, like, 1),
        ({"commit": "causal", "block_origin": "prompt", "draws_first_token": False, "shift": False}, like, 2),
        ({}, lambda model: like(model, jnp.float16), 2),
        ({}, lambda model: like(model, jnp.float32), 2),
        ({}, mixed, 2),
    ],
)
def test_unmet_demands_are_what_the_kernels_refuse(changes, params, ranks):
    """Traced without asking first, the kernels themselves refuse just what `unmet_demand` names."""
    this = replace(MODEL, **changes)
    given = params(this)
    with (
        mock.patch.object(implementations, "unsupported", return_value=None),
        mock.patch.object(specfold_jax.backends.pallas, "unmet_demand", return_value=None),
    ):
        try:
            traced(given, this, replace(AUTO, impl="pallas"), replace(GRAPH, token_ranks=ranks), sf.FoldConfig())
            refused = None
        except (NotImplementedError, ValueError) as error:
            refused = str(error)
    assert (unmet_demand(given, this, AUTO.block(this), sf.FoldConfig(), ranks) is None) == (refused is None), refused


OPTIONS = ({"gates": 1}, {"scope": "ffn"}, {"correction": False}, {"force_revealed": False})


@pytest.mark.parametrize("option", OPTIONS)
def test_kernels_have_every_other_option_of_a_fold(option):
    fold = sf.FoldConfig(**option)
    assert unmet_demand(like(MODEL), MODEL, 16, fold) is None
    with mock.patch.object(launch, "no_hopper", return_value=None):
        traced(like(MODEL), MODEL, replace(AUTO, impl="pallas"), fold=fold)
