"""Runs of the golden cases, which the tests of both sides share."""

from collections.abc import Callable
from functools import cache

import pytest

from parity_tests.harness.checkpoints import FAMILIES
from parity_tests.harness.golden_cases import Case, in_scope

Rows = list[tuple[list[int], int]]
"""Tokens and forwards of each row."""


Run = Callable[..., Rows]


EVERY = [pytest.param(case, id=f"{case.family}-{case.name}") for family in FAMILIES for case in in_scope(family)]


@cache
def alike(family: str) -> dict[tuple, list[Case]]:
    """The cases in scope by what they can share a call with."""
    groups: dict[tuple, list[Case]] = {}
    for case in in_scope(family):
        groups.setdefault((case.static, case.stop_ids, case.threshold), []).append(case)
    return groups


def results_of(run: Run, checkpoints) -> Callable[[Case], Rows]:
    """The result of a case, with `run` called once for all cases that are alike."""

    @cache
    def of_group(family: str, key: tuple) -> dict[str, Rows]:
        rows = iter(run(checkpoints[family], alike(family)[key]))
        return {case.name: [next(rows) for _ in case.prompts] for case in alike(family)[key]}

    return lambda case: of_group(case.family, (case.static, case.stop_ids, case.threshold))[case.name]


def assert_the_authors(case: Case, rows: Rows) -> None:
    """Tokens and forwards are those the authors' code gave."""
    assert any(case.compared)
    for (tokens, forwards), want, compared in zip(rows, case.outputs, case.compared, strict=True):
        if compared:
            # A batch of the authors' ends for all rows at once, so a row's expected tokens may break off before its budget.
            assert tokens[: len(want)] == list(want)
            assert case.nfe is None or len(tokens) == len(want)
        assert case.nfe is None or forwards == case.nfe
