"""Arrays and PyG objects as people have them: sparse, masked, with several splits, in archives."""

import warnings

import numpy as np
import pytest
import torch

from fivefold.errors import DataError
from fivefold.gnn.data import SourceOptions, array_source, find_source, ingest, pyg_source
from fivefold.gnn.data._pyg import load_plain

with warnings.catch_warnings():  # of deprecations in torch, on import
    warnings.simplefilter("ignore")
    from torch_geometric.data import Data, HeteroData, InMemoryDataset

EDGES = np.array([[0, 1, 2, 2], [1, 2, 0, 1]])
X = np.arange(6, dtype=np.float32).reshape(3, 2)


def sparse_matrix():
    with warnings.catch_warnings():  # sparse tensors warn in every version of torch
        warnings.simplefilter("ignore")
        size, ones = (3, 3), torch.ones(4)
        return torch.sparse_coo_tensor(torch.from_numpy(EDGES[::-1].copy()), ones, size)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"features": np.array([[1, 2]] * 3, object)}, "features holds Python objects"),
        ({"features": [[1, 2], [3]]}, "features is no array"),
        ({"features": torch.ones(3, 2, dtype=torch.bfloat16)}, "bfloat16, which NumPy has not"),
        ({"features": np.ma.masked_array(X, X > 2)}, "features has masked elements"),
        ({"features": torch.eye(3).to_sparse()}, "features is a sparse Tensor"),
        ({"weights": np.array([1j] * 4)}, "weights have dtype complex128"),
        ({"weights": np.array([1e300] * 4)}, "weight is negative, infinite"),
        ({"labels": [0, np.inf, 1]}, "a label is inf"),
        ({"labels": [0, 1 << 40, 1]}, "a label is 1099511627776"),
        ({"num_nodes": -1}, "num_nodes is -1"),
        ({"edge_index": [[0, 1 << 40], [1, 2]]}, "they have gaps"),
        ({"labels": [0, 1, 0], "splits": {"train": np.ones((3, 2), bool)}}, "--split 0"),
    ],
)
def test_what_cannot_be_right_is_refused(tmp_path, arrays, message):
    with pytest.raises(DataError, match=message):
        ingest(array_source(**{"edge_index": EDGES, **arrays}), tmp_path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_archive_of_arrays(tmp_path, save):
    save(tmp_path / "g.npz", edge_index=EDGES, x=X, y=[0, 1, 0], train_mask=[1, 0, 1], other=3)
    with ingest(find_source(tmp_path / "g.npz")[0], tmp_path / "out") as dataset:
        np.testing.assert_array_equal(dataset.features.read("x"), X)
        assert dataset.topology().neighbors(1).tolist() == [0, 2]
        assert dataset.train.tolist() == [0, 2]  # a mask of numbers
    save(tmp_path / "none.npz", x=X)
    with pytest.raises(DataError, match="no array edge_index"):
        find_source(tmp_path / "none.npz")


@pytest.mark.parametrize("place", ["memory", "file", "fortran"])
def test_one_of_several_splits(tmp_path, place):
    masks = np.array([[1, 0], [0, 1], [1, 1]], bool)
    data = Data(
        x=torch.from_numpy(X),
        edge_index=torch.from_numpy(EDGES),
        y=torch.tensor([0, 1, 0]),
        train_mask=torch.from_numpy(masks),
    )
    path = tmp_path / "data.pt"
    torch.save(data, path)
    if place == "fortran":
        path = tmp_path / "arrays"
        path.mkdir()
        arrays = {"edge_index": EDGES, "y": np.array([0, 1, 0]), "train_mask": masks}
        for name, array in arrays.items():
            np.save(path / f"{name}.npy", np.asfortranarray(array))
    options = SourceOptions(split=1)
    source = pyg_source(data, split=1) if place == "memory" else find_source(path, options)[0]
    with ingest(source, tmp_path / "out") as dataset:
        assert dataset.train.tolist() == [1, 2]
    with pytest.raises(DataError, match="split 2 was asked for"):
        find_source(path, SourceOptions(split=2))


@pytest.mark.parametrize("layout", ["coo", "csr", "torch_sparse"])
@pytest.mark.parametrize("weighted", [False, True])
def test_transposed_adjacency(tmp_path, layout, weighted):
    matrix = sparse_matrix()
    if weighted:
        matrix = matrix * 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        matrix = matrix.to_sparse_csr() if layout == "csr" else matrix
    if layout == "torch_sparse":
        indices, values = matrix.coalesce().indices(), matrix.coalesce().values()

        class SparseTensor:  # as torch_sparse has it
            def coo(self):
                return indices[0], indices[1], values if weighted else None

        matrix = SparseTensor()
    data = Data(x=torch.from_numpy(X))
    data.adj_t = matrix
    with ingest(pyg_source(data), tmp_path) as dataset:
        topology = dataset.topology()
        found = {v: sorted(topology.neighbors(v).tolist()) for v in range(3)}
        assert found == {0: [2], 1: [0, 2], 2: [1]}
        assert dataset.weighted is weighted


def test_files_of_data_sets_of_pyg(tmp_path):
    data = Data(edge_index=torch.from_numpy(EDGES), y=torch.tensor([0, 1, 0]))
    path = tmp_path / "data.pt"
    InMemoryDataset.save([data], str(path))
    with ingest(find_source(path)[0], tmp_path / "out") as dataset:
        assert (dataset.num_nodes, dataset.num_edges) == (3, 4)
    torch.save({"edge_index": data.edge_index}, path)
    assert find_source(path)[0].num_nodes == 3  # by the edges
    for several in ([data, data], [data] * 3):
        InMemoryDataset.save(several, str(path))
        with pytest.raises(DataError, match=f"holds {len(several)} graphs"):
            find_source(path)
    hetero = HeteroData()
    hetero["a"].x = torch.from_numpy(X)
    hetero["a", "to", "a"].edge_index = torch.from_numpy(EDGES)
    InMemoryDataset.save([hetero], str(path))
    assert list(find_source(path)[0].nodes) == ["a"]
    del hetero["a"].x
    torch.save(hetero, path)
    with pytest.raises(DataError, match="neither features nor num_nodes"):
        find_source(path)


def test_arrays_without_elements_in_a_pickle(tmp_path):
    splits = {"train": np.arange(3), "test-challenge": np.array([], np.int64)}
    torch.save(splits, tmp_path / "split_dict.pt")
    assert load_plain(tmp_path / "split_dict.pt")["test-challenge"].size == 0
    torch.save({"a": warnings.catch_warnings}, tmp_path / "class.pt")
    with pytest.raises(DataError, match=r"it refers to warnings\.catch_warnings"):
        load_plain(tmp_path / "class.pt")
