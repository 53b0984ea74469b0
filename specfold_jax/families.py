"""The model families: what `config.json` and the published decoding code of each say, as rows of switches.

Fast-dLLM v2 (arXiv 2509.26328, Qwen2.5 backbone), Nemotron-Labs-Diffusion (Ministral-3 backbone), SDAR (Qwen3 backbone).
"""

import math
from collections.abc import Sequence
from typing import Any

from specfold_jax.config import ModelConfig

_FAST_DLLM_V2: dict[str, Any] = dict(
    family="fast_dllm_v2", qkv_bias=True, qk_norm=False, shift=True, seed=True, stop_rule="reveal", sub_block=8
)
_NEMOTRON: dict[str, Any] = dict(
    family="nemotron_labs_diffusion",
    qkv_bias=False,
    qk_norm=False,
    seed=True,
    block_origin="prompt",
    commit="causal",
    strict=False,
    stop_rule="reveal_commit",
    sub_block=None,
)
_SDAR: dict[str, Any] = dict(family="sdar", qkv_bias=False, qk_norm=True, stop_rule="commit", sub_block=None)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Fast_dLLM_QwenForCausalLM": _FAST_DLLM_V2,
    "NemotronLabsDiffusionModel": _NEMOTRON,
    "SDARForCausalLM": _SDAR,
}
# What the checkpoints of a family leave out of config.json: the mask token's id and the block size.
_MASK_ID = {"fast_dllm_v2": 151665, "nemotron_labs_diffusion": 100, "sdar": 151669}
_BLOCK_SIZE = {"fast_dllm_v2": 32, "nemotron_labs_diffusion": 32, "sdar": 4}


def model_config(config: dict[str, Any], mask_id: int | None = None, stop_ids: Sequence[int] | None = None) -> ModelConfig:
    """Reads a checkpoint's `config.json`.

    `mask_id` and `stop_ids` override the checkpoint's own. Raises ValueError for an unknown architecture or a missing field.
    """
    architecture = next(iter(config.get("architectures") or ["(none)"]))
    if architecture not in ARCHITECTURES:
        raise ValueError(f"config.json: unknown architecture {architecture!r}; known: {', '.join(ARCHITECTURES)}")
    switches = ARCHITECTURES[architecture]
    fields = (
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("intermediate_size", "rms_norm_eps"),
    )
    if missing := [name for name in fields if config.get(name) is None]:
        raise ValueError(f"config.json of {architecture}: missing {', '.join(missing)}")
    family = switches["family"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    inv_freq, rope_scale, rope = _rotary(config, head_dim)
    if mask_id is None:
        mask_id = int(config.get("mask_token_id") or _MASK_ID[family])
    if not 0 <= mask_id < config["vocab_size"]:
        raise ValueError(f"{mask_id=} lies outside the vocabulary of {config['vocab_size']}; pass the checkpoint's own mask_id")
    if stop_ids is None:
        stop_ids = _ids(config.get("eos_token_id"))
    return ModelConfig(
        vocab=config["vocab_size"],
        dim=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        hidden=config["intermediate_size"],
        norm_eps=config["rms_norm_eps"],
        inv_freq=inv_freq,
        rope_scale=rope_scale,
        query_scale_beta=float(rope.get("llama_4_scaling_beta") or 0.0),
        query_scale_length=int(rope.get("original_max_position_embeddings") or 1),
        tied=bool(config.get("tie_word_embeddings", False)),
        block_size=config.get("bd_size") or config.get("block_size") or _BLOCK_SIZE[family],
        mask_id=mask_id,
        stop_ids=tuple(stop_ids),
        pad_id=next(iter(_ids(config.get("pad_token_id"))), 0),
        **switches,
    )


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _rotary(config: dict[str, Any], head_dim: int) -> tuple[tuple[float, ...], float, dict[str, Any]]:
    """Inverse frequencies, the factor on cos and sin, and the rope parameters themselves (plain RoPE or YaRN, arXiv 2309.00071)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if theta is None:
        raise ValueError("config.json: missing rope_theta")
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if kind == "default":
        return tuple(plain), 1.0, rope
    if kind != "yarn":
        raise ValueError(f"config.json: rope_type={kind!r} is not supported; known: default, yarn")
    factor, length = rope["factor"], rope["original_max_position_embeddings"]

    def correction(rotations: float) -> float:  # the dimension that turns `rotations` times over the original length
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction(rope.get("beta_fast") or 32), correction(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(head_dim // 2)]
    scaled = [f / factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        attention_factor = magnitude(mscale) / magnitude(mscale_all_dim) if mscale and mscale_all_dim else magnitude(1.0)
    return tuple(scaled), attention_factor, rope
