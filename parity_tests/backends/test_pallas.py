"""The Pallas kernels together: a check against the `jnp` one, whole decodes, what holds bit for bit, and what they refuse."""

from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import specfold_jax as sf
from kernels_pallas import launch
from kernels_pallas.attention import branch_attention
from kernels_pallas.head import head, rank_wanted
from kernels_pallas.linear import linear, silu_pair
from kernels_pallas.pack import pack
from kernels_pallas.qkv import attention_inputs
from kernels_pallas.rows import GATED, Norm, advance_norm, gate, norm
from kernels_pallas.tiles import DEPTH, MOST_STAGES, ROWS, SHARED_BYTES, Tile, pair_tile, product_tile
from parity_tests.harness.cases import NAMED, model
from parity_tests.harness.devices import DEVICE
from parity_tests.harness.implementations import run
from parity_tests.harness.pallas_ops import on_kernels
from specfold_jax.backends import pallas
from specfold_jax.models.check import Branches, check
from specfold_jax.models.parameters import shapes
from specfold_jax.models.transformer import Cache

GPU = DEVICE.type == "cuda"
pytestmark = [pytest.mark.gpu] if GPU else []
MODEL = replace(
    model(2, 1, 64, qkv_bias=True),
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
BFLOAT16 = 0.02
"""Relative RMS of bf16 hidden states against fp32 on the same rounded parameters, about twice what `jnp` shows."""


def parameters(like: sf.ModelConfig, seed: int = 0) -> dict:
    """Random parameters in bf16 whose layers pass on what they get, about as strong."""
    rng = np.random.default_rng(seed)

    def draw(shape: tuple[int, ...]) -> jax.Array:
        values = 1 + 0.1 * rng.normal(size=shape) if len(shape) == 1 else rng.normal(size=shape) * shape[1] ** -0.5
        return jnp.asarray(values, jnp.bfloat16)

    tree = jax.tree.map(draw, shapes(like), is_leaf=lambda leaf: isinstance(leaf, tuple))
    return tree | {"embed": tree["embed"] * jnp.bfloat16(like.dim**0.5)}


def branches(like: sf.ModelConfig, context: bool) -> Branches:
    """Two sequences of a main branch and two drafts: of the first, one is absent; of the second, the last descends from the other, or is
    a continuation. Valid branches so stand elsewhere in the kernels' list than in their sequence."""
    tokens = np.full((2, 3, like.block_size), like.mask_id)
    tokens[:, :, :3] = np.random.default_rng(1).integers(4, like.vocab, (2, 1, 3))
    tokens[:, 1:, 4] = 7
    tokens[:, 2, 6] = 9
    return Branches(
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray([[True, False, True], [True, True, True]]),
        jnp.asarray([[0, 0, 0], [0, 0, 2 if context else 1]], jnp.int32),
        jnp.asarray([16, 32], jnp.int32),
        jnp.asarray([False, True]),
        jnp.asarray([[-1, -1, -1], [-1, -1, 0]], jnp.int32) if context else None,
    )


@pytest.mark.parametrize(
    ("fold", "context"),
    [
        (None, True),
        (sf.FoldConfig(tau=0.3), True),
        (sf.FoldConfig(tau=0.3, gates=1, force_revealed=False), False),
        (sf.FoldConfig(tau=0.3, correction=False, scope="ffn"), False),
    ],
    ids=["all", "folded", "one gate", "feed-forward only"],
)
def test_a_check_is_the_reference(fold, context):
    like = replace(MODEL, qk_norm=True, dim=192)  # no multiple of 128
    params, where = parameters(like), branches(like, context)
    rng = np.random.default_rng(2)
    cache = Cache(*(jnp.asarray(rng.normal(size=(1, 2, 48, 1, 64)), jnp.bfloat16) for _ in range(2)))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (params, cache))
    want = jax.jit(lambda params, cache: check(params, where, cache, where.start, like, fold))(*wide)
    with on_kernels(races=False):
        got = jax.jit(lambda params, cache: pallas.check(params, where, cache, where.start, like, fold))(params, cache)
    np.testing.assert_array_equal(got.computed_rows, want.computed_rows)
    np.testing.assert_array_equal(got.folded, want.folded)
    valid = np.asarray(where.valid)
    for one, other in zip(jax.tree.leaves((got.hidden, got.kv)), jax.tree.leaves((want.hidden, want.kv)), strict=True):
        one, other = (np.asarray(x, np.float32)[valid] for x in (got.ordered(one), other))
        assert np.linalg.norm(one - other) <= BFLOAT16 * np.linalg.norm(other)


GRAPH = sf.DraftGraph.from_sets([((0, 0),), ((0, 0), (1, 0))], [1, 2], max_drafts=2)


def decoded(method: str, decode: sf.DecodeConfig, params: dict, fold: sf.FoldConfig | None = None) -> sf.Decoded:
    """A prompt that ends inside a block."""
    prompts, lengths = jnp.asarray(np.random.default_rng(3).integers(4, MODEL.vocab, (1, 12)), jnp.int32), jnp.asarray([12], jnp.int32)
    given = (params, prompts, lengths, MODEL, decode)
    match method:
        case "vanilla":
            return jax.jit(sf.vanilla_decode)(*given)
        case "spiffy":
            return jax.jit(sf.spiffy_decode)(*given, GRAPH)
        case _:
            return jax.jit(sf.specfold_decode)(*given, GRAPH, fold)


def test_whole_decodes_run_on_the_kernels_and_are_lossless():
    params = parameters(MODEL)
    decode = sf.DecodeConfig(max_new_tokens=8, steps=4, threshold=0.6, impl="pallas")
    with on_kernels(races=False):
        vanilla, spiffy = decoded("vanilla", decode, params), decoded("spiffy", decode, params)
        folded = decoded("specfold", decode, params, sf.FoldConfig(tau=0.3, guard=float("inf")))
    for other in (spiffy, folded):
        np.testing.assert_array_equal(other.tokens, vanilla.tokens)
        assert np.all(other.stats.nfe <= vanilla.stats.nfe)
    assert spiffy.stats.accepted.sum() > 0
    assert np.all(np.asarray(folded.stats.computed_rows).sum(axis=(1, 2)) < 2 * MODEL.layers * np.asarray(folded.stats.total_rows))
    plain = decoded("vanilla", replace(decode, impl="xla"), params)
    assert np.mean(np.asarray(plain.tokens) == np.asarray(vanilla.tokens)) > 0.8  # bf16: another order of sums may decide otherwise


def bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("function", [linear, silu_pair])
def test_products_have_the_same_bits_whatever_rows_and_tiles_share_them(function):
    """The number of rows, their count, blocks, warpgroups, clusters, stages, of which there are fewer than steps in the last case; only
    splits could change bits, and they follow from the weight."""
    rng = np.random.default_rng(4)
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((136, 256), (80, 256)))

    def usual(rows: int) -> Tile:
        return (product_tile(80, 256, rows) if function is linear else pair_tile(40, rows))._replace(splits=1)

    def call(rows: int, count: int, tile: Tile) -> np.ndarray:
        out = function(x[:rows], weight, jnp.asarray([count], jnp.int32), tile=tile)
        return np.asarray(out.astype(jnp.float32))[..., : min(rows, count), :]

    with on_kernels():
        everything = call(136, 136, usual(136))
        for rows, count, tile in (
            (8, 8, usual(8)),
            (72, 70, usual(72)),
            (136, 40, usual(136)._replace(cluster=1)),
            (136, 136, usual(136)._replace(warpgroups=1)),
            (136, 65, usual(136)._replace(blocks=1, warpgroups=1, stages=2)),
        ):
            np.testing.assert_array_equal(call(rows, count, tile), everything[..., : min(rows, count), :])
    wide = x.astype(jnp.float32) @ weight.astype(jnp.float32).T
    want = wide if function is linear else jax.nn.silu(wide[:, :40]) * wide[:, 40:]
    got = everything.sum(axis=0) if function is linear else everything
    assert np.linalg.norm(got - want) <= 5e-3 * np.linalg.norm(want)


@pytest.mark.parametrize("out", [8, 80, 136, 1536])
@pytest.mark.parametrize("rows", [8, 320, 328])
def test_products_of_any_width_lower_for_a_gpu(rows, out):
    x, weight, count = (jax.ShapeDtypeStruct(*one) for one in (((rows, 128), jnp.bfloat16), ((out, 128), jnp.bfloat16), ((1,), jnp.int32)))
    for function in (linear, silu_pair) if out % 16 == 0 else (linear,):
        function.trace(x, weight, count).lower(lowering_platforms=("cuda",))


def test_a_block_has_the_same_bits_from_the_cache_and_from_this_call():
    """What makes a commit that is shared with the next block's first check lossless; and branches do not touch each other."""
    rng = np.random.default_rng(5)
    qkv, *cache = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((3, 16, 6, 64), *[(2, 1, 80, 1, 64)] * 2))

    def attend(qkv: jax.Array, cache: list, prefix: int, context: list[int], count: int) -> jax.Array:
        where = jnp.zeros(3, jnp.int32), jnp.asarray([prefix], jnp.int32), jnp.zeros(1, bool)
        behind, most = jnp.asarray(context, jnp.int32), jnp.asarray([count], jnp.int32)
        return branch_attention(qkv, *cache, jnp.ones(1, jnp.int32), *where, behind, most, heads=4)

    with on_kernels():
        for prefix in (0, 48):
            ahead = attend(qkv, cache, prefix, [-1, 0, -1], 3)
            stored = [x.at[1, :, prefix : prefix + 16].set(qkv[0, :, 4 + n : 5 + n]) for n, x in enumerate(cache)]
            later = attend(qkv[1:].repeat(2, axis=0)[:3], stored, prefix + 16, [-1, -1, -1], 1)
            np.testing.assert_array_equal(bits(ahead[1]), bits(later[0]))


def test_branches_have_the_same_attention_in_any_order_up_to_their_count():
    rng = np.random.default_rng(6)
    qkv, *cache = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((4, 32, 4, 128), *[(1, 2, 96, 1, 128)] * 2))

    def attend(order: list[int], sequence: list[int], context: list[int], count: int) -> jax.Array:
        where = jnp.asarray(sequence, jnp.int32), jnp.asarray([70, 32], jnp.int32), jnp.asarray([False, True])
        behind, most = jnp.asarray(context, jnp.int32), jnp.asarray([count], jnp.int32)
        return branch_attention(qkv[jnp.asarray(order)], *cache, jnp.zeros(1, jnp.int32), *where, behind, most, heads=2)[:count]

    with on_kernels(races=False):
        everything = attend([0, 1, 2, 3], [0, 1, 1, 0], [-1, -1, 1, -1], 4)
        some = attend([2, 0, 1, 3], [1, 0, 1, 0], [2, -1, -1, -1], 3)
    np.testing.assert_array_equal(bits(some), bits(everything[jnp.asarray([2, 0, 1])]))


@pytest.mark.parametrize("flagged", [1, 63, 64, 65, 128])
def test_packed_rows_stand_in_order_without_gaps_and_every_row_finds_its_own(flagged):
    """Counts at a whole tile of rows and beside it, and all rows."""
    rows, block, parent = 128, 32, [0, 0, 1, 1]
    flags = np.random.default_rng(flagged).permutation(np.arange(rows) < flagged)
    x = jax.random.normal(jax.random.key(3), (rows, 128)).astype(jnp.bfloat16)
    weight = Norm(jnp.ones(128, jnp.bfloat16), 1e-6, 128)
    with on_kernels():
        packed, count, slot, source = pack(x, jnp.asarray(flags, jnp.int32), jnp.int32(parent), jnp.int32([rows]), weight)
        normed = norm(x, weight)
    computed = np.flatnonzero(flags).tolist()
    assert int(count[0]) == flagged
    np.testing.assert_array_equal(bits(packed)[:flagged], bits(normed)[computed])
    for row in range(rows):
        branch, within = divmod(row, block)
        while not flags[branch * block + within] and branch != parent[branch]:
            branch = parent[branch]
        if flags[at := branch * block + within]:
            assert (int(source[row]), int(slot[row])) == (at, computed.index(at))


def test_rows_that_do_not_exist_may_name_anything():
    """Whatever their slots and references say, other rows are the same, none of them is flagged, and nothing else is read."""
    rng, count, rows = np.random.default_rng(5), 20, 40
    x = jnp.asarray(rng.normal(size=(rows, 128)), jnp.bfloat16)
    sums = jnp.asarray(rng.normal(size=(3, 24, 512)), jnp.float32)
    slots, references = (jnp.asarray(rng.integers(0, most, rows), jnp.int32) for most in (24, count))
    rotary = pallas.rotary(jnp.arange(rows, dtype=jnp.int32), MODEL)
    weight, need, tau = Norm(jnp.ones(128, jnp.bfloat16), 1e-6, 128), jnp.full(rows, GATED), jnp.full(1, 0.9, jnp.float32)
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 64, "eps": 1e-6, "dtype": x.dtype}
    found = []
    for absent in ([0] * (rows - count), np.resize([2**31 - 1, -(2**31), 24, -1], rows - count)):
        slot, reference = (array.at[count:].set(jnp.asarray(absent, jnp.int32)) for array in (slots, references))
        with on_kernels(races=False):
            after, flags = gate(x, sums[..., :128], slot, reference, need, jnp.full(1, count), tau)
            advanced = advance_norm(x, sums[..., :128], slot, jnp.full(1, count), weight)
            qkv = attention_inputs(sums, slot, jnp.full(1, count), rotary, None, None, None, **sizes)
        assert not flags[count:].any()
        found.append([each[:count] for each in (after, flags, *advanced, qkv)])
    assert 0 < found[0][1].sum() < count
    for one, another in zip(*found, strict=True):
        np.testing.assert_array_equal(one, another)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_head_of_a_row_has_the_same_bits_whatever_rows_share_the_call(temperature):
    inputs = NAMED["head-several row tiles"].inputs(torch.bfloat16, DEVICE) | {"temperature": temperature}
    everything = run("head", inputs, "pallas")
    for rows in (slice(0, 1), slice(3, 50, 9)):
        some = {name: inputs[name][rows].contiguous() for name in ("hidden", "seed", "position", "step")}
        for name, x in run("head", inputs | some, "pallas").items():
            assert torch.equal(x, everything[name][rows])


def test_a_head_without_noise_has_the_bits_of_one_whose_temperature_turns_out_to_be_zero():
    rng = np.random.default_rng(7)
    hidden, weight = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((70, 64), (200, 64)))
    names = [jnp.arange(70, dtype=jnp.int32)] * 3
    with on_kernels():
        known, found = (head(hidden, weight, *names, temperature, 5, 2) for temperature in (None, jnp.float32(0)))
    for some, same in zip(known, found, strict=True):
        np.testing.assert_array_equal(bits(some), bits(same))


@pytest.mark.parametrize("temperature", [None, jnp.float32(0.7)], ids=["greedy", "sampled"])
def test_the_head_ranks_what_is_wanted_wherever_it_stands(temperature):
    """Rows that are not wanted are not even numbers."""
    rng = np.random.default_rng(6)
    hidden, weight = (rng.normal(size=shape) for shape in ((70, 64), (200, 64)))
    wanted = rng.random(70) < 0.5
    hidden[~wanted] = np.nan
    names = [jnp.zeros(70, jnp.int32)] * 3
    given = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16), *names
    with on_kernels():
        tokens, odds, gap = rank_wanted(*given, jnp.asarray(wanted), temperature, 5, 2)
        alone = head(given[0][wanted], given[1], *(x[wanted] for x in names), temperature, 5, 2)
    for some, all_of_them in zip(alone, (tokens, odds, gap), strict=True):
        np.testing.assert_array_equal(np.asarray(some), np.asarray(all_of_them)[wanted])


@pytest.mark.parametrize("mask_id", [0, 5, 71])
def test_a_row_of_nan_never_reveals_mask(mask_id):
    """It would be revealed again and again, and the decode never end."""
    hidden, weight = jnp.full((8, 64), jnp.nan, jnp.bfloat16), jnp.ones((72, 64), jnp.bfloat16)
    with on_kernels():
        tokens = np.asarray(head(hidden, weight, *[jnp.zeros(8, jnp.int32)] * 3, None, mask_id, 2)[0])
    assert ((tokens >= 0) & (tokens < 72) & (tokens != mask_id)).all()


@pytest.mark.parametrize(("fold", "temperature"), [(None, 0.0), (sf.FoldConfig(), 0.7)], ids=["spiffy, greedy", "specfold, sampled"])
def test_a_decode_of_a_real_layer_lowers_for_a_gpu(fold, temperature):
    """Mosaic's whole lowering, layouts and shared memory included, runs without a GPU."""
    like = replace(model(12, 2, 128, qkv_bias=True), dim=1536, ffn_dim=8960, vocab=151936, mask_id=151665, block_size=32, sub_block=8)
    like = replace(like, shift=True, draws_first_token=True)
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.bfloat16), shapes(like), is_leaf=lambda leaf: isinstance(leaf, tuple))
    prompts, lengths = jax.ShapeDtypeStruct((2, 64), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    given = (params, prompts, lengths, like, sf.DecodeConfig(max_new_tokens=64, temperature=temperature, impl="pallas"), GRAPH)
    with mock.patch.object(launch, "no_hopper", return_value=None):
        traced = jax.jit(sf.spiffy_decode).trace(*given) if fold is None else jax.jit(sf.specfold_decode).trace(*given, fold)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.skipif(GPU, reason="there is a GPU")
def test_without_a_hopper_gpu_it_says_so():
    with pytest.raises(NotImplementedError, match=r"need a Hopper GPU .*, not cpu; use impl='xla'"):
        decoded("vanilla", sf.DecodeConfig(impl="pallas"), parameters(MODEL))


@pytest.mark.parametrize(
    ("changes", "fold", "message"),
    [
        ({}, sf.FoldConfig(reference="source"), "fold.reference='source' is not supported"),
        ({"head_dim": 96, "inv_freq": (1.0,) * 48}, None, "head_dim=96 is not supported"),
        ({"block_size": 4, "sub_block": None}, None, "block=4 is not supported"),
        ({"dim": 96}, None, "dim=96 is not supported by the Pallas kernels, which take multiples of 64"),
    ],
)
def test_what_the_kernels_lack_is_named(changes, fold, message):
    like = replace(MODEL, **changes)
    decode = sf.DecodeConfig(max_new_tokens=8, impl="pallas")
    prompts, lengths = jnp.full((1, 8), 5, jnp.int32), jnp.asarray([8], jnp.int32)
    method = sf.spiffy_decode if fold is None else sf.specfold_decode
    with on_kernels(), pytest.raises(NotImplementedError, match=message):
        jax.jit(method).trace(parameters(like), prompts, lengths, like, decode, GRAPH, *(() if fold is None else (fold,)))


def test_kernels_refuse_what_does_not_fit():
    x, count = jnp.zeros((8, 64), jnp.bfloat16), jnp.zeros(1, jnp.int32)
    with pytest.raises(NotImplementedError, match="x has dtype float32; the Pallas kernels take bfloat16 and float16"):
        linear(x.astype(jnp.float32), x.astype(jnp.float32), count)
    with pytest.raises(ValueError, match=r"weight must be bfloat16 \[8, 64\], not float16"):
        linear(x, x.astype(jnp.float16), count)
    with pytest.raises(ValueError, match=r"count must be int32 \[1\], not int32 \[2\]"):
        linear(x, x, jnp.zeros(2, jnp.int32))
    with pytest.raises(NotImplementedError, match="x has 64 columns; the kernels take multiples of 128"):
        norm(x, Norm(x[0], 1e-6, 64))
    with pytest.raises(ValueError, match=r"x must be \[rows width\] with no empty axis"):
        norm(x[:0], Norm(x[0], 1e-6, 64))


@pytest.mark.parametrize("rows", [8, 64, 65, 288, 321, 2304])
@pytest.mark.parametrize("sizes", [(2048, 1536), (1536, 8960), (64, 64), (5120, 16384), (448, 320)])
def test_tiles_fit_and_their_splits_follow_from_the_weight(rows, sizes):
    columns, depth = sizes
    for tile, parts, itemsize in ((product_tile(columns, depth, rows), 1, 4), (pair_tile(columns, rows), 2, 2)):
        alone = tile.blocks // tile.warpgroups if tile.shares_last(parts) else -(-tile.blocks // tile.warpgroups)
        sums = (alone * parts + tile.shares_last(parts)) * tile.columns
        assert sums * ROWS // 128 <= 192, "registers of a thread for sums"
        assert 2 <= tile.stages <= MOST_STAGES
        assert tile.shared_bytes(rows, parts, itemsize) <= SHARED_BYTES
        assert depth // DEPTH % tile.splits == 0
    assert product_tile(columns, depth, rows).splits == product_tile(columns, depth, 8).splits
