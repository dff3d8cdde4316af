"""The threads engine, and the few threads that stay with a reader.

One call runs one function on several threads and on the caller's, which takes part as worker 0.
Threads are started when first needed, and again in the child of a fork, where they are gone. They
hold no reference to who uses them, so a forgotten reader ends its threads when it is collected. An
executor of ``concurrent.futures`` costs a call of 16 pages on 16 threads a fifth of its time.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Literal

from fivefold._compiler import njit
from fivefold.gnn.storage._requests import DONE, ENDED, FAILED, Work, deliver, halt, take
from fivefold.gnn.storage.arrays import Ids
from fivefold.gnn.storage.files import Files, move_bytes
from fivefold.gnn.storage.pages import PAGE_BYTES, aligned_empty

_Task = tuple[Callable[[int], None], int, "_Round"]


class _Round:
    """One call: knows when its tasks have ended and keeps the first exception."""

    def __init__(self) -> None:
        self._ended = threading.Semaphore(0)
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self.error = self.error or error
        self._ended.release()

    def wait(self, tasks: int) -> None:
        """Wait for this many tasks, whatever happens: they write into the caller's memory."""
        interruption: BaseException | None = None
        while tasks:
            try:
                self._ended.acquire()
                tasks -= 1
            except BaseException as caught:  # noqa: BLE001 - Ctrl-C, raised again below
                interruption = caught
        if interruption is not None:
            raise interruption


def _serve(tasks: SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        function, number, round_ = task
        error: BaseException | None = None
        try:
            function(number)
        except BaseException as caught:  # noqa: BLE001 - it goes to the caller
            error = caught
        del task, function
        round_.finish(error)


def _end(tasks: SimpleQueue[_Task | None], count: list[int]) -> None:
    for _ in range(count[0]):
        tasks.put(None)


class Workers:
    """Threads that run one function at a time, each with its own number."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._started = [0]
        self._finalizer = weakref.finalize(self, _end, self._tasks, self._started)

    def run(self, function: Callable[[int], None], count: int) -> None:
        """Call ``function(i)`` for i below ``count`` at the same time; wait for all."""
        if self._process != os.getpid():
            self._finalizer.detach()
            self._reset()
        while self._started[0] < count - 1:
            thread = threading.Thread(
                target=_serve, args=(self._tasks,), name="fivefold-reader", daemon=True
            )
            thread.start()
            self._started[0] += 1
        round_ = _Round()
        tasks = 0
        try:
            for number in range(1, count):
                self._tasks.put((function, number, round_))
                tasks += 1
            function(0)
        finally:
            round_.wait(tasks)
        if round_.error is not None:
            raise round_.error

    def close(self) -> None:
        """End the threads."""
        self._finalizer()
        self._started = [0]


@njit
def _read_share(direct: Any, plain: Any, buffer: Any, work: Any, status: Any) -> None:
    """Read, check and copy until nothing is left, as one worker."""
    status[0] = DONE
    request = take(work, status)
    while request >= 0:
        count = work.requests.num_pages[request] * PAGE_BYTES
        offset = work.requests.first_pages[request] * PAGE_BYTES
        done, number = move_bytes(False, direct, plain, buffer, count, offset)
        if done < count:
            status[0] = FAILED if number else ENDED
            status[1], status[2] = number, offset + done
        if done < count or not deliver(buffer, request, work, status):
            halt(work.shared)
            return
        request = take(work, status)


class ThreadsBackend:
    """Compiled ``pread`` into a small buffer per worker; works everywhere."""

    name: Literal["threads"] = "threads"

    def __init__(self, files: Files, *, workers: int, block_bytes: int) -> None:
        self._files = files
        self._buffers = [aligned_empty(block_bytes) for _ in range(workers)]
        self.buffer_bytes = workers * block_bytes

    def share(self, worker: int, work: Work, status: Ids) -> None:
        """Do requests of a job until none is left; called by several workers at once."""
        buffer = self._buffers[worker].ctypes.data
        _read_share(self._files.direct, self._files.plain, buffer, work, status[worker])

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
