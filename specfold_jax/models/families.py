"""The model families: what `config.json` and the published decoding code of each say, as rows of switches.

Fast-dLLM v2 (arXiv 2509.26328, Qwen2.5 backbone), Nemotron-Labs-Diffusion (Ministral-3 backbone), SDAR (Qwen3 backbone).
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any

from specfold_jax.config import ModelConfig
from specfold_jax.values import Natural, Size, conforming

_FAST_DLLM_V2: dict[str, Any] = dict(
    family="fast_dllm_v2", qkv_bias=True, qk_norm=False, shift=True, draws_first_token=True, stop_rule="reveal", sub_block=8
)
_NEMOTRON: dict[str, Any] = dict(
    family="nemotron_labs_diffusion",
    qkv_bias=False,
    qk_norm=False,
    draws_first_token=True,
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

_FEW, _BASE, _SCALE = Annotated[int, 1, 9999], Annotated[float, 2, 1e15], Annotated[float, 1e-6, 1e6]
_NEEDED = {
    "vocab_size": Size,
    "hidden_size": Size,
    "num_hidden_layers": _FEW,
    "num_attention_heads": _FEW,
    "num_key_value_heads": _FEW,
    "intermediate_size": Size,
    "rms_norm_eps": Annotated[float, 1e-12, 1],
}


def model_config(config: dict[str, Any], mask_id: int | None = None, stop_ids: Sequence[int] | None = None) -> ModelConfig:
    """Reads a checkpoint's `config.json`, in which null is as good as absent.

    `mask_id` and `stop_ids` override the checkpoint's own. Raises ValueError for an unknown architecture, and naming each missing field
    and any value that is none.
    """
    architecture = next(iter(_field(config, tuple[str, ...], (), "architectures")), "(none)")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"unknown architecture {architecture!r}; known: {', '.join(ARCHITECTURES)}")
    switches = ARCHITECTURES[architecture]
    family = switches["family"]
    vocab, dim, layers, heads, kv_heads, ffn_dim, norm_eps = _needed(config, _NEEDED)
    head_dim = conforming("head_dim", _field(config, _FEW, dim // heads, "head_dim"), _FEW)
    inv_freq, rope_scale, rope = _rotary(config, head_dim)
    return ModelConfig(
        vocab=vocab,
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_dim=ffn_dim,
        norm_eps=norm_eps,
        inv_freq=inv_freq,
        rope_scale=rope_scale,
        query_scale_beta=_field(rope, float, 0.0, "llama_4_scaling_beta"),
        query_scale_length=_field(rope, Size, 1, "original_max_position_embeddings"),
        tied=_field(config, bool, False, "tie_word_embeddings"),
        block_size=_field(config, Size, _BLOCK_SIZE[family], "bd_size", "block_size"),
        mask_id=_field(config, Natural, _MASK_ID[family], "mask_token_id") if mask_id is None else mask_id,
        stop_ids=_ids(config, "eos_token_id") if stop_ids is None else conforming("stop_ids", stop_ids, tuple[Natural, ...]),
        pad_id=next(iter(_ids(config, "pad_token_id")), 0),
        **switches,
    )


def _needed(config: dict[str, Any], hints: dict[str, Any]) -> list[Any]:
    """The fields of these names, each in the type of its annotation."""
    if missing := [name for name in hints if config.get(name) is None]:
        raise ValueError(f"missing {', '.join(missing)}; the fields must be there")
    return [conforming(name, config[name], hint) for name, hint in hints.items()]


def _field(config: dict[str, Any], hint: Any, default: Any, *names: str) -> Any:
    """The first of the fields that is there and not null, in the type of an annotation."""
    return next((conforming(name, config[name], hint) for name in names if config.get(name) is not None), default)


def _ids(config: dict[str, Any], name: str) -> tuple[int, ...]:
    """A token id or a list of them."""
    found = _field(config, tuple[Natural, ...] if isinstance(config.get(name), list) else Natural, (), name)
    return found if isinstance(found, tuple) else (found,)


def _rotary(config: dict[str, Any], head_dim: int) -> tuple[tuple[float, ...], float, dict[str, Any]]:
    """Inverse frequencies, the factor on cos and sin, and the rope parameters themselves (plain RoPE or YaRN, arXiv 2309.00071)."""
    rope = _field(config, dict[str, Any], {}, "rope_parameters", "rope_scaling")
    (theta,) = _needed({"rope_theta": _field(rope, _BASE, config.get("rope_theta"), "rope_theta")}, {"rope_theta": _BASE})
    kind = _field(rope, str, "default", "rope_type", "type")
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if kind == "default":
        return tuple(plain), 1.0, rope
    if kind != "yarn":
        raise ValueError(f"rope_type={kind!r} is not supported; known: default, yarn")
    factor, length = _needed(rope, {"factor": _SCALE, "original_max_position_embeddings": Size})

    def correction(rotations: float) -> float:  # the dimension that turns `rotations` times over the original length
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction(_field(rope, _SCALE, 32.0, "beta_fast")), correction(_field(rope, _SCALE, 1.0, "beta_slow"))
    if _field(rope, bool, True, "truncate"):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(head_dim // 2)]
    scaled = [f / factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    attention_factor = _field(rope, _SCALE, None, "attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = (_field(rope, Annotated[float, 0, 1e6], 0.0, name) for name in ("mscale", "mscale_all_dim"))
        attention_factor = magnitude(mscale) / magnitude(mscale_all_dim) if mscale and mscale_all_dim else magnitude(1.0)
    return tuple(scaled), attention_factor, rope
