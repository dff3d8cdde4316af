"""Opening, describing and verifying data sets, and the commands."""

import hashlib
import json
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from fivefold.cli import main
from fivefold.errors import ConfigurationError, DataError, StorageError
from fivefold.gnn.data import (
    Dataset,
    HeteroDataset,
    HeteroSource,
    array_source,
    find_source,
    generate_graph,
    ingest,
)
from fivefold.gnn.data.statistics import describe, verify


@pytest.fixture
def folder(tmp_path):
    generate_graph(tmp_path / "data", nodes=600, dim=5, seed=1, classes=3).close()
    return tmp_path / "data"


def run(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["fivefold", "gnn", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    captured = capsys.readouterr()
    return end.value.code or 0, captured.out, captured.err


def test_open_reads_what_was_written(folder):
    with Dataset.open(folder) as dataset:
        assert (dataset.num_nodes, dataset.dim, dataset.row_bytes) == (600, 5, 20)
        assert dataset.num_classes == 3
        assert dataset.num_edges == dataset.topology().num_edges
        mapped = dataset.topology(mapped=True)
        np.testing.assert_array_equal(mapped.indices, dataset.topology().indices)
        assert dataset.train.size == 60
        first = dataset.fingerprint
    with Dataset.open(folder) as dataset:
        assert dataset.fingerprint == first


def test_fingerprint_tells_data_sets_apart(folder, tmp_path):
    other = generate_graph(tmp_path / "other", nodes=600, dim=5, seed=2, classes=3)
    with other, Dataset.open(folder) as dataset:
        assert other.fingerprint != dataset.fingerprint


def source_of_one_loop():
    nodes = {"a": array_source([[0], [0]], features=np.zeros((1, 2), np.float32))}
    return HeteroSource(name="loop", nodes=nodes, edges={("a", "to", "a"): nodes["a"].edges()})


def digest_of(*parts):
    return hashlib.blake2b(" ".join(parts).encode(), digest_size=16).hexdigest()


def test_runs_and_stores_remember_a_hash_of_the_files(folder, tmp_path):
    edges, rows = np.array([[0, 1], [1, 0]]), np.zeros((2, 3), np.float32)
    places = ("graph.fvf", "features.fvf", "labels.fvf", "edge_features.fvf")
    made = {
        "generated": Dataset.open(folder),
        "bare": ingest(array_source(edges, num_nodes=2), tmp_path / "bare"),
        "edges": ingest(array_source(edges, features=rows, edge_features=rows), tmp_path / "edges"),
    }
    for name, dataset in made.items():
        with dataset:
            found = {place: file.fingerprint for place, file in dataset.containers.items()}
            told = [found.get(place, "-") for place in places[: 4 if name == "edges" else 3]]
            assert dataset.fingerprint == digest_of(*told), name


def test_a_fingerprint_of_several_types_names_the_files(tmp_path):
    with ingest(source_of_one_loop(), tmp_path / "typed") as dataset:
        found = [f"{place} {file.fingerprint}" for place, file in dataset.containers.items()]
        assert dataset.fingerprint == digest_of(*found)


def test_a_closed_data_set_opens_no_file_again(folder, tmp_path):
    ingest(source_of_one_loop(), tmp_path / "typed").close()
    dataset, typed = Dataset.open(folder), HeteroDataset.open(tmp_path / "typed")
    train = dataset.train
    dataset.close()
    typed.close()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for use in (
        lambda: dataset.labels,
        lambda: dataset.features.read("x"),
        dataset.topology,
        lambda: typed.features("a"),
        typed.topology,
    ):
        with pytest.raises(StorageError, match="has been closed; open it again"):
            use()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert (dataset.dim, dataset.num_classes, dataset.train.size) == (5, 3, train.size)


def test_open_says_what_is_missing(tmp_path, folder):
    with pytest.raises(DataError, match="holds no data set") as caught:
        Dataset.open(tmp_path / "nowhere")
    assert "does not exist" in caught.value.hint
    (folder / "graph.fvf").rename(folder / "graph.fvf.partial")
    with pytest.raises(DataError) as caught:
        Dataset.open(folder)
    assert "goes on" in caught.value.hint
    (folder / "graph.fvf.partial").unlink()
    with pytest.raises(DataError) as caught:
        Dataset.open(folder)
    assert "fivefold gnn" in caught.value.hint


def test_describe_counts(tmp_path):
    edges = [[0, 0, 0, 2], [1, 2, 3, 1]]
    source = array_source(edges, features=np.zeros((5, 3), np.float16), labels=[0, 1, -1, 0, 0])
    with ingest(source, tmp_path) as dataset:
        facts = describe(dataset)
    assert (facts["nodes"], facts["edges"], facts["isolated_nodes"]) == (5, 4, 1)
    assert facts["in_degree"] == {
        "mean": 0.8,
        "median": 1.0,
        "max": 2,
        "top_1_percent_share": 0.5,
    }
    assert facts["out_degree"]["max"] == 3
    assert facts["features"] == {"dim": 3, "dtype": "float16", "row_bytes": 6, "bytes": 30}
    assert facts["labels"] == {"classes": 2, "labelled": 4, "train": 0, "valid": 0, "test": 0}


@pytest.mark.parametrize(("nodes", "edges"), [(1, 0), (2, 1), (7, 60), (450, 900), (1000, 9000)])
def test_described_degrees_are_those_of_numpy(tmp_path, nodes, edges):
    """Histograms, block by block, against whole arrays of degrees."""
    random = np.random.default_rng(nodes)
    ends = (nodes * random.random((2, edges)) ** [[3], [1.5]]).astype(np.int64)
    told = []
    with ingest(array_source(ends, num_nodes=nodes), tmp_path) as dataset:
        facts = describe(dataset, lambda *call: told.append(call))
    out, into = (np.bincount(end, minlength=nodes) for end in ends)
    top = max(1, nodes // 100)
    for key, degrees in (("in_degree", into), ("out_degree", out)):
        assert facts[key] == {
            "mean": edges / nodes,
            "median": np.median(degrees),
            "max": degrees.max(),
            "top_1_percent_share": np.sort(degrees)[::-1][:top].sum() / max(1, edges),
        }
    assert facts["isolated_nodes"] == np.count_nonzero((into == 0) & (out == 0))
    assert told[-1] == ("degrees", edges, edges)


def test_describing_takes_few_bytes_per_node(tmp_path):
    nodes = 6_000_000
    source = array_source([[0], [5]], num_nodes=nodes, labels=np.zeros(nodes, np.int8))
    with ingest(source, tmp_path) as dataset:
        tracemalloc.start()
        assert describe(dataset)["isolated_nodes"] == nodes - 2
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 12 * nodes  # 4 of them are counters, the rest a few blocks of a million rows


@pytest.mark.parametrize("name", ["graph.fvf", "features.fvf", "labels.fvf"])
def test_verify_finds_a_flipped_bit(folder, name):
    path = folder / name
    data = bytearray(path.read_bytes())
    data[4096 + 10] ^= 1
    path.write_bytes(data)
    with Dataset.open(folder) as dataset, pytest.raises(DataError, match=name):
        verify(dataset)


def test_commands(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "made"
    command = ["generate", folder, "--nodes", 400, "--dim", 4, "--option", "classes=7", "--json"]
    code, out, _ = run(capsys, monkeypatch, *command)
    assert (code, json.loads(out)["labels"]["classes"]) == (0, 7)
    code, out, _ = run(capsys, monkeypatch, "info", folder)
    assert code == 0
    assert "nodes: 400" in out
    assert "row bytes: 16" in out
    code, out, _ = run(capsys, monkeypatch, "info", folder, "--json")
    assert json.loads(out)["nodes"] == 400
    code, out, _ = run(capsys, monkeypatch, "verify", folder)
    assert (code, "is whole" in out) == (0, True)
    data = bytearray((folder / "graph.fvf").read_bytes())
    data[5000] ^= 1
    (folder / "graph.fvf").write_bytes(data)
    code, out, err = run(capsys, monkeypatch, "verify", folder)
    assert code == 1
    assert "error:" in err
    assert "hint:" in err


def test_ingest_command(tmp_path, capsys, monkeypatch):
    rng = np.random.default_rng(0)
    arrays = tmp_path / "arrays"
    arrays.mkdir()
    np.save(arrays / "edge_index.npy", rng.integers(0, 50, (2, 200)))
    np.save(arrays / "features.npy", rng.random((50, 3)))
    np.save(arrays / "y.npy", rng.integers(0, 4, 50))
    np.save(arrays / "train_mask.npy", np.arange(50) < 10)
    code, out, _ = run(capsys, monkeypatch, "ingest", arrays, tmp_path / "a", "--json")
    facts = json.loads(out)
    assert (code, facts["edges"], facts["labels"]["train"]) == (0, 200, 10)
    command = ["ingest", arrays / "edge_index.npy", tmp_path / "b", "--undirected", "--json"]
    command += ["--array", f"features={arrays / 'features.npy'}", "--memory", "32 MB"]
    code, out, _ = run(capsys, monkeypatch, *command)
    assert json.loads(out)["edges"] == 400
    table = tmp_path / "edges.csv"
    table.write_text("weight,a,b\n0.5,x,y\n1.5,y,z\n")
    command = ["ingest", table, tmp_path / "c", "--json", "--column", "weight=weight"]
    command += ["--column", "source=a", "--column", "target=b"]
    code, out, _ = run(capsys, monkeypatch, *command)
    assert (json.loads(out)["nodes"], json.loads(out)["weighted"]) == (3, True)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["ingest", "{0}/none", "{0}/out"], 1, "there is no"),
        (["ingest", "{0}", "{0}/out"], 1, "nothing that is known"),
        (["ingest", "{0}", "{0}/out", "--kind", "graphml"], 1, "source kind"),
        (["ingest", "{0}", "{0}/out", "--array", "colour=x.npy"], 2, "--array got"),
        (["ingest", "{0}", "{0}/out", "--memory", "lots"], 2, "'lots' is not a size"),
        (["generate", "{0}/out", "--nodes", "5", "--option", "p_in=many"], 2, "--option p_in"),
        (["generate", "{0}/out", "--nodes", "5", "--dtype", "int4"], 1, "dtype is"),
        (["info", "{0}"], 1, "holds no data set"),
    ],
)
def test_mistakes_are_explained(tmp_path, capsys, monkeypatch, arguments, code, message):
    arguments = [argument.format(tmp_path) for argument in arguments]
    got, out, err = run(capsys, monkeypatch, *arguments)
    assert got == code, err
    assert message in " ".join(err.split())
    assert "hint:" in err
    assert out == ""


def test_kinds_are_found(tmp_path):
    (tmp_path / "thing.bin").write_bytes(b"")
    with pytest.raises(DataError, match="of no known kind"):
        find_source(tmp_path / "thing.bin")
    with pytest.raises(ConfigurationError, match="memory_bytes"):
        generate_graph(tmp_path / "x", nodes=2, dim=1, memory_bytes=5)
