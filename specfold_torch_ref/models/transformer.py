"""One functional transformer for all families: parameters are a plain dict, every pass is a function.

Parameters: {"embed": [vocab, dim], "layers": [{"attn_norm", "qkv", "qkv_bias"?, "q_norm"?, "k_norm"?, "o", "ffn_norm", "gate_up",
"down"}], "norm": [dim], "head": [vocab, dim] unless tied}.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specfold_jax.config import Attention, ModelConfig
from specfold_torch_ref.models.reference import Segment, attention_inputs, logits, rms_norm, silu_pair
from specfold_torch_ref.models.reference import attention as attend

Params = dict[str, Any]
KeyValue = tuple[Tensor, Tensor]
Cache = tuple[KeyValue, ...]
"""Keys and values per layer, each [batch, capacity, kv_heads, head_dim]."""


def head_weight(params: Params) -> Float[Tensor, "vocab dim"]:
    """The language-model head's weight (the embedding when tied)."""
    return params.get("head", params["embed"])


def sequence_mask(length: int, pattern: Attention, block_size: int) -> Bool[Tensor, "query key"]:
    """Which keys a query sees in a whole sequence."""
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    match pattern:
        case "block":
            return query // block_size >= key // block_size
        case "bidirectional":
            return torch.ones((length, length), dtype=torch.bool)
        case "causal":
            return query >= key


def prefill(
    params: Params, tokens: Int[Tensor, "batch length"], model: ModelConfig, pattern: Attention, block_size: int
) -> tuple[Float[Tensor, "batch length dim"], Cache]:
    """Whole sequences from position 0: hidden states after the final norm, and the keys and values of every position.

    Plain PyTorch under every implementation: nothing is drafted or folded here, and all methods share it.
    """
    device, length = params["embed"].device, tokens.shape[1]
    mask = sequence_mask(length, pattern, block_size).to(device)
    positions = torch.arange(length, device=device).expand(tokens.shape)
    x, cache = F.embedding(tokens.to(device), params["embed"]), []
    for layer in params["layers"]:
        q, k, v = attention_inputs(x, *qkv_weights(layer), positions, model)
        o = attend(q[:, None], [Segment(k, v, mask)])[:, 0]
        x = x + F.linear(o.flatten(-2), layer["o"])
        h = silu_pair(F.linear(rms_norm(x, layer["ffn_norm"], model.norm_eps), layer["gate_up"]))
        x = x + F.linear(h, layer["down"])
        cache.append((k, v))
    return rms_norm(x, params["norm"], model.norm_eps), tuple(cache)


def qkv_weights(layer: Params) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """A layer's norm, projection, bias and q/k norms (None where the family has none)."""
    return layer["attn_norm"], layer["qkv"], layer.get("qkv_bias"), layer.get("q_norm"), layer.get("k_norm")


def forward(
    params: Params, tokens: Int[Tensor, "batch length"], model: ModelConfig, attention: Attention | None = None
) -> Float[Tensor, "batch length vocab"]:
    """Logits of whole sequences, aligned to the positions they predict (the family's shift is applied).

    `attention`: "block" (block-causal), "bidirectional" or "causal". None is the family's denoising pattern: bidirectional if blocks start
    at the prompt's end, else block-causal.
    """
    pattern = attention or ("bidirectional" if model.block_origin == "prompt" else "block")
    hidden, _ = prefill(params, tokens, model, pattern, model.block_size)
    out = logits(hidden, head_weight(params))
    return torch.cat([out[:, :1], out[:, :-1]], dim=1) if model.shift else out


def cast(params: Params, dtype: torch.dtype) -> Params:
    """The same parameters in another dtype."""
    layers = [{name: x.to(dtype) for name, x in layer.items()} for layer in params["layers"]]
    return {name: x.to(dtype) for name, x in params.items() if name != "layers"} | {"layers": layers}
