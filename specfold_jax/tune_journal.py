"""What a tune run has measured so far, on disk: an interrupted run continues, and another run in its folder is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specfold_jax.timing_table import write_json


class Journal:
    """The folder of a run: `tune.json` says what runs there, `results.jsonl` holds what is measured, line by line as it comes."""

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        """Begins a run in a new folder, or continues the same one. Raises ValueError saying what differs."""
        self.folder, self.path = folder, folder / "results.jsonl"
        plan_path = folder / "tune.json"
        plan = json.loads(json.dumps(plan))
        if plan_path.is_file():
            before = json.loads(plan_path.read_text(encoding="utf-8"))
            if differ := _differences(before, plan):
                raise ValueError(f"{folder} holds a run with {', '.join(differ)}; use another folder, or the same settings to continue it")
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} exists already and holds no tune run; name a new folder")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(plan_path, plan)
        text = self.path.read_text(encoding="utf-8") if self.path.is_file() else ""
        text = text[: text.rfind("\n") + 1]  # a line cut short by an interruption
        self.path.write_text(text, encoding="utf-8")
        self.entries: dict[str, Any] = {entry["key"]: entry["value"] for entry in map(json.loads, text.splitlines())}

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """The value of `key`, made and written down where it is new."""
        if key not in self.entries:
            value = json.loads(json.dumps(make()))
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "value": value}) + "\n")
            self.entries[key] = value
        return self.entries[key]


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What two plans disagree on, entry by entry."""
    found = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differences(old, new)
        elif old != new:
            found.append(f"{name}={old!r} (now {new!r})")
    return found
