"""A profile: the method and the settings that `specfold tune` chose for a model on a device, and what it measured.

    found = profile.load("profile.json")
    decoded = batch.run(params, prompts, lengths, Decoding(model, found.decode, found.graph, found.fold))

decodes with it whatever its method: vanilla's graph is empty, and only SpecFold has a fold.
"""

import json
import math
import os
from dataclasses import asdict, dataclass, fields
from typing import Any

from specfold_jax import values as graph_json_values
from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.diffusion.graph import DraftGraph, differing, require_made_for
from specfold_jax.files import read_json, write_json
from specfold_jax.methods import METHODS, MethodName
from specfold_jax.values import Size, conform, conforming

_MADE_FOR: dict[str, Any] = {"model": str, "vocab": Size, "block": Size, "sub_block": Size}


@dataclass(frozen=True, eq=False)  # a graph of arrays has no truth value under `==`
class Profile:
    """`method`, and the arguments of a decode with it. `made_for`: model name, vocabulary, block and sub-block (positions).

    `measured`: figures and intervals of the choice and its rivals; `notes`: what to know about them, in words.
    """

    method: MethodName
    decode: DecodeConfig
    graph: DraftGraph
    fold: FoldConfig | None
    made_for: dict[str, Any]
    measured: dict[str, Any]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        conform(self)
        graph_json_values.same_names("made_for", self.made_for, list(_MADE_FOR))
        made_for = {name: conforming(f"made_for[{name!r}]", self.made_for[name], hint) for name, hint in _MADE_FOR.items()}
        method = METHODS[self.method]
        if (self.fold is not None) != method.folds:
            raise ValueError(f"method={self.method!r} must {'have a' if method.folds else 'not have a'} fold")
        if (self.graph.max_drafts > 0) != method.drafts:
            raise ValueError(f"method={self.method!r} does not go with a graph of at most {self.graph.max_drafts} drafts a check")
        require_made_for(self.graph, *made_for.values())

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

    def require_made_for(self, name: str, model: ModelConfig, block: int | None = None, sub_block: int | None = None) -> None:
        """Raises ValueError naming what differs from what the profile was made for. `block`, `sub_block`: sizes asked for, if any."""
        here = made_for(name, model, self.decode) | {k: v for k, v in (("block", block), ("sub_block", sub_block)) if v}
        if differ := differing(self.made_for, here):
            raise ValueError(f"the profile was made for {differ}; run specfold tune for this model and decoding")


def load(path: str | os.PathLike, name: str | None = None, model: ModelConfig | None = None) -> Profile:
    """Reads a profile; with a model, also checks that it was made for it (`name`: the model's, as `specfold tune` recorded it).

    Raises ValueError naming the file and what is wrong or differs.
    """
    data = read_json(path, "a profile")
    try:
        graph_json_values.same_names("the profile", data, [field.name for field in fields(Profile)])
        found = Profile(
            method=data["method"],
            decode=_config(DecodeConfig, "decode", data["decode"]),
            graph=DraftGraph.empty() if data["graph"] is None else graph_from(data["graph"]),
            fold=None if data["fold"] is None else _config(FoldConfig, "fold", data["fold"]),
            made_for=data["made_for"],
            measured=data["measured"],
            notes=data["notes"],
        )
        if model is not None:
            found.require_made_for(found.made_for["model"] if name is None else name, model)
        return found
    except ValueError as error:
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
    graph_json_values.same_names(name, values, list(cls.__dataclass_fields__))  # type: ignore[attr-defined]  (cls is a dataclass)
    return cls(**{key: math.inf if value == "inf" else value for key, value in values.items()})


def graph_record(graph: DraftGraph) -> dict[str, Any]:
    """A graph as the JSON value of its file."""
    return json.loads(graph.text())


def graph_from(record: Any) -> DraftGraph:
    """The graph of such a value."""
    try:
        return DraftGraph.parse(record)
    except ValueError as error:
        raise ValueError(f"graph: {error}") from error
