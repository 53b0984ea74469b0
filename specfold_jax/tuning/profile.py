"""A profile: the method and the settings that `specfold tune` chose for a model on a device, and what it measured.

    found = Profile.load("profile.json")
    decoded = batch.run(params, prompts, lengths, Decoding(model, found.decode, found.graph, found.fold))

This decodes with any method: vanilla's graph is empty, and only SpecFold has a fold.
"""

import os
from dataclasses import asdict, dataclass, fields
from typing import Any

from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.diffusion.graph import DraftGraph, differing, require_made_for
from specfold_jax.files import read_json, write_json
from specfold_jax.methods import METHODS, MethodName
from specfold_jax.values import Size, conform, conforming, of_record, same_names, to_json

_MADE_FOR: dict[str, Any] = {"model": str, "vocab": Size, "block": Size, "sub_block": Size}


@dataclass(frozen=True, eq=False)  # a graph of arrays has no truth value under `==`
class Profile:
    """`method`, and what a decode with it takes. `made_for`: model name, vocabulary, block and sub-block (positions).

    `measured`: figures and intervals of the choice and its rivals. `notes`: what to know about them, in words.
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
        same_names("made_for", self.made_for, list(_MADE_FOR))
        made_for = {name: conforming(f"made_for[{name!r}]", self.made_for[name], hint) for name, hint in _MADE_FOR.items()}
        method = METHODS[self.method]
        if (self.fold is not None) != method.folds:
            raise ValueError(f"method={self.method!r} must {'have a' if method.folds else 'not have a'} fold")
        if (self.graph.max_drafts > 0) != method.drafts:
            raise ValueError(f"method={self.method!r} does not go with a graph of at most {self.graph.max_drafts} drafts a check")
        require_made_for(self.graph, *made_for.values())

    def record(self) -> dict[str, Any]:
        """The profile as a JSON value, its graph inside."""
        return {
            "method": self.method,
            "decode": to_json(asdict(self.decode)),
            "fold": None if self.fold is None else to_json(asdict(self.fold)),
            "graph": self.graph.record() if METHODS[self.method].drafts else None,
            "made_for": self.made_for,
            "measured": self.measured,
            "notes": list(self.notes),
        }

    @classmethod
    def of(cls, record: Any) -> "Profile":
        """The profile of `record`'s value. Raises ValueError naming the field."""
        same_names("the profile", record, [field.name for field in fields(cls)])
        configs = {
            "decode": of_record(DecodeConfig, "decode", record["decode"]),
            "fold": None if record["fold"] is None else of_record(FoldConfig, "fold", record["fold"]),
            "graph": DraftGraph.empty() if record["graph"] is None else graph_of(record["graph"]),
        }
        return cls(**record | configs)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the profile as JSON."""
        write_json(path, self.record())

    @classmethod
    def load(cls, path: str | os.PathLike, name: str | None = None, model: ModelConfig | None = None) -> "Profile":
        """Reads a profile. If a model is given, also checks that the profile was made for it. `name`: the model's, as it was recorded.

        Raises ValueError naming the file and what is wrong or differs.
        """
        data = read_json(path, "a profile")
        try:
            found = cls.of(data)
            if model is not None:
                found.require_made_for(found.made_for["model"] if name is None else name, model)
            return found
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def require_made_for(self, name: str, model: ModelConfig, block: int | None = None, sub_block: int | None = None) -> None:
        """Raises ValueError naming what differs from what the profile was made for. `block`, `sub_block`: sizes asked for, if any."""
        here = made_for(name, model, self.decode) | {k: v for k, v in (("block", block), ("sub_block", sub_block)) if v}
        if differ := differing(self.made_for, here):
            raise ValueError(f"the profile was made for {differ}; run specfold tune for this model and decoding")


def made_for(name: str, model: ModelConfig, decode: DecodeConfig) -> dict[str, Any]:
    """What a profile is bound to."""
    return {"model": name, "vocab": model.vocab, "block": decode.block(model), "sub_block": decode.window(model)}


def graph_of(record: Any) -> DraftGraph:
    """`DraftGraph.of`, for a graph inside another record."""
    try:
        return DraftGraph.of(record)
    except ValueError as error:
        raise ValueError(f"graph: {error}") from error
