"""Prompt files: one prompt a line, as plain text or as JSON objects."""

import json
from pathlib import Path
from typing import Any

from specfold_jax.values import conforming


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file, one a line. Blank lines are skipped.

    In a `.txt` file the line is the prompt. In a `.jsonl` file it is an object with the string "prompt" or "question", or with Spec-Bench's
    list "turns", whose first turn is the prompt. Raises ValueError naming the file, the line and what would be right.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"{path}: a prompts file must be named .txt (one prompt a line) or .jsonl (one object a line)")
    return [line if path.suffix == ".txt" else _prompt(where, json_object(where, line)) for where, line in lines_of(path)]


def lines_of(path: Path) -> list[tuple[str, str]]:
    """Every line that is not blank, with "file:number" for messages."""
    lines = []
    for number, raw in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}:{number}: must be UTF-8 text ({error.reason} at byte {error.start})") from error
        if text.strip():
            lines.append((f"{path}:{number}", text))
    if not lines:
        raise ValueError(f"{path}: is empty; it must hold at least one line")
    return lines


def json_object(where: str, line: str) -> dict[str, Any]:
    """The object of a line. Raises ValueError, which begins with `where`, if it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # not JSON, a number with too many digits, or nested too deeply
        raise ValueError(f"{where}: must be one JSON object ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f'{where}: must be a JSON object such as {{"prompt": "..."}}, got {type(record).__name__}')
    return record


def _prompt(where: str, record: dict[str, Any]) -> str:
    turns = record.get("turns")
    first = turns[0] if isinstance(turns, list) and turns else None
    prompt = record.get("prompt", record.get("question", first))
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f'{where}: must have a non-empty string "prompt" or "question", or a list "turns"; got keys {sorted(record)}')
    return conforming(f"{where}: prompt", prompt, str)
