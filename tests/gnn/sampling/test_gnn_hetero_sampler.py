"""Heterogeneous sampling: equal to the reference, and to the plain sampler for one type."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.sampling import Adjacency, HeteroAdjacency, HeteroNeighborSampler
from fivefold.gnn.sampling.batches import stream_key
from helpers.night import by_day
from oracles.neighbor_sampling import reference_hetero_sample

CITES = ("paper", "cites", "paper")
WRITES = ("author", "writes", "paper")
WRITTEN = ("paper", "written by", "author")
TOPIC = ("topic", "of", "paper")


def random_edges(rng, targets, sources, degree, *, weighted=False):
    indptr = np.concatenate([[0], np.cumsum(rng.poisson(degree, targets))])
    indices = rng.integers(0, sources, indptr[-1]).astype(np.int32)
    weights = rng.random(indptr[-1], np.float32) if weighted else None
    return Adjacency(indptr, indices, weights, num_sources=sources)


def random_graph(seed, sizes=(60, 40, 5)):
    rng = np.random.default_rng(seed)
    papers, authors, topics = sizes
    edges = {
        CITES: random_edges(rng, papers, papers, 4),
        WRITES: random_edges(rng, papers, authors, 3, weighted=True),
        WRITTEN: random_edges(rng, authors, papers, 5),
        TOPIC: random_edges(rng, papers, topics, 1),
    }
    return HeteroAdjacency({"paper": papers, "author": authors, "topic": topics}, edges)


def reference(graph, fanouts, seeds, *, seed, epoch, batch):
    keys = {
        (hop, kind): stream_key(seed, epoch, batch, hop, number)
        for number, kind in enumerate(graph.edges)
        for hop in range(len(next(iter(fanouts.values()))))
    }
    return reference_hetero_sample(graph, fanouts, seeds, keys=keys, number=batch)


def assert_same(found, expected):
    assert (found.number, found.batch_sizes) == (expected.number, expected.batch_sizes)
    for name in ("node_ids", "nodes_per_hop", "edges_per_hop", "degrees", "sources", "edge_ids"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert list(ours) == list(theirs)
        for kind in ours:
            assert ours[kind].dtype == theirs[kind].dtype, (name, kind)
            np.testing.assert_array_equal(ours[kind], theirs[kind], err_msg=f"{name} {kind}")


@by_day(30)
@given(st.integers(0, 2**32), st.data())
def test_hetero_sampler_equals_the_reference(seed, data):
    sizes = data.draw(st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(1, 3)))
    graph = random_graph(seed, sizes)
    hops = data.draw(st.integers(1, 3))
    fanouts = {
        kind: data.draw(st.lists(st.integers(-1, 4), min_size=hops, max_size=hops))
        for kind in graph.edges
    }
    seeds = {
        name: data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=8))
        for name, size in graph.num_nodes.items()
    }
    sampler = HeteroNeighborSampler(graph, fanouts, seed=seed, edge_ids=True)
    for epoch, batch in [(0, 0), (3, 1)]:
        expected = reference(graph, fanouts, seeds, seed=seed, epoch=epoch, batch=batch)
        assert_same(sampler.sample(seeds, epoch=epoch, batch=batch), expected)


def test_edges_of_a_batch_are_edges_of_the_graph():
    graph = random_graph(1, (500, 300, 10))
    sampler = HeteroNeighborSampler(graph, [3, 2], edge_ids=True)
    batch = sampler.sample({"paper": range(20), "author": [7]}, epoch=0, batch=0)
    np.testing.assert_array_equal(batch.seeds("paper"), np.arange(20))
    assert batch.nodes_per_hop["topic"][0] == 0 < batch.nodes_per_hop["topic"][1]
    for kind, topology in graph.edges.items():
        sources, targets = batch.edge_index(kind)
        positions = batch.edge_ids[kind]
        assert len(set(positions.tolist())) == positions.size > 0
        owners = np.searchsorted(topology.indptr, positions, side="right") - 1
        np.testing.assert_array_equal(batch.node_ids[kind[0]][sources], topology.indices[positions])
        np.testing.assert_array_equal(batch.node_ids[kind[2]][targets], owners)
    for name, ids in batch.node_ids.items():
        assert len(set(ids.tolist())) == ids.size == batch.nodes_per_hop[name].sum()
    with pytest.raises(ConfigurationError, match="no edge type"):
        batch.edge_index(("a", "b", "c"))


def test_types_may_be_left_out():
    graph = random_graph(2)
    fanouts = {CITES: [2], WRITES: [0], WRITTEN: [-1], TOPIC: [0]}
    batch = HeteroNeighborSampler(graph, fanouts).sample({"paper": [3]}, epoch=0, batch=0)
    assert batch.node_ids["author"].size == batch.node_ids["topic"].size == 0
    assert batch.edge_ids == {}
    assert batch.edge_index(WRITES).shape == (2, 0)


def test_graph_without_edge_types():
    graph = HeteroAdjacency({"a": 3}, {})
    batch = HeteroNeighborSampler(graph, [2]).sample({"a": [2, 0]}, epoch=0, batch=0)
    assert batch.node_ids["a"].tolist() == [2, 0]


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        ({"venue": [0]}, "unknown type 'venue'"),
        ({"topic": [5]}, "seed 5 is out of range"),
        ({"paper": [1, 1]}, "stands twice"),
    ],
)
def test_wrong_seeds_are_refused(seeds, message):
    sampler = HeteroNeighborSampler(random_graph(0), [2])
    with pytest.raises(ConfigurationError, match=message):
        sampler.sample(seeds, epoch=0, batch=0)


@pytest.mark.parametrize(
    ("fanouts", "message"),
    [
        ([], "fanouts"),
        ({CITES: [1]}, "differ in"),
        ({CITES: [1], WRITES: [1], WRITTEN: [1, 2], TOPIC: [1]}, "numbers of hops"),
        ({CITES: [1], WRITES: [1], WRITTEN: [-2], TOPIC: [1]}, "fanouts"),
    ],
)
def test_wrong_fanouts_are_refused(fanouts, message):
    with pytest.raises(ConfigurationError, match=message):
        HeteroNeighborSampler(random_graph(0), fanouts)


def test_what_does_not_fit_together_is_refused():
    edges = Adjacency([0, 1, 1], [0])
    with pytest.raises(DataError, match="joins 'b'"):
        HeteroAdjacency({"a": 2}, {("b", "to", "a"): edges})
    with pytest.raises(DataError, match="num_sources"):
        HeteroAdjacency({"a": 2, "b": 3}, {("b", "to", "a"): edges})


def test_fingerprint_and_sizes():
    graph, same, other = random_graph(0), random_graph(0), random_graph(1)
    assert graph.fingerprint == same.fingerprint != other.fingerprint
    assert graph.num_edges == sum(topology.num_edges for topology in graph.edges.values())
    assert graph.nbytes > 4 * graph.num_edges
    assert graph.node_types == ["paper", "author", "topic"]
    assert graph.edge_types == [CITES, WRITES, WRITTEN, TOPIC]


def test_ids_far_beyond_32_bits():
    big = 2**33 - 2
    ids = np.array([big - 1, 2**32, 2**31, 5, 2**32 + 5], np.int64)
    kind = ("user", "likes", "item")
    graph = HeteroAdjacency(
        {"user": big, "item": 3}, {kind: Adjacency([0, 3, 3, 5], ids, num_sources=big)}
    )
    batch = HeteroNeighborSampler(graph, [-1]).sample({"item": [2, 0]}, epoch=0, batch=0)
    assert batch.node_ids["user"].tolist() == [5, 2**32 + 5, big - 1, 2**32, 2**31]
    with pytest.raises(DataError, match="at most"):
        Adjacency([0], [], num_sources=big + 1)
