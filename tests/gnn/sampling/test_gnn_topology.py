"""Topologies: what is a graph, what is refused, and that one mapped from a file is the same."""

import numpy as np
import pytest

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.sampling import Adjacency, NeighborSampler
from fivefold.gnn.sampling import _topology as module
from fivefold.gnn.storage import Container, ContainerWriter


def write_graph(path, topology, **attributes):
    arrays = {"indptr": topology.indptr, "indices": topology.indices}
    if topology.weights is not None:
        arrays["weights"] = topology.weights
    sections = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    with ContainerWriter(path, kind="graph", sections=sections, attributes=attributes) as writer:
        for name, array in arrays.items():
            writer.write(name, 0, array)
        return writer.commit()


def random_topology(dtype, *, weighted):
    rng = np.random.default_rng(0)
    indptr = np.concatenate([[0], np.cumsum(rng.poisson(20, 700))])
    weights = rng.random(indptr[-1], np.float32) if weighted else None
    return Adjacency(indptr, rng.integers(0, 700, indptr[-1]).astype(dtype), weights)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_topology_from_a_file_gives_the_same_samples(tmp_path, dtype, weighted):
    made = random_topology(dtype, weighted=weighted)
    expected = NeighborSampler(made, [5, 5]).sample(range(50), epoch=0, batch=0)
    prints = set()
    with write_graph(tmp_path / "g", made) as container:
        for mapped in (False, True):
            topology = Adjacency.open(container, mapped)
            assert topology.indices.dtype == dtype
            assert topology.nbytes == made.nbytes
            prints.add(topology.fingerprint)
            batch = NeighborSampler(topology, [5, 5]).sample(range(50), epoch=0, batch=0)
            np.testing.assert_array_equal(batch.node_ids, expected.node_ids)
            np.testing.assert_array_equal(batch.sources, expected.sources)
    assert prints == {container.fingerprint}


def test_a_bipartite_topology_keeps_its_sources(tmp_path):
    made = Adjacency([0, 1, 2], [8, 3], num_sources=9)
    with write_graph(tmp_path / "g", made, num_sources=9) as container:
        assert Adjacency.open(container).num_sources == 9


def test_another_container_is_refused(tmp_path):
    with ContainerWriter(
        tmp_path / "f", kind="features", sections={"x": ("f4", (2, 2))}, attributes={}
    ) as writer:
        writer.write("x", 0, np.zeros((2, 2), "f4"))
        with writer.commit() as container, pytest.raises(DataError, match="indices and indptr"):
            Adjacency.open(container)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], []), "indptr is empty"),
        (([1, 2], [0, 0]), "wrong at node 0"),
        (([0, 2, 1, 3], [0, 0, 0]), "wrong at node 1"),
        (([0, 1], [0, 0]), "wrong at node 1"),
        (([0, 3], [0, 0]), "wrong at node 1"),
        (([0, 1], [1]), "edge 0 comes from node 1"),
        (([0, 2], [0, -1]), "edge 1 comes from node -1"),
        (([0, 1], [0], [1.0, 2.0]), "2 weights for 1 edges"),
        (([0, 2], [0, 0], [0.0, -1.0]), "edge 1 has weight -1"),
        (([0, 2], [0, 0], [np.nan, 1.0]), "edge 0 has weight nan"),
        (([0, 1], [0], [np.inf]), "edge 0 has weight inf"),
        (([0, 1], [0.0]), "indices has dtype float64"),
        (([0.0, 1], [0]), "indptr has dtype float64"),
        (([[0, 1]], [0]), "indptr has shape"),
    ],
)
def test_what_is_no_graph_is_refused(arguments, message):
    with pytest.raises(DataError, match=message):
        Adjacency(*arguments)


def test_counts_and_neighbours():
    topology = Adjacency(np.array([0, 2, 2, 5], np.uint32), np.array([2, 1, 0, 0, 2], np.uint8))
    assert (topology.num_nodes, topology.num_edges, topology.max_degree) == (3, 5, 3)
    assert [topology.neighbors(node).tolist() for node in range(3)] == [[2, 1], [], [0, 0, 2]]
    with pytest.raises(ConfigurationError, match="node 3"):
        topology.neighbors(3)
    with pytest.raises(ValueError, match="read-only"):
        topology.indices[0] = 1


def test_fingerprints_tell_graphs_apart():
    graphs = [
        Adjacency([0, 1, 2], [1, 0]),
        Adjacency([0, 2, 2], [1, 0]),
        Adjacency([0, 1, 2], [0, 1]),
        Adjacency([0, 1, 2], [1, 0], [1.0, 1.0]),
        Adjacency([0, 1, 2], [1, 0], num_sources=3),
        Adjacency([0, 0, 0], []),
    ]
    assert len({graph.fingerprint for graph in graphs}) == len(graphs)
    assert graphs[0].fingerprint == Adjacency([0, 1, 2], [1, 0]).fingerprint


def test_the_callers_arrays_stay_writable():
    indices = np.array([1, 0])
    Adjacency([0, 1, 2], indices)
    assert indices.flags.writeable


def test_a_mapped_indptr_is_checked_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_ROWS", 64)
    made = random_topology(np.int32, weighted=False)
    with write_graph(tmp_path / "g", made) as container:
        assert Adjacency.open(container, mapped=True).max_degree == made.max_degree
    for node, value in [(0, 1), (64, -1), (65, 0), (128, 10**6), (640, 3), (700, 5)]:
        indptr = made.indptr.copy()
        indptr[node] = value
        arrays = {"indptr": indptr, "indices": made.indices}
        with ContainerWriter(
            tmp_path / "bad",
            kind="graph",
            sections={name: (array.dtype, array.shape) for name, array in arrays.items()},
            attributes={},
        ) as writer:
            for name, array in arrays.items():
                writer.write(name, 0, array)
            container = writer.commit()
        messages = set()
        for mapped in (False, True):
            with pytest.raises(DataError, match="indptr is wrong at node") as caught:
                Adjacency.open(container, mapped=mapped)
            messages.add(str(caught.value))
        assert len(messages) == 1
        container.close()


def test_a_damaged_indptr_is_noticed_when_mapped(tmp_path):
    with write_graph(tmp_path / "g", random_topology(np.int32, weighted=False)) as container:
        offset = container.sections["indptr"].offset
    with (tmp_path / "g").open("r+b") as file:
        file.seek(offset + 808)
        file.write(b"\x01")
    with Container.open(tmp_path / "g") as container:
        for mapped in (False, True):
            with pytest.raises(DataError, match="damaged"):
                Adjacency.open(container, mapped=mapped)


@pytest.mark.parametrize("mapped", [False, True])
def test_opening_says_how_far_it_is(tmp_path, mapped):
    nodes, edges = 1000, 3 << 20
    with ContainerWriter(
        tmp_path / "graph.fvf",
        kind="graph",
        sections={"indptr": (np.int64, (nodes + 1,)), "indices": (np.int32, (edges,))},
        attributes={},
    ) as writer:
        writer.write("indptr", 0, np.linspace(0, edges, nodes + 1).astype(np.int64))
        writer.write("indices", 0, np.zeros(edges, np.int32))
        container = writer.commit()
    told = []
    with container:
        Adjacency.open(container, mapped, lambda *call: told.append(call))
    assert told[-1] == ("topology", edges, edges)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
