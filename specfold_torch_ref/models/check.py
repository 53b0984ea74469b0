"""One check: several canvases of every sequence evaluated in a single forward pass."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specfold_jax.config import FoldConfig, ModelConfig
from specfold_torch_ref.models.fold import Rows
from specfold_torch_ref.models.ops import Gate, Implementation, add_inherited, branch_attention, packed_linear, packed_qkv, packed_silu_pair
from specfold_torch_ref.models.reference import rms_norm, take_branch
from specfold_torch_ref.models.transformer import Cache, KeyValue, Params, qkv_weights


class Branches(NamedTuple):
    """The canvases one check evaluates. Branch 0 is the main branch, the row's true state.

    `specfold_jax.models.check.Branches` explains the fields, with an example.
    """

    tokens: Int[Tensor, "batch branch block"]
    valid: Bool[Tensor, "batch branch"]
    parent: Int[Tensor, "batch branch"]
    start: Int[Tensor, " batch"]
    causal: Bool[Tensor, " batch"]
    context: Int[Tensor, "batch branch"] | None = None

    def to(self, device: torch.device) -> "Branches":
        """The same branches on a device, numbers as int32."""

        def moved(x: Tensor) -> Tensor:
            return x.to(device, torch.bool if x.dtype == torch.bool else torch.int32)

        tokens, valid, parent, start, causal = (moved(x) for x in (self.tokens, self.valid, self.parent, self.start, self.causal))
        return Branches(tokens, valid, parent, start, causal, None if self.context is None else moved(self.context))

    def starts(self) -> Int[Tensor, "batch branch"]:
        """Absolute position of each branch's block."""
        start = self.start[:, None].expand(self.valid.shape)
        return start if self.context is None else start + (self.context >= 0).to(start.dtype) * self.tokens.shape[2]

    def drafts(self) -> Bool[Tensor, "batch branch"]:
        """The valid draft branches: not the main one, and not a continuation."""
        drafts = self.valid & (torch.arange(self.valid.shape[1], device=self.valid.device) > 0)
        return drafts if self.context is None else drafts & (self.context < 0)


class Checked(NamedTuple):
    """The result of a check. Invalid branches hold unspecified values.

    Attributes:
        hidden [batch, branch, block, dim]: states after the final norm.
        kv: of each layer, keys and values [batch, branch, block, kv_heads, head_dim].
        computed_rows [batch, layers, 2]: rows of draft branches computed before attention, and before the feed-forward network.
        folded [batch, branch]: whether any row of the branch was inherited.
        gates: of each layer, the decisions before attention and before the feed-forward network.
    """

    hidden: Float[Tensor, "batch branch block dim"]
    kv: tuple[KeyValue, ...]
    computed_rows: Int[Tensor, "batch layers 2"]
    folded: Bool[Tensor, "batch branch"]
    gates: tuple[tuple[Gate, Gate], ...]


def check(
    params: Params,
    branches: Branches,
    cache: Cache,
    prefix: Int[Tensor, " batch"],
    model: ModelConfig,
    fold: FoldConfig | None = None,
    pack: bool = True,
    *,
    impl: Implementation = "torch",
) -> Checked:
    """Evaluates several canvases in one forward pass.

    A branch attends to the first `prefix[b]` entries of the cache, to its own block and to its context's block. It sees no other branch.
    Nothing is written to the cache.
    """
    branches, prefix = branches.to(params["embed"].device), prefix.to(params["embed"].device, torch.int32)
    tokens, causal, context = branches.tokens, branches.causal, branches.context
    positions = branches.starts()[..., None] + torch.arange(tokens.shape[2], dtype=torch.int32, device=tokens.device)
    revealed = tokens != take_branch(tokens, branches.parent[..., None].expand_as(tokens))
    rows = Rows(branches.valid, branches.parent, revealed, fold, pack, impl)
    dense = rows.all()

    x, kv, gates = F.embedding(tokens, params["embed"]), [], []
    for layer, (k_prefix, v_prefix) in zip(params["layers"], cache, strict=True):
        first = rows.before_attention(x, dense)
        source = first.gate.source
        q, k, v = packed_qkv(x, first.packed, *qkv_weights(layer), positions, model, impl=impl)
        o = branch_attention(q, k, v, source, k_prefix, v_prefix, prefix, causal, context, impl=impl)
        if fold is not None and not fold.correction:
            o = take_branch(o, source)
        x = packed_linear(o.flatten(-2), dense.packed, layer["o"], x, impl=impl)
        second = rows.before_ffn(x, first)
        h = packed_silu_pair(x, second.packed, layer["ffn_norm"], layer["gate_up"], model.norm_eps, impl=impl)
        update = packed_linear(h, second.packed, layer["down"], None, impl=impl)
        x = add_inherited(x, update, second.gate.source, impl=impl)
        kv.append((k, v) if fold is None else (take_branch(k, source), take_branch(v, source)))
        gates.append((first.gate, second.gate))
    computed = torch.stack([torch.stack([gate.computed for gate in pair]) for pair in gates])  # [layers, 2, batch, branch, block]
    counts = torch.sum(computed & branches.drafts()[..., None], dim=(3, 4), dtype=torch.int32).permute(2, 0, 1)
    complete = torch.all(computed.flatten(0, 1), dim=0).all(dim=-1)
    return Checked(rms_norm(x, params["norm"], model.norm_eps), tuple(kv), counts, branches.valid & ~complete, tuple(gates))
