"""A failing disk under real reads and writes: errors, short reads, interruptions, no space."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from fivefold.errors import StorageError, UnsupportedError
from fivefold.gnn.storage import ContainerWriter
from fivefold.gnn.storage._uring import Ring

PAGE = 4096


def ring_works():
    try:
        Ring(1).close()
    except UnsupportedError:
        return False
    return True


without_ring = pytest.mark.skipif(not ring_works(), reason="io_uring is not permitted here")
BACKENDS = ["threads", pytest.param("io_uring", marks=without_ring)]

READ = """
import json, os, sys
import numpy as np
from fivefold.errors import FivefoldError
from fivefold.gnn.storage import Container, RowReader

path, offset, *backends = sys.argv[1:]
rows = np.load(path + ".npy")
chosen = np.concatenate([np.arange(0, 900, 3), np.arange(1000, len(rows))])
results = {}

def read(backend, direct):
    out = np.zeros_like(rows)
    try:
        with Container.open(path) as container, RowReader(
            container, "x", backend=backend, threads=2, direct=direct, block_bytes=16384
        ) as reader:
            for _ in range(2):
                reader.read_rows(chosen, out, chosen)
                assert np.array_equal(out[chosen], rows[chosen])
            return "right"
    except FivefoldError as error:
        # A row is right, or it has not come (a row over two pages: in part).
        assert ((out == rows) | (out == 0)).all()
        return type(error).__name__ + " " + str(error)

os.environ["FAULT_OFFSET"] = offset
for backend in backends:
    for mode in ("short", "eintr", "eio", "eof"):
        os.environ["FAULT_MODE"] = mode
        results[backend + " " + mode] = [read(backend, True), read(backend, False)]
        os.environ["FAULT_MODE"] = ""
        assert read(backend, True) == "right"
print(json.dumps(results))
"""
BAD_PAGE = 40


@pytest.fixture(scope="module")
def faulty_reads(tmp_path_factory, faulty_disk):
    """What each back end did on each kind of faulty disk, and where the fault was."""
    folder = tmp_path_factory.mktemp("reads")
    rows = np.random.default_rng(0).integers(1, 2**31, (3000, 25)).astype(np.int32)
    path = folder / "a.fvf"
    schema = {"x": (rows.dtype, rows.shape)}
    with ContainerWriter(path, kind="k", sections=schema, attributes={}) as writer:
        writer.write("x", 0, rows)
        writer.commit().close()
    np.save(f"{path}.npy", rows)
    offset = (1 + BAD_PAGE) * PAGE
    backends = ["threads", *(["io_uring"] if ring_works() else [])]
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", READ, str(path), str(offset), *backends],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "LD_PRELOAD": str(faulty_disk), "FAULT_PATH": "a.fvf"},
    )
    assert result.returncode == 0, result.stderr
    return offset, json.loads(result.stdout)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["short", "eintr"])
def test_short_and_interrupted_reads_are_completed(faulty_reads, backend, mode):
    assert faulty_reads[1][f"{backend} {mode}"] == ["right", "right"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_of_the_disk_names_place_and_remedy(faulty_reads, backend):
    offset, results = faulty_reads
    reason = "Bad file descriptor" if backend == "io_uring" else "Input/output error"
    for line in results[f"{backend} eio"]:
        assert line.startswith("StorageError")
        assert reason in line
        assert "a.fvf at offset" in line
        found = int(line.split("at offset ")[1].split()[0])
        assert found <= offset < found + 16384
        assert "; " in line


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_that_ends_too_early_is_called_truncated(faulty_reads, backend):
    offset, results = faulty_reads
    for line in results[f"{backend} eof"]:
        assert line.startswith("StorageError")
        assert "truncated" in line
        found = int(line.split("at offset ")[1].split()[0].rstrip(","))
        assert offset - 16384 < found <= offset


WRITE = """
import os, resource, signal, subprocess, sys
import numpy as np
from fivefold.errors import StorageError
from fivefold.gnn.storage import ContainerWriter

path, *steps = sys.argv[1:]
rows = np.random.default_rng(0).random((4000, 100))
schema = {"x": (rows.dtype, (None, 100))}

def write():
    with ContainerWriter(path, kind="k", sections=schema, attributes={}, resume=True) as writer:
        first = writer.progress or 0
        print("from", first, flush=True)
        try:
            for low in range(first, 4000, 500):
                writer.append("x", rows[low : low + 500])
                writer.mark(low + 500)
            with writer.commit() as container:
                assert np.array_equal(container.read("x"), rows)
                print("whole", flush=True)
        except StorageError as error:
            print("StorageError", error, flush=True)

for step in steps:
    child = os.fork()
    if child == 0:
        if step == "limited":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, resource.RLIM_INFINITY))
        elif step != "free":
            subprocess.run(["mount", "-o", "remount,size=" + step, os.path.dirname(path)])
        write()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.path.exists(path) == (step != "limited" and step != "2m")
"""


@pytest.mark.slow
def test_a_limit_on_file_sizes_stops_writing_and_the_rest_is_written_later(tmp_path, run_script):
    result = run_script(WRITE, tmp_path / "a.fvf", "limited", "free")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "from 0"
    assert lines[1].startswith("StorageError writing")
    assert "File too large; raise the limit" in lines[1]
    assert lines[2:] == ["from 1500", "whole"]


@pytest.mark.slow
def test_a_full_disk_stops_writing_and_the_rest_is_written_later(tmp_path, run_script):
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a small file system")
    try:
        result = run_script(WRITE, folder / "a.fvf", "2m", "20m")
        assert result.returncode == 0, result.stderr
        lines = result.stdout.splitlines()
        assert lines[0] == "from 0"
        assert lines[1].startswith("StorageError")
        assert "No space left on device" in lines[1]
        assert "free some space" in lines[1]
        # 2 MiB hold 2500 of these rows and the little files beside them, 3000 they do not.
        assert lines[2:] == ["from 2500", "whole"]
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_too_little_space_is_seen_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("fivefold.gnn.storage._partial.free_bytes", lambda _folder: 10_000)
    with pytest.raises(StorageError, match=r"needs .* 10 kB are free; free some space"):
        ContainerWriter(
            tmp_path / "a", kind="k", sections={"x": (np.uint8, (9000,))}, attributes={}
        )
