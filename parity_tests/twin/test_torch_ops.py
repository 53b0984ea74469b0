"""Parts of the Torch side against the JAX side's: noise, ranking, gates, row lists; and what the operations refuse."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import specfold_jax as sf
from parity_tests.harness.torch_twin import FAST, tensor
from specfold_jax.diffusion import draft as jax_draft
from specfold_jax.diffusion import layout as jax_branches
from specfold_jax.diffusion import row as jax_row
from specfold_jax.models import fold as jax_fold
from specfold_jax.models import noise as jax_noise
from specfold_jax.models import sampling as jax_sampling
from specfold_torch_ref.diffusion import draft
from specfold_torch_ref.diffusion import layout as branches
from specfold_torch_ref.diffusion import row as torch_row
from specfold_torch_ref.models import noise, ops, sampling


# Known answers published with Random123 (threefry2x32, 20 rounds): counter, key, output.
@pytest.mark.parametrize(
    ("counter", "key", "output"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers(counter, key, output):
    assert tuple(int(word) for word in noise.threefry(*(torch.tensor(word) for word in (*key, *counter)))) == output


def test_a_continuation_stands_behind_the_same_draft_and_the_same_draft_gives_way(fast):
    """Random drafts, among them sets that are full and whose only complete draft is the lightest."""
    rng, batch, drafts, block = np.random.default_rng(4), 200, 3, 4
    tokens = np.where(rng.random((batch, drafts, block)) < 0.2, fast.model.mask_id, 7).astype(np.int32)
    valid = rng.random((batch, drafts)) < 0.8
    numbers = {"start": 8, "step": 0, "lengths": 5, "seed": 0} | {"limit": rng.choice([12, 40], batch), "phase": rng.choice([0, 1], batch)}
    fields = {name: np.broadcast_to(np.int32(value), (batch,)) for name, value in numbers.items()}
    fields |= {"canvas": np.full((batch, block), 7, np.int32), "stopped": np.zeros(batch, bool)}
    decode = sf.DecodeConfig(block_size=block, stop_ids=(9,))
    sides = ((jax_branches, jax_draft, jax_row, jnp.asarray), (branches, draft, torch_row, tensor))
    found = []
    for its, drafting, rows, to in sides:
        row = rows.Row(**{name: to(value) for name, value in fields.items()})
        proposed = drafting.Drafts(to(tokens), to(valid), to(valid))
        continuation = its.plan_continuation(proposed, row, fast.model, decode)
        found.append((its.make_room(proposed, continuation), *continuation))
    want, got = found
    lost = valid & ~np.asarray(want[0].valid)
    assert lost[:, 1].any()
    assert lost[:, 2].any()
    for mine, other in ((got[0].valid, want[0].valid), *zip(got[1:], want[1:], strict=True)):
        np.testing.assert_array_equal(mine, other)


def test_noise_is_the_jax_side_s():
    """Seeds, positions and steps at both ends of int32."""
    seed, position, step = np.array([[0, -1, 2**31 - 1, -(2**31)], [5, 900, 0, 2**31 - 1], [0, 31, 2, 7]], np.int32)
    want = np.asarray(jax_noise.gumbel(*(jnp.asarray(x) for x in (seed, position, step)), 500))
    got = noise.gumbel(*(tensor(x).int() for x in (seed, position, step)), 500)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_ranks_with_ties_are_the_jax_side_s(temperature):
    """Logits from few values, so that most ranks are ties at T = 0; MASK is the largest."""
    rng = np.random.default_rng(4)
    logits = rng.choice([-1.0, 0.5, 2.0], (40, 19)).astype(np.float32)
    logits[:, 3] = 9.0
    numbers = [rng.integers(0, 50, 40).astype(np.int32) for _ in range(3)]
    want = jax_sampling.rank(jnp.asarray(logits), *map(jnp.asarray, numbers), jnp.float32(temperature), 3, 4)
    got = sampling.rank(tensor(logits), *map(tensor, numbers), temperature, 3, 4)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    assert not (got.tokens == 3).any()
    np.testing.assert_allclose(got.odds, want.odds, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.gap, want.gap, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reference", ["parent", "source"])
@pytest.mark.parametrize("force", [True, False])
def test_gate_of_deep_chains_is_the_jax_side_s(reference, force):
    """Random forests with drifting chains; a zero row and a NaN."""
    rng, shape = np.random.default_rng(6), (5, 9, 4)
    parent = np.stack([[rng.integers(max(b - 2, 0), b + 1) if b else 0 for b in range(9)] for _ in range(5)]).astype(np.int32)
    x = rng.normal(size=(*shape, 6)).astype(np.float32)
    for row, b in np.ndindex(5, 9):
        if b and parent[row, b] != b:
            x[row, b] = x[row, parent[row, b]] * rng.choice([1, 1.08, 1.3], (4, 1)).astype(np.float32)
    x[0, :, 1], x[1, 3, 2] = 0.0, np.nan
    revealed, valid = rng.random(shape) < 0.2, np.ones(shape[:2], bool)
    valid[2, 8] = valid[3, 7:] = False
    fold = sf.FoldConfig(tau=0.2, reference=reference, force_revealed=force)
    want = jax.jit(jax_fold.gate)(x, parent, revealed, valid, fold)
    got = ops.gate(*map(tensor, (x, parent, revealed, valid)), 0.2, reference=reference, force_revealed=force, impl="torch")
    np.testing.assert_array_equal(got.computed, want.computed)
    np.testing.assert_array_equal(got.source[tensor(valid)], np.asarray(want.source)[valid])
    assert got.source.dtype == torch.int32
    assert 0 < got.computed.sum() < got.computed.numel()


@pytest.mark.parametrize("chosen", [(), (3,), (0, 5, 11), tuple(range(12))])
def test_packed_rows_are_the_dense_rows(chosen):
    computed = torch.zeros(12, dtype=torch.bool)
    computed[list(chosen)] = True
    computed = computed.reshape(2, 2, 3)
    packed = ops.pack(computed, impl="torch")
    assert packed.index.tolist() == [*chosen, *[12] * (12 - len(chosen))]
    assert packed.index.dtype == packed.count.dtype == torch.int32
    assert int(packed.count) == len(chosen)
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(2, 2, 3, n, generator=generator) for n in (5, 7))
    weight = torch.randn(7, 5, generator=generator)
    x[~computed] = torch.nan
    got = ops.packed_linear(x, packed, weight, residual, impl="torch")
    torch.testing.assert_close(got[computed], (residual + x @ weight.T)[computed])


def random_known(rng, width, ranks=3):
    tokens = rng.integers(0, 40, (3, width, 8, ranks)).astype(np.int32)
    odds = rng.choice([-np.inf, -1.0, 0.5, 2.0, 4.0], (3, 8)).astype(np.float32)
    return tokens, odds


@pytest.mark.parametrize("run_on", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_are_the_jax_side_s(seed, run_on):
    """Rank and confidence nodes on canvases with gaps, equal odds and equal weights; different tokens at each step ahead."""
    rng = np.random.default_rng(seed)
    sets = [frozenset({(0, 0)}), frozenset({(0, 0), (1, 0)}), frozenset({(0, 1)}), frozenset({(2, 0)}), frozenset({(0, 0), (2, 2), (5, 0)})]
    thetas = ((3.0, 0), (0.0, 0), (1.0, 1))
    graph = sf.DraftGraph.from_sets(sets, [1, 2, 1, 1, 2], thetas=thetas, run_on=run_on, max_drafts=4)
    canvas = np.where(rng.random((3, 8)) < 0.6, 99, rng.integers(0, 40, (3, 8))).astype(np.int32)
    canvas[2] = 7  # complete
    tokens, odds = random_known(rng, graph.width)
    known = jax_draft.Known(jnp.asarray(tokens), jnp.asarray(odds))
    want = jax.jit(jax_draft.propose, static_argnums=(3, 4), compiler_options=FAST)(canvas, known, graph, 99, 4)
    got = draft.propose(tensor(canvas), draft.Known(tensor(tokens), tensor(odds)), graph, 99, 4)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    every = np.concatenate([canvas[:, None], np.asarray(want.tokens)], axis=1)
    valid = np.concatenate([np.ones((3, 1), bool), np.asarray(want.valid)], axis=1)
    np.testing.assert_array_equal(
        draft.descent(tensor(every), tensor(valid), 99), jax_draft.descent(jnp.asarray(every), jnp.asarray(valid), 99)
    )
    assert got.valid.any()
    assert not got.valid[2].any()


def arguments(function, model) -> dict:
    """Small, fitting arguments of an operation."""
    heads = (model.heads, model.kv_heads, model.kv_heads)
    q, k, v = (torch.zeros(1, 2, 4, n, model.head_dim) for n in heads)
    x, flags = torch.zeros(1, 2, 4, model.dim), torch.ones(1, 2, 4, dtype=torch.bool)
    prefix = torch.zeros(1, 3, model.kv_heads, model.head_dim)
    numbers = torch.zeros(4, dtype=torch.int32)
    fitting = {
        "x": x, "parent": numbers[:2].reshape(1, 2), "revealed": flags, "valid": flags[..., 0], "tau": 0.1, "reference": "parent",
        "force_revealed": True, "computed": flags, "packed": ops.pack(flags, impl="torch"), "norm": torch.ones(model.dim),
        "bias": None, "q_norm": None, "k_norm": None, "positions": flags.int(), "model": model, "q": q, "k": k, "v": v,
        "source": torch.zeros(1, 2, 4, dtype=torch.int32), "k_prefix": prefix, "v_prefix": prefix, "prefix": numbers[:1],
        "causal": flags[:, 0, 0], "context": None, "residual": None, "eps": 1e-6, "update": x, "hidden": x[0, 0], "seed": numbers,
        "position": numbers, "step": numbers, "temperature": 0.0, "mask_id": 3, "ranks": 2,
    }  # fmt: skip
    out = {name: fitting[name] for name in inspect.signature(function).parameters if name in fitting}
    if "weight" in inspect.signature(function).parameters:
        out["weight"] = torch.zeros((model.heads + 2 * model.kv_heads) * model.head_dim, model.dim)
    return out


OPS = ("gate", "pack", "packed_qkv", "branch_attention", "packed_linear", "packed_silu_pair", "add_inherited", "head")


@pytest.mark.parametrize("name", OPS)
def test_an_implementation_runs_or_raises(name, fast, monkeypatch):
    """Unknown names are refused, and kernels are where tensors cannot be: nothing falls back."""
    from kernels_triton import arguments as checks

    function = getattr(ops, name)
    good = arguments(function, fast.model)
    function(**good, impl="torch")
    with pytest.raises(ValueError, match="impl='cuda' must be 'torch' or 'triton'"):
        function(**good, impl="cuda")
    with pytest.raises(TypeError, match="impl"):
        function(**good)
    monkeypatch.setattr(checks.INTERPRET, "value", False)
    with pytest.raises(NotImplementedError, match="need CUDA tensors, not cpu"):
        function(**good, impl="triton")
