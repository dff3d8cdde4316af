"""Arrays in memory, in .npy files and in the Open Graph Benchmark's folders."""

import gzip
import os
import re
import signal
import subprocess
import sys
import textwrap
import zipfile

import numpy as np
import pytest
import torch

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.data import EdgeRules, array_source, find_source, ingest
from fivefold.gnn.data._benchmarks import mag240m_source, ogb_source

SMALL = 16 << 20


def check_graph(dataset, graph, expected_csr):
    indptr, indices, order = expected_csr(graph["sources"], graph["targets"], graph["num_nodes"])
    topology = dataset.topology()
    np.testing.assert_array_equal(topology.indptr, indptr)
    np.testing.assert_array_equal(topology.indices, indices)
    if dataset.weighted:
        np.testing.assert_array_equal(topology.weights, graph["weights"][order])


@pytest.mark.parametrize("form", ["split", "pairs", "fortran split", "fortran pairs"])
@pytest.mark.parametrize("place", ["memory", "file"])
def test_edges_of_either_shape_and_order(tmp_path, random_graph, expected_csr, form, place):
    edges = np.stack([random_graph["sources"], random_graph["targets"]])
    edges = edges.T if "pairs" in form else edges
    edges = np.asfortranarray(edges) if "fortran" in form else np.ascontiguousarray(edges)
    if place == "file":
        np.save(tmp_path / "edges.npy", edges)
        edges = tmp_path / "edges.npy"
    source = array_source(edges, num_nodes=300, weights=random_graph["weights"])
    with ingest(source, tmp_path / "out", memory_bytes=SMALL) as dataset:
        check_graph(dataset, random_graph, expected_csr)


@pytest.mark.parametrize("place", ["file", "memory"])
def test_two_edges_are_read_in_the_order_they_were_saved(tmp_path, place):
    """[2, 2] is ambiguous: it is [sources, targets], in either memory order."""
    edges = np.array([[0, 1], [2, 3]])
    for index, array in enumerate([edges, np.asfortranarray(edges)]):
        np.save(tmp_path / f"{index}.npy", array)
        path = tmp_path / f"{index}.npy"
        source = array_source(path if place == "file" else array, num_nodes=4)
        with ingest(source, tmp_path / f"out{index}") as dataset:
            assert dataset.topology().neighbors(2).tolist() == [0]
            assert dataset.topology().neighbors(3).tolist() == [1]


@pytest.mark.parametrize("kind", ["int8", "uint8", "int32", ">i4", "uint64", "int64"])
def test_ids_of_any_integer_type(tmp_path, kind):
    edges = np.array([[0, 1, 2], [1, 2, 0]]).astype(kind)
    np.save(tmp_path / "edges.npy", edges)
    with ingest(array_source(tmp_path / "edges.npy"), tmp_path / "out") as dataset:
        assert dataset.num_nodes == 3
        assert dataset.topology().indices.tolist() == [2, 0, 1]


@pytest.mark.parametrize("dim", [1, 3, 100, 128, 1025])
@pytest.mark.parametrize("kind", ["float16", "float32", ">f4", "float64", "int8", "uint8", "bool"])
def test_features_are_stored_bit_for_bit(tmp_path, dim, kind):
    rng = np.random.default_rng(dim)
    rows = (rng.standard_normal((37, dim)) * 50).astype(kind)
    for index, array in enumerate([rows, np.asfortranarray(rows)]):
        np.save(tmp_path / "x.npy", array)
        source = array_source([[0], [1]], features=tmp_path / "x.npy")
        with ingest(source, tmp_path / f"out{index}") as dataset:
            found = dataset.features.read("x")
            assert found.dtype == rows.dtype.newbyteorder("<")
            np.testing.assert_array_equal(found, rows)
            assert (dataset.num_nodes, dataset.dim) == (37, dim)


def test_one_feature_per_node_may_be_flat(tmp_path):
    source = array_source([[0], [1]], features=np.arange(4, dtype=np.float32))
    with ingest(source, tmp_path) as dataset:
        assert dataset.features.read("x").tolist() == [[0.0], [1.0], [2.0], [3.0]]


def test_labels_masks_and_ids(tmp_path):
    labels = np.array([[0.0], [2.0], [np.nan], [1.0]], np.float32)
    mask = np.array([True, False, False, True])
    splits = {"train": mask, "valid": np.array([2], np.int32), "test": []}
    source = array_source([[0], [3]], labels=labels, splits=splits)
    with ingest(source, tmp_path) as dataset:
        assert dataset.labels.tolist() == [0, 2, -1, 1]
        assert (dataset.train.tolist(), dataset.valid.tolist()) == ([0, 3], [2])
        assert (dataset.test.size, dataset.num_classes) == (0, 3)
        assert not dataset.has_features
        with pytest.raises(DataError, match="no features"):
            _ = dataset.features


@pytest.mark.parametrize("memory", [SMALL, 1 << 28])
@pytest.mark.parametrize(
    "rules",
    [
        EdgeRules(add_reverse=True),
        EdgeRules(drop_self_loops=True),
        EdgeRules(drop_duplicates=True),
        EdgeRules(add_reverse=True, drop_self_loops=True, drop_duplicates=True),
    ],
)
def test_rules(tmp_path, random_graph, as_edges, rules, memory):
    pairs = list(zip(random_graph["sources"], random_graph["targets"], strict=True))
    expected = [(int(s), int(t)) for s, t in pairs]
    if rules.drop_self_loops:
        expected = [(s, t) for s, t in expected if s != t]
    if rules.add_reverse:
        expected += [(t, s) for s, t in expected]
    if rules.drop_duplicates:
        expected = list(set(expected))
    source = array_source(np.array(pairs), num_nodes=300, weights=random_graph["weights"])
    with ingest(source, tmp_path, rules=rules, memory_bytes=memory) as dataset:
        sources, targets = as_edges(dataset.topology())
        found = list(zip(sources.tolist(), targets.tolist(), strict=True))
        assert sorted(found) == sorted(expected)
        assert dataset.topology().weights.size == len(expected)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"edge_index": [[0, 5], [1, 1]], "num_nodes": 3}, "edge has source 5, but there are 3"),
        ({"edge_index": [[0, 1], [1, -2]], "num_nodes": 3}, "edge has target -2"),
        ({"edge_index": [[0.0], [1.0]]}, "edges have dtype float64"),
        ({"edge_index": np.zeros((3, 3), int)}, "edges have shape"),
        ({"edge_index": [[0], [1]], "features": np.zeros((2, 2, 2))}, "features have shape"),
        ({"edge_index": [[0], [1]], "features": np.zeros((2, 0))}, "features have shape"),
        ({"edge_index": [[0], [1]], "features": [["a"], ["b"]]}, "features have dtype"),
        (
            {"edge_index": [[0], [1]], "features": [[0.0, 1.0], [2.0, np.nan]]},
            "feature of nodes is not finite: row 1 has nan in column 1",
        ),
        (
            {"edge_index": [[0], [1]], "edge_features": np.full((1, 2), np.inf, np.float16)},
            "feature of edges is not finite: row 0 has inf in column 0",
        ),
        ({"edge_index": [[0], [1]], "weights": [1.0, 2.0]}, "weights have shape"),
        ({"edge_index": [[0], [1]], "weights": [-1.0]}, "weight is negative"),
        ({"edge_index": [[0], [1]], "weights": [np.nan]}, "not a number"),
        ({"edge_index": [[0], [1]], "labels": [0.5, 1.0]}, "a label is 0.5"),
        ({"edge_index": [[0], [1]], "labels": [-3, 1]}, "a label is -3"),
        ({"edge_index": [[0], [1]], "labels": [[0, 1], [1, 0]]}, "labels have shape"),
        ({"edge_index": [[0], [1]], "splits": {"train": [0]}}, "splits but no labels"),
        ({"edge_index": [[0], [1]], "splits": {"trian": [0]}}, "no split 'trian'"),
        (
            {"edge_index": [[0], [1]], "labels": [0, 1], "splits": {"train": [0, 7]}},
            "train split has ids from 0 to 7",
        ),
        (
            {"edge_index": [[0], [1]], "labels": [0, 1], "splits": {"test": [1, 1]}},
            "names a node twice",
        ),
        (
            {"edge_index": [[0], [1]], "labels": [0, 1], "splits": {"test": [True]}},
            "mask has 1 entries",
        ),
        (
            {"edge_index": [[0], [1]], "labels": [0, 1, 1], "features": np.zeros((2, 1))},
            "3 labels for 2 nodes",
        ),
        (
            {"edge_index": [[0], [1]], "num_nodes": 5, "features": np.zeros((2, 1))},
            "2 feature rows for 5 nodes",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, arrays, message):
    with pytest.raises(DataError, match=message) as caught:
        ingest(array_source(**arrays), tmp_path)
    assert caught.value.hint


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "x.npy"
    with pytest.raises(DataError, match="there is no file"):
        array_source([[0], [1]], features=path)
    path.write_bytes(b"no array")
    with pytest.raises(DataError, match=r"no \.npy array"):
        array_source([[0], [1]], features=path)
    np.save(path, np.zeros((100, 10)))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="100 bytes are missing"):
        ingest(array_source([[0], [1]], features=path), tmp_path / "out")
    np.save(path, np.array([{}, {}]), allow_pickle=True)
    with pytest.raises(DataError, match="Python objects"):
        array_source([[0], [1]], features=path)
    with pytest.raises(ConfigurationError, match="memory_bytes"):
        ingest(array_source([[0], [1]]), tmp_path / "out2", memory_bytes=1)


def test_a_changed_source_is_not_mixed_with_the_old(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((3, 2)))
    ingest(array_source([[0], [1]], features=path), tmp_path / "out").close()
    np.save(path, np.ones((3, 2)))
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match="differs in features") as refused:
        ingest(array_source([[0], [1]], features=path), tmp_path / "out")
    assert "remove features.fvf graph.fvf there" in refused.value.hint


def test_a_source_whose_edges_were_wrong_is_taken_when_it_is_right(tmp_path):
    features = np.ones((3, 2), np.float32)
    with pytest.raises(DataError, match="an edge has target 7"):
        ingest(array_source([[0], [7]], features=features, num_nodes=3), tmp_path)
    right = array_source([[0], [2]], features=features, num_nodes=3)
    with pytest.raises(DataError, match="was made otherwise") as refused:
        ingest(right, tmp_path)
    for name in re.findall(r"\S+\.fvf", refused.value.hint):
        (tmp_path / name).unlink()
    with ingest(right, tmp_path) as dataset:
        assert dataset.topology().neighbors(2).tolist() == [0]


def test_empty_graphs(tmp_path):
    none = np.empty((2, 0), np.int64)
    with ingest(array_source(none), tmp_path / "a") as dataset:
        assert (dataset.num_nodes, dataset.num_edges) == (0, 0)
    source = array_source(none, features=np.ones((5, 2)), labels=np.zeros(5))
    with ingest(source, tmp_path / "b") as dataset:
        assert dataset.topology().indptr.tolist() == [0] * 6


# --- Open Graph Benchmark ---------------------------------------------------------------------


def write_gz(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(",".join(map(str, np.atleast_1d(row))) + "\n" for row in rows)
    path.write_bytes(gzip.compress(lines.encode()))


def write_splits(folder, kind):
    ids = {"train": range(150), "valid": range(150, 200), "test": range(200, 300)}
    for name, values in ids.items():
        write_gz(folder / "split" / kind / f"{name}.csv.gz", list(values))


def write_products(folder, graph):
    raw = folder / "raw"
    write_gz(raw / "edge.csv.gz", np.stack([graph["sources"], graph["targets"]], axis=1).tolist())
    write_gz(raw / "node-feat.csv.gz", graph["features"].tolist())
    write_gz(raw / "node-label.csv.gz", graph["labels"].tolist())
    write_gz(raw / "num-node-list.csv.gz", [300])
    write_gz(raw / "num-edge-list.csv.gz", [4000])
    write_splits(folder, "sales_ranking")


def write_papers(folder, graph, *, compressed):
    raw = folder / "raw"
    raw.mkdir(parents=True)
    save = np.savez_compressed if compressed else np.savez
    save(
        raw / "data.npz",
        edge_index=np.stack([graph["sources"], graph["targets"]]),
        node_feat=graph["features"],
        node_year=np.zeros((300, 1), np.int64),
        num_nodes_list=np.array([300]),
        num_edges_list=np.array([4000]),
    )
    labels = graph["labels"].astype(np.float32)[:, None]
    labels[7] = np.nan
    save(raw / "node-label.npz", node_label=labels)
    write_splits(folder, "time")


def test_ogbn_products(tmp_path, random_graph, as_edges):
    folder = tmp_path / "under any name"  # its files say what it is
    write_products(folder, random_graph)
    source, wants_reverse = find_source(folder)
    assert wants_reverse
    rules = EdgeRules(add_reverse=wants_reverse)
    with ingest(source, tmp_path / "out", rules=rules, memory_bytes=SMALL) as dataset:
        np.testing.assert_array_equal(dataset.features.read("x"), random_graph["features"])
        np.testing.assert_array_equal(dataset.labels, random_graph["labels"])
        assert dataset.train.tolist() == list(range(150))
        assert dataset.test.tolist() == list(range(200, 300))
        found = sorted(zip(*map(np.ndarray.tolist, as_edges(dataset.topology())), strict=True))
        pairs = zip(random_graph["sources"].tolist(), random_graph["targets"].tolist(), strict=True)
        forward = list(pairs)
        assert found == sorted(forward + [(t, s) for s, t in forward])


@pytest.mark.parametrize("compressed", [False, True])
def test_ogbn_papers100m(tmp_path, random_graph, expected_csr, compressed):
    folder = tmp_path / "papers100M-bin"
    write_papers(folder, random_graph, compressed=compressed)
    source, wants_reverse = find_source(folder)
    assert not wants_reverse
    with ingest(source, tmp_path / "out", memory_bytes=SMALL) as dataset:
        check_graph(dataset, random_graph, expected_csr)
        np.testing.assert_array_equal(dataset.features.read("x"), random_graph["features"])
        assert dataset.labels[7] == -1
        assert dataset.valid.tolist() == list(range(150, 200))


def test_ogb_split_dict(tmp_path, random_graph):
    folder = tmp_path / "papers"
    write_papers(folder, random_graph, compressed=False)
    for name in ("train", "valid", "test"):
        (folder / "split" / "time" / f"{name}.csv.gz").unlink()
    split = {"train": np.arange(3), "valid": torch.arange(3, 5), "test": np.arange(5, 6)}
    torch.save(split, folder / "split" / "time" / "split_dict.pt")
    with ingest(ogb_source(folder), tmp_path / "out") as dataset:
        assert dataset.valid.tolist() == [3, 4]


def test_ogb_damage(tmp_path, random_graph):
    folder = tmp_path / "papers"
    write_papers(folder, random_graph, compressed=True)
    data = bytearray((folder / "raw" / "data.npz").read_bytes())
    with zipfile.ZipFile(folder / "raw" / "data.npz") as archive:
        place = archive.getinfo("node_feat.npy").header_offset
    data[place + 3000] ^= 0xFF
    (folder / "raw" / "data.npz").write_bytes(data)
    with pytest.raises(DataError, match="node_feat"):
        ingest(ogb_source(folder), tmp_path / "out")
    (folder / "raw" / "data.npz").write_bytes(b"PK no archive")
    with pytest.raises(DataError, match="cannot read"):
        ogb_source(folder)


def test_mag240m(tmp_path, random_graph, expected_csr):
    folder = tmp_path / "mag240m_kddcup2021"
    papers = folder / "processed" / "paper"
    cites = folder / "processed" / "paper___cites___paper"
    papers.mkdir(parents=True)
    cites.mkdir()
    rows = np.random.default_rng(0).standard_normal((300, 768)).astype(np.float16)
    np.save(papers / "node_feat.npy", rows)
    labels = random_graph["labels"].astype(np.float32)
    labels[::3] = np.nan
    np.save(papers / "node_label.npy", labels)
    np.save(papers / "node_year.npy", np.zeros(300, np.int32))
    edges = np.stack([random_graph["sources"], random_graph["targets"]])
    np.save(cites / "edge_index.npy", edges)
    splits = {"train": np.arange(0, 100), "valid": np.arange(100, 150)}
    torch.save(splits | {"test": np.arange(150, 300)}, folder / "split_dict.pt")
    torch.save(
        {"paper": 300, "author": 5, "institution": 2, "num_classes": 153}, folder / "meta.pt"
    )
    assert mag240m_source(folder).recipe == mag240m_source(tmp_path).recipe
    with ingest(find_source(tmp_path)[0], tmp_path / "out", memory_bytes=SMALL) as dataset:
        check_graph(dataset, random_graph, expected_csr)
        assert (dataset.dtype, dataset.row_bytes) == (np.float16, 1536)
        np.testing.assert_array_equal(
            dataset.features.read("x").view(np.int16), rows.view(np.int16)
        )
        assert (dataset.num_classes, dataset.labels[0]) == (153, -1)
        assert dataset.test.tolist() == list(range(150, 300))


def test_pickles_that_call_something_are_not_opened(tmp_path):
    folder = tmp_path / "mag240m_kddcup2021"
    (folder / "processed" / "paper").mkdir(parents=True)
    (folder / "processed" / "paper___cites___paper").mkdir()
    np.save(folder / "processed" / "paper" / "node_feat.npy", np.zeros((2, 1), np.float16))
    edges = folder / "processed" / "paper___cites___paper" / "edge_index.npy"
    np.save(edges, np.array([[0], [1]]))

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    torch.save({"train": Evil()}, folder / "split_dict.pt")
    with pytest.raises(DataError, match="cannot be read safely"):
        mag240m_source(folder)
    assert not (tmp_path / "evil").exists()


# --- kill -9 ------------------------------------------------------------------------------------

SCRIPT = """
    import os, signal, sys
    from fivefold.gnn.data import _ingest, _write_graph, array_source, ingest
    _ingest._MARK_EVERY_BYTES = _write_graph._MARK_EVERY_EDGES = 50_000
    folder, kill_at = sys.argv[1], int(sys.argv[2])
    calls = 0

    def progress(stage, done, total):
        global calls
        calls += 1
        if calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    source = array_source(f"{folder}/edges.npy", features=f"{folder}/x.npy")
    ingest(source, f"{folder}/out", memory_bytes=16 << 20, progress=progress).close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [(4, 9), (14, 5)])
def test_killed_and_resumed(tmp_path, expected_csr, kills):
    rng = np.random.default_rng(3)
    sources, targets = rng.integers(0, 40_000, (2, 600_000))
    rows = rng.standard_normal((40_000, 60)).astype(np.float32)
    np.save(tmp_path / "edges.npy", np.stack([sources, targets]))
    np.save(tmp_path / "x.npy", rows)
    for kill_at in kills:
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path), str(kill_at)]
        done = subprocess.run(command, check=False, timeout=120)
        assert done.returncode == -signal.SIGKILL
    source = array_source(tmp_path / "edges.npy", features=tmp_path / "x.npy")
    with ingest(source, tmp_path / "out", memory_bytes=SMALL) as dataset:
        indptr, indices, _ = expected_csr(sources, targets, 40_000)
        np.testing.assert_array_equal(dataset.topology().indptr, indptr)
        np.testing.assert_array_equal(dataset.topology().indices, indices)
        np.testing.assert_array_equal(dataset.features.read("x"), rows)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "features.fvf",
        "graph.fvf",
    ]
