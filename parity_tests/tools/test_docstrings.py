"""The worked examples in docstrings, run as they stand."""

import doctest
import importlib
from pathlib import Path

import specfold_jax
from specfold_jax.diffusion.accept import Chain
from specfold_jax.diffusion.draft import Drafts, Known
from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.models.check import Branches
from specfold_jax.models.fold import Gate

EXPLAINED = (Branches, Chain, DraftGraph, Drafts, Gate, Known)
"""Classes that must have an example."""


def examples() -> list[doctest.DocTest]:
    """All docstrings of the package that have examples. Modules without any are not imported."""
    root = Path(specfold_jax.__file__).parent
    paths = [path.relative_to(root.parent) for path in sorted(root.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]
    modules = [importlib.import_module(".".join(path.with_suffix("").parts)) for path in paths]
    return [test for module in modules for test in doctest.DocTestFinder().find(module) if test.examples]


def test_examples_in_docstrings_are_right():
    results = {test.name: doctest.DocTestRunner(verbose=False).run(test) for test in examples()}
    assert [name for name, result in results.items() if result.failed] == []
    for explained in EXPLAINED:
        assert results[f"{explained.__module__}.{explained.__name__}"].attempted, explained
