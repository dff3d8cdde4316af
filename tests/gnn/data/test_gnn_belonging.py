"""Files of a data set belong together: those of another one are refused, whatever their size."""

import gzip
import json
import logging
import shutil

import numpy as np
import pytest
import torch

from fivefold.errors import DataError
from fivefold.gnn.data import (
    Dataset,
    EdgeRules,
    HeteroDataset,
    array_source,
    generate_graph,
    ingest,
    pyg_source,
    table_source,
)
from fivefold.gnn.data._find_source import ogb_source
from fivefold.gnn.data.statistics import verify
from fivefold.gnn.sampling import HeteroNeighborSampler, NeighborSampler, sample_epochs
from fivefold.gnn.storage import Container, ContainerWriter

NODES = 3000
FILES = ("graph.fvf", "features.fvf", "labels.fvf")


@pytest.fixture
def two_graphs(tmp_path):
    """Folders of two data sets that differ in nothing but the seed."""
    for name, seed in (("one", 1), ("other", 2)):
        generate_graph(tmp_path / name, nodes=NODES, dim=4, seed=seed).close()
    return tmp_path / "one", tmp_path / "other"


def flip(path, place):
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))


def place_of(path, section, share=0.5):
    """A byte in the middle of a section."""
    with Container.open(path) as container:
        found = container.sections[section]
        return found.offset + int(found.nbytes * share)


def without_files(folder):
    """Make the graph of a folder one of a version that did not name the files beside it."""
    with Container.open(folder / "graph.fvf") as new:
        sections = {name: new.read(name) for name in new.sections}
        attributes = {name: value for name, value in new.attributes.items() if name != "files"}
    schema = {name: (array.dtype, array.shape) for name, array in sections.items()}
    with ContainerWriter(
        folder / "graph.fvf", kind="graph", sections=schema, attributes=attributes
    ) as writer:
        for name, array in sections.items():
            writer.write(name, 0, array)
        writer.commit().close()
    return sections


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_data_set_of_the_same_size_is_refused(name, two_graphs):
    one, other = two_graphs
    shutil.copy(other / name, one / name)
    with pytest.raises(DataError, match="belong"):
        Dataset.open(one)


@pytest.mark.parametrize("name", FILES[1:])
def test_a_file_that_is_gone_is_missed(name, two_graphs):
    (two_graphs[0] / name).unlink()
    with pytest.raises(DataError, match=f"{name}.*missing"):
        Dataset.open(two_graphs[0])


def test_labels_that_the_graph_did_not_have_are_refused(tmp_path, two_graphs):
    pairs = np.array([[0, 1], [1, 2]])
    source = pyg_source(_Data(edge_index=pairs, num_nodes=NODES))
    ingest(source, tmp_path / "bare").close()
    shutil.copy(two_graphs[0] / "labels.fvf", tmp_path / "bare")
    with pytest.raises(DataError, match="belong"):
        Dataset.open(tmp_path / "bare")


def test_a_graph_that_names_no_files_is_refused(two_graphs):
    without_files(two_graphs[0])
    with pytest.raises(DataError, match=r"does not say which .* belong"):
        Dataset.open(two_graphs[0])


class _Data:
    """Attributes, as PyTorch Geometric's ``Data`` has them."""

    def __init__(self, **values):
        for name, value in values.items():
            array = torch.as_tensor(value) if isinstance(value, np.ndarray) else value
            setattr(self, name, array)

    def keys(self):
        return list(vars(self))


class _Hetero(dict):
    node_types = property(lambda self: [key for key in self if isinstance(key, str)])
    edge_types = property(lambda self: [key for key in self if isinstance(key, tuple)])


def hetero_of(seed):
    rng = np.random.default_rng(seed)
    papers = _Data(x=rng.random((50, 3), np.float32), y=rng.integers(0, 3, 50), num_nodes=50)
    pairs = np.stack([rng.integers(0, 20, 400), rng.integers(0, 50, 400)])
    written = _Data(edge_index=pairs)
    types = {"paper": papers, "author": _Data(num_nodes=20), ("author", "writes", "paper"): written}
    return pyg_source(_Hetero(types), name="typed")


@pytest.fixture
def two_typed_graphs(tmp_path):
    for name, seed in (("one", 1), ("other", 2)):
        ingest(hetero_of(seed), tmp_path / name).close()
    return tmp_path / "one", tmp_path / "other"


@pytest.mark.parametrize(
    "name",
    ["nodes/0_paper/features.fvf", "nodes/0_paper/labels.fvf", "edges/0_writes/graph.fvf"],
    ids=["features", "labels", "graph"],
)
def test_a_file_of_another_graph_of_several_types_is_refused(name, two_typed_graphs):
    one, other = two_typed_graphs
    shutil.copy(other / name, one / name)
    with pytest.raises(DataError, match="belong"), HeteroDataset.open(one) as dataset:
        verify(dataset)


def test_a_changed_list_of_types_is_refused(two_typed_graphs):
    listing = two_typed_graphs[0] / "dataset.json"
    listing.write_text(listing.read_text().replace('"writes"', '"wrytes"'))
    with pytest.raises(DataError, match="damaged"):
        HeteroDataset.open(two_typed_graphs[0])


def test_a_list_of_types_of_an_older_version_is_refused(two_typed_graphs):
    listing = two_typed_graphs[0] / "dataset.json"
    values = json.loads(listing.read_text())
    listing.write_text(json.dumps({**values, "version": 1}))
    with pytest.raises(DataError, match="ingest it again"):
        HeteroDataset.open(two_typed_graphs[0])


@pytest.mark.parametrize("section", ["indices", "indptr"])
def test_a_mapped_graph_with_a_flipped_byte_is_refused(section, two_graphs):
    path = two_graphs[0] / "graph.fvf"
    flip(path, place_of(path, section))
    with Dataset.open(two_graphs[0]) as dataset, pytest.raises(DataError, match="checksum"):
        dataset.topology(mapped=True)


def test_a_mapped_graph_of_several_types_with_a_flipped_byte_is_refused(two_typed_graphs):
    path = two_typed_graphs[0] / "edges/0_writes/graph.fvf"
    flip(path, place_of(path, "indices"))
    with (
        HeteroDataset.open(two_typed_graphs[0]) as dataset,
        pytest.raises(DataError, match="checksum"),
    ):
        dataset.topology(mapped=True)


def test_a_mapped_graph_that_is_written_to_while_it_is_used_is_refused(two_graphs, tmp_path):
    path = two_graphs[0] / "graph.fvf"
    with Dataset.open(two_graphs[0]) as dataset:
        sampler = NeighborSampler(dataset.topology(mapped=True), [5, 5], threads=1)
        sampler.sample([1, 2, 3], epoch=0, batch=0)
        flip(path, place_of(path, "indices"))
        with pytest.raises(DataError, match="changed"):
            sample_epochs(sampler, dataset.train, tmp_path / "s.fvf", batch_size=50)


def test_mapped_typed_graphs_notice_changes_too(two_typed_graphs):
    path = two_typed_graphs[0] / "edges/0_writes/graph.fvf"
    with HeteroDataset.open(two_typed_graphs[0]) as dataset:
        sampler = HeteroNeighborSampler(dataset.topology(mapped=True), [5])
        flip(path, place_of(path, "indices"))
        with pytest.raises(DataError, match="changed"):
            sampler.sample({"paper": [0, 1, 2]}, epoch=0, batch=0)


def edge_rows(dataset):
    """[edges, 2 + F]: source, target and row of features of every edge, from the files."""
    topology = dataset.topology()
    rows = dataset.edge_features.read("x")[topology.edge_ids]
    targets = np.repeat(np.arange(dataset.num_nodes), np.diff(topology.indptr))
    return np.column_stack([topology.indices, targets, rows])


@pytest.mark.parametrize("edges", [700, 400_000])  # in memory; through buckets on disk
@pytest.mark.parametrize(
    "rules", [EdgeRules(), EdgeRules(add_reverse=True, drop_self_loops=True)], ids=["as is", "both"]
)
def test_features_of_edges_stay_with_their_edges(tmp_path, rules, edges):
    pairs = np.random.default_rng(0).integers(0, 5000, (2, edges))
    data = _Data(
        edge_index=pairs, edge_attr=np.arange(2.0 * edges).reshape(edges, 2), num_nodes=5000
    )
    expected = np.column_stack([pairs.T, data.edge_attr])
    if rules.add_reverse:
        expected = expected[expected[:, 0] != expected[:, 1]]
        expected = np.concatenate([expected, expected[:, [1, 0, 2, 3]]])
    run = {"rules": rules, "memory_bytes": 16_000_000}
    with ingest(pyg_source(data), tmp_path / "out", **run) as dataset:
        found = edge_rows(dataset)
        verify(dataset)
    by_all = [rows[np.lexsort(rows.T)] for rows in (found, expected)]
    np.testing.assert_array_equal(*by_all)
    with ingest(pyg_source(data, leave_out=["edge_attr"]), tmp_path / "bare", **run) as dataset:
        assert dataset.edge_features is None
        kept = np.sort(dataset.topology().edge_ids)  # they stay: all else per edge needs them
    np.testing.assert_array_equal(kept, np.sort(found[:, 2].astype(int) // 2))


def test_features_of_one_edge_type_are_stored(tmp_path):
    pairs, values = np.array([[0, 1], [1, 2]]), np.ones((2, 4), np.float32)
    kind = ("a", "to", "a")
    data = _Hetero({"a": _Data(num_nodes=3), kind: _Data(edge_index=pairs, edge_attr=values)})
    with ingest(pyg_source(data), tmp_path / "out") as dataset:
        np.testing.assert_array_equal(dataset.edge_features(kind).read("x"), values)
        assert dataset.topology().edges[kind].edge_ids.tolist() == [0, 1]
    assert pyg_source(data, leave_out=["edge_attr"]).edge_features == {}


def test_features_of_edges_of_ogb_are_stored(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    rows = {"edge_index": np.array([[0, 1], [1, 2]]), "num_nodes_list": np.array([3])}
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.savez(raw / "data.npz", **rows, edge_feat=values)
    with ingest(ogb_source(tmp_path), tmp_path / "out") as dataset:
        assert edge_rows(dataset).tolist() == [[0, 1, 0, 1, 2, 3], [1, 2, 4, 5, 6, 7]]
    with ingest(ogb_source(tmp_path, leave_out=["edge_feat"]), tmp_path / "bare") as dataset:
        assert dataset.edge_features is None


def test_a_list_of_ogb_that_is_missing_says_what_to_do(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "edge.csv.gz").write_bytes(gzip.compress(b"0,1\n"))
    with pytest.raises(DataError, match=r"no file .*num-node-list") as caught:
        ogb_source(tmp_path)
    assert caught.value.hint == "unpack the benchmark's archive again"


def test_features_of_too_few_edges_are_refused():
    with pytest.raises(DataError, match="1 rows of edge features for 2 edges"):
        array_source([[0, 1], [1, 2]], edge_features=np.ones((1, 4)))


def test_columns_of_edge_tables_that_are_not_stored_are_named(tmp_path, caplog):
    (tmp_path / "edges.csv").write_text("source,target,amount\n0,1,2.5\n1,2,0.5\n")
    with caplog.at_level(logging.INFO):
        ingest(table_source([tmp_path / "edges.csv"]), tmp_path / "out").close()
    assert "left out column amount" in caplog.text
