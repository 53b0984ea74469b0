"""A profile: the method and the settings that `specfold tune` chose for a model on a device, and what it measured.

    profile = profile.load("profile.json")
    specfold_decode(params, prompts, lengths, model, profile.decode, profile.graph, profile.fold)

decodes with it whatever its method: vanilla's graph is empty, and only SpecFold has a fold.
"""

import json
import math
import os
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from specfold_jax import graph_json
from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.generate import METHODS, Method
from specfold_jax.graph import DraftGraph
from specfold_jax.timing_table import write_json


@dataclass(frozen=True, eq=False)  # a graph of arrays has no truth value under `==`
class Profile:
    """`method`, and the arguments of a decode with it. `made_for`: model name, vocabulary, block and sub-block (positions).

    `measured`: figures and intervals of the choice and its rivals; `notes`: what to know about them, in words.
    """

    method: Method
    decode: DecodeConfig
    graph: DraftGraph
    fold: FoldConfig | None
    made_for: dict[str, Any]
    measured: dict[str, Any]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} must be one of {METHODS}")
        if (self.fold is not None) != (self.method == "specfold"):
            raise ValueError(f"method={self.method!r} must {'have a' if self.method == 'specfold' else 'not have a'} fold")
        if (self.graph.max_drafts > 0) != (self.method != "vanilla"):
            raise ValueError(f"method={self.method!r} does not go with a graph of at most {self.graph.max_drafts} drafts a check")

    def save(self, path: str | os.PathLike) -> None:
        """Writes the profile as JSON, its graph inside; the file is whole or not there."""
        record = {
            "method": self.method,
            "decode": config_record(self.decode),
            "fold": None if self.fold is None else config_record(self.fold),
            "graph": None if self.method == "vanilla" else graph_record(self.graph),
            "made_for": self.made_for,
            "measured": self.measured,
            "notes": list(self.notes),
        }
        write_json(path, record)

    def check(self, name: str, model: ModelConfig, block: int | None = None, sub_block: int | None = None) -> None:
        """Raises ValueError naming what differs from what the profile was made for. `block`, `sub_block`: sizes asked for, if any."""
        here = made_for(name, model, self.decode) | {k: v for k, v in (("block", block), ("sub_block", sub_block)) if v}
        if differ := [
            f"{key}={self.made_for.get(key)!r} (here {value!r})" for key, value in here.items() if self.made_for.get(key) != value
        ]:
            raise ValueError(f"the profile was made for {', '.join(differ)}; run specfold tune for this model and decoding")


def load(path: str | os.PathLike, name: str | None = None, model: ModelConfig | None = None) -> Profile:
    """Reads a profile; with a model, also checks that it was made for it (`name`: the model's, as `specfold tune` recorded it).

    Raises ValueError naming the file and what is wrong or differs.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        graph_json.same_names("the profile", data, [field.name for field in fields(Profile)])
        graph_json.same_names("made_for", data["made_for"], ["model", "vocab", "block", "sub_block"])
        found = Profile(
            method=data["method"],
            decode=_config(DecodeConfig, "decode", data["decode"]),
            graph=DraftGraph.empty() if data["graph"] is None else graph_from(data["graph"]),
            fold=None if data["fold"] is None else _config(FoldConfig, "fold", data["fold"]),
            made_for=data["made_for"],
            measured=data["measured"],
            notes=tuple(data["notes"]),
        )
        if model is not None:
            found.check(found.made_for["model"] if name is None else name, model)
        return found
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def made_for(name: str, model: ModelConfig, decode: DecodeConfig) -> dict[str, Any]:
    """What a profile is bound to."""
    return {"model": name, "vocab": model.vocab, "block": decode.block(model), "sub_block": decode.window(model)}


def config_record(config: DecodeConfig | FoldConfig) -> dict[str, Any]:
    """A configuration as JSON values: float32 numbers by their own digits, infinity as a word."""

    def plain(value: Any) -> Any:
        if hasattr(value, "dtype"):
            value = value.tolist() if value.dtype.kind in "iu" or value.ndim else float(str(value))
        return "inf" if value == math.inf else value

    return {key: plain(value) for key, value in asdict(config).items()}


def _config[T](cls: type[T], name: str, values: Any) -> T:
    graph_json.same_names(name, values, list(cls.__dataclass_fields__))  # type: ignore[attr-defined]  (cls is a dataclass)
    return cls(**{key: math.inf if value == "inf" else value for key, value in values.items()})


def graph_record(graph: DraftGraph) -> dict[str, Any]:
    """A graph as the JSON value of its file."""
    with tempfile.TemporaryDirectory() as folder:  # the file format has one writer and one reader, which check everything
        graph.save(Path(folder) / "graph.json")
        return json.loads((Path(folder) / "graph.json").read_text(encoding="utf-8"))


def graph_from(record: Any) -> DraftGraph:
    """The graph of such a value."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.json"
        file.write_text(json.dumps(record), encoding="utf-8")
        try:
            return DraftGraph.load(file)
        except ValueError as error:
            raise ValueError(f"graph: {str(error).removeprefix(f'{file}: ')}") from error
