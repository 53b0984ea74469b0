"""The parity matrix: operation x case x dtype x implementation, against the fp32 reference on the same rounded inputs; and what must
hold bit for bit on a GPU."""

import pytest
import torch

from parity_tests.harness.cases import CASES, NAMED, Case, Draw
from parity_tests.harness.close import EXACT, TOLERANCE, errors, relative_rms, same_bits
from parity_tests.harness.devices import DEVICE
from parity_tests.harness.implementations import IMPLEMENTATIONS, PACKED, lowered, reference, run, takes
from specfold_torch_ref.models import ops

GPU = DEVICE.type == "cuda"


def matrix() -> list:
    """Every combination that runs here. With a GPU all of them run on it and carry its mark; without one bf16 and fp16 run for some."""
    out = []
    for case in CASES:
        for dtype in case.dtypes:
            if case.layer or case.runs(dtype, DEVICE):
                marks = [pytest.mark.gpu] if GPU or case.layer else []
                name = str(dtype).removeprefix("torch.")
                able = [i for i in IMPLEMENTATIONS if takes(i, case, dtype)]
                out += [pytest.param(case, dtype, i, marks=marks, id=f"{case.op}-{case.name}-{name}-{i}") for i in able]
    return out


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that is allocated and not written holds NaN or a number out of all ranges."""

    def poison(x: torch.Tensor) -> torch.Tensor:
        return x.fill_(torch.nan if x.dtype.is_floating_point else x.dtype != torch.bool and -(2**30))

    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: poison(empty(*shape, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda like: poison(empty_like(like)))


@pytest.mark.parametrize(("case", "dtype", "implementation"), matrix())
def test_every_implementation_is_the_reference(case: Case, dtype: torch.dtype, implementation: str):
    want = reference(case, dtype)
    if case.op == "head" and case.name != "ties":
        assert float(want["gap"].min()) > 1e-4  # else rounding may decide otherwise, and equal tokens are too much to ask
    found = errors(run(case.op, case.inputs(dtype, DEVICE), implementation), want)
    most = {name: TOLERANCE[case.op][dtype] if x.dtype.is_floating_point else EXACT for name, x in want.items()}
    assert all(found[name] <= most[name] for name in want), f"{found}, at most {most}"


KERNELS = [case for case in CASES if not case.layer and takes("pallas", case, torch.bfloat16)]


@pytest.mark.parametrize("case", KERNELS, ids=lambda case: f"{case.op}-{case.name}")
def test_every_pallas_case_lowers_for_a_gpu(case: Case):
    """Mosaic's layouts, alignment and shared memory: the interpreter knows none of them."""
    assert "mosaic_gpu" in lowered(case, torch.bfloat16)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bit for bit; but the interpreter multiplies with BLAS, whose sums depend on a row's place, so there equal but for rounding."""
    return same_bits(got, want) if GPU else got.dtype == want.dtype and relative_rms(got, want) < 1e-6


MARKS = [pytest.mark.gpu] if GPU else []
BITWISE = [pytest.param(dtype, marks=MARKS) for dtype in ((torch.float32, torch.bfloat16) if GPU else (torch.float32,))]


@pytest.mark.parametrize("name", ["some rows", "aligned rows, several tiles"])
def test_a_packed_product_is_rounded_once(name: str):
    """Sum and residual in fp32: what is rounded in between differs in a quarter of the numbers, within the tolerance of the matrix."""
    case = NAMED[f"packed_linear-{name}"]
    want = reference(case, torch.bfloat16)["y"].to(torch.bfloat16)
    got = run("packed_linear", case.inputs(torch.bfloat16, DEVICE), "triton")["y"]
    assert (got != want).float().mean() < 0.02  # where another order of the sum falls to the other side


@pytest.mark.parametrize("dtype", BITWISE)
@pytest.mark.parametrize("op", PACKED)
def test_a_packed_row_is_the_same_bits_whatever_rows_share_the_call(op: str, dtype: torch.dtype):
    case = NAMED[f"{op}-all packed, several tiles"]
    inputs = case.inputs(dtype, DEVICE)
    everything = run(op, inputs, "triton")
    assert all(same(x, again) for x, again in zip(everything.values(), run(op, inputs, "triton").values(), strict=True))
    number = torch.arange(inputs["computed"].numel(), device=DEVICE).reshape(inputs["computed"].shape)
    for some in (number % 3 == 1, number == number.max(), number > 5):
        part = run(op, inputs | {"computed": some}, "triton")
        for name, x in part.items():
            assert same(x, everything[name][some.flatten().cpu()])


@pytest.mark.parametrize("dtype", BITWISE)
def test_attention_of_a_branch_is_the_same_bits_whatever_shares_the_call(dtype: torch.dtype):
    """Fewer branches, fewer sequences, other rows computed elsewhere."""
    inputs = NAMED["branch_attention-folded, ratio 6"].inputs(dtype, DEVICE)
    everything = run("branch_attention", inputs, "triton")["o"]
    assert same(everything, run("branch_attention", inputs, "triton")["o"])
    by_branch = {name: inputs[name][:, :2].contiguous() for name in ("q", "k", "v", "source")}
    assert same(run("branch_attention", inputs | by_branch, "triton")["o"], everything[:, :2])
    one = {name: x[1:].contiguous() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    assert same(run("branch_attention", one, "triton")["o"], everything[1:])


@pytest.mark.parametrize("dtype", BITWISE)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_head_of_a_row_is_the_same_bits_whatever_rows_share_the_call(temperature: float, dtype: torch.dtype):
    inputs = NAMED["head-several row tiles"].inputs(dtype, DEVICE) | {"temperature": temperature}
    everything = run("head", inputs, "triton")
    for rows in (slice(0, 1), slice(64, 70), slice(3, 50, 9), slice(None)):
        some = {name: inputs[name][rows].contiguous() for name in ("hidden", "seed", "position", "step")}
        for name, x in run("head", inputs | some, "triton").items():
            assert same(x, everything[name][rows])


@pytest.mark.parametrize("dtype", BITWISE)
@pytest.mark.parametrize(("block", "prefix"), [(4, 8), (32, 64)])
def test_a_block_gives_the_same_bits_from_the_cache_and_from_this_call(block: int, prefix: int, dtype: torch.dtype):
    """What makes a commit that is shared with the next block's first check lossless."""
    draw = Draw("cache", DEVICE)
    shape = {"q": 6, "k": 2, "v": 2}
    q, k, v = (draw.normal(1, 2, block, heads, 24).to(dtype) for heads in shape.values())
    cache = [draw.normal(1, prefix + block, 2, 24).to(dtype) for _ in range(2)]
    source = torch.arange(2, dtype=torch.int32, device=DEVICE)[None, :, None].expand(1, 2, block).contiguous()
    causal, at = torch.zeros(1, dtype=torch.bool, device=DEVICE), torch.tensor([prefix], dtype=torch.int32, device=DEVICE)
    ahead = ops.branch_attention(q, k, v, source, *cache, at, causal, draw.given([[-1, 0]]), impl="triton")[:, 1:]
    for stored, new in zip(cache, (k, v), strict=True):
        stored[:, prefix:] = new[:, 0]
    q, k, v, source = (x[:, 1:].contiguous() for x in (q, k, v, source))
    later = ops.branch_attention(q, k, v, source - 1, *cache, at + block, causal, None, impl="triton")
    assert same(ahead, later)


def test_prefix_is_read_through_any_strides():
    """A cache that holds layers or heads in another order is no copy."""
    inputs = NAMED["branch_attention-folded, ratio 6"].inputs(torch.float32, DEVICE)
    want = run("branch_attention", inputs, "triton")["o"]
    strided = {name: inputs[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("k_prefix", "v_prefix")}
    assert same(run("branch_attention", inputs | strided, "triton")["o"], want)


@pytest.mark.parametrize("name", ["source", "k_prefix", "context"])
def test_the_matrix_notices_a_wrong_attention_argument(name: str):
    """One swapped source, key or context is far outside the tolerance."""
    inputs = NAMED["branch_attention-context, ratio 1"].inputs(torch.float32, DEVICE)
    want = run("branch_attention", inputs, "jnp")
    changed = inputs[name].clone()
    if name == "source":
        folded = (changed != torch.arange(3, device=DEVICE)[:, None]).nonzero()[-1]
        changed[tuple(folded)] = int(folded[1])
    elif name == "context":
        changed[:, 2] = -1
    else:
        changed[:, [0, 1]] = changed[:, [1, 0]]
    worst = max(errors(run("branch_attention", inputs | {name: changed}, "triton"), want).values())
    assert not worst <= 100 * TOLERANCE["branch_attention"][torch.float32]
