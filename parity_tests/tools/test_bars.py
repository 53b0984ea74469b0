"""The table of bars and that of tokens a second, on made-up results."""

import pytest

from benchmarks.tables.bars import bars
from benchmarks.tables.implementations import profile, tokens

FIXED = {"shape": "1.5b", "dtype": "bfloat16", "prefix": 512}


def check(ms, impl="pallas", batch=1, drafts=8, tau=None, recompute=None, groups=None):
    setting = FIXED | {"impl": impl, "batch": batch, "drafts": drafts, "tau": tau}
    rows = batch * (drafts + 1) * 32
    measured = {"median_ms": ms, "rows": rows, "recompute": recompute, "kernels": groups and {"all": ms, "groups": groups}}
    return {"setting": setting, "measured": measured}


def decode(method, step, overhead=0.0, tau=None, impl="pallas", rate=100.0):
    setting = FIXED | {"impl": impl, "batch": 1, "method": method, "drafts": 8, "tau": tau, "guard": 0.5}
    part = {"median_ms": step, "kernels": None}
    one = {"step": part, "check": part, "overhead_ms": overhead, "rows": 288, "recompute": [0.2, 0.3]}
    return {"setting": setting, "measured": {"one": one, "tokens_per_second": rate, "recompute_ratio": 0.25}}


def lines(text):
    """Of each line of a table its cells."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")][1:]


CHECKS = [
    check(1.4, drafts=0),
    check(2.4, groups={"gate": 0.0, "pack": 0.0, "rows": 0.25, "attention": 0.27}),
    check(2.0, tau=0.1, recompute=[0.2, 0.22], groups={"gate": 0.21, "pack": 0.11, "rows": 0.11, "attention": 0.27}),
    check(1.9, tau=0.05, recompute=[0.4, 0.3]),
    check(10.0, batch=8),
    check(6.0, batch=8, tau=0.1, recompute=[0.2, 0.2]),
    check(2.0, impl="xla", drafts=0),
    check(2.3, impl="xla"),
    check(4.0, drafts=15),
    check(4.0, impl="xla", drafts=15),
]
DECODES = [decode("vanilla", 1.6, 0.1), decode("specfold", 2.2, 0.33, tau=0.1)]


def test_bars():
    assert lines(bars(DECODES, CHECKS)) == [
        ["vanilla step, 32 rows", "1.55 ms", "1.60 ms", "missed"],
        ["Spiffy check, D = 8 (288 rows), over the vanilla step", "1.70x", "1.50x", "met"],
        ["SpecFold check, D = 8, tau 0.1 (recompute 0.21), over the vanilla step", "1.25x", "1.25x", "met"],
        ["SpecFold check, D = 8, tau 0.1 (recompute 0.21): folding itself, less the row kernels it replaces", "10%", "9%", "met"],
        ["SpecFold check, D = 8, tau 0.1 (recompute 0.20), batch 8, over the Spiffy check", "0.55x", "0.60x", "missed"],
        ["vanilla step, all but the model's forward", "10%", "6%", "met"],
        ["SpecFold step, all but the model's forward", "10%", "15%", "missed"],
        ["whole check of 1 to 288 rows, over XLA's, at worst", "1.00x", "1.04x", "missed"],
        ["whole check of 289 to 1024 rows, over XLA's, at worst", "1.15x", "1.00x", "met"],
    ]


@pytest.mark.parametrize(("decodes", "checks"), [([], []), (DECODES, []), ([], CHECKS)])
def test_what_was_not_measured_is_said(decodes, checks):
    found = lines(bars(decodes, checks))
    assert all((cells[2] == "-") == (cells[3] == "not measured") for cells in found)
    assert sum(cells[3] == "not measured" for cells in found) == {0: 9, 2: 6, 10: 5}[len(decodes) + len(checks)]


def test_kernels_that_the_profiler_did_not_see_are_not_measured():
    unseen = [row | {"measured": row["measured"] | {"kernels": {"error": "lost"}}} for row in CHECKS]
    assert [cells[3] for cells in lines(bars(DECODES, unseen)) if "folding itself" in cells[0]] == ["not measured"]


def test_tokens():
    results = [
        decode("vanilla", 1, rate=200.0),
        decode("spiffy", 1, rate=500.0),
        decode("specfold", 1, tau=0.0),
        decode("specfold", 1, tau=0.1),
    ]
    results += [decode(method, 1, impl="xla") for method in ("vanilla", "specfold")]  # not whole
    assert lines(tokens(results)) == [["1.5b", "1", "pallas", "8", "0.1", "200", "500", "100", "0.50", "0.20", "0.25"]]


def test_profile_of_a_step():
    seen, unseen = decode("vanilla", 1.6), decode("specfold", 2.2, tau=0.1)
    groups = dict(
        zip(("products", "attention", "gate", "pack", "rows", "head", "rest"), (1.0, 0.2, 0.0, 0.0, 0.1, 0.125, 0.075), strict=True)
    )
    seen["measured"]["one"] |= {"step": {"median_ms": 1.6, "kernels": {"all": 1.5, "groups": groups}}, "floors": {"bytes_floor_ms": 0.6}}
    seen["measured"] |= {"title": "vanilla", "iteration": {"bytes_floor_ms": 0.75}}
    every = ["1.000", "0.200", "0.000", "0.000", "0.100", "0.125", "0.075", "1.500", "1.600"]
    assert lines(profile([seen, unseen])) == [["vanilla", "288", *every, "0.600 and 0.150"]]
