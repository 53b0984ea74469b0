"""Cases of the parity matrix: inputs of every operation, small ones with the awkward sizes and the layers of real models.

Rows that are not computed hold NaN wherever an operation must not read them.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import specfold_jax as sf

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Inputs = dict[str, Any]


def is_float(x: Any) -> bool:
    """Whether a dtype applies to this input."""
    return isinstance(x, torch.Tensor) and x.is_floating_point()


class Draw:
    """Random inputs that depend on the case alone."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(sum(i * ord(letter) for i, letter in enumerate(name, 1)))

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normal fp32."""
        return torch.randn(shape, generator=self.generator, device=self.device) * scale

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int32 in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=torch.int32)

    def flags(self, share: float, *shape: int) -> torch.Tensor:
        """Flags of which about that share are set."""
        return torch.rand(shape, generator=self.generator, device=self.device) < share

    def given(self, values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """These values."""
        return torch.tensor(values, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Case:
    """`build` draws the inputs in fp32. `narrow`: bf16 and fp16 run on the CPU too. `layer`: the size of a real model, for GPUs.

    `aligned`: sizes that Hopper's matrix units take, as the Pallas kernels demand.
    """

    op: str
    name: str
    build: Callable[[Draw], Inputs]
    narrow: bool = False
    layer: bool = False
    aligned: bool = False
    dtypes: tuple[torch.dtype, ...] = FLOATS

    def inputs(self, dtype: torch.dtype, device: torch.device) -> Inputs:
        """The inputs with floating-point tensors rounded to `dtype`."""
        drawn = self.build(Draw(f"{self.op} {self.name}", device))
        return {name: x.to(dtype) if is_float(x) else x for name, x in drawn.items()}

    def runs(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the case is worth its time there."""
        return dtype in self.dtypes and (device.type == "cuda" or (not self.layer and (self.narrow or dtype == torch.float32)))


CASES: list[Case] = []


def _case(op: str, name: str, build: Callable[..., Inputs], *sizes: Any, narrow: bool = False, aligned: bool = False, **more: Any) -> None:
    CASES.append(Case(op, name, functools.partial(build, sizes=sizes, **more), narrow or aligned, aligned=aligned))


def _layer(op: str, name: str, build: Callable[..., Inputs], *sizes: Any, dtypes: tuple[torch.dtype, ...], **options: Any) -> None:
    CASES.append(Case(op, name, functools.partial(build, sizes=sizes, **options), layer=True, aligned=True, dtypes=dtypes))


def model(heads: int, kv_heads: int, head_dim: int, **switches: Any) -> sf.ModelConfig:
    """A model's attention; its other sizes do not matter here."""
    frequencies = tuple(10000 ** (-2 * i / head_dim) for i in range(head_dim // 2))
    sizes = {"vocab": 8, "dim": 8, "layers": 1, "ffn_dim": 8, "norm_eps": 1e-6, "tied": True, "mask_id": 0, "stop_ids": (), "block_size": 4}
    options = {"qkv_bias": False, "qk_norm": False} | switches
    return sf.ModelConfig(
        family="none", heads=heads, kv_heads=kv_heads, head_dim=head_dim, inv_freq=frequencies, sub_block=None, **sizes, **options
    )


def chain(branches: int) -> list[int]:
    """Every branch the child of the one before."""
    return [max(branch - 1, 0) for branch in range(branches)]


def _sources(draw: Draw, batch: int, branches: int, block: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Computed positions, and where the others come from along a chain."""
    computed = draw.flags(share, batch, branches, block)
    computed[:, 0] = True
    own = torch.arange(branches, device=draw.device)[:, None].expand_as(computed)
    return computed, torch.where(computed, own, -1).cummax(dim=1).values.int()


def _spoiled(x: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
    return torch.where(computed.reshape(computed.shape + (1,) * (x.ndim - 3)), x, torch.nan)


def gate(
    draw: Draw,
    sizes: tuple,
    parent: list[int],
    tau: float,
    reference: str = "parent",
    force: bool = True,
    step: float = 0.2,
    steady: bool = False,
    revealed: float = 0.1,
    spoiled: int | None = None,
) -> Inputs:
    """Branches drift from their parents by up to `step`, or `steady` by all of it in one direction; no relative residual lies near tau.

    About the share `revealed` of positions is. The last branch of sequence 1 is absent. Branch `spoiled` has a NaN in each position.
    """
    batch, block, dim = sizes
    x = [draw.normal(batch, block, dim)]
    for branch, above in enumerate(parent[1:], 1):
        size = draw.given([0.02, 0.05, 0.12, 0.2], torch.float32)[draw.integers(0, 4, batch, block, 1).long()] * step / 0.2
        origin = x[above % branch]  # of a second root: the main branch
        x.append(origin * (1 + step) if steady else origin + size * torch.sign(draw.normal(batch, block, dim)) * torch.abs(origin))
    if spoiled is not None:
        x[spoiled][..., 0] = torch.nan
    valid = torch.ones(batch, len(parent), dtype=torch.bool, device=draw.device)
    valid[1:, -1] = len(parent) == 1
    return {
        "x": torch.stack(x, dim=1),
        "parent": draw.given([parent] * batch),
        "revealed": draw.flags(revealed, batch, len(parent), block),
        "valid": valid,
        "tau": tau,
        "reference": reference,
        "force_revealed": force,
    }


_case("gate", "chain", gate, 2, 3, 40, parent=[0, 0, 1, 2, 0], tau=0.1, narrow=True)
_case("gate", "by source", gate, 1, 2, 40, parent=[0, 0, 1, 2, 3], tau=0.15, reference="source", narrow=True)
_case("gate", "length 1", gate, 1, 1, 5, parent=[0, 0], tau=0.1)
_case("gate", "main branch alone", gate, 2, 2, 16, parent=[0], tau=0.1)
_case("gate", "deep chain", gate, 1, 1, 33, parent=chain(17), tau=0.1)
_case("gate", "deep chain by source", gate, 1, 1, 33, parent=chain(9), tau=0.1, reference="source")
_case("gate", "a second root", gate, 1, 3, 33, parent=[0, 0, 1, 3, 3], tau=0.1, force=False)
_case("gate", "all computed", gate, 1, 2, 16, parent=[0, 0, 1], tau=0.0)
_case("gate", "infinite tau", gate, 1, 2, 16, parent=[0, 0, 1], tau=math.inf, force=False)
_case("gate", "all masked", gate, 1, 2, 16, parent=[0, 0, 1], tau=0.0, step=0.0)
_case("gate", "chain as long as its rounds reach", gate, 1, 2, 33, parent=chain(16), tau=math.inf, force=False)
_case("gate", "steady drift by source", gate, 2, 4, 33, parent=chain(9), tau=0.2, reference="source", step=0.08, steady=True, revealed=0.3)
_case("gate", "revealed and not forced", gate, 1, 4, 33, parent=chain(4), tau=math.inf, force=False, revealed=0.5)
_case("gate", "a NaN", gate, 1, 2, 33, parent=chain(4), tau=math.inf, force=False, spoiled=2)
_case("gate", "more than one load wide", gate, 1, 2, 1100, parent=chain(3), tau=0.1)
_case("gate", "aligned rows", gate, 2, 16, 128, parent=[0, 0, 1, 2, 0], tau=0.1, aligned=True)
_case("gate", "aligned rows, deep chain", gate, 1, 8, 192, parent=chain(9), tau=0.1, aligned=True)


def pack(draw: Draw, sizes: tuple, share: float) -> Inputs:
    """Flags of which about that share are set."""
    return {"computed": draw.flags(share, *sizes)}


_case("pack", "some", pack, 2, 5, 7, share=0.3)
_case("pack", "none", pack, 2, 5, 7, share=0.0)
_case("pack", "all", pack, 2, 5, 7, share=1.0)
_case("pack", "one row", pack, 1, 1, 1, share=1.0)
_case("pack", "several tiles", pack, 3, 17, 41, share=0.6)


def packed_linear(draw: Draw, sizes: tuple, share: float = 0.5, residual: bool = True) -> Inputs:
    """[batch, branch, block] rows of which about that share are computed."""
    *lead, width, columns = sizes
    computed = draw.flags(share, *lead)
    return {
        "x": _spoiled(draw.normal(*lead, width), computed),
        "computed": computed,
        "weight": draw.normal(columns, width, scale=width**-0.5),
        "residual": draw.normal(*lead, columns) if residual else None,
    }


_case("packed_linear", "some rows", packed_linear, 2, 3, 5, 48, 80, narrow=True)
_case("packed_linear", "no residual", packed_linear, 2, 3, 5, 48, 80, residual=False, narrow=True)
_case("packed_linear", "length 1", packed_linear, 1, 1, 1, 3, 5, share=1.0)
_case("packed_linear", "no packed rows", packed_linear, 1, 3, 4, 32, 16, share=0.0)
_case("packed_linear", "all packed, several tiles", packed_linear, 2, 5, 13, 150, 70, share=1.0)
_case("packed_linear", "aligned rows", packed_linear, 2, 3, 8, 64, 80, aligned=True)
_case("packed_linear", "aligned rows, several tiles", packed_linear, 2, 5, 16, 320, 136, residual=False, share=0.7, aligned=True)


def packed_silu_pair(draw: Draw, sizes: tuple, share: float = 0.5) -> Inputs:
    """[batch, branch, block] rows of which about that share are computed, of unlike sizes."""
    *lead, width, hidden = sizes
    computed = draw.flags(share, *lead)
    return {
        "x": _spoiled(draw.normal(*lead, width) * torch.exp(draw.normal(*lead, 1)), computed),
        "computed": computed,
        "norm": 1 + draw.normal(width, scale=0.2),
        "weight": draw.normal(2 * hidden, width, scale=width**-0.5),
        "eps": 1e-6,
    }


_case("packed_silu_pair", "some rows", packed_silu_pair, 2, 3, 5, 48, 80, narrow=True)
_case("packed_silu_pair", "length 1", packed_silu_pair, 1, 1, 1, 3, 5, share=1.0)
_case("packed_silu_pair", "no packed rows", packed_silu_pair, 1, 3, 4, 32, 16, share=0.0)
_case("packed_silu_pair", "all packed, several tiles", packed_silu_pair, 2, 5, 13, 150, 70, share=1.0)
_case("packed_silu_pair", "aligned rows", packed_silu_pair, 2, 3, 8, 64, 80, aligned=True)
_case("packed_silu_pair", "aligned rows, several tiles", packed_silu_pair, 2, 5, 16, 320, 136, share=0.7, aligned=True)


def packed_qkv(draw: Draw, sizes: tuple, share: float = 0.5, most: int = 3000, **switches: Any) -> Inputs:
    """One layer's attention inputs at positions up to `most`."""
    *lead, width, heads, kv_heads, head_dim = sizes
    family = model(heads, kv_heads, head_dim, **switches)
    computed, columns = draw.flags(share, *lead), (heads + 2 * kv_heads) * head_dim
    return {
        "x": _spoiled(draw.normal(*lead, width) * torch.exp(draw.normal(*lead, 1)), computed),
        "computed": computed,
        "norm": 1 + draw.normal(width, scale=0.2),
        "weight": draw.normal(columns, width, scale=width**-0.5),
        "bias": draw.normal(columns) if family.qkv_bias else None,
        "q_norm": 1 + draw.normal(head_dim, scale=0.2) if family.qk_norm else None,
        "k_norm": 1 + draw.normal(head_dim, scale=0.2) if family.qk_norm else None,
        "positions": draw.integers(0, most, *lead),
        "model": family,
    }


YARN = {"rope_scale": 1.25, "query_scale_beta": 0.1, "query_scale_length": 64}
_case("packed_qkv", "bias", packed_qkv, 2, 2, 5, 48, 6, 1, 24, qkv_bias=True, narrow=True)
_case("packed_qkv", "q/k norm", packed_qkv, 1, 3, 5, 48, 4, 4, 24, qk_norm=True, narrow=True)
_case("packed_qkv", "query scale", packed_qkv, 1, 3, 5, 48, 7, 1, 24, **YARN, narrow=True)
_case("packed_qkv", "length 1", packed_qkv, 1, 1, 1, 3, 1, 1, 64, share=1.0)
_case("packed_qkv", "no packed rows", packed_qkv, 1, 3, 4, 32, 2, 1, 96, share=0.0)
_case("packed_qkv", "all packed, several tiles", packed_qkv, 2, 4, 11, 70, 2, 1, 96, share=1.0, qkv_bias=True)
_case("packed_qkv", "head_dim 128", packed_qkv, 1, 2, 3, 40, 2, 1, 128, qk_norm=True)
_case("packed_qkv", "aligned rows, bias", packed_qkv, 2, 2, 8, 64, 5, 1, 64, qkv_bias=True, aligned=True)
_case("packed_qkv", "aligned rows, q/k norm", packed_qkv, 1, 3, 8, 128, 4, 2, 128, qk_norm=True, aligned=True)
_case("packed_qkv", "aligned rows, query scale", packed_qkv, 1, 3, 8, 192, 7, 1, 64, **YARN, aligned=True)


def branch_attention(draw: Draw, sizes: tuple, prefix: list[int], share: float = 0.5, causal: bool = False, context: Any = None) -> Inputs:
    """A chain of branches; the last sequence alone is causal. Entries beyond the prefix are huge, rows that were not computed NaN."""
    branches, block, heads, kv_heads, head_dim = sizes
    batch, capacity = len(prefix), max(prefix) + 3
    computed, source = _sources(draw, batch, branches, block, share)
    beyond = torch.arange(capacity, device=draw.device) >= draw.given(prefix)[:, None]
    keys = [draw.normal(batch, capacity, kv_heads, head_dim).masked_fill(beyond[..., None, None], 1e3) for _ in range(2)]
    return {
        "q": _spoiled(draw.normal(batch, branches, block, heads, head_dim), computed),
        "k": _spoiled(draw.normal(batch, branches, block, kv_heads, head_dim), computed),
        "v": _spoiled(draw.normal(batch, branches, block, kv_heads, head_dim), computed),
        "source": source,
        "k_prefix": keys[0],
        "v_prefix": keys[1],
        "prefix": draw.given(prefix),
        "causal": draw.given([causal and row == batch - 1 for row in range(batch)], torch.bool),
        "context": None if context is None else draw.given([context] * batch),
    }


_case("branch_attention", "folded, ratio 6", branch_attention, 3, 5, 6, 1, 24, prefix=[11, 4], causal=True, narrow=True)
_case("branch_attention", "context, ratio 1", branch_attention, 3, 4, 2, 2, 24, prefix=[8], context=[-1, -1, 1], narrow=True)
_case("branch_attention", "ratio 7", branch_attention, 2, 7, 7, 1, 16, prefix=[20], narrow=True)
_case("branch_attention", "length 1, prefix 0", branch_attention, 1, 1, 1, 1, 64, prefix=[0])
_case("branch_attention", "prefix 0, causal", branch_attention, 2, 5, 4, 2, 24, prefix=[0, 0], causal=True)
_case("branch_attention", "all computed", branch_attention, 3, 4, 2, 1, 64, prefix=[5, 9], share=1.0)
_case("branch_attention", "deep chain, head_dim 96", branch_attention, 9, 3, 2, 1, 96, prefix=[7], share=0.1)
_case("branch_attention", "block of 32, head_dim 128", branch_attention, 2, 32, 6, 1, 128, prefix=[64], share=0.3)
_case("branch_attention", "aligned block, ratio 6", branch_attention, 3, 32, 6, 1, 64, prefix=[96, 0], causal=True, aligned=True)
_case("branch_attention", "aligned block, ratio 7", branch_attention, 2, 32, 7, 1, 128, prefix=[64], aligned=True)
_case("branch_attention", "aligned block, ratio 1", branch_attention, 3, 16, 2, 2, 64, prefix=[40], context=[-1, -1, 1], aligned=True)


def add_inherited(draw: Draw, sizes: tuple, share: float = 0.5) -> Inputs:
    """Updates that were not computed hold NaN."""
    *lead, width = sizes
    computed, source = _sources(draw, *lead, share)
    return {"x": draw.normal(*lead, width), "update": _spoiled(draw.normal(*lead, width), computed), "source": source}


_case("add_inherited", "folded", add_inherited, 2, 3, 5, 40, narrow=True)
_case("add_inherited", "length 1", add_inherited, 1, 1, 1, 3)
_case("add_inherited", "deep chain, two tiles", add_inherited, 1, 9, 2, 1100, share=0.1)
_case("add_inherited", "aligned rows", add_inherited, 2, 3, 8, 128, aligned=True)


def head(
    draw: Draw, sizes: tuple, temperature: float = 0.0, mask: int = 5, ranks: int = 3, scale: float = 3.0, whole: bool = False
) -> Inputs:
    """Logits of about normal size `scale`; `whole`: small whole numbers, whose many ties are exact in every dtype."""
    rows, width, vocab = sizes
    hidden = draw.integers(-1, 2, rows, width).float() if whole else draw.normal(rows, width)
    weight = draw.integers(-1, 2, vocab, width).float() if whole else draw.normal(vocab, width, scale=scale * width**-0.5)
    return {
        "hidden": hidden,
        "weight": weight,
        **{name: draw.integers(0, 1000, rows) for name in ("seed", "position", "step")},
        "temperature": temperature,
        "mask_id": mask,
        "ranks": ranks,
    }


_case("head", "ragged vocabulary", head, 5, 48, 301, aligned=True)
_case("head", "temperature", head, 5, 48, 130, temperature=0.7, aligned=True)
_case("head", "ties", head, 7, 6, 203, whole=True, ranks=4, aligned=True)
_case("head", "one row, two tokens", head, 1, 3, 3, mask=0, ranks=1, aligned=True)
_case("head", "mask alone in the last tile", head, 3, 20, 65, mask=64, ranks=2, aligned=True)
_case("head", "certain", head, 3, 20, 80, scale=60.0, aligned=True)
_case("head", "several row tiles", head, 70, 20, 40, ranks=2, aligned=True)


WIDE, MAIN = (torch.float32, torch.bfloat16), (torch.bfloat16,)
# dim, heads, kv_heads, head_dim, hidden, vocab, MASK's id, switches, dtypes
LAYERS = {
    "1.5B": (1536, 12, 2, 128, 8960, 151936, 151665, {"qkv_bias": True}, WIDE),
    "7B": (3584, 28, 4, 128, 18944, 152064, 151665, {"qkv_bias": True}, MAIN),
    "14B": (5120, 32, 8, 128, 16384, 131072, 100, {**YARN, "query_scale_length": 1024}, MAIN),
}
for _name, (_dim, _heads, _kv_heads, _head_dim, _hidden, _vocab, _mask, _switches, _dtypes) in LAYERS.items():
    _rows = (2, 9, 32)
    _layer("gate", _name, gate, 2, 32, _dim, parent=[0, 0, 1, 2, 3, 0, 5, 6, 0], tau=0.1, dtypes=_dtypes)
    _layer("packed_qkv", _name, packed_qkv, *_rows, _dim, _heads, _kv_heads, _head_dim, dtypes=_dtypes, **_switches)
    _layer(
        *("branch_attention", _name, branch_attention, 9, 32, _heads, _kv_heads, _head_dim),
        **{"prefix": [544, 1024], "context": [-1] * 8 + [3], "dtypes": _dtypes},
    )
    _layer("packed_linear", f"{_name} output", packed_linear, *_rows, _heads * _head_dim, _dim, dtypes=_dtypes)
    _layer("packed_linear", f"{_name} down", packed_linear, *_rows, _hidden, _dim, residual=False, dtypes=_dtypes)
    _layer("packed_silu_pair", _name, packed_silu_pair, *_rows, _dim, _hidden, dtypes=_dtypes)
    _layer("add_inherited", _name, add_inherited, *_rows, _dim, dtypes=_dtypes)
    _layer("head", _name, head, 80, _dim, _vocab, mask=_mask, ranks=4, dtypes=_dtypes)
    _layer("head", f"{_name} at T > 0", head, 80, _dim, _vocab, mask=_mask, ranks=4, temperature=0.8, dtypes=_dtypes)


NAMED = {f"{case.op}-{case.name}": case for case in CASES}
