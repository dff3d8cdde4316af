"""Rows of a section, read into their final places by one of two back ends.

One call runs one function on several threads and on the caller's, which takes part as worker 0. An
executor of ``concurrent.futures`` costs a call of 16 pages a third more time.
"""

from __future__ import annotations

import logging
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from fivefold._compiler import njit
from fivefold.errors import (
    ConfigurationError,
    DataError,
    UnsupportedError,
    require_flag,
    require_one_of,
    require_whole,
)
from fivefold.files import storage_error
from fivefold.gnn.storage._format import Section
from fivefold.gnn.storage._requests import (
    DAMAGED,
    DONE,
    ENDED,
    FAILED,
    STOPPED,
    Requests,
    Work,
    deliver,
    halt,
    join_rows,
    plan_requests,
    take,
)
from fivefold.gnn.storage._uring import RingBackend
from fivefold.gnn.storage.files import (
    Closing,
    Files,
    closed_error,
    move_bytes,
    open_files,
    truncated_error,
)
from fivefold.gnn.storage.pages import PAGE_BYTES, Array, Ids, aligned_empty

_logger = logging.getLogger(__name__)
_IN_FLIGHT_BYTES = 1 << 20
_MOST_THREADS = 16
Backend = Literal["auto", "threads", "io_uring"]
Integers = NDArray[np.integer[Any]] | Sequence[int]


def _serve(tasks: SimpleQueue[Any]) -> None:
    while (task := tasks.get()) is not None:
        function, number, ended, errors = task
        try:
            function(number)
        except BaseException as caught:  # noqa: BLE001 - it goes to the caller
            errors.append(caught)
        # While it waits, a thread holds nothing of who uses it: a reader that is forgotten can be
        # collected, and that ends its threads.
        del task, function
        ended.release()
        del ended, errors


def _end(tasks: SimpleQueue[Any], count: list[int]) -> None:
    for _ in range(count[0]):
        tasks.put(None)


class Workers:
    """Threads that run one function at a time, each with its own number."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Any] = SimpleQueue()
        self._started = [0]
        self._finalizer = weakref.finalize(self, _end, self._tasks, self._started)

    def run(self, function: Callable[[int], None], count: int) -> None:
        """Call ``function(i)`` for i below ``count`` at the same time; wait for all."""
        while self._started[0] < count - 1:
            thread = threading.Thread(
                target=_serve, args=(self._tasks,), name="fivefold-reader", daemon=True
            )
            thread.start()
            self._started[0] += 1
        ended, under_way = threading.Semaphore(0), 0
        errors: list[BaseException] = []
        interruption: BaseException | None = None
        try:
            for number in range(1, count):
                self._tasks.put((function, number, ended, errors))
                under_way += 1
            function(0)
        finally:
            while under_way:  # whatever happens: they write into the caller's memory
                try:
                    ended.acquire()
                    under_way -= 1
                except BaseException as caught:  # noqa: BLE001 - Ctrl-C, raised below
                    interruption = caught
            if interruption is not None:  # here: in place of what worker 0 raised
                raise interruption
        if errors:
            raise errors[0]

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

    def share(self, worker: int, work: Work, status: Ids) -> None:
        """Do requests of a job until none is left; called by several workers at once."""
        buffer = self._buffers[worker].ctypes.data
        _read_share(self._files.direct, self._files.plain, buffer, work, status[worker])

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


@dataclass(frozen=True)
class ReadStatistics:
    """Counts of one or more reads; they add up with ``+``."""

    requests: int = 0
    bytes_read: int = 0  # whole pages
    bytes_used: int = 0  # of the rows that were wanted
    seconds: float = 0.0

    def __add__(self, other: ReadStatistics) -> ReadStatistics:
        return ReadStatistics(*map(operator.add, astuple(self), astuple(other)))


class _PagedFile(Protocol):
    """Container as a reader needs it."""

    path: Path
    file_id: int
    page_checksums: NDArray[np.uint32]

    @property
    def descriptor(self) -> int: ...
    def section(self, name: str) -> Section: ...
    def damaged_page(self, page: int) -> DataError: ...


class RowReader(Closing):
    """Reads runs of consecutive rows of one section to where they are wanted.

    Requests are whole pages, past the page cache where the file system can do that. Runs that
    share or adjoin pages are read together, so no page is read twice in a call. Each page is
    compared with its checksum before a row of it is copied.

    Args:
        container: The file; it may be closed before the reader is.
        section: Name of the section, or the section.
        backend: "threads" or "io_uring"; "auto" takes io_uring where the kernel permits it.
        threads: Workers of one call, the calling thread included.
        queue_depth: Requests in flight at most, over all workers. With "threads" these are
            threads, at most 16, and only calls with small requests use more than ``threads``.
        direct: Read past the page cache, where the file system can.
        block_bytes: Longest request; also the size of each worker's buffer.
        max_gap_bytes: Read over gaps of at most this size between runs.
        verify: Compare pages with their checksums.

    Attributes:
        backend: The back end in use.
        direct: Whether reads go past the page cache.

    Raises:
        ConfigurationError: An argument is out of range.
        DataError: No such section.
        StorageError: The file cannot be opened again.
        UnsupportedError: The back end is not available.

    Examples:
        >>> import tempfile
        >>> from fivefold.gnn.storage import ContainerWriter
        >>> rows = np.arange(3000, dtype=np.float32).reshape(1000, 3)
        >>> folder = tempfile.TemporaryDirectory()
        >>> schema = {"x": (np.float32, (1000, 3))}
        >>> writer = ContainerWriter(
        ...     f"{folder.name}/a.fvf", kind="demo", sections=schema, attributes={}
        ... )
        >>> writer.write("x", 0, rows)
        >>> out = np.empty((5, 3), np.float32)
        >>> with writer.commit() as container, RowReader(container, "x") as reader:
        ...     cost = reader.read_runs(np.array([7, 900]), np.array([2, 3]), np.array([3, 0]), out)
        >>> np.array_equal(out, rows[[900, 901, 902, 7, 8]]), cost.requests, cost.bytes_read
        (True, 2, 8192)
        >>> folder.cleanup()
    """

    def __init__(  # noqa: PLR0913 - the contract of the engines; all but two by name
        self,
        container: _PagedFile,
        section: str | Section,
        *,
        backend: Backend = "auto",
        threads: int = 2,
        queue_depth: int = 64,
        direct: bool = True,
        block_bytes: int = 1 << 20,
        max_gap_bytes: int = 0,
        verify: bool = True,
    ) -> None:
        require_one_of(backend, get_args(Backend), f"backend is {backend!r}")
        self.threads = require_whole("threads", threads)
        self.queue_depth = require_whole("queue_depth", queue_depth)
        self.block_bytes = require_whole("block_bytes", block_bytes, least=PAGE_BYTES)
        if block_bytes % PAGE_BYTES:
            message = f"block_bytes is {block_bytes}"
            raise ConfigurationError(message, hint=f"use a multiple of {PAGE_BYTES}")
        self.max_gap_bytes = require_whole("max_gap_bytes", max_gap_bytes, least=0)
        self.section = section if isinstance(section, Section) else container.section(section)
        self._container = container
        checked = require_flag("verify", verify)
        self._checksums = container.page_checksums if checked else np.empty(0, np.uint32)
        self._shared = np.zeros(2, np.int64)
        self._lock = threading.Lock()
        self._closing = self._closed = False
        self._workers = Workers()
        self._files = open_files(
            container.path, container.descriptor, direct=require_flag("direct", direct)
        )
        try:
            self._backend = self._make_backend(backend)
        except BaseException:
            self._files.close()
            raise
        # What is closed when the reader is, or when it is forgotten; backends change after a fork.
        self._resources: list[ThreadsBackend | RingBackend | Files] = [self._backend, self._files]
        self._finalizer = weakref.finalize(self, _release, self._resources)
        self._process = os.getpid()
        self.backend = self._backend.name
        self.direct = self._files.is_direct
        _logger.debug("%s: %s, %s", container.path, self.backend, self._files.why)

    def _make_backend(self, name: Backend) -> ThreadsBackend | RingBackend:
        if name != "threads":
            try:
                return RingBackend(
                    self._files,
                    workers=self.threads,
                    block_bytes=self.block_bytes,
                    queue_depth=self.queue_depth,
                )
            except UnsupportedError as error:
                if name == "io_uring":
                    raise
                _logger.debug("%s: threads, for %s", self._container.path, error.message)
        return ThreadsBackend(self._files, workers=self._most_workers, block_bytes=self.block_bytes)

    @property
    def _most_workers(self) -> int:
        return max(self.threads, min(self.queue_depth, _MOST_THREADS))

    def read_runs(
        self, starts: Integers, counts: Integers, destinations: Integers, out: Array
    ) -> ReadStatistics:
        """Copy runs of consecutive rows into an array.

        Args:
            starts: First row of each run, ascending; runs do not overlap.
            counts: Rows of each run; 0 is allowed.
            destinations: Row of ``out`` at which each run goes; the ranges should not overlap.
            out: Contiguous rows of the section's dtype and row shape. Rows to which no run goes
                keep their contents.

        Returns:
            What it cost.

        Raises:
            ConfigurationError: Runs out of order or range, or the output does not fit.
            DataError: A page is damaged; rows may have been copied, but none of that page.
            StorageError: The disk failed, the file was truncated, or the reader is closed.
        """
        runs = np.empty((3, len(starts)), np.int64)
        if not len(starts) == len(counts) == len(destinations):
            raise ConfigurationError(
                f"{len(starts)} starts, {len(counts)} counts, {len(destinations)} destinations",
                hint="give one of each per run",
            )
        runs[0], runs[1], runs[2] = starts, counts, destinations
        return self._read(runs, out)

    def read_rows(
        self, rows: Integers, out: Array, destinations: Integers | None = None
    ) -> ReadStatistics:
        """Copy single rows into an array.

        Args:
            rows: Numbers of the rows, ascending, none twice.
            out: As for :meth:`read_runs`.
            destinations: Row of ``out`` for each; None puts them one after another.

        Returns:
            What it cost.

        Raises:
            ConfigurationError: Rows out of order or range, or the output does not fit.
            DataError: A page is damaged.
            StorageError: The disk failed, the file was truncated, or the reader is closed.
        """
        places = np.arange(len(rows)) if destinations is None else destinations
        if len(places) != len(rows):
            raise ConfigurationError(
                f"{len(rows)} rows and {len(places)} destinations", hint="give one per row"
            )
        runs = np.empty((3, len(rows)), np.int64)
        count = join_rows(np.asarray(rows, np.int64), np.asarray(places, np.int64), runs)
        return self._read(np.ascontiguousarray(runs[:, :count]), out)

    def _read(self, runs: Ids, out: Array) -> ReadStatistics:
        begin = time.perf_counter()
        self._check_out(out)
        requests = plan_requests(
            runs,
            offset=self.section.offset,
            row_bytes=self.section.row_bytes,
            num_rows=self.section.num_rows,
            out_rows=len(out),
            block_bytes=self.block_bytes,
            max_gap_bytes=self.max_gap_bytes,
        )
        num_bytes = int(requests.num_pages.sum()) * PAGE_BYTES
        if num_bytes:
            self._perform(requests, out, num_bytes)
        else:
            self._check_open()
        seconds = time.perf_counter() - begin
        return ReadStatistics(len(requests.first_pages), num_bytes, requests.bytes_used, seconds)

    def _perform(self, requests: Requests, out: Array, num_bytes: int) -> None:
        workers = self._active_workers(len(requests.first_pages), num_bytes)
        self._renew_after_fork()
        with self._lock:
            # In this order: close() says that it is closing before it sets the stop word.
            self._shared[:] = 0
            self._check_open()
            work = Work(
                requests=requests,
                out=out.ctypes.data,
                checksums=self._checksums,
                file_id=np.uint64(self._container.file_id),
                shared=self._shared.ctypes.data,
            )
            status = np.zeros((workers, 4), np.int64)
            self._workers.run(lambda worker: self._backend.share(worker, work, status), workers)
        self._raise_failures(status)

    def _renew_after_fork(self) -> None:
        """Make threads and rings anew: a child has none, nor a right to its parent's."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._lock = threading.Lock()  # another thread may have held it at the fork
            self._workers = Workers()
            self._shared = np.zeros(2, np.int64)
            self._shared[1] = int(self._closing)
            if not self._closed:
                self._backend = self._make_backend(self.backend)
                self._resources.insert(0, self._backend)

    def _active_workers(self, requests: int, num_bytes: int) -> int:
        if self.backend != "threads":
            return min(self.threads, requests)
        # Short requests wait longer than they transfer: more of them at a time.
        wanted = -(-_IN_FLIGHT_BYTES * requests // num_bytes)
        return min(max(self.threads, min(wanted, self._most_workers)), requests)

    def _check_open(self) -> None:
        if self._closing:
            raise closed_error(f"the reader of {self._container.path}")

    def _check_out(self, out: Array) -> None:
        fits = out.dtype == self.section.dtype and out.shape[1:] == self.section.shape[1:]
        if not fits or out.ndim == 0 or not out.flags.c_contiguous or not out.flags.writeable:
            raise ConfigurationError(
                f"the output is {out.dtype} of shape {out.shape}",
                hint=f"give a contiguous, writable array of {self.section.dtype} rows of shape "
                f"{self.section.shape[1:]}",
            )

    def _raise_failures(self, status: Ids) -> None:
        """Raise for the failure at the smallest place, whichever worker met it."""
        failed = status[(status[:, 0] != DONE) & (status[:, 0] != STOPPED)]
        if len(failed):
            code, number, place, _ = min(failed.tolist(), key=lambda row: (row[2], row[0]))
            if code == DAMAGED:
                raise self._container.damaged_page(place)
            if code == ENDED:
                raise truncated_error(self._container.path, place)
            assert code == FAILED, f"unknown status {code}"
            raise storage_error(number, self._container.path, "reading", offset=place)
        if (status[:, 0] == STOPPED).any():
            raise closed_error(f"while it was being read, {self._container.path}")

    def close(self) -> None:
        """Stop a read that another thread is in, and release threads, buffers and descriptors."""
        self._closing = True
        self._shared[1] = 1
        with self._lock:
            if not self._closed:
                self._closed = True
                self._workers.close()
                self._finalizer()


def _release(resources: list[ThreadsBackend | RingBackend | Files]) -> None:
    for resource in resources:
        resource.close()
