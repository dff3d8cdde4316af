"""What nodes and edges carry by names of their own, from every kind of source into the loaders."""

import gzip
import warnings

import numpy as np
import pytest
import torch

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.data import (
    Dataset,
    EdgeRules,
    SourceOptions,
    TableColumns,
    array_source,
    find_source,
    ingest,
    pyg_source,
)
from fivefold.gnn.loading import LinkLoader, OnlineLoader

with warnings.catch_warnings():  # of deprecations in torch, on import
    warnings.simplefilter("ignore")
    from torch_geometric.data import Data

ENDS = np.array([[0, 3, 1, 2, 0, 3, 2], [1, 0, 2, 3, 1, 3, 0]])
WHEN = np.array([5, 1, 9, 2, 7, 3, 4])
SIGN = np.array([0.5, -1, 2, 0, 1, 1, 3])
YEAR = np.array([1999, 2020, 7, 2**53 + 1])
X = np.arange(8, dtype=np.float32).reshape(4, 2)


def of_arrays(_folder):
    edges = {"edge_time": WHEN, "edge_sign": SIGN}
    return array_source(ENDS, features=X, node_parts={"node_year": YEAR}, edge_parts=edges)


def of_a_folder(folder):
    for name, rows in {"edge_index": ENDS, "x": X, "node_year": YEAR, "edge_time": WHEN,
                       "edge_sign": SIGN}.items():  # fmt: skip
        np.save(folder / f"{name}.npy", rows)
    return find_source(folder)[0]


def of_an_archive(folder):
    np.savez(folder / "a.npz", edge_index=ENDS, x=X, node_year=YEAR, edge_time=WHEN, edge_sign=SIGN)
    return find_source(folder / "a.npz")[0]


def of_a_table(folder):
    rows = zip(*ENDS, WHEN, SIGN, strict=True)
    lines = ["src,dst,edge_time,edge_sign", *(",".join(map(str, row)) for row in rows), ""]
    (folder / "e.csv").write_text("\n".join(lines))
    np.save(folder / "x.npy", X)
    columns = TableColumns(edge=("edge_time", "edge_sign"))
    arrays = {"features": folder / "x.npy"}
    return find_source(folder / "e.csv", SourceOptions(columns=columns, arrays=arrays))[0]


def of_the_benchmark(folder):
    texts = {"edge": ENDS.T, "num-node-list": [4], "num-edge-list": [7], "node-feat": X,
             "node_year": YEAR, "edge_time": WHEN, "edge_sign": SIGN}  # fmt: skip
    (folder / "raw").mkdir()
    for name, rows in texts.items():
        lines = [",".join(map(str, np.atleast_1d(row).tolist())) for row in rows]
        path = folder / "raw" / f"{name}.csv.gz"
        path.write_bytes(gzip.compress("\n".join([*lines, ""]).encode()))
    return find_source(folder)[0]


def of_pyg(_folder):
    data = Data(x=torch.from_numpy(X), edge_index=torch.from_numpy(ENDS))
    data.node_year, data.edge_time = torch.from_numpy(YEAR), torch.from_numpy(WHEN)
    data.edge_sign = torch.from_numpy(SIGN)
    return pyg_source(data)


@pytest.mark.parametrize(
    "rules", [EdgeRules(), EdgeRules(add_reverse=True, drop_duplicates=True, drop_self_loops=True)]
)
@pytest.mark.parametrize(
    "make", [of_arrays, of_a_folder, of_an_archive, of_a_table, of_the_benchmark, of_pyg]
)
def test_parts_come_back_and_serve_loaders_by_name(tmp_path, make, rules):
    (tmp_path / "in").mkdir()
    source = make(tmp_path / "in")
    assert not source.reading.left_out
    with ingest(source, tmp_path / "out", rules=rules) as dataset:
        fingerprint = dataset.fingerprint
        assert dataset.part("edge", "edge_time").tolist() == WHEN.tolist()
        assert dataset.part("edge", "edge_sign").tolist() == SIGN.tolist()
        if make is not of_a_table:
            assert dataset.part("node", "node_year").tolist() == YEAR.tolist()
        options = {"fanouts": [-1], "batch_size": 4, "input_time": [4] * 4}
        found = []
        for when in ("edge_time", WHEN):
            with OnlineLoader(dataset, np.arange(4), edge_time=when, **options) as loader:
                found.append(next(iter(loader)).edge_index)
        assert torch.equal(*found)
        links = {"fanouts": [1], "batch_size": 20, "negatives": None}
        with LinkLoader(dataset, edge_label="edge_sign", **links) as loader:
            batch = next(iter(loader))
        ends = batch.n_id[batch.links["edge_label_index"]].numpy()
        for pair, label in zip(ends.T, batch.links["edge_label"].numpy(), strict=True):
            same = (pair[:, None] == ENDS).all(0) | (
                rules.add_reverse & (pair[::-1, None] == ENDS).all(0)
            )
            assert label in SIGN[same]
    with Dataset.open(tmp_path / "out") as dataset:
        assert dataset.part_names("edge") == ["edge_time", "edge_sign"] or make is not of_a_table
        assert dataset.fingerprint == fingerprint


def a_table(folder, text, **columns):
    (folder / "e.csv").write_text(text)
    return find_source(folder / "e.csv", SourceOptions(columns=TableColumns(**columns)))[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: array_source(ENDS, edge_parts={"t": WHEN[1:]}), "t has 6 rows for 7 edges"),
        (lambda _: array_source(ENDS, features=X, node_parts={"t": WHEN}), "7 rows for 4 nodes"),
        (lambda folder: a_table(folder, "src,dst,t\n0,1,a\n", edge=("t",)), "is of type string"),
        (lambda folder: a_table(folder, "src,dst,t\n0,1,2\n", edge=("u",)), "no column 'u'"),
        (lambda folder: a_table(folder, "src,dst,t\n0,1,2\n", edge=("src",)), "two roles"),
        (lambda folder: a_table(folder, "src,dst,t\n0,1,2\n1,2,\n", edge=("t",)), "empty field"),
    ],
)
def test_parts_that_are_refused(tmp_path, make, message):
    with pytest.raises(DataError, match=message):
        ingest(make(tmp_path), tmp_path / "out")


def test_names_that_are_not_there(tmp_path):
    with ingest(of_arrays(tmp_path), tmp_path / "out") as dataset:
        with pytest.raises(DataError, match="no part 'when'") as caught:
            OnlineLoader(dataset, [0], fanouts=[1], batch_size=1, edge_time="when")
        assert "edge_time, edge_sign" in caught.value.hint
        with pytest.raises(ConfigurationError, match="are not the graph's edges"):
            LinkLoader(dataset, [[0], [1]], fanouts=[1], batch_size=1, edge_label="edge_sign")


def test_several_labels_lead_to_a_part_of_the_nodes(tmp_path):
    """What the refusal says is followed: the matrix comes back, row by row."""
    labels = np.random.default_rng(0).random((4, 3))
    np.save(tmp_path / "edge_index.npy", [[0, 1], [1, 2]])
    np.save(tmp_path / "x.npy", np.zeros((4, 2), np.float32))
    np.save(tmp_path / "y.npy", labels)
    with pytest.raises(DataError, match="several for each node") as caught:
        ingest(find_source(tmp_path)[0], tmp_path / "out")
    assert 'dataset.part("node", "node_y")' in caught.value.hint
    (tmp_path / "y.npy").rename(tmp_path / "node_y.npy")
    with ingest(find_source(tmp_path)[0], tmp_path / "again") as dataset:
        np.testing.assert_array_equal(dataset.part("node", "node_y"), labels)
