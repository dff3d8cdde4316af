"""The external counting sort against NumPy's stable sort."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fivefold.errors import DataError, InfeasibleError
from fivefold.gnn.data._write_graph import EdgeBuckets
from fivefold.gnn.data.parts import EdgeBlock


def sort_all(buckets):
    if not buckets.complete:
        buckets.finish_adding()
    pieces = [piece for b in range(buckets.num_buckets) for piece in buckets.pieces(b)]
    degrees = np.concatenate([piece.degrees for piece in pieces])
    sources = np.concatenate([piece.values["sources"] for piece in pieces])
    weights = [
        piece.values.get("weights") for piece in pieces if piece.values.get("weights") is not None
    ]
    return degrees, sources, np.concatenate(weights) if weights else None


def make(folder, *, num_nodes, limit, count=1, weighted=False, drop_duplicates=False):
    buckets = EdgeBuckets(
        folder / "work",
        num_nodes=num_nodes,
        num_sources=num_nodes,
        expected_edges=count * limit,
        weighted=weighted,
        memory_bytes=48 * 1024,
        drop_duplicates=drop_duplicates,
    )
    buckets.limit = limit
    buckets.in_memory = False
    buckets.resume("x")
    return buckets


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_order_is_that_of_a_stable_sort(tmp_path_factory, data):
    num_nodes = data.draw(st.integers(1, 60))
    count = data.draw(st.integers(0, 400))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    skew = data.draw(st.sampled_from([1, 6]))
    sources = rng.integers(0, num_nodes, count)
    targets = (num_nodes * rng.random(count) ** skew).astype(np.int64)
    weights = rng.random(count).astype(np.float32) if data.draw(st.booleans()) else None
    limit = data.draw(st.sampled_from([8, 40, 1000]))
    buckets = make(
        tmp_path_factory.mktemp("b"),
        num_nodes=num_nodes,
        limit=limit,
        count=data.draw(st.integers(1, 4)),
        weighted=weights is not None,
    )
    step = data.draw(st.integers(1, 100))
    for first in range(0, count, step):
        part = slice(first, first + step)
        block_weights = None if weights is None else weights[part]
        buckets.add(EdgeBlock(sources[part], targets[part], first + step, block_weights))
    buckets.finish_adding()
    degrees, found, found_weights = sort_all(buckets)
    order = np.argsort(targets, kind="stable")
    assert degrees.tolist() == np.bincount(targets, minlength=num_nodes).tolist()
    assert found.tolist() == sources[order].tolist()
    if weights is not None:
        assert found_weights.tolist() == weights[order].tolist()


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 0.9, 1.0, 1.1, 2.5])
@pytest.mark.parametrize("known", [True, False])
def test_any_number_of_edges_beside_the_limit(tmp_path, share, known):
    """Around the border between memory and disk, with a right guess and with a wrong one."""
    buckets = EdgeBuckets(
        tmp_path / "work",
        num_nodes=500,
        num_sources=500,
        expected_edges=int(share * 1024) if known else 0,
        weighted=False,
        memory_bytes=48 * 1024,
    )
    buckets.resume("x")
    rng = np.random.default_rng(2)
    sources, targets = rng.integers(0, 500, (2, int(share * buckets.limit)))
    for first in range(0, targets.size, 100):
        part = slice(first, first + 100)
        buckets.add(EdgeBlock(sources[part], targets[part], first + 100))
    buckets.finish_adding()
    degrees, found, _ = sort_all(buckets)
    assert degrees.tolist() == np.bincount(targets, minlength=500).tolist()
    assert found.tolist() == sources[np.argsort(targets, kind="stable")].tolist()


def test_many_nodes_with_few_edges_are_not_counted_in_memory(tmp_path):
    buckets = EdgeBuckets(
        tmp_path / "work",
        num_nodes=100_000,
        num_sources=100_000,
        expected_edges=2,
        weighted=False,
        memory_bytes=48 * 1024,
    )
    buckets.resume("x")
    buckets.add(EdgeBlock(np.array([3, 4]), np.array([99_999, 7]), 2))
    buckets.finish_adding()
    assert not buckets.in_memory
    assert max(buckets.nodes_of(b) for b in range(buckets.num_buckets)) < 1000
    degrees, found, _ = sort_all(buckets)
    assert (np.flatnonzero(degrees).tolist(), found.tolist()) == ([7, 99_999], [4, 3])


def test_duplicates_are_dropped_and_the_first_weight_is_kept(tmp_path):
    buckets = make(tmp_path, num_nodes=3, limit=100, weighted=True, drop_duplicates=True)
    sources, targets = np.array([2, 1, 2, 0, 1]), np.array([0, 0, 0, 2, 0])
    weights = np.arange(5, dtype=np.float32)
    buckets.add(EdgeBlock(sources, targets, 5, weights))
    degrees, found, kept = sort_all(buckets)
    assert degrees.tolist() == [2, 0, 1]
    assert found.tolist() == [1, 2, 0]
    assert kept.tolist() == [1.0, 0.0, 3.0]


def test_a_giant_node_cannot_be_searched_for_duplicates(tmp_path):
    buckets = make(tmp_path, num_nodes=2, limit=8, drop_duplicates=True)
    buckets.add(EdgeBlock(np.arange(50) % 2, np.zeros(50, np.int64), 50))
    with pytest.raises(InfeasibleError, match="node 0 has more than 8 edges"):
        sort_all(buckets)


def test_more_edges_than_expected_leave_memory(tmp_path):
    buckets = EdgeBuckets(
        tmp_path / "work",
        num_nodes=50,
        num_sources=50,
        expected_edges=10,
        weighted=False,
        memory_bytes=48 * 1024,
    )
    buckets.resume("x")
    rng = np.random.default_rng(0)
    sources, targets = rng.integers(0, 50, (2, 5000))
    for first in range(0, 5000, 500):
        part = slice(first, first + 500)
        buckets.add(EdgeBlock(sources[part], targets[part], first + 500))
    assert not buckets.in_memory
    buckets.finish_adding()
    assert sort_all(buckets)[1].tolist() == sources[np.argsort(targets, kind="stable")].tolist()
    buckets.remove()
    assert not (tmp_path / "work").exists()


def test_what_came_after_the_last_mark_is_taken_again(tmp_path, monkeypatch):
    monkeypatch.setattr("fivefold.gnn.data._write_graph._MARK_EVERY_EDGES", 40)
    rng = np.random.default_rng(1)
    sources, targets = rng.integers(0, 20, (2, 90))
    first = make(tmp_path, num_nodes=20, limit=30, count=2)
    first.add(EdgeBlock(sources[:40], targets[:40], 40))
    first.add(EdgeBlock(sources[40:70], targets[40:70], 70))  # lost: not marked
    first.close()
    second = EdgeBuckets(
        tmp_path / "work",
        num_nodes=20,
        num_sources=20,
        expected_edges=60,
        weighted=False,
        memory_bytes=48 * 1024,
    )
    second.limit, second.in_memory = 30, False
    second.resume("x")
    assert (second.position, second.num_edges) == (40, 40)
    second.add(EdgeBlock(sources[40:], targets[40:], 90))
    second.finish_adding()
    assert sort_all(second)[1].tolist() == sources[np.argsort(targets, kind="stable")].tolist()
    other = make(tmp_path, num_nodes=20, limit=30, count=2)
    assert other.num_edges == 90
    other.resume("another recipe")
    assert other.num_edges == 0
    other.remove()


def test_a_spill_that_was_cut_short_is_refused(tmp_path):
    buckets = make(tmp_path, num_nodes=20, limit=30)
    buckets.add(EdgeBlock(np.arange(20), np.arange(20), 20))
    buckets.finish_adding()
    path = tmp_path / "work" / "edges.fvf"
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(DataError, match="truncated"):
        make(tmp_path, num_nodes=20, limit=30)


def test_a_block_without_edges_is_spilled_like_any_other(tmp_path):
    """As where all edges of a block are self-loops, which are dropped."""
    nothing = np.empty(0, np.int64)
    for blocks in ([], [nothing], [nothing, np.arange(20)]):
        buckets = make(tmp_path / str(len(blocks)), num_nodes=20, limit=30)
        for ids in blocks:
            buckets.add(EdgeBlock(ids, ids, ids.size))
        degrees, found, _ = sort_all(buckets)
        assert degrees.tolist() == [int(len(blocks) == 2)] * 20
        assert found.tolist() == (list(range(20)) if len(blocks) == 2 else [])
        buckets.remove()
