"""Launchers refuse what their kernels cannot take, and say what they need."""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import pytest
import torch

import specfold_jax as sf
from kernels_triton import attention, gate, head, inherit, linear, pack, qkv, silu_pair
from kernels_triton.arguments import FLOATS, INTERPRET, require_device
from kernels_triton.tiles import product_tile
from parity_tests.harness.branches import branches_of, cache_of
from parity_tests.harness.cases import CASES
from parity_tests.harness.devices import DEVICE
from parity_tests.harness.torch_twin import tensor, twin
from specfold_torch_ref.models.check import Branches, check

CPU = torch.device("cpu")
LAUNCHERS: dict[str, Callable[..., Any]] = {
    "gate": gate.gate,
    "packed_linear": linear.packed_linear,
    "packed_silu_pair": silu_pair.packed_silu_pair,
    "packed_qkv": qkv.packed_qkv,
    "branch_attention": attention.branch_attention,
    "add_inherited": inherit.add_inherited,
    "head": head.head,
}
CASE = {case.op: case for case in reversed(CASES) if case.narrow} | {
    case.op: case for case in CASES if case.name in ("context, ratio 1", "q/k norm")
}


ANY = {
    ("packed_linear", "weight", "shape"),
    ("packed_silu_pair", "weight", "shape"),
    ("head", "weight", "shape"),
    ("branch_attention", "k_prefix", "strides"),
    ("branch_attention", "v_prefix", "strides"),
    ("branch_attention", "prefix", "strides"),
    ("branch_attention", "causal", "strides"),
}
"""What doubling or spreading leaves valid: more output columns, a cache in another order, a single element."""


def arguments(op: str, device: torch.device = DEVICE) -> dict[str, Any]:
    """Arguments that the launcher takes: those of a case, with a row list of everything for packed operations."""
    inputs = CASE[op].inputs(torch.float32, device)
    if "computed" in inputs:
        count = inputs.pop("computed").numel()
        rows = torch.arange(count, dtype=torch.int32, device=device)
        inputs["packed"] = (rows, torch.tensor(count, dtype=torch.int32, device=device))
    if op == "packed_qkv":
        model = inputs.pop("model")
        inputs["inv_freq"] = torch.tensor(model.inv_freq, device=device)
        inputs |= {name: getattr(model, name) for name in ("heads", "kv_heads", "rope_scale", "query_scale_beta", "query_scale_length")}
        inputs["eps"] = model.norm_eps
    return inputs


@pytest.mark.parametrize("fold", [None, sf.FoldConfig(tau=0.3)], ids=["dense", "folded"])
def test_a_check_with_triton_runs_on_its_kernels_and_nothing_else(fold, fast):
    """As PyTorch's, and every operation by its launcher, which takes what the model gives it."""
    small = fast.first_layers(1)
    branches, cache = branches_of(small.model, context=True), cache_of(small.model)
    ours = Branches(*(None if x is None else tensor(x).to(DEVICE) for x in branches))
    params = jax.tree.map(lambda x: x.to(DEVICE), twin(small))
    pairs = tuple((tensor(k).to(DEVICE), tensor(v).to(DEVICE)) for k, v in zip(*cache, strict=True))
    arguments = params, ours, pairs, ours.start, small.model, fold
    want = check(*arguments, impl="torch")
    launchers = (qkv, "packed_qkv"), (attention, "branch_attention"), (linear, "packed_linear"), (silu_pair, "packed_silu_pair")
    with contextlib.ExitStack() as stack:
        spies = [stack.enter_context(mock.patch.object(module, name, wraps=getattr(module, name))) for module, name in launchers]
        got = check(*arguments, impl="triton")
    assert [spy.call_count for spy in spies] == [1, 1, 2, 1]
    torch.testing.assert_close(got.hidden[ours.valid], want.hidden[ours.valid], rtol=0, atol=2e-5)
    assert torch.equal(got.computed_rows, want.computed_rows)


def wrong(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same tensor with one thing wrong."""
    match how:
        case "shape":
            return torch.cat([x, x])
        case "dtype":
            return x.double() if x.is_floating_point() else x.long()
        case "strides":
            return torch.stack([x, x], dim=-1)[..., 0]
        case _:
            return x.to("meta")


@pytest.mark.parametrize("how", ["shape", "dtype", "strides", "device"])
@pytest.mark.parametrize("op", LAUNCHERS)
def test_every_tensor_argument_is_checked_and_named(op: str, how: str):
    good = arguments(op)
    for name, x in good.items():
        if isinstance(x, torch.Tensor) and (op, name, how) not in ANY:
            # A shape or a device can be told to be wrong only where two arguments meet, and the other one may be named.
            with pytest.raises((ValueError, NotImplementedError), match={"shape": "must be", "device": "meta"}.get(how, name)):
                LAUNCHERS[op](**good | {name: wrong(x, how)})


@pytest.mark.parametrize("op", LAUNCHERS)
def test_what_is_no_tensor_is_refused(op: str):
    good = arguments(op)
    with pytest.raises(ValueError, match="must be a tensor"):
        LAUNCHERS[op](**good | {next(iter(good)): [[1.0]]})


@pytest.mark.parametrize(
    ("op", "changed", "error", "message"),
    [
        ("gate", {"reference": "main"}, ValueError, "'parent' or 'source'"),
        ("head", {"mask_id": 301}, ValueError, "inside the vocabulary of 301"),
        ("head", {"ranks": 0}, ValueError, "ranks=0"),
        ("head", {"ranks": 301}, ValueError, "ranks=301"),
        ("head", {"temperature": -1.0}, ValueError, "temperature=-1.0"),
        ("head", {"temperature": float("nan")}, ValueError, "temperature=nan"),
        ("packed_qkv", {"k_norm": None}, ValueError, "both"),
        ("gate", {"tau": -0.1}, ValueError, "tau=-0.1 must be at least 0"),
        ("gate", {"tau": float("nan")}, ValueError, "tau=nan"),
        ("packed_qkv", {"heads": 6, "kv_heads": 2}, ValueError, "weight must be"),
        ("packed_qkv", {"heads": 3, "kv_heads": 2}, ValueError, "heads=3 must be a multiple of kv_heads=2"),
        ("packed_qkv", {"kv_heads": 0}, ValueError, "kv_heads=0, both at least 1"),
        ("packed_qkv", {"query_scale_length": 0}, ValueError, "query_scale_length=0 must be at least 1"),
        ("packed_silu_pair", {"weight": torch.ones(33, 16, device=DEVICE)}, ValueError, "an even number of rows, .* not 33"),
        ("packed_qkv", {"inv_freq": torch.ones(129, device=DEVICE)}, NotImplementedError, "head_dim=258"),
    ],
)
def test_a_wrong_value_is_named(op: str, changed: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        LAUNCHERS[op](**arguments(op) | changed)


def test_pack_takes_flags_only():
    with pytest.raises(ValueError, match=r"computed must be torch\.bool"):
        pack.pack(torch.ones(3, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match="at least one row"):
        pack.pack(torch.ones(0, dtype=torch.bool, device=DEVICE))


def test_attention_sizes():
    def call(block: int, heads: int, kv_heads: int, head_dim: int) -> None:
        q, k = (torch.zeros(1, 1, block, n, head_dim, device=DEVICE) for n in (heads, kv_heads))
        zero = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        source, cache = zero.expand(1, 1, block).contiguous(), k[:, 0]
        attention.branch_attention(q, k, k, source, cache, cache, zero, zero.bool(), None)

    with pytest.raises(ValueError, match="kv_heads=2 must divide heads=3"):
        call(4, 3, 2, 16)
    with pytest.raises(NotImplementedError, match="head_dim=15"):
        call(4, 2, 1, 15)
    with pytest.raises(NotImplementedError, match="block=129"):
        call(129, 2, 1, 16)


@pytest.mark.parametrize("op", LAUNCHERS)
def test_cpu_tensors_outside_the_interpreter_are_refused(op: str, monkeypatch):
    monkeypatch.setattr(INTERPRET, "value", False)
    with pytest.raises(NotImplementedError, match=r"CUDA tensors, not cpu; .*TRITON_INTERPRET=1"):
        LAUNCHERS[op](**arguments(op, CPU))


def test_gpus_are_checked(monkeypatch):
    monkeypatch.setattr(INTERPRET, "value", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(NotImplementedError, match=r"capability \(8, 0\) or higher; cuda:0 has \(7, 5\)"):
        require_device(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    require_device(torch.device("cuda", 0))
    with pytest.raises(ValueError, match="cuda:1 need that GPU to be the current one, not cuda:0"):
        require_device(torch.device("cuda", 1))


def test_tiles_know_nothing_of_rows():
    """By signature; and narrow dtypes have tiles that the matrix units take."""
    for columns in (1, 256, 1536, 8192, 151936):
        for dtype in FLOATS:
            tile = product_tile(columns, dtype)
            assert min(tile.rows, tile.columns, tile.depth) >= 16
            assert all(size & (size - 1) == 0 for size in tile[:3])
