"""Memory bounds, full disks, and more nodes than 32 bits can count."""

import os
import resource
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from fivefold.errors import StorageError
from fivefold.gnn.data import EdgeRules, _write_graph, array_source, generate_graph, ingest
from fivefold.gnn.data._write_graph import write_graph
from fivefold.gnn.data.parts import EdgeBlock, index_dtype
from fivefold.gnn.storage import Container

SMALL = 16 << 20


def run(script, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        check=False,
        timeout=200,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


MEMORY_SCRIPT = """
    import sys
    from pathlib import Path
    from fivefold.gnn.data import array_source, generate_graph, ingest

    def high_water_kib():  # getrusage would count what the parent had before the fork
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    folder = sys.argv[1]
    ingest(array_source([[0], [1]], num_nodes=5000), f"{folder}/warm").close()
    generate_graph(f"{folder}/warm2", nodes=5000, dim=8, neighbors="both").close()
    before = high_water_kib()
    source = array_source(f"{folder}/edges.npy", features=f"{folder}/x.npy")
    ingest(source, f"{folder}/out", memory_bytes=16 << 20).close()
    generate_graph(f"{folder}/made", nodes=150_000, dim=128, neighbors="both",
                   memory_bytes=16 << 20, threads=2).close()
    print((high_water_kib() - before) / 1024)
"""


@pytest.mark.slow
def test_memory_stays_below_the_bound(tmp_path):
    """75 MB of rows and 60 MB of edges go through 16 MiB."""
    rng = np.random.default_rng(0)
    np.save(tmp_path / "edges.npy", rng.integers(0, 150_000, (2, 4_000_000)))
    np.save(tmp_path / "x.npy", np.zeros((150_000, 128), np.float32))
    used_mib = float(run(MEMORY_SCRIPT, tmp_path))
    assert used_mib < 24


@pytest.mark.parametrize("limit_bytes", [300_000, 3_000_000])
def test_a_full_disk_is_a_storage_error_and_the_run_goes_on(tmp_path, limit_bytes, monkeypatch):
    """A limit on file sizes stands for the full disk: writes fail in the same places."""
    rng = np.random.default_rng(1)
    edges = rng.integers(0, 20_000, (2, 500_000))
    source = array_source(edges, features=np.ones((20_000, 100), np.float32))
    monkeypatch.setattr(_write_graph, "_MARK_EVERY_EDGES", 100_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limits[1]))
    try:
        with pytest.raises(StorageError) as caught:
            ingest(source, tmp_path, memory_bytes=SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.hint
    with ingest(source, tmp_path, memory_bytes=SMALL) as dataset:
        order = np.argsort(edges[1], kind="stable")
        np.testing.assert_array_equal(dataset.topology().indices, edges[0][order])


def test_spilling_to_a_full_disk(tmp_path, monkeypatch):
    edges = np.zeros((2, 500_000), np.int64)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(_write_graph, "_MARK_EVERY_EDGES", 100_000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"writing .* bytes of .*edges") as caught:
            ingest(array_source(edges, num_nodes=10), tmp_path, memory_bytes=SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "stays for resuming" in caught.value.hint
    with ingest(array_source(edges, num_nodes=10), tmp_path, memory_bytes=SMALL) as dataset:
        assert dataset.topology().indptr.tolist() == [0, *[500_000] * 10]


def test_ids_take_64_bits_from_where_32_end():
    assert index_dtype(2**31) == np.int32
    assert index_dtype(2**31 + 1) == np.int64


class FarSources:
    """Five edges from a type of three thousand million nodes."""

    num_edges = expected_edges = 5
    weighted = False

    def blocks(self, position, max_edges):
        assert (position, max_edges) >= (0, 1)
        sources = np.array([2_999_999_999, 0, 2**31, 2**31 - 1, 5])
        yield EdgeBlock(sources, np.array([1, 0, 1, 2, 1]), position=5)


@pytest.mark.parametrize("rules", [EdgeRules(), EdgeRules(drop_duplicates=True)])
def test_more_sources_than_32_bits_count(tmp_path, rules):
    attributes = {"name": "far", "num_nodes": 3, "num_sources": 3_000_000_000}
    write_graph(
        tmp_path / "graph.fvf",
        FarSources(),
        attributes,
        rules=rules,
        memory_bytes=SMALL,
        progress=lambda *_: None,
    )
    with Container.open(tmp_path / "graph.fvf", kind="graph") as graph:
        assert graph.sections["indices"].dtype == np.int64
        assert graph.read("indptr").tolist() == [0, 1, 4, 5]
        middle = [2_999_999_999, 2**31, 5]
        middle = sorted(middle) if rules.drop_duplicates else middle
        assert graph.read("indices").tolist() == [0, *middle, 2**31 - 1]


def test_threads_and_errors_of_theirs_reach_the_caller(tmp_path, monkeypatch):
    from fivefold.gnn.data import _generate

    def broken(*_):
        message = "no more"
        raise MemoryError(message)

    monkeypatch.setattr(_generate._Generator, "rows", broken)
    with pytest.raises(MemoryError, match="no more"):
        generate_graph(tmp_path, nodes=1000, dim=4, threads=3)
    monkeypatch.undo()
    with generate_graph(tmp_path, nodes=1000, dim=4) as dataset:  # and it goes on
        assert dataset.num_nodes == 1000
