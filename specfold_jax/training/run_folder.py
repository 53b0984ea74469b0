"""A training run on disk: `step-00001200/` (safetensors and meta.json), `curve.jsonl`, and in the end `model/`.

A "complete" checkpoint holds all of the state and resumes bit for bit. A "compact" one holds the weights and the step alone, a third of the
size. A run that resumes from it starts AdamW's moments from zero, under another warm-up. meta.json says which kind a checkpoint is.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from specfold_jax.models import checkpoint
from specfold_jax.training.data import TrainData
from specfold_jax.training.step import State, TrainConfig
from specfold_jax.training.tokenizer import END, MASK, PAD
from specfold_jax.values import conforming

Kind = Literal["complete", "compact"]


def latest(out: Path) -> Path | None:
    """The newest checkpoint of a run. A checkpoint has its name only once it is complete."""
    return max((p for p in out.glob("step-*") if (p / "meta.json").is_file()), default=None)


def _named(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def save_state(out: Path, state: State, meta: Mapping[str, Any], kind: Kind = "complete", shard_mib: float | None = None) -> Path:
    """Writes a checkpoint under another name, renames it, then deletes older ones. `shard_mib`: the largest size of its files."""
    conforming("kind", kind, Kind)
    named = {name: np.asarray(jax.device_get(x)) for name, x in _named(state).items()}
    if kind == "compact":
        named = {name: x for name, x in named.items() if name == "step" or name.startswith("params/")}
    shards: list[dict[str, np.ndarray]] = [{}]
    limit = float("inf") if shard_mib is None else shard_mib * 2**20 - 2**16  # less the file's header
    for name, array in named.items():
        if shards[-1] and sum(x.nbytes for x in shards[-1].values()) + array.nbytes > limit:
            shards.append({})
        shards[-1][name] = array
    out.mkdir(parents=True, exist_ok=True)
    final = out / f"step-{int(state.step):08}"
    partial = out / f".partial-{final.name}-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for index, shard in enumerate(shards):
        save_file(shard, partial / f"state-{index:03}.safetensors")
    about = {"kind": kind, "step": int(state.step), "shards": len(shards)} | dict(meta)
    (partial / "meta.json").write_text(json.dumps(about, indent=2) + "\n")
    if final.exists():  # the same step of the same run
        final.rename(partial / "replaced")
    partial.rename(final)
    shutil.rmtree(final / "replaced", ignore_errors=True)
    for old in out.glob("step-*"):
        if old.name < final.name:
            shutil.rmtree(old)
    return final


def read_meta(folder: Path) -> dict[str, Any]:
    """A checkpoint's meta.json: kind, step, seconds, configuration, digest of the data."""
    return json.loads((folder / "meta.json").read_text())


def load_state(folder: Path, like: State) -> tuple[State, dict[str, Any]]:
    """Reads a checkpoint, and its meta.json. `like`: a fresh state of the same shapes. Raises ValueError naming what does not fit."""
    meta = read_meta(folder)
    files = sorted(folder.glob("state-*.safetensors"))
    if len(files) != meta["shards"]:
        raise ValueError(f"{folder} must hold {meta['shards']} state files, as its meta.json says; it holds {len(files)}")
    found: dict[str, np.ndarray] = {}
    for file in files:
        found |= load_file(file)
    compact = meta["kind"] == "compact"
    wanted = _named(like)
    for name, leaf in wanted.items():
        if name in found:
            is_, must = (f"{x.dtype}{list(x.shape)}" for x in (found[name], leaf))
            if is_ != must:
                raise ValueError(f"{folder}: {name} is {is_}, must be {must}")
        elif not compact or name.startswith("params/"):
            raise ValueError(f"{folder}: {name} is missing")
    if compact:
        found["restart"] = found["step"]
    leaves = [jnp.asarray(found[name]) if name in found else leaf for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves), meta


def append_curve(out: Path, record: Mapping[str, Any]) -> None:
    """Adds a line to the learning curve."""
    with (out / "curve.jsonl").open("a") as file:
        file.write(json.dumps(dict(record)) + "\n")


def read_curve(out: Path) -> list[dict[str, Any]]:
    """The learning curve. Steps increase: of lines that a resumed run repeated, only the later ones are kept."""
    path, kept = out / "curve.jsonl", []
    for line in path.read_text().splitlines() if path.is_file() else []:
        record = json.loads(line)
        while kept and kept[-1]["step"] >= record["step"]:
            kept.pop()
        kept.append(record)
    return kept


def write_model(out: Path, state: State, config: TrainConfig, data: TrainData) -> Path:
    """Writes `model/`: weights in bfloat16, config.json, the tokenizer and a model card. The folder appears when it is complete."""
    folder, partial = out / "model", out / f".partial-model-{os.getpid()}"
    if folder.exists():
        raise ValueError(f"{folder} exists already")
    shutil.rmtree(partial, ignore_errors=True)
    special = special_ids(data)
    checkpoint.save(partial, state.params, config.model(*special), config.hugging_face(*special))
    data.tokenizer.save_pretrained(partial, save_jinja_files=False)
    (partial / "README.md").write_text(model_card(out, int(state.step), config, data))
    partial.rename(folder)
    return folder


def special_ids(data: TrainData) -> tuple[int, int, int, int]:
    """Vocabulary size and the ids of mask, end and pad."""
    vocab = data.tokenizer.get_vocab()
    return len(vocab), vocab[MASK], vocab[END], vocab[PAD]


def model_card(out: Path, step: int, config: TrainConfig, data: TrainData) -> str:
    """README.md of the model folder. Accuracy comes from `evaluation.json` in the run's folder, if there is one."""
    curve, meta = read_curve(out), data.meta
    last = curve[-1] if curve else {"epochs": 0.0, "loss": float("nan"), "accuracy": float("nan"), "seconds": 0.0}
    file = out / "evaluation.json"
    scores = json.loads(file.read_text()) if file.is_file() else {}
    accuracy = "\n".join(f"- {name}: {value}" for name, value in scores.items()) or "- accuracy: not evaluated yet"
    return f"""---
license: apache-2.0
pipeline_tag: text-generation
---

# A tiny block-diffusion language model

Trained from scratch by `specfold train` to have a real model for tests, examples and benchmarks. It solves grade-school word problems of
reasoning-gym's `{meta["task"]}` with worked answers, and nothing else.

- architecture: Fast-dLLM v2 (Qwen2.5 with QKV bias, tied embeddings): {config.layers} layers, width {config.dim}, {config.heads} heads,
  {config.kv_heads} key-value head(s) of {config.head_dim}, feed-forward {config.ffn_dim}, vocabulary {len(data.tokenizer)};
  block {config.block_size}, shifted logits
- data: {meta["samples"]} different problems from {meta["draws"]} draws (reasoning-gym {meta["reasoning_gym"]}, seed {meta["seed"]}),
  {meta["tokens"]} tokens
- recipe: Fast-dLLM v2's (arXiv 2509.26328): complementary masks over the answer, a block's first token predicted from the committed
  block before it; AdamW {config.rate:g}, cosine to {config.final_rate:g} of it, {config.warmup} warm-up steps, {config.rows} rows a step,
  {config.dtype}
- training: {step} steps, about {last["epochs"] * meta["samples"]:,.0f} samples and {last["epochs"] * meta["tokens"]:,.0f} clean tokens,
  {last["seconds"]:.0f} s; at the end loss {last["loss"]:.4f}, masked accuracy {last["accuracy"]:.4f}
{accuracy}

Prompts go through the chat template: the question, then `<|answer|>`. The answer ends with `#### number` and `<|end|>`.
"""
