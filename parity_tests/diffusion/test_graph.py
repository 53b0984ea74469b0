"""The draft graph: its rules, its file, its life as a pytree, its picture."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specfold_jax.calibration.picture import draw_graph
from specfold_jax.diffusion.graph import DraftGraph, MadeFor, require_made_for

MADE = MadeFor("m10", 1536, 32, 8, 0.9, 0.0)
A, B, AB, AC = frozenset({(0, 0)}), frozenset({(1, 0)}), frozenset({(0, 0), (1, 0)}), frozenset({(0, 0), (2, 1)})
LEAVES = ("pairs", "level", "parent", "weight")


def small(**changes) -> DraftGraph:
    graph = DraftGraph.from_sets([AB, B, A, AC], [2, 1, 1, 2], [0.2, 0.3, 0.5, 0.1], max_drafts=2, made_for=MADE)
    return dataclasses.replace(graph, **changes)


def edited(name: str, index, value) -> dict[str, np.ndarray]:
    array = np.array(getattr(small(), name))
    array[index] = value
    return {name: array}


@st.composite
def graphs(draw) -> DraftGraph:
    """Nested chains thrown together: every node of level l > 1 has its predecessor among the nodes."""
    level: dict[frozenset, int] = {}
    for _ in range(draw(st.integers(0, 4))):
        positions = draw(st.permutations(range(6)))
        node = frozenset()
        for step, position in enumerate(positions[: draw(st.integers(1, 4))], start=1):
            node |= {(position, draw(st.integers(0, 3)))}
            if level.setdefault(node, step) != step:
                break
    weights = draw(st.lists(st.floats(0, 1e6, width=32), min_size=len(level), max_size=len(level)))
    kept = draw(st.integers(min(1, len(level)), len(level)))
    made = draw(
        st.none() | st.builds(MadeFor, st.text(max_size=5), st.just(1536), st.just(32), st.just(8), st.floats(0, 1), st.floats(0, 9))
    )
    return DraftGraph.from_sets(list(level), list(level.values()), weights, kept, draw(st.integers(4, 9)), made)


def test_nodes_are_sorted_and_get_all_their_parents():
    graph = small()
    assert graph.sets == (A, B, AB, AC)
    assert (graph.nodes, graph.width, graph.max_drafts, graph.token_ranks) == (4, 2, 2, 4)
    np.testing.assert_array_equal(graph.pairs[:, 1], [[-1, -1], [-1, -1], [1, 0], [2, 1]])
    np.testing.assert_array_equal(graph.parent, np.array([[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]], bool))
    np.testing.assert_array_equal(graph.weight, np.float32([0.5, 0.3, 0.2, 0.1]))
    assert [getattr(graph, name).dtype for name in LEAVES] == [np.int32, np.int32, np.bool_, np.float32]


def test_no_edge_skips_a_level():
    graph = DraftGraph.from_sets([A, B, AB, AB | AC], [1, 1, 2, 3])
    assert graph.parent.sum(axis=1).tolist() == [0, 0, 2, 1]
    assert graph.max_drafts == 4
    np.testing.assert_array_equal(graph.weight, 1)


def test_the_empty_graph(tmp_path):
    graph = DraftGraph.empty(width=3, token_ranks=2)
    assert (graph.nodes, graph.width, graph.max_drafts, graph.token_ranks, graph.sets) == (0, 3, 0, 2, ())
    graph.validate(block=1)
    graph.save(tmp_path / "graph.json")
    assert DraftGraph.load(tmp_path / "graph.json").nodes == 0
    assert DraftGraph.from_sets([], []).max_drafts == 0


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graph=graphs())
def test_saving_and_loading_gives_the_same_graph(tmp_path, graph):
    path = tmp_path / "graph.json"
    graph.save(path)
    loaded = DraftGraph.load(path)
    for name in LEAVES:
        saved, read = getattr(graph, name), getattr(loaded, name)
        assert saved.dtype == read.dtype
        np.testing.assert_array_equal(saved, read)
    assert (loaded.max_drafts, loaded.token_ranks, loaded.made_for) == (graph.max_drafts, graph.token_ranks, graph.made_for)
    assert [entry.name for entry in tmp_path.iterdir()] == ["graph.json"]


def test_the_file_holds_the_documented_fields_one_node_a_line(tmp_path):
    small(weight=jnp.asarray([0.5, 0.3, 0.2, 0.1])).save(tmp_path / "graph.json")
    text = (tmp_path / "graph.json").read_text()
    data = json.loads(text)
    assert list(data) == [field.name for field in dataclasses.fields(DraftGraph)]
    assert data["weight"] == [0.5, 0.3, 0.2, 0.1]
    assert data["made_for"] == {"model": "m10", "vocab": 1536, "block": 32, "sub_block": 8, "threshold": 0.9, "temperature": 0.0}
    assert "    [[0, 0], [1, 0]],\n    [[0, 0], [2, 1]]\n" in text


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "graph.json"
    small().save(path)
    before = path.read_text()

    def broken(*_):
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.replace", broken)
    with pytest.raises(OSError, match="disk full"):
        DraftGraph.empty().save(path)
    assert path.read_text() == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edited("pairs", 1, [[0, 0], [-1, -1]]), r"node 1 \{\(0,0\)\} is a duplicate of node 0"),
        (edited("pairs", 2, [[1, 0], [1, 1]]), r"node 2 \{\(1,0\), \(1,1\)\}: a position rank occurs twice"),
        (edited("pairs", 1, -1), "node 1 is empty"),
        (edited("pairs", (1, 0), [-2, 0]), "node 1 .*ranks must be at least 0"),
        (edited("pairs", (1, 0), [1, -1]), "node 1 .*ranks must be at least 0"),
        (edited("pairs", 1, [[-1, -1], [1, 0]]), "node 1 .*padding must stand at the end"),
        (edited("pairs", (3, 1), [2, 4]), r"node 3 \{\(0,0\), \(2,4\)\}: token rank 4 must be below token_ranks=4"),
        ({"token_ranks": 1}, "token rank 1 must be below token_ranks=1"),
        (edited("level", 0, 0), "node 0 .*level 0 must be at least 1"),
        (edited("weight", 2, np.nan), "node 2 .*weight nan must be a finite number of at least 0"),
        (edited("weight", 2, -1), "node 2 .*weight -1.0 must be"),
        (edited("weight", 2, np.inf), "node 2 .*weight inf must be"),
        (edited("parent", 2, False), r"node 2 \{\(0,0\), \(1,0\)\} of level 2 is unreachable: it must have a parent of level 1"),
        (edited("level", 2, 3), r"edge from node 0 \{\(0,0\)\} to node 2 .* leads from level 1 to level 3; it must go up exactly one"),
        (edited("parent", (1, 0), True), r"edge from node 0 .* to node 1 \{\(1,0\)\} leads from level 1 to level 1"),
        (edited("parent", (3, 1), True), r"edge from node 1 \{\(1,0\)\} to node 3 .*must be a proper subset of the child's"),
        (edited("parent", (0, 0), True), r"nodes \[0, 2, 3\] hang on a cycle"),
        (edited("parent", (0, 2), True), r"nodes \[0, 2, 3\] hang on a cycle"),
        ({"max_drafts": 0}, r"max_drafts=0 must lie in 1\.\.4"),
        ({"max_drafts": 5}, r"max_drafts=5 must lie in 1\.\.4"),
        ({"max_drafts": 2.5}, "max_drafts=2.5 must be a whole number"),
        ({"token_ranks": 0}, "token_ranks=0 must be a whole number of at least 1"),
        ({"made_for": {"model": "m10"}}, "must be a MadeFor"),
        ({"run_on": 1}, "run_on=1 must be true or false"),
        ({"level": [1, 1, 2, 2]}, r"level must be an array int32 \[4\], not a list"),
        ({"level": np.ones(3, np.int32)}, r"level is int32 \[3\] and must be int32 \[4\]"),
        ({"level": np.ones(4)}, r"level is float64 \[4\] and must be int32 \[4\]"),
        ({"parent": np.zeros((4, 3), bool)}, r"parent is bool \[4, 3\] and must be bool \[4, 4\]"),
        ({"pairs": np.zeros((4, 3), np.int32)}, r"pairs is int32 \[4, 3\] and must be int32 \[4, width, 2\]"),
        ({"pairs": np.int32(3)}, r"pairs is int32 \[\] and must be"),
        ({"pairs": np.zeros((4, 0, 2), np.int32)}, "pairs has width 0"),
    ],
)
def test_a_broken_graph_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        small(**change)


def test_position_ranks_are_checked_against_a_block():
    small().validate(block=3)
    with pytest.raises(ValueError, match=r"node 3 \{\(0,0\), \(2,1\)\}: position rank 2 must be below the block of 2 positions"):
        small().validate(block=2)


@pytest.mark.parametrize(
    ("sets", "levels", "message"),
    [
        ([A, B], [1], "2 sets, 1 levels and 2 weights must be equally many"),
        ([A, A], [1, 1], "duplicate"),
        ([frozenset()], [1], "is empty"),
        ([frozenset({(0, -1)})], [1], r"pair \(0, -1\) must be"),
        ([frozenset({(0, 0, 0)})], [1], r"pair \(0, 0, 0\) must be"),
        ([A], [0], "level=0 must be a whole number of at least 1"),
        ([A, AB], [1, 3], "unreachable"),
        ([B, AC], [1, 2], "unreachable"),
    ],
)
def test_from_sets_refuses(sets, levels, message):
    with pytest.raises(ValueError, match=message):
        DraftGraph.from_sets(sets, levels, [1.0] * len(sets))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("pairs", [[[0, 0]], [[1, 0], [2, 0]]], "pairs must be a list of equally long rows"),
        ("pairs", [[[0.5, 0]]], "pairs must hold int32 numbers"),
        ("pairs", "no", "pairs must hold int32 numbers"),
        ("pairs", [[[2**40, 0]]], "pairs must hold int32 numbers"),
        ("parent", [[2]], "parent must hold bool numbers"),
        ("weight", [None], "weight must hold float32 numbers"),
        ("level", [], r"level is int32 \[0\] and must be int32 \[4\]"),
        ("weight", [float("nan"), 0, 0, 0], "weight nan"),
        ("weight", [1e39, 0, 0, 0], "weight must hold float32 numbers"),
        ("max_drafts", True, "max_drafts=True must be a whole number"),
        ("token_ranks", None, "token_ranks=None must be a whole number"),
        ("made_for", [], "made_for must be an object with the fields"),
        ("made_for", {"model": "m10"}, r"made_for lacks \['vocab', 'block', 'sub_block', 'threshold', 'temperature'\]"),
        ("made_for", dataclasses.asdict(MADE) | {"date": 1}, r"made_for has unknown fields \['date'\]"),
        ("made_for", dataclasses.asdict(MADE) | {"block": 30}, "sub_block=8 must divide block=30"),
        ("made_for", dataclasses.asdict(MADE) | {"threshold": "0.9"}, "threshold='0.9' must be a number"),
        ("made_for", dataclasses.asdict(MADE) | {"temperature": True}, "temperature=True must be a number"),
        ("made_for", dataclasses.asdict(MADE) | {"vocab": 1536.0}, "vocab=1536.0 must be a whole number of at least 1"),
        ("run_on", "false", "run_on='false' must be true or false"),
        ("phi", 1, r"unknown fields \['phi'\]"),
        ("theta", [None, 1.0], "thetas|equally|must be"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path, name, value, message):
    path = tmp_path / "graph.json"
    small().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ValueError, match=rf"graph\.json.*{message}"):
        DraftGraph.load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"pairs: 3", "must be a draft graph in JSON"),
        (b"\xff\xfe\x00", "must be a draft graph in JSON"),
        (b"[" * 100_000, "must be a draft graph in JSON"),
        (b'{"level": ' + b"9" * 5000 + b"}", "must be a draft graph in JSON"),
        (b"[1]", "must be an object with the fields"),
        (b"{}", "lacks"),
    ],
)
def test_what_is_no_graph_file_is_refused(tmp_path, content, message):
    (tmp_path / "graph.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"graph\.json.*{message}"):
        DraftGraph.load(tmp_path / "graph.json")


@pytest.mark.parametrize("name", ["level", "made_for", "token_ranks"])
def test_a_missing_field_is_named(tmp_path, name):
    small().save(tmp_path / "graph.json")
    data = json.loads((tmp_path / "graph.json").read_text())
    del data[name]
    (tmp_path / "graph.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"graph\.json: the draft graph lacks \['{name}'\]"):
        DraftGraph.load(tmp_path / "graph.json")


def test_a_swept_threshold_is_recorded_in_its_own_digits():
    assert MadeFor("m10", np.int64(1536), 32, 8, np.float32(0.9), jnp.float32(0.0)) == MADE
    assert hash(MADE) == hash(dataclasses.replace(MADE))


def test_check_made_for_names_what_differs():
    require_made_for(small(), "m10", 1536, 32, 8)
    require_made_for(small(made_for=None), "other", 1, 2, 3)
    require_made_for(small(), None, 1536, 32, 8)
    with pytest.raises(ValueError, match=r"for model='m10' \(here 'm40'\), sub_block=8 \(here 16\); calibrate"):
        require_made_for(small(), "m40", 1536, 32, 16)


def test_graphs_of_one_size_share_a_compilation():
    traces = []

    @jax.jit
    def heaviest(graph):
        traces.append(graph.made_for)
        return graph.pairs[jnp.argmax(graph.weight), 0], graph

    (_, back), other = heaviest(small()), small(weight=np.float32([0, 1, 0, 0]), made_for=dataclasses.replace(MADE, model="m40"))
    np.testing.assert_array_equal(heaviest(other)[0], [1, 0])
    heaviest(small(made_for=None))
    assert traces == [None]  # one trace, and it does not claim to know whose
    assert back.made_for is None
    heaviest(small(max_drafts=3))
    assert len(traces) == 2


def test_tree_functions_keep_the_record_and_do_not_check():
    graph = small()
    assert jax.device_put(graph).made_for == MADE
    assert jax.tree.structure(graph) == jax.tree.structure(small(made_for=None))
    shifted = jax.tree.map(lambda leaf: -leaf if leaf.dtype != bool else leaf, graph)  # broken, and allowed to be
    assert shifted.made_for == MADE
    with pytest.raises(ValueError, match="node 0"):
        shifted.validate()
    assert jax.tree.map(lambda _: object(), graph).max_drafts == 2
    assert jax.eval_shape(lambda g: g, graph).pairs.shape == (4, 2, 2)
    names = [jax.tree_util.keystr(key) for key, _ in jax.tree_util.tree_leaves_with_path(graph)]
    assert names == [".pairs", ".level", ".parent", ".weight", ".theta", ".hop", ".theta_weight"]


def test_replacing_a_leaf_under_a_trace_checks_static_facts_only():
    negative = jax.jit(lambda graph, weight: dataclasses.replace(graph, weight=weight).weight)
    assert negative(small(), -jnp.ones(4)).shape == (4,)
    with pytest.raises(ValueError, match=r"weight is float32 \[3\] and must be float32 \[4\]"):
        negative(small(), jnp.ones(3))


def test_pictures(tmp_path):
    wide = [frozenset((i, i % 4) for i in range(k)) for k in range(1, 9)]
    for n, graph in enumerate((DraftGraph.empty(), small(), DraftGraph.from_sets(wide, range(1, 9), [0.0] * 8))):
        draw_graph(graph, tmp_path / f"{n}.png")
        assert (tmp_path / f"{n}.png").read_bytes().startswith(b"\x89PNG")


def confident(thetas=((2.0, 0), (-np.inf, 0), (1.0, 1)), **changes):
    return DraftGraph.from_sets([frozenset({(0, 0)})], [1], thetas=list(thetas), **changes)


def test_confidence_nodes_are_ordered_counted_and_saved(tmp_path):
    graph = confident([(1.0, 1), (-np.inf, 0), (2.0, 0)], theta_weights=[0.1, 0.2, 0.3], run_on=True, width=3, reach=4)
    assert graph.theta.tolist() == [2.0, -np.inf, 1.0]
    assert graph.hop.tolist() == [0, 0, 1]
    np.testing.assert_allclose(graph.theta_weight, [0.3, 0.2, 0.1])
    assert (graph.nodes, graph.width, graph.max_drafts) == (4, 3, 4)
    graph.save(tmp_path / "graph.json")
    again = DraftGraph.load(tmp_path / "graph.json")
    assert again.theta.tolist() == graph.theta.tolist()
    assert (again.run_on, again.reach, again.width) == (True, 4, 3)
    draw_graph(again, tmp_path / "graph.png")
    assert (tmp_path / "graph.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("thetas", "changes", "message"),
    [
        ([(np.nan, 0)], {}, "below infinity"),
        ([(np.inf, 0)], {}, "below infinity"),
        ([(1.0, 2)], {"reach": 2}, "below reach=2"),
        ([(1.0, -1)], {}, "hop at least 0"),
        ([(1.0, 0), (1.0, 0)], {}, "must differ"),
        ([(1.0, 0)], {"theta_weights": [np.nan]}, "finite number"),
        ([(1.0, 0)], {"theta_weights": [1.0, 2.0]}, "equally many"),
        ([(1.0, 0)], {"reach": 0}, "reach=0"),
        ([(1.0, 0)], {"max_drafts": 3}, r"must lie in 1\.\.2"),
    ],
)
def test_broken_confidence_nodes_are_refused(thetas, changes, message):
    with pytest.raises(ValueError, match=message):
        confident(thetas, **changes)
