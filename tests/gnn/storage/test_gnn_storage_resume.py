"""Writers that are killed at any time go on, and the file is the same byte for byte."""

import errno
import json

import numpy as np
import pytest

from fivefold.errors import DataError
from fivefold.gnn.storage import Container, ContainerWriter

WRITE = """
import os, signal, sys
import numpy as np
from fivefold.gnn.storage import ContainerWriter

rows = np.random.default_rng(0).random((3000, 257)).astype(np.float32)
order = np.array_split(np.random.default_rng(1).permutation(30), 6)  # pieces of 100 rows
schema = {
    "x": (np.float32, rows.shape),
    "big": (np.uint8, (None,)),
    "small": (np.int64, (None, 3)),
}

def write(path, steps):
    def step():
        nonlocal steps
        steps -= 1
        if steps == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    writer = ContainerWriter(path, kind="k", sections=schema, attributes={"a": 1}, resume=True)
    done = writer.progress["done"] if writer.progress else 0
    print("from", done, flush=True)
    for number in range(done, 6):
        for piece in order[number].tolist():
            writer.write("x", 100 * piece, rows[100 * piece : 100 * piece + 100])
            step()
        writer.append("big", np.full(7000 + number, number, np.uint8))
        step()
        writer.append("small", np.full((11, 3), number))
        step()
        writer.mark({"done": number + 1})
        step()
    writer.commit().close()
    print("whole", flush=True)

path, *steps = sys.argv[1:]
for step in steps:
    child = os.fork()
    if child == 0:
        write(path, int(step))
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == (-signal.SIGKILL if int(step) else 0), code
    assert os.path.exists(path) == (step == "0")
write(path + ".plain", 0)
"""


@pytest.mark.nightly
def test_killed_again_and_again_the_file_is_the_same_in_the_end(tmp_path, run_script):
    result = run_script(WRITE, tmp_path / "a.fvf", 3, 9, 15, 22, 0)
    assert result.returncode == 0, result.stderr
    # 8 steps a round: after 3 none is done, after 9 one, then one more (15), then two more (22).
    starts = ["from 0", "from 0", "from 1", "from 2", "from 4", "whole", "from 0", "whole"]
    assert result.stdout.splitlines() == starts
    assert (tmp_path / "a.fvf").read_bytes() == (tmp_path / "a.fvf.plain").read_bytes()
    left = sorted(path.name for path in tmp_path.iterdir() if "fvf" in path.name)
    assert left == ["a.fvf", "a.fvf.plain"]
    Container.open(tmp_path / "a.fvf", verify="full").close()


SCHEMA = {"x": (np.int64, (4000,)), "y": (np.int64, (None,))}


def start(path, **changes):
    settings = {"kind": "k", "sections": SCHEMA, "attributes": {}, "resume": True, **changes}
    return ContainerWriter(path, **settings)


def test_without_a_journal_resuming_begins_anew(tmp_path):
    with start(tmp_path / "a") as writer:
        writer.write("x", 0, np.ones(4000, np.int64))
        assert writer.progress is None
    with start(tmp_path / "a") as writer:
        assert writer.progress is None
        assert not writer.read("x").any()


def test_what_was_appended_after_the_mark_is_dropped(tmp_path):
    with start(tmp_path / "a") as writer:
        writer.append("y", np.arange(1000))
        writer.mark([1, {"two": None}])
        writer.append("y", np.arange(5000))
    with start(tmp_path / "a") as writer:
        assert writer.progress == [1, {"two": None}]
        assert writer.rows("y") == 1000
        assert np.array_equal(writer.read("y"), np.arange(1000))
        writer.append("y", np.arange(7))
        writer.write("x", 0, np.arange(4000))
        with writer.commit() as container:
            container.verify()
            assert np.array_equal(container.read("y")[1000:], np.arange(7))


def test_an_unfinished_file_of_another_making_is_refused_or_discarded(tmp_path):
    with start(tmp_path / "a") as writer:
        writer.mark(1)
    for changes in ({"kind": "other"}, {"attributes": {"a": 1}}, {"sections": {"x": SCHEMA["x"]}}):
        with pytest.raises(DataError, match=r"cannot be resumed: it has another.*; delete"):
            start(tmp_path / "a", **changes)
    with start(tmp_path / "a", kind="other", resume=False) as writer:
        assert writer.progress is None
        writer.abort()


def test_a_damaged_journal_or_a_cut_file_is_refused(tmp_path):
    with start(tmp_path / "a") as writer:
        writer.mark(1)
    journal = tmp_path / "a.partial.journal"
    kept = journal.read_bytes()
    journal.write_bytes(kept[:10])
    with pytest.raises(DataError, match="its journal is damaged; delete"):
        start(tmp_path / "a")
    journal.write_bytes(json.dumps([1]).encode())
    with pytest.raises(DataError, match="its journal is damaged; delete"):
        start(tmp_path / "a")
    journal.write_bytes(kept)
    with (tmp_path / "a.partial").open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(DataError, match="shorter than its sections"):
        start(tmp_path / "a")


def test_lost_checksums_are_refused(tmp_path):
    with start(tmp_path / "a") as writer:
        writer.write("x", 0, np.arange(4000))
        writer.mark(1)
    (tmp_path / "a.partial.sums").unlink()
    with pytest.raises(DataError, match="its checksums are missing"):
        start(tmp_path / "a")


def fill(writer):
    writer.write("x", 0, np.arange(4000))
    writer.append("y", np.arange(700))
    writer.append("z", np.arange(900.0))
    writer.mark("filled")


THREE = {**SCHEMA, "z": (np.float64, (None,))}


@pytest.mark.parametrize("stage", ["first sync", "second sync", "rename", "leftovers"])
def test_a_commit_that_was_broken_off_is_made_again(tmp_path, monkeypatch, stage):
    with start(tmp_path / "plain", sections=THREE) as writer:
        fill(writer)
        writer.commit().close()
    with start(tmp_path / "a", sections=THREE) as writer:
        fill(writer)
        with monkeypatch.context() as patch:
            break_at(patch, stage)
            with pytest.raises(OSError, match=r"broken off|Input/output error"):
                writer.commit()
    if stage != "leftovers":
        assert not (tmp_path / "a").exists()
        with pytest.raises(DataError, match="unfinished"):
            Container.open(tmp_path / "a")
    with start(tmp_path / "a", sections=THREE) as writer:
        if writer.progress != "filled":
            assert stage == "leftovers"  # the file was complete; this is a new one
            fill(writer)
        writer.commit().close()
    assert (tmp_path / "a").read_bytes() == (tmp_path / "plain").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "plain"]


def break_at(patch, stage):
    calls = []

    def fail(*_args, **_more):
        calls.append(1)
        if stage != "second sync" or len(calls) == 2:
            raise OSError(errno.EIO, "broken off")

    where = "fivefold.gnn.storage."
    names = {
        "first sync": "_partial.PartialFile.sync",
        "second sync": "_partial.PartialFile.sync",
        "leftovers": "_writer.ContainerWriter._remove_side_files",
    }
    if stage == "rename":
        patch.setattr("pathlib.Path.replace", fail)
    else:
        patch.setattr(where + names[stage], fail)


def test_checksums_of_many_pages_are_saved_for_resuming(tmp_path):
    rows = np.random.default_rng(3).integers(0, 256, (5000, 4096)).astype(np.uint8)
    schema = {"x": (np.uint8, rows.shape)}  # more pages than are saved in one piece
    with ContainerWriter(tmp_path / "a", kind="k", sections=schema, attributes={}) as writer:
        writer.write("x", 0, rows[:4900])
        writer.mark({"rows": 4900})
    with ContainerWriter(
        tmp_path / "a", kind="k", sections=schema, attributes={}, resume=True
    ) as writer:
        assert writer.progress == {"rows": 4900}
        writer.write("x", 4900, rows[4900:])
        writer.commit().close()
    with Container.open(tmp_path / "a", verify="full") as found:
        assert np.array_equal(found.read("x"), rows)
