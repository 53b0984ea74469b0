"""The decoding methods there are: one table that the command line, benchmarks and tests read."""

from dataclasses import dataclass
from typing import Literal

MethodName = Literal["vanilla", "spiffy", "specfold"]


@dataclass(frozen=True)
class Method:
    """`name`: in commands and files; `title`: in text. `drafts`: it evaluates the drafts of a graph. `folds`: it takes a `FoldConfig`.
    `lossless`: its tokens are vanilla's whatever its configuration says."""

    name: MethodName
    title: str
    drafts: bool
    folds: bool
    lossless: bool


METHODS: dict[MethodName, Method] = {
    method.name: method
    for method in (
        Method("vanilla", "vanilla", drafts=False, folds=False, lossless=True),
        Method("spiffy", "Spiffy", drafts=True, folds=False, lossless=True),
        Method("specfold", "SpecFold", drafts=True, folds=True, lossless=False),
    )
}
"""By name, each after those it builds on."""


def method_named(name: str) -> Method:
    """The method of this name. Raises ValueError naming those there are."""
    for method in METHODS.values():
        if method.name == name:
            return method
    raise ValueError(f"method={name!r} must be one of {', '.join(METHODS)}")
