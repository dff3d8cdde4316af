"""The calls of a group: their numbers, their work objects, and the thread that runs them.

The number and the kind of a call make the tag of its messages: one of another call is never taken
for one of this. Calls that differ would then wait for each other until the timeout, so a rank whose
call takes long compares its last calls with those of others through the group's store (`CallLog`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch.distributed import distributed_c10d

from fivefold.errors import CommunicationError

dist: Any = torch.distributed
c10d: Any = distributed_c10d


def inner_method(group: Any, *names: str) -> Callable[..., Any]:
    """Return the method that a group has under one of the names that torch gave it over time."""
    found: Callable[..., Any] = next(getattr(group, name) for name in names if hasattr(group, name))
    return found


_LOOK_S = 1.0
_PEERS_A_LOOK = 8  # or thousands of ranks that wait for one would keep the store busy
_REMEMBERED = 128
NUM_TAGS = 1 << 31  # gloo's are 31 bits
_STEP = 0x9E3779B1  # golden ratio: neighbouring numbers get tags far apart
_ABORT_TAG = NUM_TAGS - 1
_FAILED = "failed"


class CollectiveError(CommunicationError, dist.DistBackendError):
    """A collective failed or timed out: names collective, rank and peer.

    It is also what torch raises for failures of a backend, hence a ``RuntimeError``.
    """


class CallKind(NamedTuple):
    """Properties of a collective call that all ranks must agree on."""

    name: str  # name of the collective
    size_bytes: int = -1  # size that all ranks see; -1 where it may differ
    dtype: torch.dtype | None = None  # type of the elements; None where there are none
    operation: Any = None  # how values are combined; None where they are not
    root: int = -1  # rank that sends to all or receives from all; -1 where there is none

    def __str__(self) -> str:
        words = [self.name]
        if self.size_bytes >= 0:
            words.append(f"of {self.size_bytes} bytes")
        if self.dtype is not None:
            words.append(f"of {str(self.dtype).removeprefix('torch.')}")
        if self.operation is not None:
            words.append(f"by {getattr(self.operation, 'name', self.operation)}")
        if self.root >= 0:
            words.append(f"from or to rank {self.root}")
        return " ".join(words)


@functools.lru_cache(maxsize=1 << 12)
def _code(kind: CallKind) -> int:
    return zlib.crc32(str(kind).encode())


class CallLog:
    """The calls of one group on one rank.

    Where two ranks' differ, one writes down what they called and breaks the connections that are
    waited on: every rank then fails with that reason. Calls of under a second cost nothing of this.
    """

    def __init__(
        self, store: Any, *, rank: int, size: int, groups: Callable[[], Iterable[Any]]
    ) -> None:
        self._store, self._rank, self._size, self._groups = store, rank, size, groups
        self._number = 0
        self._last: deque[tuple[int, CallKind]] = deque(maxlen=_REMEMBERED)
        self._open: tuple[float, Callable[[], bool]] | None = None
        self._looked = 0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.reason: str | None = None  # what the ranks called, where they differ
        store.set(self._key(rank), "[]")

    def begin(self, kind: CallKind) -> int:
        self.check()
        self._number += 1
        self._last.append((self._number, kind))
        return (_code(kind) + self._number * _STEP) % NUM_TAGS

    def undo(self) -> None:
        """Forget the last call, which the inner backend refused before anything was sent."""
        self._number -= 1
        self._last.pop()

    def check(self) -> None:
        """Raise where the group cannot go on."""
        if self.failure is not None:
            raise CollectiveError(
                f"an earlier collective of this group failed: {self.failure}",
                hint="destroy the process group and make a new one",
            ) from self.failure

    def check_reason(self) -> None:
        """Raise where the ranks have called different collectives."""
        if self.reason is not None:
            raise CollectiveError(self.reason)

    def watch(self, is_completed: Callable[[], bool]) -> None:
        """Look after the call that was begun last: it should end."""
        self._open = (time.monotonic(), is_completed)
        if self._thread is None and self._size > 1:
            self._thread = threading.Thread(
                target=self._loop, name=f"fivefold rank {self._rank}, watch", daemon=True
            )
            self._thread.start()

    def explain(self, error: BaseException, *, by_inner: bool = False) -> BaseException:
        """Note that the group cannot go on.

        Where the inner group failed it knows best whether it can go on, unless the ranks' calls
        differ: not all of its errors are those of connections.
        """
        if not self._closed.is_set():
            with contextlib.suppress(RuntimeError):  # the store may be gone with rank 0
                self._read_reason()
        if self.reason is not None and self.failure is None:
            error = CollectiveError(
                f"the ranks of a group called different collectives: {self.reason}",
                hint="all ranks call the same ones, in one order, with equal sizes and types",
            )
        if self.reason is not None or not by_inner:
            self.failure = self.failure or error
        return error

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=_LOOK_S)

    def _key(self, rank: int) -> str:
        return f"calls of {rank}"

    def _loop(self) -> None:
        while not self._closed.wait(_LOOK_S) and self.failure is None:
            found = self._open
            if found is None or time.monotonic() - found[0] < _LOOK_S:
                continue
            if found[1]():
                self._open = None
                continue
            try:
                self._look()
            except RuntimeError:  # the store is gone, and rank 0 with it: gloo will say so
                return
            if self.reason is not None:
                self._abort()
                return

    def _look(self) -> None:
        """Write down the last calls and compare those of some other ranks."""
        mine = {number: str(kind) for number, kind in list(self._last)}
        self._store.set(self._key(self._rank), json.dumps(list(mine.items())))
        self._read_reason()
        for _ in range(min(_PEERS_A_LOOK, self._size - 1)):
            if self.reason is not None:
                return
            self._looked = self._looked % (self._size - 1) + 1
            peer = (self._rank + self._looked) % self._size
            for number, theirs in json.loads(self._store.get(self._key(peer))):
                if mine.get(number, theirs) != theirs:
                    self.reason = (
                        f"call {number} is {mine[number]} on rank {self._rank} and {theirs} on "
                        f"rank {peer}"
                    )
                    self._store.set(_FAILED, self.reason)
                    break

    def _read_reason(self) -> None:
        if self.reason is None and self._store.check([_FAILED]):
            self.reason = self._store.get(_FAILED).decode()

    def _abort(self) -> None:
        """End all waits: gloo closes a group's connections when one message does not come."""
        lost = torch.empty(1, dtype=torch.uint8)
        for group in self._groups():
            for step in range(1, self._size):  # of a connection that is closed it says so at once
                peer = (self._rank + step) % self._size
                with contextlib.suppress(RuntimeError):
                    group.recv([lost], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))


class FivefoldWork(dist.Work):
    """A collective that is under way, or over; the methods are torch's."""

    def __init__(self, results: list[Any], *, what: object) -> None:
        super().__init__()
        self._results, self._what = results, what
        self._over: futures.Future[None] = futures.Future()

    def finish(self, error: BaseException | None = None) -> None:
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit_s = timeout.total_seconds() if timeout > timedelta(0) else None
        try:
            self._over.result(limit_s)
        except TimeoutError:
            if self._over.done():
                raise
            raise CollectiveError(f"{self._what} is not over after {limit_s:g} s") from None
        return True

    def is_completed(self) -> bool:
        return self._over.done()

    def is_success(self) -> bool:
        return self._over.done() and self._over.exception() is None

    def exception(self) -> Any:
        return self._over.exception() if self._over.done() else None

    def result(self) -> list[Any]:
        self.wait()
        return self._results

    def synchronize(self) -> None:
        """Wait as :meth:`wait` does: there is no stream to hand over to."""
        self.wait()

    def get_future(self) -> Any:
        """Return a future of the tensors; DDP's reducer chains on it."""
        future: Any = torch.futures.Future()

        def resolve(over: futures.Future[None]) -> None:
            error = over.exception()
            if error is None:
                future.set_result(self._results)
            elif isinstance(error, Exception):
                future.set_exception(error)
            else:  # torch's futures take no others, and whoever waits would wait for ever
                wrapped = CollectiveError(f"{self._what} was ended by {error!r}")
                wrapped.__cause__ = error
                future.set_exception(wrapped)

        self._over.add_done_callback(resolve)
        return future


class InnerWork(dist.Work):
    """A collective of the inner group, with the backend's errors; the methods are torch's."""

    def __init__(self, work: Any, *, what: object, explain: Callable[..., BaseException]) -> None:
        super().__init__()
        self._work, self._what, self._explain = work, what, explain

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        try:
            return bool(self._work.wait(timeout) if timeout else self._work.wait())
        except RuntimeError as error:
            failed = CollectiveError(
                f"{self._what} failed on the inner backend: {error}",
                hint="a peer ended, is stuck, or called another collective",
            )
            raise self._explain(failed, by_inner=True) from error

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> Any:
        return self._work.result()

    def synchronize(self) -> None:
        self._work.synchronize()

    def get_future(self) -> Any:
        return self._work.get_future()


def profiler_event(name: str, tensors: Sequence[torch.Tensor]) -> Callable[[], None] | None:
    """Begin an event of torch's profiler."""
    if not torch._C._autograd._profiler_enabled():  # noqa: SLF001 - torch has no public name
        return None
    record = torch._C._profiler._RecordFunctionFast(  # noqa: SLF001 - the one that takes shapes
        f"fivefold:{name}", list(tensors)
    )
    record.__enter__()
    return lambda: record.__exit__(None, None, None)


Job = Callable[[], None]


class WorkQueue:
    """Runs jobs in the order of their calls: at once in the caller's thread, or in its own.

    Both keep the order of calls, which is the same on all ranks, unless these have called others.
    """

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._jobs: queue.Queue[tuple[Job, FivefoldWork] | None] = queue.Queue()
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Return whether a job is in the thread, or waits for it."""
        return self._jobs.unfinished_tasks > 0

    def submit(self, job: Job, work: FivefoldWork, *, in_thread: bool) -> None:
        if not in_thread and not self.is_busy:
            self._run(job, work)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put((job, work))

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout=1.0)
            self._thread = None

    def _loop(self) -> None:
        while (item := self._jobs.get()) is not None:
            self._run(*item)
            del item  # a waiting thread keeps no tensor alive
            self._jobs.task_done()
        self._jobs.task_done()  # the None of `close`

    def _run(self, job: Job, work: FivefoldWork) -> None:
        error: BaseException | None = None
        with self._turn:
            try:
                with torch.no_grad():
                    job()
            except BaseException as caught:  # noqa: BLE001 - handed to whoever waits
                error = caught
            work.finish(error)
