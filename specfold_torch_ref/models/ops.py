"""The operations of a check: the readable PyTorch specification of each ("torch"), and the road to its Triton kernel ("triton").

Weights are `[out, in]`, activations `[batch, branch, block, dim]`. A named implementation runs or raises, and nothing falls back. Kernels
are imported when they are asked for, and nowhere else.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specfold_jax.config import ModelConfig
from specfold_torch_ref.models.reference import (
    Segment,
    attention,
    attention_inputs,
    frequencies,
    logits,
    residual_exceeds,
    resolve,
    rms_norm,
    silu_pair,
    take_branch,
)
from specfold_torch_ref.models.sampling import Ranked, rank

Implementation = Literal["torch", "triton"]


class Gate(NamedTuple):
    """A gate's decision on every position of every branch. `specfold_jax.models.fold.Gate` explains it with an example.

    Attributes:
        computed [batch, branch, block]: whether the position is computed. The others are folded.
        source [batch, branch, block]: the branch that computes the position.
    """

    computed: Bool[Tensor, "batch branch block"]
    source: Int[Tensor, "batch branch block"]


class Packed(NamedTuple):
    """The computed rows of all sequences and branches.

    Attributes:
        index [rows]: their flat numbers in ascending order, filled up with `rows`.
        count []: how many there are.
    """

    index: Int[Tensor, " rows"]
    count: Int[Tensor, ""]


def gate(
    x: Float[Tensor, "batch branch block dim"],
    parent: Int[Tensor, "batch branch"],
    revealed: Bool[Tensor, "batch branch block"],
    valid: Bool[Tensor, "batch branch"],
    tau: float,
    *,
    reference: Literal["parent", "source"],
    force_revealed: bool,
    impl: Implementation,
) -> Gate:
    """Decides from the residual stream which positions are computed. `FoldConfig` has the options.

    `revealed`: positions revealed in a branch and not in its parent. Parents come before children. Roots are always computed.
    """
    match impl:
        case "torch":
            roots = parent == torch.arange(x.shape[1], device=x.device)
            forced = (roots[..., None] | (revealed & force_revealed)).expand_as(revealed)
            if reference == "parent":
                above = take_branch(x, parent[..., None].expand_as(revealed))
                computed = (residual_exceeds(x, above, tau) | forced) & valid[..., None]
                return Gate(computed, resolve(computed, parent))
            return _gate_by_source(x, parent, forced, valid, tau)
        case "triton":
            from kernels_triton import gate as kernel

            return Gate(*kernel.gate(x, parent, revealed, valid, tau, reference=reference, force_revealed=force_revealed))
        case _:
            raise _unknown(impl)


def _gate_by_source(
    x: Float[Tensor, "batch branch block dim"],
    parent: Int[Tensor, "batch branch"],
    forced: Bool[Tensor, "batch branch block"],
    valid: Bool[Tensor, "batch branch"],
    tau: float,
) -> Gate:
    """Compares a position with the branch that it would be folded onto, its parent's source.

    That source must be decided first. So branches are visited one by one, parents before children.
    """
    row = torch.arange(x.shape[0], device=x.device)
    computed, source = torch.zeros_like(forced), torch.zeros_like(forced, dtype=torch.int32)
    for branch in range(x.shape[1]):
        above = source[row, parent[:, branch].long()]  # the parent's source [batch, block]
        exceeds = residual_exceeds(x[:, branch], take_branch(x, above[:, None])[:, 0], tau)
        computed[:, branch] = (exceeds | forced[:, branch]) & valid[:, branch, None]
        source[:, branch] = torch.where(computed[:, branch], branch, above)
    return Gate(computed, source)


def pack(computed: Bool[Tensor, "batch branch block"], *, impl: Implementation) -> Packed:
    """The computed rows' flat numbers over all sequences and branches, on the device, in ascending order."""
    match impl:
        case "torch":
            flat, rows = computed.flatten(), computed.numel()
            number = torch.arange(rows, dtype=torch.int32, device=flat.device)
            return Packed(torch.where(flat, number, rows).sort().values, torch.sum(flat, dtype=torch.int32))
        case "triton":
            from kernels_triton import pack as kernel

            return Packed(*kernel.pack(computed))
        case _:
            raise _unknown(impl)


def _on_packed(function: Callable[..., Any], packed: Packed, *inputs: Tensor) -> Any:
    """A row-wise function on the packed rows of inputs [batch, branch, block, ...]. The other rows of its outputs are zero."""
    lead, flat = inputs[0].shape[:3], [x.flatten(0, 2) for x in inputs]
    chosen = packed.index[: int(packed.count)].long()

    def scatter(y: Tensor) -> Tensor:
        return y.new_zeros(flat[0].shape[0], *y.shape[1:]).index_copy(0, chosen, y).unflatten(0, lead)

    out = function(*(x[chosen] for x in flat))
    return tuple(map(scatter, out)) if isinstance(out, tuple) else scatter(out)


def packed_qkv(
    x: Float[Tensor, "batch branch block dim"],
    packed: Packed,
    norm: Float[Tensor, " dim"],
    weight: Float[Tensor, "qkv dim"],
    bias: Float[Tensor, " qkv"] | None,
    q_norm: Float[Tensor, " head_dim"] | None,
    k_norm: Float[Tensor, " head_dim"] | None,
    positions: Int[Tensor, "batch branch block"],
    model: ModelConfig,
    *,
    impl: Implementation,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention_inputs` of the packed rows: q, k, v [batch, branch, block, heads, head_dim]. Other rows are unspecified."""
    match impl:
        case "torch":
            return _on_packed(
                lambda x, positions: attention_inputs(x, norm, weight, bias, q_norm, k_norm, positions, model), packed, x, positions
            )
        case "triton":
            from kernels_triton import qkv as kernel

            return kernel.packed_qkv(
                *(x, packed, norm, weight, bias, q_norm, k_norm, positions, frequencies(model, x.device)),
                heads=model.heads,
                kv_heads=model.kv_heads,
                eps=model.norm_eps,
                rope_scale=model.rope_scale,
                query_scale_beta=model.query_scale_beta,
                query_scale_length=model.query_scale_length,
            )
        case _:
            raise _unknown(impl)


def branch_attention(
    q: Float[Tensor, "batch branch block heads head_dim"],
    k: Float[Tensor, "batch branch block kv_heads head_dim"],
    v: Float[Tensor, "batch branch block kv_heads head_dim"],
    source: Int[Tensor, "batch branch block"],
    k_prefix: Float[Tensor, "batch capacity kv_heads head_dim"],
    v_prefix: Float[Tensor, "batch capacity kv_heads head_dim"],
    prefix: Int[Tensor, " batch"],
    causal: Bool[Tensor, " batch"],
    context: Int[Tensor, "batch branch"] | None,
    *,
    impl: Implementation,
) -> Float[Tensor, "batch branch block heads head_dim"]:
    """Attention of every branch over its sequence's first `prefix` cache entries, its context branch's block and its own block.

    Folded positions take their query from their source, and keys and values of a block from each position's source: the correction.
    `causal` rows use causal attention inside the block. A branch with `context` m >= 0 also sees branch m's block.
    """
    match impl:
        case "torch":
            q, k, v = (take_branch(x, source) for x in (q, k, v))
            segments = [Segment(k_prefix, v_prefix, (torch.arange(k_prefix.shape[1], device=q.device) < prefix[:, None])[:, None, None])]
            if context is not None:
                row, behind = torch.arange(q.shape[0], device=q.device)[:, None], context.clamp(min=0).long()
                segments.append(Segment(k[row, behind], v[row, behind], (context >= 0)[..., None, None]))
            within = torch.arange(q.shape[2], device=q.device)
            inside = ~causal[:, None, None, None] | (within[:, None] >= within)
            return attention(q, [*segments, Segment(k, v, inside)])
        case "triton":
            from kernels_triton import attention as kernel

            return kernel.branch_attention(q, k, v, source, k_prefix, v_prefix, prefix, causal, context)
        case _:
            raise _unknown(impl)


def packed_linear(
    x: Float[Tensor, "batch branch block in"],
    packed: Packed,
    weight: Float[Tensor, "out in"],
    residual: Float[Tensor, "batch branch block out"] | None,
    *,
    impl: Implementation,
) -> Float[Tensor, "batch branch block out"]:
    """(residual +) x @ weight.T of the packed rows. Other rows are unspecified. The kernel rounds once, after the sum."""
    match impl:
        case "torch":
            if residual is None:
                return _on_packed(lambda x: F.linear(x, weight), packed, x)
            return _on_packed(lambda x, residual: residual + F.linear(x, weight), packed, x, residual)
        case "triton":
            from kernels_triton import linear as kernel

            return kernel.packed_linear(x, packed, weight, residual)
        case _:
            raise _unknown(impl)


def packed_silu_pair(
    x: Float[Tensor, "batch branch block dim"],
    packed: Packed,
    norm: Float[Tensor, " dim"],
    weight: Float[Tensor, "two_hidden dim"],
    eps: float,
    *,
    impl: Implementation,
) -> Float[Tensor, "batch branch block hidden"]:
    """silu(gate) * up of RMSNorm(x) @ weight.T for the packed rows. Other rows are unspecified."""
    match impl:
        case "torch":
            return _on_packed(lambda x: silu_pair(F.linear(rms_norm(x, norm, eps), weight)), packed, x)
        case "triton":
            from kernels_triton import silu_pair as kernel

            return kernel.packed_silu_pair(x, packed, norm, weight, eps)
        case _:
            raise _unknown(impl)


def add_inherited(
    x: Float[Tensor, "batch branch block dim"],
    update: Float[Tensor, "batch branch block dim"],
    source: Int[Tensor, "batch branch block"],
    *,
    impl: Implementation,
) -> Float[Tensor, "batch branch block dim"]:
    """Every branch's own residual stream plus the update of the branch that computed it."""
    match impl:
        case "torch":
            return x + take_branch(update, source)
        case "triton":
            from kernels_triton import inherit as kernel

            return kernel.add_inherited(x, update, source)
        case _:
            raise _unknown(impl)


def head(
    hidden: Float[Tensor, "rows dim"],
    weight: Float[Tensor, "vocab dim"],
    seed: Int[Tensor, " rows"],
    position: Int[Tensor, " rows"],
    step: Int[Tensor, " rows"],
    temperature: float,
    mask_id: int,
    ranks: int,
    *,
    impl: Implementation,
) -> Ranked:
    """Ranked tokens of the rows' logits (`sampling.rank`). The kernel never holds [rows, vocab]."""
    match impl:
        case "torch":
            return rank(logits(hidden, weight), seed, position, step, temperature, mask_id, ranks)
        case "triton":
            from kernels_triton import head as kernel

            return Ranked(*kernel.head(hidden, weight, seed, position, step, temperature, mask_id, ranks))
        case _:
            raise _unknown(impl)


def _unknown(impl: str) -> ValueError:
    return ValueError(f"{impl=} must be 'torch' or 'triton'")
