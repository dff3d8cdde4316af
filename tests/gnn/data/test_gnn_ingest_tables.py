"""Edge lists and node tables in CSV and Parquet."""

import gzip
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fivefold.errors import ConfigurationError, DataError, InfeasibleError
from fivefold.gnn.data import TableColumns, find_source, ingest, table_source

SMALL = 16 << 20


def write_edges(path, sources, targets, weights=None, *, header=None, delimiter=","):
    columns = [sources, targets, *([] if weights is None else [weights])]
    lines = [delimiter.join(map(str, row)) for row in zip(*columns, strict=True)]
    text = "\n".join([*([] if header is None else [header]), *lines, ""])
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def check_edges(dataset, graph, expected_csr):
    indptr, indices, _ = expected_csr(graph["sources"], graph["targets"], dataset.num_nodes)
    np.testing.assert_array_equal(dataset.topology().indptr, indptr)
    np.testing.assert_array_equal(dataset.topology().indices, indices)


@pytest.mark.parametrize("delimiter", [",", "\t", " ", ";"])
@pytest.mark.parametrize("header", [None, "from{}to", "# SNAP\n% more\nfrom{}to"])
@pytest.mark.parametrize("name", ["e.csv", "e.txt.gz"])
def test_number_ids(tmp_path, random_graph, expected_csr, delimiter, header, name):
    path = tmp_path / name
    header = header and header.format(delimiter)
    write_edges(
        path, random_graph["sources"], random_graph["targets"], header=header, delimiter=delimiter
    )
    with ingest(find_source(path)[0], tmp_path / "out", memory_bytes=SMALL) as dataset:
        check_edges(dataset, random_graph, expected_csr)


def test_several_files_and_weights(tmp_path, random_graph, expected_csr):
    folder = tmp_path / "parts"
    folder.mkdir()
    for index, part in enumerate([slice(0, 1500), slice(1500, 4000)]):
        table = pa.table(
            {key: random_graph[key][part] for key in ("weights", "sources", "targets")}
        )
        parquet.write_table(table, folder / f"part{index}.parquet", row_group_size=300)
    columns = TableColumns(source="sources", target="targets", weight="weights")
    source = table_source(sorted(folder.iterdir()), columns=columns, num_nodes=310)
    with ingest(source, tmp_path / "out") as dataset:
        assert dataset.num_nodes == 310
        check_edges(dataset, random_graph, expected_csr)
        order = np.argsort(random_graph["targets"], kind="stable")
        np.testing.assert_array_equal(dataset.topology().weights, random_graph["weights"][order])


NAMES = np.array([f"knoten-{7 * i}-ä" for i in range(300)])


def named_edges(dataset, folder, as_edges):
    names = parquet.read_table(folder / "names.parquet")["name"].to_numpy(zero_copy_only=False)
    sources, targets = as_edges(dataset.topology())
    weights = dataset.topology().weights
    return sorted(zip(names[sources], names[targets], weights.tolist(), strict=True))


@pytest.mark.parametrize("gaps", [False, True])
def test_text_ids_without_a_node_table(tmp_path, random_graph, as_edges, gaps):
    """Text, and numbers with large gaps, which must be named as such."""
    names = np.arange(300) * 10**15 if gaps else NAMES
    sources, targets = names[random_graph["sources"]], names[random_graph["targets"]]
    write_edges(tmp_path / "e.csv", sources, targets, random_graph["weights"])
    columns = TableColumns(weight="2")
    ids = "text" if gaps else "auto"
    prints = set()
    for memory in (SMALL, 1 << 30):
        folder = tmp_path / f"out{memory}"
        source = table_source([tmp_path / "e.csv"], columns=columns, ids=ids)
        with ingest(source, folder, memory_bytes=memory) as dataset:
            found = named_edges(dataset, folder, as_edges)
            prints.add(dataset.fingerprint)
        assert sorted(path.name for path in folder.iterdir()) == [
            "graph.fvf",
            "names.parquet",
        ]
    weights = random_graph["weights"].tolist()
    expected = zip(map(str, sources), map(str, targets), weights, strict=True)
    assert found == sorted(expected)
    assert len(prints) == 1


def node_table(random_graph):
    return pa.table(
        {
            "id": NAMES,
            "vector": pa.FixedSizeListArray.from_arrays(random_graph["features"].ravel(), 5),
            "label": np.array(["red", "blue", "green", "none"])[random_graph["labels"]],
            "age": np.arange(300, dtype=np.float32),
            "split": np.array(["train", "val", "test", ""])[np.arange(300) % 4],
        }
    )


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_node_table_with_text_ids(tmp_path, random_graph, expected_csr, kind):
    table = node_table(random_graph)
    if kind == "parquet":
        parquet.write_table(table, tmp_path / "nodes.parquet", row_group_size=64)
        features = np.column_stack([random_graph["features"], np.arange(300, dtype=np.float32)])
    else:
        frame = table.drop_columns(["vector"]).to_pydict()
        rows = zip(*frame.values(), strict=True)
        text = "\n".join([",".join(frame), *(",".join(map(str, row)) for row in rows), ""])
        (tmp_path / "nodes.csv").write_text(text)
        features = np.arange(300, dtype=np.float32)[:, None]
    sources, targets = NAMES[random_graph["sources"]], NAMES[random_graph["targets"]]
    write_edges(tmp_path / "e.csv.gz", sources, targets, header="source,target")
    source = table_source([tmp_path / "e.csv.gz"], nodes=tmp_path / f"nodes.{kind}")
    with ingest(source, tmp_path / "out", memory_bytes=SMALL) as dataset:
        check_edges(dataset, random_graph, expected_csr)
        assert dataset.class_names == ["blue", "green", "none", "red"]
        colours = np.array(["red", "blue", "green", "none"])[random_graph["labels"]]
        assert np.array(dataset.class_names)[dataset.labels].tolist() == colours.tolist()
        assert dataset.dtype == np.float32
        np.testing.assert_array_equal(dataset.features.read("x"), features)
        assert dataset.train.tolist() == list(range(0, 300, 4))
        assert dataset.valid.tolist() == list(range(1, 300, 4))


def test_node_table_with_numbers_as_ids(tmp_path, random_graph, expected_csr):
    lines = ["node,y,a"] + [f"{i},{i % 3},{i / 8}" for i in range(300)]
    (tmp_path / "nodes.csv").write_text("\n".join(lines))
    write_edges(tmp_path / "e.csv", random_graph["sources"], random_graph["targets"])
    source = table_source([tmp_path / "e.csv"], nodes=tmp_path / "nodes.csv")
    assert not source.text_ids
    with ingest(source, tmp_path / "out") as dataset:
        check_edges(dataset, random_graph, expected_csr)
        assert dataset.labels.tolist() == [i % 3 for i in range(300)]
    shuffled = [lines[0], *lines[:0:-1]]
    (tmp_path / "nodes2.csv").write_text("\n".join(shuffled))
    source = table_source([tmp_path / "e.csv"], nodes=tmp_path / "nodes2.csv")
    assert not source.text_ids  # rows go by their ids, whatever their order
    with ingest(source, tmp_path / "out2") as dataset:
        check_edges(dataset, random_graph, expected_csr)
        assert dataset.labels.tolist() == [i % 3 for i in range(300)]
        assert dataset.features.read("x")[:, 0].tolist() == [i / 8 for i in range(300)]


@pytest.mark.parametrize(
    ("edges", "nodes", "message"),
    [
        ("0,1\n1,\n", None, "empty field"),
        ("0  1\n1  2\n", None, "several blanks"),
        ("a,b\n,c\n", None, "empty field"),
        ("0,1\n1,2,3\n", None, "Expected 2 columns"),
        ("lonely\n", None, "has 1 columns"),
        ("u,v\na,b\nb,c\n", "id,z\na,1\nb,2\n", "names node 'c'"),
        ("u,v\na,b\nb,a\n", "id,z\na,1\nb,2\na,3\n", "node 'a' twice"),
        ("0,1\n", "id,label,z\n0,red,1\n1,red,\n", "empty fields"),
        ("a,b\nb,c\n", "id,z\na,1\nb,2\n", "cannot tell whether"),
    ],
)
def test_damaged_tables(tmp_path, edges, nodes, message):
    (tmp_path / "e.csv").write_text(edges)
    if nodes is not None:
        (tmp_path / "n.csv").write_text(nodes)
        nodes = tmp_path / "n.csv"
    columns = TableColumns(names=False if nodes is None else None)
    with pytest.raises(DataError, match=message) as caught:
        ingest(table_source([tmp_path / "e.csv"], nodes=nodes, columns=columns), tmp_path / "out")
    assert caught.value.hint


def test_numbers_that_become_fractions_late(tmp_path):
    """Arrow guesses a column's type from the first block."""
    rows = [f"{i},{i}" for i in range(500_000)] + ["500000,0.5"]
    (tmp_path / "n.csv").write_text("\n".join(["id,a", *rows]))
    (tmp_path / "e.csv").write_text("s,t\n0,1\n")
    source = table_source([tmp_path / "e.csv"], nodes=tmp_path / "n.csv")
    with ingest(source, tmp_path / "out") as dataset:
        assert dataset.features.read("x", 499_999).tolist() == [[499_999.0], [0.5]]


def test_lists_and_categories_of_parquet(tmp_path):
    table = {
        "id": pa.array(["b", "NA", "c"]).cast(pa.large_string()),
        "label": pa.array(["x", "y", None]).dictionary_encode(),
        "v": pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        "flag": [True, False, True],
    }
    parquet.write_table(pa.table(table), tmp_path / "n.parquet")
    (tmp_path / "e.csv").write_text("source,target\nNA,b\nc,NA\n")
    source = table_source([tmp_path / "e.csv"], nodes=tmp_path / "n.parquet")
    with ingest(source, tmp_path / "out") as dataset:
        assert dataset.features.read("x").tolist() == [[1, 2, 1], [3, 4, 0], [5, 6, 1]]
        assert (dataset.labels.tolist(), dataset.class_names) == ([0, 1, -1], ["x", "y"])
        assert dataset.topology().neighbors(1).tolist() == [2]
    table["v"] = pa.array([[1.0, 2.0], [3.0], [5.0, 6.0, 7.0]])
    parquet.write_table(pa.table(table), tmp_path / "n.parquet")
    with pytest.raises(DataError, match="lists of several lengths"):
        ingest(table_source([tmp_path / "e.csv"], nodes=tmp_path / "n.parquet"), tmp_path / "out2")


def test_wrong_arguments(tmp_path):
    with pytest.raises(ConfigurationError, match="no edge table"):
        table_source([])
    with pytest.raises(DataError, match="there is no file"):
        table_source([tmp_path / "none.csv"])
    (tmp_path / "e.csv").write_text("a,b\n0,1\n")
    with pytest.raises(ConfigurationError, match="ids is"):
        table_source([tmp_path / "e.csv"], ids="names")
    with pytest.raises(DataError, match="no column 'w'"):
        table_source([tmp_path / "e.csv"], columns=TableColumns(weight="w"))
    (tmp_path / "t.csv").write_text("0,1\n1,b\n")
    with pytest.raises(DataError, match="cannot be read as a table"):
        table_source([tmp_path / "t.csv"], ids="number")
    (tmp_path / "e.parquet").write_bytes(b"none")
    with pytest.raises(DataError, match="cannot read"):
        table_source([tmp_path / "e.parquet"])


@pytest.mark.nightly
def test_names_are_numbered_as_they_come_and_refused_where_memory_is_short(tmp_path):
    rng = np.random.default_rng(0)
    names = np.array(["a", "ab", "b", "ba", "ü" * 50, *map(str, range(90_000))])
    ends = names[rng.integers(0, names.size, 300_000)].reshape(-1, 2)  # of several batches
    table = pa.table({"source": ends[:, 0], "target": ends[:, 1]})
    parquet.write_table(table, tmp_path / "e.parquet")
    source = table_source([tmp_path / "e.parquet"])
    with ingest(source, tmp_path / "g", memory_bytes=SMALL) as dataset:
        expected = list(dict.fromkeys(ends[: 1 << 16].ravel().tolist()))
        found = parquet.read_table(tmp_path / "g" / "names.parquet")["name"].to_pylist()
        assert found[: len(expected)] == expected
        assert len(set(found)) == len(found) == dataset.num_nodes == len(np.unique(ends))
        assert dataset.num_edges == len(ends)
    parquet.write_table(pa.concat_tables([table] * 8), tmp_path / "e.parquet")
    source = table_source([tmp_path / "e.parquet"])
    with pytest.raises(InfeasibleError, match=r"names of nodes.*--memory"):
        ingest(source, tmp_path / "h", memory_bytes=SMALL)


SCRIPT = """
    import os, signal, sys
    from fivefold.gnn.data import ingest, table_source
    folder, kill_at = sys.argv[1], int(sys.argv[2])
    calls = 0

    def progress(stage, done, total):
        global calls
        calls += 1
        if calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    ingest(table_source([f"{folder}/e.csv"]), f"{folder}/out", progress=progress).close()
"""


@pytest.mark.nightly
@pytest.mark.parametrize("kill_at", [1, 2])
def test_killed_while_names_are_numbered(tmp_path, random_graph, as_edges, kill_at):
    sources, targets = NAMES[random_graph["sources"]], NAMES[random_graph["targets"]]
    write_edges(tmp_path / "e.csv", sources, targets, header="source,target")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path), str(kill_at)],
        check=False,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == -signal.SIGKILL
    with ingest(table_source([tmp_path / "e.csv"]), tmp_path / "out") as dataset:
        names = parquet.read_table(tmp_path / "out" / "names.parquet")["name"].to_pylist()
        found = [[names[i] for i in ends] for ends in as_edges(dataset.topology())]
    expected = sorted(zip(sources.tolist(), targets.tolist(), strict=True))
    assert sorted(zip(*found, strict=True)) == expected
