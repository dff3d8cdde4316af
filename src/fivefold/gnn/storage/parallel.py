"""Threads beside the caller's: calls and reads ahead of it, in order and bounded, writes behind it.

An error of a thread comes out of the caller's next call; all threads end with the ``with`` block.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Self, TypeVar

from fivefold.gnn.storage.pages import Bytes

Request = TypeVar("Request")
Result = TypeVar("Result")
Buffer = Bytes
Check = Callable[[], None]
_WRITERS = 2  # so that the disk has the next request when it is through with one


def in_threads(calls: Iterable[Callable[[], Result]], *, threads: int) -> Iterator[Result]:
    """Yield what the calls return, in order; one more than there are threads is under way."""
    with ThreadPoolExecutor(threads, thread_name_prefix="fivefold") as pool:
        running: deque[Future[Result]] = deque()
        try:
            for call in calls:
                running.append(pool.submit(call))
                if len(running) > threads:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()


def read_ahead(
    requests: Iterable[Request], read: Callable[[Request, Any], Result], buffers: tuple[Any, Any]
) -> Iterator[tuple[Result, Any]]:
    """Yield what ``read`` returns for each request, and its buffer, while the next is being read.

    A buffer is overwritten when the one after the next is asked for.
    """

    def filled(request: Request, buffer: Any) -> tuple[Result, Any]:
        return read(request, buffer), buffer

    turns = (partial(filled, request, buffers[n % 2]) for n, request in enumerate(requests))
    return in_threads(turns, threads=1)


class _DroppedError(Exception):
    """Failure of the call beside this one, which is not needed any more."""


def side_by_side(first: Callable[[Check], Any], second: Callable[[Check], Any]) -> tuple[Any, Any]:
    """Return what two calls return that run at once, ``second`` in a thread of its own.

    Each is given a function to call now and then, which ends it when the other one has failed; the
    error of the one that failed comes out when both have ended.
    """
    failed = threading.Event()

    def check() -> None:
        if failed.is_set():
            raise _DroppedError

    def watched(call: Callable[[Check], Any]) -> Any:
        try:
            return call(check)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(1, thread_name_prefix="fivefold-pack-beside") as pool:
        beside = pool.submit(watched, second)
        try:
            return watched(first), beside.result()
        except _DroppedError:
            beside.result()  # raises why
            raise
        except BaseException:
            failed.set()  # also where the wait was interrupted
            raise


class WriteBehind:
    """Buffers that take turns: one is filled while the others are written, by two threads.

    Calls are carried out in their order, each after all that was put before it, and none after
    anything that failed: a mark that follows a write says that it is done.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = buffers
        self._writes: deque[Future[None]] = deque()  # each has a buffer
        self._since: list[Future[None]] = []  # the last call
        self._calls: deque[Future[None]] = deque()
        self._turn = 0
        self._failed = False
        self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="fivefold-pack-write")
        self._caller = ThreadPoolExecutor(1, thread_name_prefix="fivefold-pack-mark")

    def take(self) -> Buffer:
        """Return the free buffer, as soon as what was put from it is written."""
        while len(self._writes) >= len(self._buffers):
            self._writes.popleft().result()
        if self._calls and self._calls[0].done():
            self._calls.popleft().result()
        return self._buffers[self._turn]

    def put(self, write: Callable[[Buffer], None]) -> None:
        """Have ``write`` called with the buffer that was taken last."""
        buffer = self._buffers[self._turn]
        writing = self._writers.submit(self._carry_out, lambda: write(buffer))
        self._writes.append(writing)
        self._since.append(writing)
        self._turn = (self._turn + 1) % len(self._buffers)

    def then(self, call: Callable[[], None]) -> None:
        """Have ``call`` called after all that was put, without waiting for it.

        Waits for the call before it: on a slow disk marks would pile up, and all that they stand
        for would be done again after a kill.
        """
        while self._calls:
            self._calls.popleft().result()
        before, self._since = self._since, []

        def after() -> None:
            wait(before)
            self._carry_out(call)

        self._calls.append(self._caller.submit(after))

    def _carry_out(self, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            call()
        except BaseException:
            self._failed = True
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error of the caller, what was not begun is dropped: it would be redone anyway.
        self._failed = self._failed or kind is not None
        for pool in (self._writers, self._caller):
            pool.shutdown(wait=True)
        if kind is None:
            for future in (*self._writes, *self._calls):
                future.result()
