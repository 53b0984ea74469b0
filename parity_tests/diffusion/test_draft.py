"""Draft canvases against a slow reading of the graph: rank nodes, confidence nodes, pruning, descent; and the steps tokens are drawn at."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specfold_jax.diffusion import draft
from specfold_jax.diffusion.draft import Known, nothing_known
from specfold_jax.diffusion.graph import DraftGraph

BLOCK, SUB, MASK, RANKS, WIDTH = 8, 4, 99, 3, 3
propose, descent = jax.jit(draft.propose, static_argnums=(3, 4)), jax.jit(draft.descent, static_argnums=2)
draw_steps = jax.jit(draft.draw_steps)


def node(*pairs) -> frozenset:
    return frozenset(pairs)


SETS = [node((0, 0)), node((1, 0)), node((0, 1)), node((0, 0), (1, 0)), node((0, 0), (1, 0), (5, 2)), node((0, 0), (4, 0))]
LEVELS = [1, 1, 1, 2, 3, 2]


def graph_of(weights, max_drafts, thetas=(), theta_weights=None, run_on=False, sets=SETS, levels=LEVELS) -> DraftGraph:
    return DraftGraph.from_sets(sets, levels, weights, max_drafts, RANKS, None, thetas, theta_weights, run_on, WIDTH)


def slow_nodes(canvas, tokens, odds, graph) -> list[tuple[list[int], float]]:
    """All canvases of the graph's nodes with their weights, node by node."""
    masked = [i for i in range(BLOCK) if canvas[i] == MASK]
    if not masked:
        return []
    start = masked[0] // SUB * SUB

    def best_known(low: int) -> list[int]:
        known = [i for i in masked if low <= i < low + SUB and odds[i] > -np.inf]
        return sorted(known, key=lambda i: (-odds[i], i))

    here, after = best_known(start), best_known(start + SUB)
    ranked, steps, out = here + (after if graph.run_on else []), np.asarray(draw_steps(graph)), []
    for n, pairs in enumerate(np.asarray(graph.pairs).tolist()):
        real = [(i, j) for i, j in pairs if i >= 0]
        if all(i < len(ranked) for i, _ in real):
            filled = list(canvas)
            for k, (i, j) in enumerate(real):
                filled[ranked[i]] = int(tokens[steps[n, k], ranked[i], j])
            out.append((filled, float(graph.weight[n])))
    level, shown, drawn_at = -1, None, {}
    for theta, hop, weight in zip(np.asarray(graph.theta), np.asarray(graph.hop), np.asarray(graph.theta_weight), strict=True):
        exceeding = [i for i in (after if hop else here) if odds[i] > theta]
        reveal = set((here if hop else here[:1]) + exceeding)
        level += reveal != shown
        shown = reveal
        filled = list(canvas)
        for i in reveal:
            filled[i] = int(tokens[min(drawn_at.setdefault(i, level), WIDTH - 1), i, 0])
        if here and (not hop or reveal & set(after)):
            out.append((filled, float(weight)))
    return out


def slow_drafts(canvas, tokens, odds, graph) -> list[tuple[list[int], float]]:
    """The distinct canvases, each at its largest weight, heaviest first, as many as are kept."""
    every: dict[tuple[int, ...], float] = {}
    for filled, weight in slow_nodes(canvas, tokens, odds, graph):
        every[tuple(filled)] = max(weight, every.get(tuple(filled), weight))
    return sorted(([list(c), w] for c, w in every.items()), key=lambda x: -x[1])[: graph.max_drafts]


WEIGHTS = st.permutations([0.5, 0.25, 1.0, 2.0, 0.125, 4.0, 8.0, 0.0625]).map(lambda x: (x[:6], x[6:]))


@given(
    masked=st.lists(st.booleans(), min_size=BLOCK, max_size=BLOCK),
    odds=st.lists(st.sampled_from([-np.inf, -2.0, 0.0, 0.0, 1.5, 3.0]), min_size=BLOCK, max_size=BLOCK),
    seed=st.integers(0, 99),
    weights=WEIGHTS,
    max_drafts=st.sampled_from([3, 8]),
    thetas=st.sampled_from([((1.0, 0), (-1.0, 0)), ((1.0, 0), (1.0, 1)), ((5.0, 0), (-9.0, 1))]),
    run_on=st.booleans(),
)
def test_drafts_are_the_definition(masked, odds, seed, weights, max_drafts, thetas, run_on):
    """Few different tokens, so that different nodes give equal canvases; none may come from a position nothing is known of."""
    graph = graph_of(weights[0], max_drafts, thetas, weights[1], run_on)
    tokens = np.random.default_rng(seed).integers(0, 3, (WIDTH, BLOCK, RANKS)).astype(np.int32)
    canvas, odds = np.where(masked, MASK, 50).astype(np.int32), np.array(odds, np.float32)
    got = propose(canvas[None], Known(jnp.asarray(tokens[None]), jnp.asarray(odds[None])), graph, MASK, SUB)
    want = slow_drafts(canvas.tolist(), tokens, odds, graph)
    valid = np.asarray(got.valid[0])
    assert got.tokens.shape == (1, max_drafts, BLOCK)
    assert valid.tolist() == [n < len(want) for n in range(max_drafts)]  # heaviest first
    assert np.asarray(got.tokens[0])[valid].tolist() == [filled for filled, _ in want]
    np.testing.assert_array_equal(np.asarray(got.weight[0])[valid], [weight for _, weight in want])
    for filled, _ in want:
        assert all(a in (MASK, b) for a, b in zip(canvas, filled, strict=True))  # nothing known is changed
        assert filled != canvas.tolist()


def test_nothing_is_drafted_where_nothing_is_known():
    graph = graph_of([1] * 6, 8, ((0.0, 0), (0.0, 1)))
    canvas = jnp.full((2, BLOCK), MASK, jnp.int32)
    assert not propose(canvas, nothing_known(2, BLOCK, graph), graph, MASK, SUB).valid.any()
    known = nothing_known(2, BLOCK, graph)._replace(odds=jnp.zeros((2, BLOCK)))
    assert propose(canvas, known, graph, MASK, SUB).valid.any()
    assert not propose(jnp.zeros((2, BLOCK), jnp.int32), known, graph, MASK, SUB).valid.any()


def test_tokens_are_drawn_at_the_step_that_reveals_them():
    """The lowest level of a contained node that holds the pair, minus one."""
    graph = graph_of([1] * 6, 6)
    at = {(s, pair): int(step) for s, row, pairs in zip(graph.sets, draw_steps(graph), graph.pairs.tolist(), strict=True)
          for pair, step in zip(map(tuple, pairs), row, strict=True) if pair[0] >= 0}  # fmt: skip
    assert at[node((0, 0)), (0, 0)] == 0
    assert at[SETS[3], (1, 0)] == 0  # {(1, 0)} is a node of level 1
    assert at[SETS[4], (5, 2)] == 2
    assert at[SETS[5], (4, 0)] == 1
    assert at[SETS[5], (0, 0)] == 0
    late = graph_of([1, 1], 2, sets=[node((0, 0)), node((0, 0), (1, 0))], levels=[1, 2])
    assert np.asarray(draw_steps(late))[1, :2].tolist() == [0, 1]


@given(
    bits=st.lists(st.integers(0, 2**6 - 1), min_size=5, max_size=5),
    swap=st.lists(st.booleans(), min_size=5, max_size=5),
    valid=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_descent_is_the_largest_contained_branch_before(bits, swap, valid):
    """Branches in the order of the number of tokens; some differ from others in a token, and descend from the main branch."""
    order = sorted(range(5), key=lambda n: bin(bits[n]).count("1"))
    tokens = np.full((6, 6), MASK, np.int32)
    for row, n in enumerate(order, start=1):
        for i in range(6):
            if bits[n] >> i & 1:
                tokens[row, i] = 7 if swap[n] and i == 0 else i
    valid = np.array([True, *valid])
    parent = np.asarray(descent(tokens[None], valid[None], MASK))[0]
    for b in range(6):
        subsets = [
            other
            for other in range(b)
            if valid[other]
            and (tokens[other] != tokens[b]).any()
            and all(x in (MASK, y) for x, y in zip(tokens[other], tokens[b], strict=True))
        ]
        want = max(subsets, key=lambda other: ((tokens[other] != MASK).sum(), -other), default=0)
        assert parent[b] == (want if valid[b] else parent[b])
        assert parent[b] <= b


@pytest.mark.parametrize("kept", [1, 2, 5])
def test_pruning_keeps_the_heaviest(kept):
    graph = graph_of([1, 6, 3, 5, 2, 4], kept)
    tokens = np.arange(WIDTH * BLOCK * RANKS, dtype=np.int32).reshape(1, WIDTH, BLOCK, RANKS)
    known = Known(jnp.asarray(tokens), jnp.arange(8.0)[None])
    every = propose(jnp.full((1, BLOCK), MASK, jnp.int32), known, graph, MASK, BLOCK)
    assert every.valid.all()
    heaviest = sorted(np.asarray(graph.weight).tolist(), reverse=True)[:kept]
    np.testing.assert_array_equal(every.weight[0], heaviest)
