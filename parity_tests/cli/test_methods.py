"""The table of methods: the command line offers its names, and a decoding takes what the table says."""

import argparse
from typing import get_args

import pytest

import specfold_jax as sf
from parity_tests.harness.laws import GRAPHS, config
from specfold_jax.cli.flags import add_method, require_method
from specfold_jax.diffusion.decoding import Decoding
from specfold_jax.methods import METHODS, MethodName, method_named
from specfold_jax.tuning.measure import Setting

GRAPH, FOLD = next(iter(GRAPHS.values())), sf.FoldConfig()


def test_the_command_line_offers_the_names():
    parser = argparse.ArgumentParser()
    add_method(parser)
    (choices,) = (action.choices for action in parser._actions if action.dest == "method")
    assert tuple(choices) == tuple(METHODS) == get_args(MethodName)
    assert all(method.name == name and method_named(name) is method for name, method in METHODS.items())


@pytest.mark.parametrize("name", METHODS)
def test_the_command_line_refuses_flags_that_a_method_does_not_read(name):
    for flag, read in (("graph", METHODS[name].drafts), ("drafts", METHODS[name].drafts), ("tau", METHODS[name].folds)):
        args = argparse.Namespace(**dict.fromkeys(("graph", "drafts", "tau", "guard", "gates")) | {flag: 1})
        if read:
            require_method(args, (name,))
        else:
            with pytest.raises(Exception, match=f"--{flag} belongs to --method .*, not to {name}"):
                require_method(args, (name,))


@pytest.mark.parametrize("name", METHODS)
def test_a_decoding_takes_what_the_table_says(name, fast):
    method = METHODS[name]
    how = Decoding.of(name, fast.model, config(), GRAPH, FOLD)
    assert how.method is method
    assert (how.graph is GRAPH, how.graph.max_drafts > 0) == (method.drafts, method.drafts)
    assert how.fold is (FOLD if method.folds else None)
    for graph, fold, needed in ((None, FOLD, method.drafts), (GRAPH, None, method.folds)):
        if needed:
            with pytest.raises(ValueError, match=f"method='{name}' needs a"):
                Decoding.of(name, fast.model, config(), graph, fold)
        else:
            assert Decoding.of(name, fast.model, config(), graph, fold).method is method


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_lossless_as_the_table_says(name):
    assert Setting(name).lossless == METHODS[name].lossless
