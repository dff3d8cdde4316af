"""Tables as people have them: columns in any order, marks, partitions, masks, ids with gaps."""

import gzip

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fivefold.errors import ConfigurationError, DataError, StorageError
from fivefold.gnn.data import SourceOptions, TableColumns, find_source, ingest

PAIR = {(0, 1), (1, 2)}


def edges_of(path, out, **options):
    with ingest(find_source(path, SourceOptions(**options))[0], out) as dataset:
        topology = dataset.topology()
        return {(int(s), v) for v in range(dataset.num_nodes) for s in topology.neighbors(v)}


@pytest.mark.parametrize(
    "text",
    [
        "dst,src\n1,0\n2,1\n",  # usual names, whatever their order
        "time,Source,Target\n2020,0,1\n2021,1,2\n",
        "\ufeffsrc,dst\r\n0,1\r\n1,2\r\n",
        '"of, src",dst\n0,1\n1,2\n',
        "\n# a comment\n\nsrc,dst\n\n0,1\n1,2\n",
        "0\t1\n1\t2",
        "# a form feed:\f, or \u2028\n0,1\n1,2\n",  # ends a line of text, but none of a table
        "a,b,dst\n0,9,1\n1,9,2\n",  # one usual name: the other end is the first column left
    ],
)
def test_columns_are_found(tmp_path, text):
    path = tmp_path / "e.csv"
    path.write_bytes(text.encode())
    columns = TableColumns(target="dst") if text.startswith("a,") else TableColumns()
    assert edges_of(path, tmp_path / "out", columns=columns) == PAIR


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("e.csv", b"a,a\n0,1\n1,2\n", "two columns 'a'"),
        ("e.csv", "src,dst\n0,1\n".encode("utf-16"), "UTF-16"),
        ("e.csv", gzip.compress(b"0,1\n", mtime=0), "name does not say so"),
        ("e.txt", b"%%MatrixMarket matrix coordinate pattern general\n3 3 1\n1 2\n", "from 1"),
        ("e.txt", b"0   1\n1   2\n", "several blanks"),
        ("e.csv", b"0;1;0,5\n1;2;0,25\n", "divided by ',' or ';'"),
    ],
)
def test_what_would_make_a_wrong_graph_is_refused(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        find_source(tmp_path / name)


def test_quoted_names_may_hold_delimiters(tmp_path):
    (tmp_path / "e.csv").write_text('"Smith, J";"Doe | K"\n"Doe | K";"Roe, A"\n')
    found = edges_of(tmp_path / "e.csv", tmp_path / "out", columns=TableColumns(names=False))
    assert found == PAIR
    names = parquet.read_table(tmp_path / "out" / "names.parquet")["name"].to_pylist()
    assert names == ["Smith, J", "Doe | K", "Roe, A"]


@pytest.mark.slow
def test_a_line_of_very_many_columns(tmp_path):
    names = [f"column_{i:05d}" for i in range(6000)]
    (tmp_path / "nodes.csv").write_text(
        "".join(f"{','.join(row)}\n" for row in (names, ["1"] * 6000))
    )
    (tmp_path / "e.csv").write_text("0,0\n")
    with ingest(find_source(tmp_path)[0], tmp_path / "out") as dataset:
        assert dataset.dim == 6000


def test_named_edges_have_weights_though_there_are_none(tmp_path):
    (tmp_path / "e.csv").write_text("source,target,weight\n")
    options = SourceOptions(ids="text", columns=TableColumns(weight="weight"))
    with ingest(find_source(tmp_path / "e.csv", options)[0], tmp_path / "out") as dataset:
        assert dataset.weighted


def test_source_and_target_are_two_columns(tmp_path):
    (tmp_path / "e.csv").write_text("src,dst\n0,1\n")
    for columns in (TableColumns(source="src", target="src"), TableColumns(source="dst")):
        options = SourceOptions(columns=columns)
        if columns.target is None:  # the other column is the target
            assert find_source(tmp_path / "e.csv", options)[0].ends == [("dst", "src", None)]
            continue
        with pytest.raises(DataError, match="both column 'src'"):
            find_source(tmp_path / "e.csv", options)


def test_folders(tmp_path):
    parts = tmp_path / "parts"
    for year, pair in enumerate(sorted(PAIR)):
        folder = parts / f"year={year}"
        folder.mkdir(parents=True)
        table = pa.table({"src": [pair[0]], "dst": [pair[1]]})
        parquet.write_table(table, folder / "part-0.parquet")
        (folder / "._part-0.parquet").write_bytes(b"left by a copy")
    assert edges_of(parts, tmp_path / "out") == PAIR
    folder = tmp_path / "tables"
    folder.mkdir()
    (folder / "edges.csv").write_text("src,dst\n0,1\n1,2\n")
    (folder / "nodes.csv").write_text("id,label,f\n0,a,1\n1,b,2\n2,a,3\n")
    with ingest(find_source(folder)[0], tmp_path / "both") as dataset:
        assert (dataset.num_nodes, dataset.num_edges, dataset.dim) == (3, 2, 1)
    (folder / "more.csv").write_text("from,to\n0,1\n")
    with pytest.raises(DataError, match="has columns from, to"):
        find_source(folder)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("id,label,f\n0,1.5,1\n1,0,1\n2,1,1\n", "a label is 1.5"),
        ("id,label,split,f\n0,1,train,1\n1,0,hold-out,1\n2,1,,1\n", "has 'hold-out'"),
    ],
)
def test_labels_and_splits_are_not_guessed(tmp_path, rows, message):
    (tmp_path / "e.csv").write_text("src,dst\n0,1\n1,2\n")
    (tmp_path / "n.csv").write_text(rows)
    with pytest.raises(DataError, match=message):
        edges_of(tmp_path / "e.csv", tmp_path / "out", nodes=tmp_path / "n.csv")


def test_masks_are_splits_and_no_features(tmp_path):
    (tmp_path / "e.csv").write_text("src,dst\n0,1\n1,2\n")
    table = {"id": [0, 1, 2], "y": [0.0, float("nan"), 1.0], "f": [1.0, 2.0, 3.0]}
    masks = {"train_mask": [True, False, None], "val_mask": [False, True, False]}
    parquet.write_table(pa.table(table | masks), tmp_path / "n.parquet")
    options = SourceOptions(nodes=tmp_path / "n.parquet")
    with ingest(find_source(tmp_path / "e.csv", options)[0], tmp_path / "out") as dataset:
        assert (dataset.dim, dataset.labels.tolist()) == (1, [0, -1, 1])
        assert [s.tolist() for s in (dataset.train, dataset.valid, dataset.test)] == [[0], [1], []]


def test_arrays_beside_an_edge_table(tmp_path):
    (tmp_path / "e.csv").write_text("src,dst\n0,1\n1,2\n")
    x = np.arange(8, dtype=np.float16).reshape(4, 2)
    files = {"features": x, "labels": np.array([0, 1, 0, -1]), "train": np.array([2, 0])}
    for name, array in files.items():
        np.save(tmp_path / f"{name}.npy", array)
    arrays = {name: tmp_path / f"{name}.npy" for name in ("features", "labels")}
    options = SourceOptions(arrays=arrays, splits={"train": tmp_path / "train.npy"})
    with ingest(find_source(tmp_path / "e.csv", options)[0], tmp_path / "out") as dataset:
        assert (dataset.num_nodes, dataset.num_edges) == (4, 2)
        np.testing.assert_array_equal(dataset.features.read("x"), x)
        assert dataset.train.tolist() == [2, 0]
    (tmp_path / "names.csv").write_text("src,dst\na,b\n")
    with pytest.raises(ConfigurationError, match="named by tables"):
        find_source(tmp_path / "names.csv", options)
    with pytest.raises(ConfigurationError, match="weights of an edge table"):
        find_source(tmp_path / "e.csv", SourceOptions(arrays={"weights": tmp_path / "w.npy"}))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("e.npy", {"nodes": "n.csv"}, "nodes was given, which a source of kind npy"),
        ("e.npy", {"columns": TableColumns(source="a")}, "columns was given"),
        ("e.pt", {"arrays": {"features": "x.npy"}}, "arrays was given"),
        ("e.pt", {"num_nodes": 5}, "num_nodes was given"),
    ],
)
def test_options_that_would_not_be_used_are_refused(tmp_path, name, options, message):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ConfigurationError, match=message):
        find_source(tmp_path / name, SourceOptions(**options))


def test_a_bound_that_cannot_be_kept_is_refused_before_names_are_numbered(tmp_path):
    (tmp_path / "e.csv").write_text("src,dst\na,b\n")
    with pytest.raises(ConfigurationError, match="1 MB") as refused:
        ingest(find_source(tmp_path / "e.csv")[0], tmp_path / "out", memory_bytes=1_000_000)
    assert "16 MB" in refused.value.hint
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as failed:
        ingest(find_source(tmp_path / "e.csv")[0], tmp_path / "file")
    assert "can be written" in failed.value.hint


def test_text_is_no_file_of_torch(tmp_path):
    (tmp_path / "e.csv").write_text("src,dst\n0,1\n1,2\n")
    with pytest.raises(DataError, match="cannot be read safely"):
        find_source(tmp_path / "e.csv", SourceOptions(kind="pyg"))
