"""Folders of other programs, known by their files and lists, never by the folder's name."""

import gzip

import numpy as np
import pytest
import torch

from fivefold.errors import DataError
from fivefold.gnn.data import SourceOptions, find_source, ingest

X = np.arange(8, dtype=np.float32).reshape(4, 2)
ENDS = np.array([[0, 1, 2], [1, 2, 3]])


def write(folder, files):
    """Write texts, arrays and packed texts by their place in a folder."""
    for place, content in files.items():
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, np.ndarray):
            np.save(path, content)
        else:
            data = content.encode()
            path.write_bytes(gzip.compress(data) if place.endswith(".gz") else data)
    return folder


def edges_of(dataset):
    topology = dataset.topology()
    targets = np.repeat(np.arange(dataset.num_nodes), np.diff(topology.indptr))
    order = np.argsort(topology.edge_ids)
    return np.stack([topology.indices, targets])[:, order].tolist()


def test_tables_of_dgl(tmp_path):
    nodes = ["nid,y,train_mask,val_mask,test_mask,feat", '3,0,0,0,1,"6,7"', '1,1,1,0,0,"2,3"',
             '2,1,0,1,0,"4,5"', '0,0,1,0,0,"0,1"']  # fmt: skip
    listing = (
        "dataset_name: mine\nedge_data:\n- {file_name: e_0.csv, src_id_field: a, dst_id_field: b}\n"
        "node_data:\n- {file_name: n_0.csv, node_id_field: nid}\n"
    )
    write(tmp_path / "in", {
        "meta.yaml": listing, "n_0.csv": "\n".join(nodes),
        "e_0.csv": "w,b,a\n1,1,0\n2,2,1\n3,3,2\n", "extra.csv": "x\n1\n",
    })  # fmt: skip
    source, _ = find_source(tmp_path / "in")
    with ingest(source, tmp_path / "out") as dataset:
        assert edges_of(dataset) == ENDS.tolist()
        np.testing.assert_array_equal(dataset.features.read("x"), X)
        assert (dataset.train.tolist(), dataset.test.tolist()) == ([0, 1], [3])
    assert {"extra.csv", "column w"} <= {note.name for note in source.reading.left_out}


def test_arrays_of_graphbolt(tmp_path):
    listing = """
dataset_name: mine
graph:
  nodes: [{num: 4}]
  edges: [{format: csv, path: e.csv}]
feature_data:
- {domain: node, name: feat, format: numpy, path: d/x.npy}
tasks:
- name: node_classification
  num_classes: 3
  train_set:
  - data:
    - {name: seeds, format: numpy, path: d/ids.npy}
    - {name: labels, format: numpy, path: d/y.npy}
"""
    write(tmp_path / "in", {
        "metadata.yaml": listing, "e.csv": "0,1\n1,2\n2,3\n", "d/x.npy": X,
        "d/ids.npy": np.array([2, 0]), "d/y.npy": np.array([1, 2]), "d/more.npy": X,
    })  # fmt: skip
    source, _ = find_source(tmp_path / "in")
    with ingest(source, tmp_path / "out") as dataset:
        assert edges_of(dataset) == ENDS.tolist()
        np.testing.assert_array_equal(dataset.features.read("x"), X)
        assert (dataset.labels.tolist(), dataset.num_classes) == ([2, -1, 1, -1], 3)
        assert sorted(dataset.train.tolist()) == [0, 2]
    assert [note.name for note in source.reading.left_out] == ["d/more.npy"]


GRAPHBOLT = """
graph:
  nodes: [{num: 4}]
  edges: [{format: numpy, path: e.npy}]
tasks:
- num_classes: 3
  train_set:
"""
PART = """
  - data:
    - {name: seeds, format: numpy, path: ids%s.npy}
    - {name: labels, format: numpy, path: y%s.npy}
"""


def test_a_split_of_several_parts(tmp_path):
    files = {"e.npy": ENDS, "ids0.npy": np.array([0, 2]), "y0.npy": np.array([1, 0]),
             "ids1.npy": np.array([3]), "y1.npy": np.array([2])}  # fmt: skip
    listing = GRAPHBOLT + PART % (0, 0) + PART % (1, 1)
    source, _ = find_source(write(tmp_path / "in", {"metadata.yaml": listing, **files}))
    with ingest(source, tmp_path / "out") as dataset:
        assert (dataset.train.tolist(), dataset.labels.tolist()) == ([0, 2, 3], [1, -1, 0, 2])


@pytest.mark.parametrize(
    ("ids", "labels", "message"),
    [
        ([0, 2], [0.5, 1.7], "a label is 0.5"),
        ([0, 2], [[1, 0], [0, 1]], "labels have shape"),
        ([-1, 2], [0, 1], "go from -1 to 2, for 4 nodes"),
        ([0, 9], [0, 1], "go from 0 to 9, for 4 nodes"),
        ([0, 2], [0, 1, 1], "has 2 nodes and 3 labels"),
    ],
)
def test_labels_of_graphbolt_are_checked(tmp_path, ids, labels, message):
    files = {"e.npy": ENDS, "ids0.npy": np.array(ids), "y0.npy": np.array(labels)}
    with pytest.raises(DataError, match=message):
        find_source(write(tmp_path / "in", {"metadata.yaml": GRAPHBOLT + PART % (0, 0), **files}))


def test_a_task_of_links_is_named(tmp_path):
    files = {"e.npy": ENDS, "ids0.npy": ENDS.T.copy(), "y0.npy": np.array([1, 0, 1])}
    listing = GRAPHBOLT + PART % (0, 0)
    source, _ = find_source(write(tmp_path / "in", {"metadata.yaml": listing, **files}))
    assert {note.name for note in source.reading.left_out} == {"ids0.npy", "y0.npy"}


BOTH = "edge_data:\n- {file_name: e.csv}\nnode_data:\n- {file_name: n.csv}\n"


@pytest.mark.parametrize(
    ("listing", "message"),
    [
        ("edge_data:\n- {name: e.csv}\nnode_data:\n- {file_name: n.csv}\n", "no 'file_name'"),
        (f"{BOTH}graph_data: {{file_name: g.csv}}\n", "many graphs"),
        ("title: other\n", "no edge tables"),
    ],
)
def test_lists_that_say_too_little(tmp_path, listing, message):
    with pytest.raises(DataError, match=message):
        find_source(write(tmp_path / "in", {"meta.yaml": listing}))


def test_files_are_named_once_however_the_list_writes_them(tmp_path):
    listing = "edge_data:\n- {file_name: ./a/e.csv}\nnode_data:\n- {file_name: n.csv}\n"
    files = {"a/e.csv": "src_id,dst_id\n0,1\n", "n.csv": "node_id,f\n0,1\n1,2\n", "e.csv": ""}
    source, _ = find_source(write(tmp_path / "in", {"meta.yaml": listing, **files}))
    assert not source.reading.missing(["a/e.csv", "n.csv", "meta.yaml", "e.csv"])


def test_papers_of_igb(tmp_path):
    files = {
        "processed/paper/node_feat.npy": X,
        "processed/paper/node_label_19.npy": np.array([0, 1, 2, 0]),
        "processed/paper__cites__paper/edge_index.npy": ENDS.T.copy(),
    }
    source, _ = find_source(write(tmp_path / "in", files))
    with ingest(source, tmp_path / "out") as dataset:
        assert edges_of(dataset) == ENDS.tolist()
        assert dataset.labels.tolist() == [0, 1, 2, 0]
    chosen = write(tmp_path / "in", {"processed/paper/node_label_2K.npy": np.arange(4.0)})
    with pytest.raises(DataError, match="several labels"):
        find_source(chosen)
    labels = chosen / "processed/paper/node_label_2K.npy"
    source, _ = find_source(chosen, SourceOptions(arrays={"labels": labels}))
    assert {note.name for note in source.reading.left_out} == {"processed/paper/node_label_19.npy"}


WRITES, CITES = np.array([[0, 2, 1], [4, 0, 1]]), np.array([[0, 1], [1, 2]])
OF_PAPERS, OF_WRITES = np.arange(10, dtype=np.float32).reshape(5, 2), np.ones((3, 2), np.float32)


def lines(array):
    return "".join(",".join(map(str, np.atleast_1d(row))) + "\n" for row in array.tolist())


def as_tables(folder):
    """As ogbn-mag lies."""
    places = {"author___writes___paper": WRITES, "paper___cites___paper": CITES}
    files = {"raw/num-node-dict.csv.gz": "author,paper\n3,5\n"}
    for kind, ends in places.items():
        files[f"raw/relations/{kind}/edge.csv.gz"] = lines(ends.T)
        files[f"raw/relations/{kind}/num-edge-list.csv.gz"] = f"{ends.shape[1]}\n"
    files["raw/relations/author___writes___paper/edge-feat.csv.gz"] = lines(OF_WRITES)
    files["raw/relations/paper___cites___paper/edge_reltype.csv.gz"] = "0\n0\n"
    files["raw/node-feat/paper/node-feat.csv.gz"] = lines(OF_PAPERS)
    files["raw/node-feat/paper/node_year.csv.gz"] = lines(np.arange(5))
    files["raw/node-label/paper/node-label.csv.gz"] = "0\n1\n2\n0\nnan\n"
    for split, ids in (("train", [0, 1]), ("valid", [2]), ("test", [3, 4])):
        files[f"split/time/paper/{split}.csv.gz"] = lines(np.array(ids))
    write(folder, files)
    return {"raw/node-feat/paper/node_year.csv.gz"}


def as_archives(folder):
    """As the writer of the benchmark makes them."""
    (folder / "raw").mkdir(parents=True)
    (folder / "split/time").mkdir(parents=True)
    archives = {
        "num_nodes_dict": {"author": np.array([3]), "paper": np.array([5])},
        "num_edges_dict": {"author___writes___paper": np.array([3])},
        "edge_index_dict": {"author___writes___paper": WRITES, "paper___cites___paper": CITES},
        "node_feat_dict": {"paper": OF_PAPERS},
        "edge_feat_dict": {"author___writes___paper": OF_WRITES},
        "node-label": {"paper": np.array([[0], [1], [2], [0], [np.nan]])},
        "node_year": {"paper": np.arange(5)[:, None]},
    }
    for name, arrays in archives.items():
        np.savez_compressed(folder / "raw" / f"{name}.npz", **arrays)
    splits = {"train": [0, 1], "valid": [2], "test": [3, 4]}
    by_type = {split: {"paper": np.array(ids)} for split, ids in splits.items()}
    torch.save(by_type, folder / "split/time/split_dict.pt")
    return {"raw/node_year.npz"}


@pytest.mark.parametrize("make", [as_tables, as_archives])
@pytest.mark.parametrize("leave_out", [(), ("edge_feat",)])
def test_types_of_ogb(tmp_path, make, leave_out):
    unread = make(tmp_path / "in")
    source, both = find_source(tmp_path / "in", SourceOptions(leave_out=leave_out))
    assert not both
    assert unread <= {note.name for note in source.reading.left_out}
    writes, cites = ("author", "writes", "paper"), ("paper", "cites", "paper")
    with ingest(source, tmp_path / "out") as dataset:
        assert dataset.num_nodes == {"author": 3, "paper": 5}
        assert dataset.labels("paper").tolist() == [0, 1, 2, 0, -1]
        splits = [dataset.split("paper", name).tolist() for name in ("train", "valid", "test")]
        assert splits == [[0, 1], [2], [3, 4]]
        np.testing.assert_array_equal(dataset.features("paper").read("x"), OF_PAPERS)
        assert (dataset.edge_features(writes) is None) == bool(leave_out)
        for kind, ends in ((writes, WRITES), (cites, CITES)):
            graph = dataset.graph(kind)
            targets = np.repeat(np.arange(5), np.diff(graph.read("indptr")))
            found = np.stack([graph.read("indices"), targets])
            assert found[:, np.argsort(graph.read("edge_ids"))].tolist() == ends.tolist()


OGB = {
    "raw/edge.csv.gz": "0,1\n1,2\n2,3\n", "raw/num-node-list.csv.gz": "4\n",
    "raw/num-edge-list.csv.gz": "3\n", "raw/node-feat.csv.gz": "1\n2\n3\n4\n",
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "both"),
    [
        ({}, False),
        ({"split/sales_ranking/train.csv.gz": "0\n"}, True),
        ({"split/time/train.csv.gz": "0\n", "raw/node_year.csv.gz": "1\n1\n1\n1\n"}, False),
        ({"raw/edge_weight.csv.gz": "1\n2\n3\n", "raw/edge_year.csv.gz": "1\n1\n1\n"}, True),
    ],
)
@pytest.mark.parametrize("name", ["ogbn_products", "data"])
def test_directions_of_ogb(tmp_path, more, both, name):
    beside = {"mapping/nodes.csv.gz": "0\n", "RELEASE_v1.txt": ""}
    source, wants_reverse = find_source(write(tmp_path / name, {**OGB, **more, **beside}))
    assert {"mapping/", "RELEASE_v1.txt"} <= {note.name for note in source.reading.left_out}
    assert wants_reverse == both
    assert not source.reading.missing(["direction", *(place[4:] for place in OGB)])
    years = {place[4:] for place in more if "year" in place}
    assert years <= {note.name for note in source.reading.read}
    with ingest(source, tmp_path / "out") as dataset:
        assert dataset.weighted == ("raw/edge_weight.csv.gz" in more)
        parts = {*dataset.part_names("node"), *dataset.part_names("edge")}
        assert parts == {year.partition(".")[0] for year in years}
