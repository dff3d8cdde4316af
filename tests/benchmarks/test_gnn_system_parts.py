"""The parts that systems are made of: page reads, prefetching, segments, caches, edge buckets."""

import threading
import time

import numpy as np
import pytest
from benchmarks.gnn.systems import (
    EdgeBuckets,
    PageReader,
    first_feasible_segment,
    neighbor_cache_ids,
    prefetched,
    source_counts,
    top_rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError, StorageError
from fivefold.gnn.sampling import Adjacency
from helpers.night import number_of


@pytest.mark.slow
@settings(max_examples=number_of(15, 1000), deadline=None)
@given(row_bytes=st.integers(1, 13_000), pages=st.integers(0, 2), seed=st.integers(0, 999))
def test_page_reads_give_the_rows_and_whole_pages_alone(row_bytes, pages, seed, tmp_path_factory):
    draw = np.random.default_rng(seed)
    base, count = 4096 * pages, 1 + 40_000 // row_bytes
    content = draw.integers(0, 256, base + count * row_bytes, dtype=np.uint8)
    path = tmp_path_factory.mktemp("pages") / "rows"
    path.write_bytes(content.tobytes() + bytes(-len(content) % 4096))
    rows = draw.integers(0, count, 25)
    out = np.zeros((30, row_bytes), np.uint8)
    places = draw.permutation(30)[:25]
    reader = PageReader(path, base=base, row_bytes=row_bytes, threads=3)
    read = reader.read(rows, places, out)
    reader.close()
    table = content[base:].reshape(count, row_bytes)
    assert np.array_equal(out[places], table[rows])
    assert not out[np.setdiff1d(np.arange(30), places)].any()
    first, last = rows * row_bytes // 4096, ((rows + 1) * row_bytes - 1) // 4096
    assert read == 4096 * int((last - first + 1).sum())


def test_page_reads_refuse_what_cannot_be(tmp_path):
    with pytest.raises(ConfigurationError, match="4096"):
        PageReader(tmp_path / "x", base=100, row_bytes=4)
    with pytest.raises(StorageError, match="check that it is there"):
        PageReader(tmp_path / "x", base=0, row_bytes=4)


def test_prefetching_keeps_the_order_and_hands_on_errors():
    assert list(prefetched(iter(range(100)), depth=3)) == list(range(100))

    def fails():
        yield 1
        message = "broken"
        raise StorageError(message, hint="mend it")

    items = prefetched(fails())
    assert next(items) == 1
    with pytest.raises(StorageError, match="mend it"):
        next(items)


def test_prefetching_runs_ahead_only_as_far_as_asked_and_stops_when_left():
    made = []

    def items():
        for i in range(1000):
            made.append(i)
            yield i

    ahead = prefetched(items(), depth=2)
    assert next(ahead) == 0
    time.sleep(0.3)
    assert len(made) <= 4
    ahead.close()
    assert not [t for t in threading.enumerate() if t.name == "prefetch"]


@given(seed=st.integers(0, 999), max_rows=st.integers(1, 60))
def test_the_first_feasible_segment_is_the_first_by_the_published_estimate(seed, max_rows):
    draw = np.random.default_rng(seed)
    batches = [draw.choice(30, draw.integers(0, 12), replace=False) for _ in range(8)]
    found = first_feasible_segment(batches, num_ids=30, num_batches=8, max_rows=max_rows)
    estimates = [
        len(np.unique(np.concatenate(batches[:s]))) * 8 / s for s in range(1, len(batches) + 1)
    ]
    feasible = [s for s, rows in enumerate(estimates, start=1) if rows < max_rows]
    assert found == (feasible[0] if feasible else 8)
    assert first_feasible_segment(batches, num_ids=30, num_batches=8, max_rows=None) == 1


def random_topology(draw, nodes, edges):
    targets = np.sort(draw.integers(0, nodes, edges))
    indptr = np.searchsorted(targets, np.arange(nodes + 1)).astype(np.int64)
    return Adjacency(indptr, draw.integers(0, nodes, edges).astype(np.int32)), targets


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), budget=st.integers(0, 1500))
def test_ginex_caches_short_lists_that_many_meet(seed, budget):
    topology, _ = random_topology(np.random.default_rng(seed), 20, 60)
    kept = neighbor_cache_ids(topology, budget_bytes=budget)
    in_degrees = np.diff(topology.indptr)
    out_degrees = np.bincount(topology.indices, minlength=20)
    ratio = [
        (out_degrees[v] / in_degrees[v]) if in_degrees[v] else (np.inf if out_degrees[v] else 0.0)
        for v in range(20)
    ]
    order = sorted(range(20), key=lambda v: -ratio[v])
    expected, words = [], budget // 8 - 20
    for v in order:
        words -= in_degrees[v] + 1
        if words < 0:
            break
        expected.append(v)
    assert kept.tolist() == expected
    assert source_counts(topology).tolist() == out_degrees.tolist()


@pytest.mark.parametrize("partitions", [1, 3, 7, 25])
def test_buckets_of_a_state_are_the_induced_graph(partitions, tmp_path):
    draw = np.random.default_rng(partitions)
    topology, targets = random_topology(draw, 23, 150)
    order = draw.permutation(23)
    rows = -(-23 // partitions)
    buckets = EdgeBuckets.write(
        tmp_path, topology, order=order, rows=rows, num_partitions=partitions
    )
    new_of = np.argsort(order)
    state = draw.permutation(partitions)[: max(1, partitions // 2)]
    graph = buckets.induced(state)
    slot_of = {int(p): s for s, p in enumerate(state)}

    def local(old):
        new = int(new_of[old])
        slot = slot_of.get(new // rows)
        return None if slot is None else slot * rows + new % rows

    pairs = [(local(t), local(s)) for t, s in zip(targets, topology.indices, strict=True)]
    expected = sorted(p for p in pairs if p[0] is not None and p[1] is not None)
    found = [
        (v, int(u))
        for v in range(graph.num_nodes)
        for u in graph.indices[graph.indptr[v] : graph.indptr[v + 1]]
    ]
    assert sorted(found) == expected
    assert buckets.nbytes == 2 * 4 * 150


def test_top_rows_prefer_lower_ids_among_equals():
    assert top_rows(np.array([1, 5, 5, 0, 5]), 2).tolist() == [1, 2]
    assert top_rows(np.array([1, 2]), 9).tolist() == [0, 1]
