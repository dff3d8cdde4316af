"""Work objects, and the thread that runs collectives which were called with ``async_op=True``.

A synchronous call runs in the caller's thread, which costs nothing; an asynchronous one is queued
for the group's own thread. Both keep one order, the order of calls, which is the same on all
ranks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fivefold.collectives.execution._calls import CollectiveError


class FivefoldWork(dist.Work):
    """A collective that is under way, or over."""

    def __init__(self, results: list[Any], *, what: object) -> None:
        super().__init__()
        self._results = results
        self._what = what
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._future: Any = None
        self._lock = threading.Lock()

    def finish(self, error: BaseException | None) -> None:
        """Say that it is over."""
        with self._lock:
            self._error = error
            self._done.set()
            future = self._future
        if future is not None:
            self._resolve(future)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until it is over."""
        limit_s = timeout.total_seconds() if timeout > timedelta(0) else None
        if not self._done.wait(limit_s):
            raise CollectiveError(f"{self._what} is not over after {limit_s:g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether it is over, well or not."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Return whether it is over and well."""
        return self._done.is_set() and self._error is None

    def exception(self) -> Any:
        """Return what went wrong, if anything did."""
        return self._error

    def result(self) -> list[Any]:
        """Return the tensors, when it is over."""
        self.wait()
        return self._results

    def synchronize(self) -> None:
        """Wait as :meth:`wait` does: there is no stream to hand over to."""
        self.wait()

    def get_future(self) -> Any:
        """Return a future of the tensors; DDP's reducer chains on it."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                resolve = self._done.is_set()
            else:
                resolve = False
        if resolve:
            self._resolve(self._future)
        return self._future

    def _resolve(self, future: Any) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(self._results)


class InnerWork(dist.Work):
    """A collective of the inner group, with the backend's errors."""

    def __init__(self, work: Any, *, what: object, explain: Callable[..., BaseException]) -> None:
        super().__init__()
        self._work, self._what, self._explain = work, what, explain

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until it is over."""
        try:
            return bool(self._work.wait(timeout) if timeout else self._work.wait())
        except RuntimeError as error:
            failed = CollectiveError(
                f"{self._what} failed on the inner backend: {error}",
                hint="a peer ended, is stuck, or called another collective",
            )
            raise self._explain(failed, by_inner=True) from error

    def is_completed(self) -> bool:
        """Return whether it is over, well or not."""
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Return whether it is over and well."""
        return bool(self._work.is_success())

    def exception(self) -> Any:
        """Return what went wrong, if anything did."""
        return self._work.exception()

    def result(self) -> Any:
        """Return the tensors, when it is over."""
        return self._work.result()

    def synchronize(self) -> None:
        """Let the current stream wait."""
        self._work.synchronize()

    def get_future(self) -> Any:
        """Return a future of the tensors."""
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
    """Runs jobs in the order of their calls: at once in the caller's thread, or in its own."""

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._jobs: queue.Queue[tuple[Job, FivefoldWork] | None] = queue.Queue()
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None
        self._waiting = 0
        self._count = threading.Lock()

    @property
    def is_busy(self) -> bool:
        """Return whether a job is in the thread, or waits for it."""
        return self._waiting > 0

    def submit(self, job: Job, work: FivefoldWork, *, in_thread: bool) -> None:
        """Run a job, or queue it."""
        if not in_thread and self._waiting == 0:
            with self._turn:
                self._run(job, work)
            return
        self._start_thread()
        with self._count:
            self._waiting += 1
        self._jobs.put((job, work))

    def close(self) -> None:
        """End the thread when its jobs are done."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout=1.0)
            self._thread = None

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()

    def _loop(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, work = item
            with self._turn:
                self._run(job, work)
            with self._count:
                self._waiting -= 1

    def _run(self, job: Job, work: FivefoldWork) -> None:
        error: BaseException | None = None
        try:
            with torch.no_grad():
                job()
        except BaseException as caught:  # noqa: BLE001 - handed to whoever waits
            error = caught
        work.finish(error)
