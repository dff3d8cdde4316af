"""The compiled sampler equals the reference for any graph, fan-outs, threads and storage."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.sampling import Adjacency, NeighborSampler
from oracles.neighbor_sampling import reference_sample

FIELDS = ("node_ids", "nodes_per_hop", "edges_per_hop", "degrees", "sources", "edge_ids")


def random_topology(nodes, mean_degree, seed, *, weighted=False, dtype=np.int32):
    """Uneven degrees, isolated nodes, parallel edges and self loops."""
    rng = np.random.default_rng(seed)
    degrees = rng.poisson(mean_degree * rng.pareto(1.5, nodes)) * (rng.random(nodes) < 0.8)
    indptr = np.concatenate([[0], np.cumsum(np.minimum(degrees, 40 * mean_degree))])
    indices = rng.integers(0, nodes, indptr[-1]).astype(dtype)
    weights = None
    if weighted:
        weights = (rng.exponential(size=indptr[-1]) * (rng.random(indptr[-1]) < 0.9)).astype("f4")
    return Adjacency(indptr, indices, weights)


def assert_same(found, expected):
    assert found.batch_size == expected.batch_size
    assert found.number == expected.number
    for name in FIELDS:
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype, name
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("fanouts", [[1], [3, 2], [-1], [4, -1, 2], [0, 3], [60, 5]])
def test_sampler_equals_the_reference(fanouts, dtype, weighted):
    topology = random_topology(150, 4, seed=len(fanouts), weighted=weighted, dtype=dtype)
    sampler = NeighborSampler(topology, fanouts, seed=3, edge_ids=True)
    seeds = np.random.default_rng(1).permutation(150)[:20]
    for epoch, batch in [(0, 0), (1, 7)]:
        expected = reference_sample(
            topology, fanouts, seeds.tolist(), seed=3, epoch=epoch, batch=batch
        )
        assert_same(sampler.sample(seeds, epoch=epoch, batch=batch), expected)


@st.composite
def cases(draw):
    nodes = draw(st.integers(1, 12))
    degrees = draw(st.lists(st.integers(0, 6), min_size=nodes, max_size=nodes))
    indices = draw(
        st.lists(st.integers(0, nodes - 1), min_size=sum(degrees), max_size=sum(degrees))
    )
    weights = draw(
        st.none()
        | st.lists(st.floats(0, 5, width=32), min_size=sum(degrees), max_size=sum(degrees))
    )
    seeds = draw(st.lists(st.integers(0, nodes - 1), unique=True))
    fanouts = draw(st.lists(st.integers(-1, 5), min_size=1, max_size=3))
    number = draw(st.integers(0, 2**63 - 1))
    return np.cumsum([0, *degrees]), indices, weights, seeds, fanouts, number


@given(cases())
def test_sampler_equals_the_reference_on_small_graphs_of_any_shape(case):
    indptr, indices, weights, seeds, fanouts, number = case
    if weights is not None:
        weights = np.array(weights, np.float32)
    topology = Adjacency(indptr, np.array(indices, np.int64), weights)
    sampler = NeighborSampler(topology, fanouts, seed=number, edge_ids=True)
    found = sampler.sample(seeds, epoch=number, batch=number)
    expected = reference_sample(topology, fanouts, seeds, seed=number, epoch=number, batch=number)
    assert_same(found, expected)


def test_a_batch_is_a_true_piece_of_the_graph():
    topology = random_topology(500, 6, seed=5)
    batch = NeighborSampler(topology, [5, 3], edge_ids=True).sample(range(40), epoch=0, batch=0)
    assert len(set(batch.node_ids.tolist())) == batch.num_nodes
    np.testing.assert_array_equal(batch.seeds, np.arange(40))
    sources, targets = batch.node_ids[batch.edge_index()]
    np.testing.assert_array_equal(sources, topology.indices[batch.edge_ids])
    owners = np.searchsorted(topology.indptr, batch.edge_ids, side="right") - 1
    np.testing.assert_array_equal(targets, owners)
    assert len(set(batch.edge_ids.tolist())) == batch.num_edges  # without replacement
    full = np.diff(topology.indptr)[batch.node_ids]
    fanouts = np.repeat([5, 3], batch.nodes_per_hop[:-1])
    np.testing.assert_array_equal(batch.degrees, np.minimum(full[: fanouts.size], fanouts))
    assert batch.nodes_per_hop.sum() == batch.num_nodes
    assert batch.edges_per_hop.sum() == batch.num_edges == batch.degrees.sum()


def test_full_neighbourhoods_are_whole():
    topology = random_topology(200, 3, seed=2)
    batch = NeighborSampler(topology, [-1, -1]).sample([4, 9], epoch=0, batch=0)
    reached = {4, 9}
    for _ in range(2):
        reached |= {int(u) for v in set(reached) for u in topology.neighbors(v)}
    assert set(batch.node_ids.tolist()) == reached


def test_threads_and_order_do_not_matter():
    topology = random_topology(3000, 8, seed=7)
    batches = np.random.default_rng(0).permutation(3000).reshape(30, 100)
    one = NeighborSampler(topology, [6, 4], threads=1, edge_ids=True)
    many = NeighborSampler(topology, [6, 4], threads=5, edge_ids=True)
    expected = list(one.sample_many(batches, epoch=2, first=10))
    assert [batch.number for batch in expected] == list(range(10, 40))
    for found, batch in zip(many.sample_many(batches, epoch=2, first=10), expected, strict=True):
        assert_same(found, batch)
    for place in (29, 0, 13):
        alone = many.sample(batches[place], epoch=2, batch=place + 10)
        assert_same(alone, expected[place])


def test_an_abandoned_or_failing_stream_ends_its_threads():
    topology = random_topology(100, 3, seed=1)
    sampler = NeighborSampler(topology, [2], threads=2)
    stream = sampler.sample_many(np.arange(100).reshape(20, 5), epoch=0)
    next(stream)
    stream.close()
    with pytest.raises(ConfigurationError, match="seed 100 is out of range"):
        list(sampler.sample_many([[0], [100], [1]], epoch=0))


def test_the_buffers_grow_and_serve_small_batches_again():
    topology = random_topology(20_000, 8, seed=8)
    sampler = NeighborSampler(topology, [10, 10], edge_ids=True)
    large = sampler.sample(range(2000), epoch=0, batch=0)
    assert large.num_nodes > 4096
    expected = reference_sample(topology, [10, 10], [5], seed=0, epoch=0, batch=0)
    assert_same(sampler.sample([5], epoch=0, batch=0), expected)
    assert_same(sampler.sample(range(2000), epoch=0, batch=0), large)


@pytest.mark.parametrize("seeds", [[], [2], [0, 1, 2]])
def test_graphs_without_edges(seeds):
    batch = NeighborSampler(Adjacency([0, 0, 0, 0], []), [3, -1]).sample(seeds, epoch=0, batch=0)
    assert batch.node_ids.tolist() == seeds
    assert batch.edge_index().shape == (2, 0)
    assert batch.nodes_per_hop.tolist() == [len(seeds), 0, 0]


def test_graph_without_nodes():
    sampler = NeighborSampler(Adjacency([0], []), [2])
    assert sampler.sample([], epoch=0, batch=0).num_nodes == 0
    with pytest.raises(ConfigurationError, match="out of range"):
        sampler.sample([0], epoch=0, batch=0)


@pytest.mark.parametrize("fanout", [49, 200])
def test_hubs_and_large_fanouts(fanout):
    topology = Adjacency([0, 1000, *[1000] * 999], np.arange(1000))
    sampler = NeighborSampler(topology, [fanout], edge_ids=True)
    expected = reference_sample(topology, [fanout], [0], seed=0, epoch=4, batch=2)
    assert_same(sampler.sample([0], epoch=4, batch=2), expected)


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        ([1, 2, 1], "seed 1 stands twice"),
        ([3], "seed 3 is out of range"),
        ([-1], "seed -1 is out of range"),
        ([0.5], "float64"),
        ([[0]], "shape"),
    ],
)
def test_wrong_seeds_are_refused(seeds, message):
    sampler = NeighborSampler(Adjacency([0, 1, 1, 1], [2]), [1])
    with pytest.raises(ConfigurationError, match=message):
        sampler.sample(seeds, epoch=0, batch=0)
    assert sampler.sample([0], epoch=0, batch=0).node_ids.tolist() == [0, 2]
    for wrong in ({"epoch": 0.5}, {"batch": "1"}):
        with pytest.raises(ConfigurationError, match="epoch or batch must be a whole number"):
            sampler.sample([0], **{"epoch": 0, "batch": 0} | wrong)


@pytest.mark.parametrize("fanouts", [[], [-2], [3, -5], [2.5], [None]])
def test_wrong_fanouts_are_refused(fanouts):
    with pytest.raises(ConfigurationError, match="fanouts"):
        NeighborSampler(Adjacency([0], []), fanouts)


def test_wrong_threads_and_bipartite_graphs_are_refused():
    with pytest.raises(ConfigurationError, match="threads"):
        NeighborSampler(Adjacency([0], []), [1], threads=0)
    with pytest.raises(ConfigurationError, match="different nodes"):
        NeighborSampler(Adjacency([0, 1], [4], num_sources=5), [1])


def test_damaged_indices_are_found_when_sampled():
    topology = Adjacency([0, 2, 2], [1, 77], check=False)
    with pytest.raises(DataError, match="edge 1 comes from node 77"):
        NeighborSampler(topology, [-1]).sample([0], epoch=0, batch=0)


def test_integers_of_numpy_are_integers():
    topology = random_topology(100, 5, seed=1)
    plain = NeighborSampler(topology, [2], seed=3).sample([5], epoch=1, batch=2)
    numpy = NeighborSampler(topology, np.array([2], np.int8), seed=np.int64(3)).sample(
        np.array([5], np.uint16), epoch=np.int32(1), batch=np.uint64(2)
    )
    np.testing.assert_array_equal(plain.node_ids, numpy.node_ids)


def test_samplers_can_be_sent_to_other_processes():
    sampler = NeighborSampler(random_topology(100, 5, seed=1), [3, 2], seed=3, edge_ids=True)
    expected = sampler.sample(range(9), epoch=0, batch=0)
    copy = pickle.loads(pickle.dumps(sampler))  # noqa: S301 - our own bytes
    assert_same(copy.sample(range(9), epoch=0, batch=0), expected)
    assert not copy.topology.indices.flags.writeable
