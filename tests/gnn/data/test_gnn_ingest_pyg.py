"""PyTorch Geometric's objects, in memory and in files."""

import warnings

import numpy as np
import pytest
import torch

from fivefold.errors import DataError
from fivefold.files import read_checked_json, write_checked_json
from fivefold.gnn.data import (
    Dataset,
    EdgeRules,
    HeteroDataset,
    find_source,
    ingest,
    open_dataset,
    pyg_source,
)
from fivefold.gnn.data.statistics import describe, verify

with warnings.catch_warnings():  # of deprecations in torch, on import
    warnings.simplefilter("ignore")
    from torch_geometric.data import Data, HeteroData


@pytest.fixture
def data(random_graph):
    edges = np.stack([random_graph["sources"], random_graph["targets"]])
    masks = {name: torch.zeros(300, dtype=torch.bool) for name in ("train", "val", "test")}
    for index, mask in enumerate(masks.values()):
        mask[index::3] = True
    return Data(
        x=torch.from_numpy(random_graph["features"]),
        edge_index=torch.from_numpy(edges),
        edge_weight=torch.from_numpy(random_graph["weights"]),
        y=torch.from_numpy(random_graph["labels"]),
        name="kept out",
        **{f"{name}_mask": mask for name, mask in masks.items()},
    )


@pytest.mark.parametrize("place", ["memory", "file"])
def test_data(tmp_path, data, random_graph, expected_csr, place):
    source = pyg_source(data)
    if place == "file":
        torch.save(data, tmp_path / "data.pt")
        source, _ = find_source(tmp_path / "data.pt")
    with ingest(source, tmp_path / "out") as dataset:
        indptr, indices, order = expected_csr(random_graph["sources"], random_graph["targets"], 300)
        topology = dataset.topology()
        np.testing.assert_array_equal(topology.indptr, indptr)
        np.testing.assert_array_equal(topology.indices, indices)
        np.testing.assert_array_equal(topology.weights, random_graph["weights"][order])
        np.testing.assert_array_equal(dataset.features.read("x"), random_graph["features"])
        np.testing.assert_array_equal(dataset.labels, random_graph["labels"])
        assert dataset.valid.tolist() == list(range(1, 300, 3))


def test_half_precision_and_float_labels(tmp_path):
    data = Data(
        x=torch.ones(3, 768, dtype=torch.float16),
        edge_index=torch.tensor([[0, 1], [1, 2]]),
        y=torch.tensor([[0.0], [1.0], [float("nan")]]),
    )
    with ingest(pyg_source(data), tmp_path) as dataset:
        assert (dataset.dtype, dataset.labels.tolist()) == (np.float16, [0, 1, -1])


def test_what_cannot_be_stored_is_refused(tmp_path):
    with pytest.raises(DataError, match="neither edge_index nor adj_t"):
        pyg_source(Data(x=torch.zeros(2, 2)))
    with pytest.raises(DataError, match="bfloat16"):
        pyg_source(
            Data(x=torch.zeros(2, 2, dtype=torch.bfloat16), edge_index=torch.zeros(2, 0).long())
        )
    torch.save({"a": 1}, tmp_path / "dict.pt")
    with pytest.raises(DataError, match="holds a dict"):
        pyg_source(tmp_path / "dict.pt")
    (tmp_path / "bad.pt").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match="cannot be read safely"):
        pyg_source(tmp_path / "bad.pt")


@pytest.fixture
def hetero():
    rng = np.random.default_rng(1)
    data = HeteroData()
    data["paper"].x = torch.from_numpy(rng.standard_normal((50, 6)).astype(np.float32))
    data["paper"].y = torch.from_numpy(rng.integers(0, 3, 50))
    data["paper"].train_mask = torch.arange(50) < 20
    data["author"].x = torch.from_numpy(rng.standard_normal((30, 4)).astype(np.float16))
    data["venue"].num_nodes = 7

    def edges(sources, targets, count):
        ends = [rng.integers(0, sources, count), rng.integers(0, targets, count)]
        return torch.from_numpy(np.stack(ends))

    data["author", "writes", "paper"].edge_index = edges(30, 50, 200)
    data["paper", "cites", "paper"].edge_index = edges(50, 50, 300)
    data["paper", "cites", "paper"].edge_weight = torch.rand(300)
    data["paper", "in / at", "venue"].edge_index = edges(50, 7, 50)
    return data


@pytest.mark.parametrize("place", ["memory", "file"])
def test_hetero_data(tmp_path, hetero, expected_csr, place):
    source = pyg_source(hetero)
    if place == "file":
        torch.save(hetero, tmp_path / "hetero.pt")
        source = pyg_source(tmp_path / "hetero.pt")
    folder = tmp_path / "out"
    with ingest(source, folder) as dataset:
        assert dataset.num_nodes == {"paper": 50, "author": 30, "venue": 7}
        assert dataset.edge_types == hetero.edge_types
        topology = dataset.topology()
        for kind in hetero.edge_types:
            sources, targets = hetero[kind].edge_index.numpy()
            indptr, indices, order = expected_csr(sources, targets, hetero[kind[2]].num_nodes)
            np.testing.assert_array_equal(topology.edges[kind].indptr, indptr)
            np.testing.assert_array_equal(topology.edges[kind].indices, indices)
            if "edge_weight" in hetero[kind]:
                weights = hetero[kind].edge_weight.numpy()[order]
                np.testing.assert_array_equal(topology.edges[kind].weights, weights)
        np.testing.assert_array_equal(dataset.features("author").read("x"), hetero["author"].x)
        np.testing.assert_array_equal(dataset.labels("paper"), hetero["paper"].y)
        assert dataset.split("paper", "train").tolist() == list(range(20))
        assert describe(dataset)["edges"]["paper in / at venue"] == 50
        assert verify(dataset) > 0
        with pytest.raises(DataError, match="there is no"):
            dataset.features("venue")
        with pytest.raises(DataError, match="no node type"):
            dataset.labels("reader")
    with pytest.raises(DataError, match="several node or edge types"):
        Dataset.open(folder)
    with open_dataset(folder) as again:
        assert isinstance(again, HeteroDataset)
        assert again.fingerprint == dataset.fingerprint
    with pytest.raises(DataError, match="reversed"):
        ingest(pyg_source(hetero), tmp_path / "reverse", rules=EdgeRules(add_reverse=True))


def test_hetero_listing_damaged(tmp_path, hetero):
    ingest(pyg_source(hetero), tmp_path).close()
    listing = tmp_path / "dataset.json"
    text = listing.read_text()
    listing.write_text(text[:-20])
    with pytest.raises(DataError, match="damaged"):
        HeteroDataset.open(tmp_path)
    listing.write_text(text)
    write_checked_json(listing, {**read_checked_json(listing), "version": 7})
    with pytest.raises(DataError, match="version 7"):
        HeteroDataset.open(tmp_path)


def test_a_typed_graph_that_was_used_is_saved_as_a_dictionary(tmp_path):
    """PyG notes in the graph which of its attributes are of nodes; that note is saved, too."""
    data = HeteroData()
    data["a"].x = torch.arange(6.0).reshape(3, 2)
    data["a", "to", "a"].edge_index = torch.tensor([[0, 1], [2, 2]])
    assert data["a"].is_node_attr("x")
    torch.save(data, tmp_path / "used.pt")
    with pytest.raises(DataError) as caught:
        pyg_source(tmp_path / "used.pt")
    assert "data.to_dict()" in caught.value.hint
    torch.save(data.to_dict(), tmp_path / "tensors.pt")
    with ingest(pyg_source(tmp_path / "tensors.pt"), tmp_path / "graph") as dataset:
        assert dataset.edge_types == [("a", "to", "a")]
        assert dataset.features("a").read("x").tolist() == data["a"].x.tolist()


def test_a_folder_keeps_the_types_that_it_has(tmp_path, hetero):
    plain = pyg_source(Data(x=torch.ones(2, 2), edge_index=torch.tensor([[0], [1]])))
    ingest(pyg_source(hetero), tmp_path / "typed").close()
    ingest(plain, tmp_path / "plain").close()
    fewer = HeteroData()
    name = hetero.node_types[0]
    fewer[name].x = hetero[name].x
    more = hetero.clone()
    bare = next(name for name in hetero.node_types if "x" not in hetero[name])
    more[bare].x = torch.ones(hetero[bare].num_nodes, 1)
    for source, folder, message in (
        (plain, "typed", "another form: dataset.json"),
        (pyg_source(hetero), "plain", "another form: graph.fvf"),
        (pyg_source(fewer), "typed", "differs in its node or edge types"),
        (pyg_source(more), "typed", "differs in its node or edge types"),
    ):
        with pytest.raises(DataError, match=message):
            ingest(source, tmp_path / folder)
    assert not (tmp_path / "typed" / "graph.fvf").exists()
    with ingest(pyg_source(hetero), tmp_path / "typed") as again:
        assert sorted(again.node_types) == sorted(hetero.node_types)
    rules = EdgeRules(add_reverse=True)
    with pytest.raises(DataError, match="cannot be reversed"):
        ingest(pyg_source(hetero), tmp_path / "new", rules=rules)
    assert not (tmp_path / "new").exists()


def test_reading_notes_nothing_in_a_graph():
    """PyG notes whose attributes are whose, and a graph with such notes cannot be saved safely."""
    data = Data(x=torch.zeros(3, 2), edge_index=torch.tensor([[0, 1], [1, 2]]))
    data.edge_time = torch.tensor([5, 7])
    before = {name for store in data.stores for name in vars(store)}
    assert "edge_time" in pyg_source(data).edge_parts()
    assert {name for store in data.stores for name in vars(store)} == before
