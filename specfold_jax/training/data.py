"""The training set on disk: tokenizer, compressed samples and held-out problems. It is made once, on a CPU."""

import hashlib
import io
import json
import lzma
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specfold_jax.text import problems as data
from specfold_jax.text.tokens import load_tokenizer
from specfold_jax.training.batches import Samples
from specfold_jax.training.tokenizer import ANSWER, END, VOCAB, encode_plain, train_tokenizer

_SAMPLES_A_FILE = 200_000  # under 7 MB a file: 29 bytes a sample
_TOKENIZER_PROBLEMS = 20_000


class TrainData(NamedTuple):
    """A prepared folder: `meta` is its meta.json, `digest` identifies its contents."""

    samples: Samples
    tokenizer: Any
    meta: dict[str, Any]
    digest: str


def to_samples(problems: Sequence[data.Problem], tokenizer: Any) -> Samples:
    """A sample for each problem: question, separator, worked answer, stop token. The answer starts after the separator."""
    questions = encode_plain(tokenizer, [p.question + ANSWER for p in problems])
    answers = encode_plain(tokenizer, [p.answer_text + END for p in problems])
    starts = np.array([len(q) for q in questions], np.int32)
    lengths = starts + np.array([len(a) for a in answers], np.int32)
    tokens = np.fromiter((i for pair in zip(questions, answers, strict=True) for ids in pair for i in ids), np.uint16, int(lengths.sum()))
    return Samples(tokens, lengths, starts)


def prepare(out: Path, draws: int = 600_000, seed: int = 0, held_out: int = 2000, vocab: int = VOCAB) -> dict[str, Any]:
    """Writes the tokenizer, the samples of the different problems among `draws`, and `held_out` problems. Returns meta.json's content.

    600 000 draws take about five minutes on two cores, and 17 MB. Raises ValueError if `out` exists and is not empty.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} must be a new or empty folder")
    problems = data.generate(draws, seed)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer((t for p in problems[:_TOKENIZER_PROBLEMS] for t in (p.question, p.answer_text)), vocab)
    tokenizer.save_pretrained(out / "tokenizer", save_jinja_files=False)
    data.write_problems(out / "held_out.jsonl", data.held_out(held_out, {p.question for p in problems}))
    tokens = answers = longest = 0
    with ThreadPoolExecutor() as pool:  # lzma releases the interpreter's lock
        writes = []
        for index, first in enumerate(range(0, len(problems), _SAMPLES_A_FILE)):
            samples = to_samples(problems[first : first + _SAMPLES_A_FILE], tokenizer)
            tokens += int(samples.lengths.sum())
            answers += int((samples.lengths - samples.answer_starts).sum())
            longest = max(longest, int(samples.lengths.max()))
            writes.append(pool.submit(_write, out / f"samples-{index:03}.npz.xz", samples))
        for write in writes:
            write.result()
    meta = {
        "task": "gsm_symbolic",
        "reasoning_gym": metadata.version("reasoning-gym"),
        "draws": draws,
        "seed": seed,
        "samples": len(problems),
        "tokens": tokens,
        "answer_tokens": answers,
        "longest": longest,
        "vocab": vocab,
        "held_out": held_out,
        "held_out_seed": data.HELD_OUT_SEED,
    }
    (out / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    return meta


def _write(path: Path, samples: Samples) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **samples._asdict())
    path.write_bytes(lzma.compress(buffer.getbuffer()))


def load(folder: Path) -> TrainData:
    """Reads a folder that `prepare` wrote. Raises ValueError if it is not complete."""
    files = sorted(folder.glob("samples-*.npz.xz"))
    if not (folder / "meta.json").is_file() or not files:
        raise ValueError(f"{folder} must be a folder of training data: it lacks meta.json or samples-*.npz.xz")
    meta = json.loads((folder / "meta.json").read_text())
    contents = [file.read_bytes() for file in files]
    digest = hashlib.sha256(b"".join(contents) + (folder / "tokenizer" / "tokenizer.json").read_bytes()).hexdigest()
    with ThreadPoolExecutor() as pool:
        parts = list(pool.map(_read, contents))
    samples = Samples(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    if samples.lengths.size != meta["samples"]:
        raise ValueError(f"{folder} must hold {meta['samples']} samples, as its meta.json says; its files hold {samples.lengths.size}")
    return TrainData(samples, load_tokenizer(folder / "tokenizer"), meta, digest)


def _read(content: bytes) -> Samples:
    with np.load(io.BytesIO(lzma.decompress(content))) as arrays:
        return Samples(*(arrays[name] for name in Samples._fields))
