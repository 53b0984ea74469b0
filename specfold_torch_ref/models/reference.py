"""What the operations are made of, in plain PyTorch: norms, rotary embedding, attention, the residual test.

Names and layouts are those of `specfold_jax.models.ops` and `specfold_jax.models.fold`. Activations keep their dtype. Norms, softmax,
residual comparisons and accumulators are fp32.
"""

from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specfold_jax.config import ModelConfig


class Segment(NamedTuple):
    """Keys and values that queries may attend to.

    Attributes:
        key, value: [batch, branch, key, kv_heads, head_dim], or [batch, key, kv_heads, head_dim] if all branches share them.
        mask: bool, broadcast to [batch, branch, query, key].
    """

    key: Tensor
    value: Tensor
    mask: Bool[Tensor, "..."]


def rms_norm(x: Float[Tensor, "*rows dim"], weight: Float[Tensor, " dim"], eps: float) -> Float[Tensor, "*rows dim"]:
    """x / rms(x) * weight, statistics in fp32 (arXiv 1910.07467)."""
    wide = x.float()
    scale = torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


@lru_cache(maxsize=8)
def frequencies(model: ModelConfig, device: torch.device) -> Float[Tensor, " half_head_dim"]:
    """Rotary embedding's angle per position. It is kept, because a copy to a GPU for every layer would cost more than its use."""
    return torch.tensor(model.inv_freq, dtype=torch.float32, device=device)


def rotate(
    x: Float[Tensor, "*rows heads head_dim"], positions: Int[Tensor, "*rows"], model: ModelConfig
) -> Float[Tensor, "*rows heads head_dim"]:
    """Rotary position embedding, half-split layout, angles in fp32 (arXiv 2104.09864)."""
    angles = positions[..., None].float() * frequencies(model, x.device)
    cos, sin = (f(angles)[..., None, :] * model.rope_scale for f in (torch.cos, torch.sin))
    first, second = torch.chunk(x.float(), 2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def query_scale(positions: Int[Tensor, "*rows"], model: ModelConfig) -> Float[Tensor, "*rows"]:
    """Llama-4's scale of the queries by position: 1 + beta ln(1 + floor(position / original length))."""
    return 1 + model.query_scale_beta * torch.log1p((positions // model.query_scale_length).float())


def attention_inputs(
    x: Float[Tensor, "*rows dim"],
    norm: Float[Tensor, " dim"],
    weight: Float[Tensor, "qkv dim"],
    bias: Float[Tensor, " qkv"] | None,
    q_norm: Float[Tensor, " head_dim"] | None,
    k_norm: Float[Tensor, " head_dim"] | None,
    positions: Int[Tensor, "*rows"],
    model: ModelConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, fused projection, bias, q/k norm, rotary embedding: q [*rows, heads, head_dim], k and v [*rows, kv_heads, head_dim]."""
    qkv = F.linear(rms_norm(x, norm, model.norm_eps), weight)
    if bias is not None:
        qkv = qkv + bias
    qkv = qkv.reshape(*x.shape[:-1], model.heads + 2 * model.kv_heads, model.head_dim)
    q, k, v = torch.split(qkv, [model.heads, model.kv_heads, model.kv_heads], dim=-2)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, model.norm_eps), rms_norm(k, k_norm, model.norm_eps)
    q, k = rotate(q, positions, model), rotate(k, positions, model)
    if model.query_scale_beta:
        q = (q.float() * query_scale(positions, model)[..., None, None]).to(q.dtype)
    return q, k, v


def attention(
    q: Float[Tensor, "batch branch query heads head_dim"], segments: Sequence[Segment]
) -> Float[Tensor, "batch branch query heads head_dim"]:
    """Softmax attention over the union of the segments, with grouped key-value heads.

    The same as attending to each segment and merging by log-sum-exp. A query that may see nothing gets zeros.
    """
    kv_heads = segments[0].key.shape[-2]
    grouped = q.float().unflatten(-2, (kv_heads, -1))
    scores = []
    for key, _, mask in segments:
        keys = "bskd" if key.ndim == 4 else "bnskd"
        score = torch.einsum(f"bnqkgd,{keys}->bnkgqs", grouped, key.float()) * q.shape[-1] ** -0.5
        scores.append(score.masked_fill(~torch.broadcast_to(mask, (*q.shape[:3], key.shape[-3]))[:, :, None, None], -torch.inf))
    top = torch.stack([torch.amax(s, dim=-1) for s in scores]).amax(dim=0)[..., None]
    top = torch.where(torch.isfinite(top), top, 0)
    weights = [torch.exp(s - top) for s in scores]
    total = reduce(torch.add, (torch.sum(w, dim=-1) for w in weights))
    out = torch.zeros_like(grouped)
    for (_, value, _), weight in zip(segments, weights, strict=True):
        values = "bskd" if value.ndim == 4 else "bnskd"
        out += torch.einsum(f"bnkgqs,{values}->bnqkgd", weight.to(value.dtype).float(), value.float())
    total = torch.moveaxis(total, -1, 2)[..., None]
    return (out / torch.where(total > 0, total, 1)).reshape(q.shape).to(q.dtype)


def silu_pair(gate_up: Float[Tensor, "*rows two_hidden"]) -> Float[Tensor, "*rows hidden"]:
    """silu(gate) * up of a fused projection (gate rows first)."""
    gate, up = torch.chunk(gate_up, 2, dim=-1)
    return F.silu(gate.float()).to(up.dtype) * up


def logits(hidden: Float[Tensor, "*rows dim"], weight: Float[Tensor, "vocab dim"]) -> Float[Tensor, "*rows vocab"]:
    """fp32 logits."""
    return F.linear(hidden.float(), weight.float())


def take_branch(
    x: Float[Tensor, "batch branch block ..."], source: Int[Tensor, "batch branch block"]
) -> Float[Tensor, "batch branch block ..."]:
    """x[b, source[b, n, i], i]."""
    row, position = torch.arange(x.shape[0], device=x.device), torch.arange(x.shape[2], device=x.device)
    return x[row[:, None, None], source.long(), position]


def residual_exceeds(x: Float[Tensor, "... dim"], reference: Float[Tensor, "... dim"], tau: float) -> Bool[Tensor, "..."]:
    """not (||x - ref||^2 <= tau^2 ||ref||^2) in fp32. NaN counts as exceeding, and nothing is divided by 0."""
    x, reference = x.float(), reference.float()
    delta = torch.sum(torch.square(x - reference), dim=-1)
    return ~(delta <= float(np.square(np.float32(tau))) * torch.sum(torch.square(reference), dim=-1))


def resolve(computed: Bool[Tensor, "batch branch block"], parent: Int[Tensor, "batch branch"]) -> Int[Tensor, "batch branch block"]:
    """Follows parents to the branch that computed each position.

    In each round every pointer jumps to where its target points. A chain of n branches takes about log2(n) rounds.
    `specfold_jax.models.fold.resolve` shows an example.
    """
    branches = computed.shape[1]
    own = torch.arange(branches, dtype=torch.int32, device=computed.device)[:, None]
    source = torch.where(computed, own, parent.int()[..., None])
    for _ in range(max(branches - 1, 1).bit_length()):
        source = take_branch(source, source)
    return source
