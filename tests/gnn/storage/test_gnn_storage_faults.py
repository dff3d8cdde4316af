"""A failing disk under real reads and writes: errors, short reads, interruptions, no space."""

import os
import subprocess

import numpy as np
import pytest

from fivefold.errors import UnsupportedError
from fivefold.gnn.storage._ring import Ring

PAGE = 4096


def ring_works():
    try:
        Ring(1).close()
    except UnsupportedError:
        return False
    return True


without_ring = pytest.mark.skipif(not ring_works(), reason="io_uring is not permitted here")
BACKENDS = ["threads", "python", pytest.param("io_uring", marks=without_ring)]

READ = """
import sys
import numpy as np
from fivefold.errors import FivefoldError
from fivefold.gnn.storage import Container, RowReader

path, backend = sys.argv[1:]
rows = np.load(path + ".npy")
chosen = np.concatenate([np.arange(0, 900, 3), np.arange(1000, len(rows))])
with Container.open(path) as container:
    for direct in (None, False):
        reader = RowReader(
            container, "x", backend=backend, threads=2, direct=direct, block_bytes=16384
        )
        for _ in range(2):
            out = np.zeros_like(rows)
            try:
                reader.read_rows(chosen, out, chosen)
                assert np.array_equal(out[chosen], rows[chosen])
                print("right")
            except FivefoldError as error:
                # A row is right, or it has not come (a row over two pages: in part).
                assert ((out == rows) | (out == 0)).all()
                print(type(error).__name__, error)
        reader.close()
"""


@pytest.fixture
def read_with_fault(make_file, run_script, faulty_disk):
    def run(backend, mode, *, page=None):
        rows = np.random.default_rng(0).integers(1, 2**31, (3000, 25)).astype(np.int32)
        container = make_file(rows)
        np.save(str(container.path) + ".npy", rows)
        offset = -1 if page is None else container.sections["x"].offset + page * PAGE
        result = run_script(
            READ,
            container.path,
            backend,
            LD_PRELOAD=faulty_disk,
            FAULT_PATH="a.fvf",
            FAULT_MODE=mode,
            FAULT_OFFSET=offset,
        )
        assert result.returncode == 0, result.stderr
        return offset, result.stdout.splitlines()

    return run


@pytest.mark.parametrize("backend", BACKENDS)
def test_short_reads_are_completed(read_with_fault, backend):
    _, lines = read_with_fault(backend, "short")
    assert lines == ["right"] * 4


@pytest.mark.parametrize("backend", ["threads", "python"])
def test_interrupted_reads_are_repeated(read_with_fault, backend):
    _, lines = read_with_fault(backend, "eintr")
    assert lines == ["right"] * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_of_the_disk_names_place_and_remedy(read_with_fault, backend):
    offset, lines = read_with_fault(backend, "eio", page=40)
    reason = "Bad file descriptor" if backend == "io_uring" else "Input/output error"
    assert len(lines) == 4
    for line in lines:
        assert line.startswith("StorageError")
        assert reason in line
        assert "a.fvf at offset" in line
        found = int(line.split("at offset ")[1].split()[0])
        assert found <= offset < found + 16384
        assert "; " in line


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_that_ends_too_early_is_called_truncated(read_with_fault, backend):
    offset, lines = read_with_fault(backend, "eof", page=40)
    assert len(lines) == 4
    for line in lines:
        assert line.startswith("StorageError")
        assert "truncated" in line
        found = int(line.split("at offset ")[1].split()[0].rstrip(","))
        assert offset - 16384 < found <= offset


WRITE = """
import resource, signal, sys
import numpy as np
from fivefold.errors import StorageError
from fivefold.gnn.storage import ContainerWriter

path, limit = sys.argv[1], int(sys.argv[2])
if limit:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
rows = np.random.default_rng(0).random((4000, 100))
schema = {"x": (rows.dtype, (None, 100))}
with ContainerWriter(path, kind="k", sections=schema, attributes={}, resume=True) as writer:
    first = writer.progress or 0
    print("from", first, flush=True)
    try:
        for low in range(first, 4000, 500):
            writer.append("x", rows[low : low + 500])
            writer.mark(low + 500)
        with writer.commit() as container:
            assert np.array_equal(container.read("x"), rows)
            print("whole")
    except StorageError as error:
        print("StorageError", error)
"""


def test_a_limit_on_file_sizes_stops_writing_and_the_rest_is_written_later(tmp_path, run_script):
    path = tmp_path / "a.fvf"
    full = run_script(WRITE, path, 1_500_000)
    assert full.returncode == 0, full.stderr
    assert full.stdout.startswith("from 0\nStorageError writing")
    assert "File too large; raise the limit" in full.stdout
    assert not path.exists()
    rest = run_script(WRITE, path, 0)
    assert rest.stdout == "from 1500\nwhole\n", rest.stderr


def test_a_full_disk_stops_writing_and_the_rest_is_written_later(tmp_path, run_script):
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a small file system")
    try:
        full = run_script(WRITE, folder / "a.fvf", 0)
        assert full.returncode == 0, full.stderr
        assert full.stdout.startswith("from 0\nStorageError")
        assert "No space left on device" in full.stdout
        assert "free some space" in full.stdout
        subprocess.run(["mount", "-o", "remount,size=20m", str(folder)], check=True)
        rest = run_script(WRITE, folder / "a.fvf", 0)
        # 2 MiB hold 2500 of these rows and the little files beside them, 3000 they do not.
        assert rest.stdout == "from 2500\nwhole\n", rest.stderr
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_too_little_space_is_seen_before_anything_is_written(tmp_path, monkeypatch):
    from fivefold.errors import StorageError
    from fivefold.gnn.storage import ContainerWriter

    monkeypatch.setattr("fivefold.gnn.storage._partial.free_bytes", lambda _folder: 10_000)
    with pytest.raises(StorageError, match=r"needs .* 10 kB are free; free some space"):
        ContainerWriter(
            tmp_path / "a", kind="k", sections={"x": (np.uint8, (9000,))}, attributes={}
        )
