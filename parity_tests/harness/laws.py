"""The law that speculation obeys, and graphs and decodes to hold it to: tokens, lengths and steps are vanilla's."""

import jax
import numpy as np

import specfold_jax as sf

NODES, WIDTH, THETAS = 6, 4, 2


FAST = {"xla_backend_optimization_level": 0}  # for programs that run a few times only
vanilla, spiffy, specfold = (jax.jit(f, compiler_options=FAST) for f in (sf.vanilla_decode, sf.spiffy_decode, sf.specfold_decode))


EXACT = sf.FoldConfig(tau=0.3, guard=float("inf"))


SEEDS = np.array([3, -1, 0, 7, 3, 2**31 - 1, 5, 5], np.int32)


STOPS = (92, 132, 172, 245, 305, 319)  # some rows of every family meet one of them within 24 tokens, some do not


def config(threshold: float = 0.9, temperature: float = 0.0, **changes) -> sf.DecodeConfig:
    """Two to three blocks of 16, of which some rows stop early. All cases of a family share this shape."""
    base = dict(max_new_tokens=24, block_size=16, sub_block=8, stop_ids=STOPS, seed=SEEDS)
    return sf.DecodeConfig(threshold=threshold, temperature=temperature, **(base | changes))


def graph_of(sets, thetas=((1.0, 0), (-1.0, 1))) -> sf.DraftGraph:
    """A graph of the one size the cases share."""
    assert len(sets) == NODES
    assert len(thetas) == THETAS
    return sf.DraftGraph.from_sets(list(sets), [len(s) for s in sets], thetas=thetas, width=WIDTH, run_on=True)


def node(*pairs) -> frozenset:
    return frozenset(pairs)


CHAIN = [node(*((i, 0) for i in range(n))) for n in (1, 2, 3, 4)]


GRAPHS = {
    "chain and second tokens": graph_of([*CHAIN, node((0, 1)), node((1, 0))]),
    "everything at once": graph_of([node((i, 0)) for i in range(6)], ((-3.0, 0), (-30.0, 1))),
    "never right": graph_of([node((i, 3)) for i in range(6)], ((30.0, 0), (20.0, 0))),
}


def random_graph(seed: int) -> sf.DraftGraph:
    """Six different nodes thrown together as nested chains, and two confidence nodes."""
    rng = np.random.default_rng(seed)
    sets: list[frozenset] = []
    while len(sets) < NODES:
        grown = frozenset()
        for position in rng.permutation(5)[: rng.integers(1, WIDTH + 1)].tolist():
            grown |= {(position, int(rng.choice([0, 0, 0, 1, 2])))}
            if grown not in sets:
                sets.append(grown)
    high, low = rng.uniform(0.5, 4), rng.uniform(-4, 0)
    hops = [(0, 0), (0, 1), (1, 1)][rng.integers(3)]
    return graph_of(sets[:NODES], ((high, hops[0]), (low, hops[1])))


def same(got: sf.Decoded, want: sf.Decoded) -> None:
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.lengths, want.lengths)
    np.testing.assert_array_equal(got.stats.steps, want.stats.steps)
    np.testing.assert_array_equal(got.stats.prefills, want.stats.prefills)
    np.testing.assert_array_equal(got.stats.status, want.stats.status)


def lossless(got: sf.Decoded, want: sf.Decoded) -> None:
    """The same tokens, and books that balance: every accepted branch saved one forward."""
    same(got, want)
    a, b = (jax.tree.map(np.asarray, x.stats) for x in (got, want))
    np.testing.assert_array_equal(a.checks + a.commits, a.nfe)
    np.testing.assert_array_equal(b.checks + b.commits, b.nfe)
    np.testing.assert_array_equal(b.nfe - a.nfe, a.accepted)
    assert np.all(a.accepted >= a.saved_commits + a.shared)
    assert not b.drafted.any()
    assert not b.accepted.any()
