"""The golden decode cases: prompts, decode arguments, expected tokens and forwards; and which cases are out of scope, and why."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "golden"
MASK = {"fast_dllm_v2": 310, "nld": None, "sdar": 310}  # None: config.json has it
VOCAB = 320

_DUAL_CACHE = "keys and values of stale positions are reused inside a block (dual cache), which is another algorithm"
_NONCAUSAL = "the block's context is bidirectional, which no published model is decoded with"
_THINK = "a token is forced into the output after a budget"
_AUTOREGRESSIVE = "autoregressive decoding"
_LINEAR = "the model's own linear speculation, which verifies causally"
_TOP_K_1 = "top_k = 1 makes every confidence exactly 1, so each block is filled in one step whatever the threshold"
EXCLUDED: dict[str, dict[str, str]] = {
    "fast_dllm_v2": dict.fromkeys(
        (
            *("n1_t0.9_s32_bc", "n1_t0.5_s8_bc", "n5_t1.0_s8_bc", "n5_t0.9_s8_bc", "n5_t0.5_s8_bc", "n31_t1.0_s8_bc", "n31_t0.9_s8_bc"),
            *("n31_t0.5_s8_bc", "n33_t1.0_s8_bc", "n33_t0.9_s8_bc", "n33_t0.5_s8_bc", "n64_t1.0_s8_bc", "n64_t0.9_s8_bc", "n64_t0.5_s8_bc"),
            *("n70_t0.9_s8_bc", "n70_t0.9_s32_bc", "stop_n33_t0.5_s8_bc", "stop_n64_t0.7_s8_bc", "stop_n70_t1.0_s8_bc"),
            *("batch3_40_40_40_t0.9_s8_bc", "batch3_33_50_80_t0.7_s8_bc", "generate_b3_n64_t0.6_s32_bc"),
        ),
        _DUAL_CACHE,
    ),
    "nld": {
        "noncausal_n33_t0.9_b32": _NONCAUSAL,
        "think_n10_t0.9_m12": _THINK,
        **dict.fromkeys(("ar_n1", "ar_n33", "ar_n31_B3"), _AUTOREGRESSIVE),
        **dict.fromkeys(("spec_n1_t0.0_b32", "spec_n33_t0.0_b8", "spec_n70_t0.0_b16"), _LINEAR),
    },
    "sdar": {"topk1_n33_t0.5_b8": _TOP_K_1},
}


@dataclass(frozen=True)
class Case:
    """One golden case.

    `prompts`, `outputs`: a list per row; outputs include the prompt and end after the first stop token. `static`: the sizes and switches
    of `DecodeConfig` as pairs. `budgets`: new tokens a row may have. `nfe`: forwards, prefill included where `counts_prefill`; None
    where the authors' batch couples its rows. `compared`: rows whose tokens equal the authors' single runs.
    """

    family: str
    name: str
    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    static: tuple[tuple[str, Any], ...]
    stop_ids: tuple[int, ...]
    threshold: float
    budgets: tuple[int, ...]
    nfe: int | None
    counts_prefill: bool
    compared: tuple[bool, ...]
    raw: dict[str, Any]

    def decode_arguments(self) -> dict[str, Any]:
        """Arguments of `DecodeConfig` but the number of new tokens."""
        return dict(self.static) | {"stop_ids": self.stop_ids, "threshold": self.threshold}


def _arguments(family: str, p: dict[str, Any]) -> tuple[dict[str, Any], float, tuple[int, ...], int]:
    """Static decode arguments, threshold, stop ids, and the budget of a row that stops early."""
    match family:
        case "fast_dllm_v2":
            return {"sub_block": p["small_block_size"]}, p["threshold"], (p["stop_token"],), p["max_new_tokens"]
        case "nld":
            threshold = 1.0 if p["threshold"] is None else p["threshold"]
            return {"block_size": p["block_length"]}, threshold, (p["eos_token_id"],), p["max_new_tokens"]
        case _:
            static = {"block_size": p["block_length"], "steps": p["denoising_steps"]}
            static["order"] = "left" if p["remasking_strategy"] == "sequential" else "confidence"
            threshold = p["confidence_threshold"] if p["remasking_strategy"] == "low_confidence_dynamic" else 1.0
            return static, threshold, tuple(p["stopping_criteria_idx"] or ()), p["gen_length"]


def _case(family: str, raw: dict[str, Any]) -> Case:
    prompts, outputs = (x if isinstance(x[0], list) else [x] for x in (raw["prompt"], raw["output"]))
    static, threshold, stops, most = _arguments(family, raw["params"])
    stops = tuple(token for token in stops if token < VOCAB)  # the authors' "never" is an id beyond the vocabulary
    ends, budgets = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        stop = next((i for i in range(len(prompt), len(output)) if output[i] in stops), None)
        ends.append(tuple(output[: None if stop is None else stop + 1]))
        budgets.append(len(output) - len(prompt) if stop is None or family == "sdar" else max(most, stop + 1 - len(prompt)))
    return Case(
        family=family,
        name=raw["name"],
        prompts=tuple(map(tuple, prompts)),
        outputs=tuple(ends),
        static=tuple(sorted(static.items())),
        stop_ids=stops,
        threshold=threshold,
        budgets=tuple(budgets),
        nfe=raw["nfe"] if len(prompts) == 1 else None,
        counts_prefill=family != "nld",
        compared=tuple(raw.get("rows_equal_single_run") or [True] * len(prompts)),
        raw=raw,
    )


@cache
def _raw(family: str, file: str) -> tuple[dict[str, Any], ...]:
    return tuple(json.loads((GOLDEN / family / f"{file}.json").read_text()))


def names(family: str) -> list[str]:
    """The names of all of a family's cases."""
    return [raw["name"] for raw in _raw(family, "cases_open")]


def in_scope(family: str) -> tuple[Case, ...]:
    """The cases this package must reproduce."""
    return tuple(_case(family, raw) for raw in _raw(family, "cases_open") if raw["name"] not in EXCLUDED[family])


def bugs(family: str, file: str) -> tuple[Case, ...]:
    """Cases whose outputs show a fault of the authors' code."""
    return tuple(_case(family, raw) for raw in _raw(family, f"official_bug_{file}"))
