"""The pipeline hangs in no case, loses no item, and names what went wrong."""

import gc
import logging
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from fivefold.errors import DataError, StorageError
from fivefold.gnn.loading import StallError
from fivefold.gnn.loading._base import BatchIterator
from fivefold.gnn.loading._pipeline import (
    BufferRing,
    Channel,
    ClosedChannelError,
    Pipeline,
    Stage,
)


def no_threads_left(before):
    until = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    return threading.active_count() <= before  # one of an earlier test may end meanwhile


def drain(pipeline):
    out = []
    while True:
        try:
            out.append(pipeline.take())
        except StopIteration:
            return out


def stages(*runs):
    return [[Stage(f"stage {i}", run)] for i, run in enumerate(runs)]


@pytest.mark.parametrize("capacity", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 50])
def test_items_come_out_once_and_in_order(count, capacity):
    before = threading.active_count()
    random = np.random.default_rng(0)
    naps = random.random(100) * 0.002

    def first(ticket):
        time.sleep(naps[ticket.batch])
        return ticket.batch * 10

    def second(ticket):
        time.sleep(naps[-ticket.batch])
        return ticket.value + 1

    pipeline = Pipeline(iter(range(count)), stages(first, second), capacity=capacity)
    assert drain(pipeline) == [10 * i + 1 for i in range(count)]
    assert pipeline.finished
    assert drain(pipeline) == []
    assert no_threads_left(before)


@pytest.mark.parametrize("lanes", [[1, 2, 1], [1, 3, 1], [1, 2, 2, 1]])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 40])
def test_threads_side_by_side_keep_the_order(count, lanes):
    before = threading.active_count()
    naps, at_work, most = np.random.default_rng(1).random(count + 1) * 0.003, [], []

    def run(ticket):
        at_work.append(ticket.batch)
        most.append(len(at_work))
        time.sleep(naps[ticket.batch])
        at_work.remove(ticket.batch)
        return ticket.batch

    runs = [lambda t: t.batch, *[run] * (len(lanes) - 2), lambda t: t.value]
    pipeline = Pipeline(iter(range(count)), stages(*runs), lanes=lanes, capacity=2)
    assert drain(pipeline) == list(range(count))
    assert pipeline.finished
    assert no_threads_left(before)
    assert count < 40 or max(most) > 1

    def fail(ticket):
        if ticket.batch == count // 2:
            raise DataError("x")  # noqa: EM101 - a test
        return run(ticket)

    runs[1] = fail
    pipeline = Pipeline(iter(range(count)), stages(*runs), lanes=lanes, capacity=2)
    if count:
        with pytest.raises(DataError, match=f"batch {count // 2}: x"):
            drain(pipeline)
    pipeline.close()
    assert no_threads_left(before)


def test_no_more_items_are_made_than_fit():
    made = []
    pipeline = Pipeline(iter(range(100)), stages(lambda t: made.append(t.batch)), capacity=2)
    time.sleep(0.1)
    assert len(made) <= 3
    pipeline.close()


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_failure_reaches_the_next_call_with_its_place(where):
    before = threading.active_count()

    def run(number):
        def stage(ticket):
            if number == where and ticket.batch == 3:
                raise DataError("page 7 is damaged", hint="pack again")  # noqa: EM101 - a test
            return ticket.batch

        return stage

    pipeline = Pipeline(iter(range(10)), stages(*(run(i) for i in range(3))), capacity=1)
    with pytest.raises(DataError, match=rf"stage 'stage {where}' of batch 3: page 7") as caught:
        drain(pipeline)
    assert caught.value.hint == "pack again"
    with pytest.raises(DataError):  # and again, not silence
        pipeline.take()
    assert no_threads_left(before)


def test_a_failure_overtakes_batches_that_are_ready():
    failed = threading.Event()

    def run(ticket):
        if ticket.batch == 2:
            failed.set()
            raise StorageError("the disk is gone")  # noqa: EM101 - a test
        return ticket.batch

    pipeline = Pipeline(iter(range(10)), stages(run), capacity=5)
    assert failed.wait(5)
    time.sleep(0.05)
    with pytest.raises(StorageError, match="disk is gone"):
        pipeline.take()


def test_other_errors_keep_their_class_and_say_where():
    def run(_):
        raise ZeroDivisionError("boom")  # noqa: EM101 - a test

    pipeline = Pipeline(iter([4]), stages(run))
    with pytest.raises(ZeroDivisionError, match="boom") as caught:
        pipeline.take()
    assert "'stage 0' of batch 4" in caught.value.__notes__[0]


def test_an_error_of_the_order_itself_is_seen():
    def numbers():
        yield 0
        raise ValueError("no order")  # noqa: EM101 - a test

    pipeline = Pipeline(numbers(), stages(lambda t: t.batch))
    with pytest.raises(ValueError, match="no order"):
        drain(pipeline)


def test_a_stage_that_hangs_is_named(caplog):
    release = threading.Event()

    def run(ticket):
        if ticket.batch == 1:
            release.wait(20)
        return ticket.batch

    pipeline = Pipeline(iter(range(5)), stages(lambda t: t.batch, run), timeout_s=1.0)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING), pytest.raises(StallError, match="'stage 1' of batch 1"):
        drain(pipeline)
    assert time.monotonic() - began < 5
    assert "left behind" in caplog.text
    assert isinstance(pipeline._failure, TimeoutError)
    release.set()


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_close_in_the_middle_ends_all_threads(taken):
    before = threading.active_count()
    pipeline = Pipeline(iter(range(1000)), stages(*[lambda t: t.batch] * 3), capacity=2)
    for i in range(taken):
        assert pipeline.take() == i
    pipeline.close()
    pipeline.close()
    assert pipeline.ended
    assert no_threads_left(before)
    assert drain(pipeline) == []
    assert not pipeline.finished


def test_close_from_another_thread_wakes_the_consumer():
    stop = threading.Event()
    pipeline = Pipeline(iter(range(3)), stages(lambda _: stop.wait(20)), timeout_s=20)
    timer = threading.Timer(0.1, lambda: (pipeline._channels[-1].close(), stop.set()))
    timer.start()
    began = time.monotonic()
    drain(pipeline)
    assert time.monotonic() - began < 5
    timer.join()


@pytest.mark.slow
def test_dropping_the_iterator_ends_the_threads():
    before = threading.active_count()
    for leave in (True, False):
        pipeline = Pipeline(iter(range(1000)), stages(lambda t: t.batch), capacity=1)
        iterator = BatchIterator(
            pipeline, on_batch=lambda v: v, on_next=lambda: None, on_end=lambda: None
        )
        del pipeline
        if leave:
            for _ in iterator:
                break
        del iterator
        gc.collect()
        assert no_threads_left(before)


PREAMBLE = """
import _thread, os, threading, time, warnings
from fivefold.errors import UnsupportedError
from fivefold.gnn.loading._base import BatchIterator
from fivefold.gnn.loading._pipeline import Pipeline, Stage
nothing = lambda *_: None
def endless(nap_s=0.0):
    stages = [[Stage("s", lambda t: time.sleep(nap_s) or t.batch)], [Stage("t", lambda t: t.batch)]]
    pipeline = Pipeline(iter(range(10**9)), stages)
    return BatchIterator(pipeline, on_batch=lambda v: v, on_next=nothing, on_end=nothing)
"""


@pytest.mark.slow
def test_interrupt_fork_and_leaving_the_interpreter():
    """One process for all three, since it takes seconds to start one."""
    code = (
        PREAMBLE
        + """
stop = threading.Event()
pipeline = Pipeline(iter(range(3)), [[Stage("s", lambda t: stop.wait(2))]])
threading.Timer(0.2, _thread.interrupt_main).start()
try:
    pipeline.take()
except KeyboardInterrupt:
    print("interrupted", pipeline._done, flush=True)
warnings.simplefilter("ignore")  # newer Pythons warn of forks beside threads
iterator = endless()
next(iterator)
child = os.fork()
if child == 0:
    try:
        next(iterator)
    except UnsupportedError as error:
        os.write(1, error.hint.encode())
    iterator.end("x")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
iterator.end("x")
left = endless(0.001)
next(left)
print(" left", flush=True)
"""
    )
    assert run(code) == "interrupted True\nmake the loader after the fork, in the child left"


def run(code):
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout.strip()


def test_channel_bounds_and_ends():
    channel = Channel(1)
    channel.put(1)
    waiting = threading.Thread(target=lambda: channel.put(2))
    waiting.start()
    time.sleep(0.05)
    assert waiting.is_alive()
    assert channel.take() == 1
    waiting.join(5)
    assert channel.take() == 2
    channel.close()
    for _ in range(2):
        with pytest.raises(ClosedChannelError):
            channel.take()
    box = Channel()
    box.close()
    with pytest.raises(ClosedChannelError):
        box.take()


def test_a_buffer_returns_when_its_last_view_is_gone():
    import torch

    ring = BufferRing(2, size_bytes=4096)
    array = ring.lend((4, 2), np.dtype(np.float32))
    tensor = torch.from_numpy(array)
    view = tensor[1:, :1].numpy()
    del array, tensor
    other = ring.lend((1, 1), np.dtype(np.uint8))
    assert ring._free._items.qsize() == 0
    del view
    assert ring._free._items.qsize() == 1
    del other
    assert ring._free._items.qsize() == 2
    assert (ring.count, ring.nbytes) == (2, 8192)


def test_a_consumer_that_keeps_batches_gets_buffers_of_its_own(caplog):
    ring, kept = BufferRing(2, size_bytes=64), []
    with caplog.at_level(logging.WARNING):
        for i in range(10):
            ring.make_room()
            array = ring.lend((16,), np.dtype(np.int32))
            array[:] = i
            ring.delivered(id(array))
            kept.append(array)
    assert [int(array[0]) for array in kept] == list(range(10))
    assert len(caplog.records) == 1
    assert ring.count >= 10
    del array
    kept.clear()
    assert ring.count == 2  # what was extra is gone


def test_a_borrower_can_be_told_to_stop_waiting():
    ring, seen, me = BufferRing(1, size_bytes=64), [], object()
    held = ring.lend((1,), np.dtype(np.uint8))
    ring.stop_waiting("another borrower, long gone")

    def wait():
        with pytest.raises(ClosedChannelError):
            ring.lend((1,), np.dtype(np.uint8), borrower=me)
        seen.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    assert not seen
    ring.stop_waiting(me)
    thread.join(5)
    assert seen == [True]
    del held
    assert ring.lend((1,), np.dtype(np.uint8)).shape == (1,)
