"""Writes that overlap: calls wait for all that was put before; nothing follows an error."""

import errno
import threading
import time

import numpy as np
import pytest

from fivefold.gnn.storage import Container, ContainerWriter
from fivefold.gnn.storage.pages import aligned_empty
from fivefold.gnn.storage.parallel import WriteBehind


def buffers(count):
    return [np.zeros(1, np.uint8) for _ in range(count)]


def test_two_writes_overlap_and_a_call_waits_for_both():
    both, seen = threading.Barrier(2, timeout=30), []

    def write(buffer):
        both.wait()  # passes only if the other one is under way as well
        time.sleep(0.01 * int(buffer[0]))
        seen.append(int(buffer[0]))

    with WriteBehind(buffers(3)) as behind:
        for pair in range(5):
            for number in (2 * pair, 2 * pair + 1):
                behind.take()[:] = number
                behind.put(write)
            behind.then(lambda pair=pair: seen.append(f"mark {pair}"))
    for pair in range(5):
        mark = seen.index(f"mark {pair}")
        assert {2 * pair, 2 * pair + 1} <= set(seen[:mark])
    assert [entry for entry in seen if isinstance(entry, str)] == [f"mark {p}" for p in range(5)]


def test_a_buffer_is_handed_out_again_only_when_it_is_written():
    taken = []

    def write(buffer):
        value = int(buffer[0])
        time.sleep(0.002)
        taken.append((value, int(buffer[0])))

    with WriteBehind(buffers(3)) as behind:
        for number in range(40):
            behind.take()[:] = number
            behind.put(write)
    assert sorted(taken) == [(number, number) for number in range(40)]


def test_no_call_follows_a_write_that_failed():
    called = []

    def write(buffer):
        if buffer[0] == 3:
            raise OSError(errno.ENOSPC, "full")

    def run():
        with WriteBehind(buffers(3)) as behind:
            for number in range(50):
                behind.take()[:] = number
                behind.put(write)
                behind.then(lambda number=number: called.append(number))

    with pytest.raises(OSError, match="full"):
        run()
    assert called == sorted(called)
    assert max(called, default=-1) < 3
    assert not [t for t in threading.enumerate() if t.name.startswith("fivefold-pack")]


def test_threads_write_pages_of_one_file_at_the_same_time(tmp_path):
    rows, row_bytes, step = 4096, 4096, 256
    random = np.random.default_rng(1)
    values = aligned_empty((rows, row_bytes), np.uint8)
    values[:] = random.integers(0, 256, values.shape, np.uint8)
    schema = {"x": (np.uint8, (rows, row_bytes))}
    with ContainerWriter(tmp_path / "a.fvf", kind="t", sections=schema, attributes={}) as writer:
        order = random.permutation(rows // step)

        def write(part):
            for number in part:
                writer.write("x", number * step, values[number * step : (number + 1) * step])
                writer.mark({"number": int(number)})

        threads = [threading.Thread(target=write, args=(order[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        writer.commit().close()
    with Container.open(tmp_path / "a.fvf") as found:
        found.verify()
        assert (found.read("x") == values).all()


def test_closing_waits_for_writes_under_way(tmp_path, monkeypatch):
    from fivefold.gnn.storage._partial import PartialFile

    put, inside = PartialFile.put_pages, threading.Event()

    def slowly(self, pages, offset):
        inside.set()
        time.sleep(0.2)
        assert self.descriptor >= 0, "closed under a write"
        return put(self, pages, offset)

    monkeypatch.setattr(PartialFile, "put_pages", slowly)
    schema = {"x": (np.uint8, (1024, 4096))}
    writer = ContainerWriter(tmp_path / "a.fvf", kind="t", sections=schema, attributes={})
    if not writer._file.direct:
        writer.close()
        pytest.skip("this file system has no direct writes")
    block = aligned_empty((1024, 4096), np.uint8)
    block[:] = 0
    errors = []

    def write():
        try:
            writer.write("x", 0, block)
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            errors.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    assert inside.wait(30)
    writer.close()
    thread.join(30)
    assert errors == []
