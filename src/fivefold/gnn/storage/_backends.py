"""The ways to get pages from a file, behind one interface.

* ``threads``: compiled ``pread`` loops that do not hold the interpreter's lock; works everywhere.
* ``io_uring``: one ring per worker with many requests in flight, where the kernel permits it.
* ``python``: ``os.preadv``, to compare with.
* ``mmap``: through the page cache, for tests and for files that fit in memory.

All check pages and copy rows with the same compiled code. Workers take the next request by an
atomic counter, so that none waits for a slow one, and look at a stop word in between. A worker
ends with a status: a code, the error number and the place.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fivefold._compiler import njit
from fivefold.errors import StorageError, UnsupportedError
from fivefold.files import storage_error
from fivefold.gnn.storage._files import read_into, truncated_error
from fivefold.gnn.storage._machine import atomic_add, pread, read_errno
from fivefold.gnn.storage._pages import PAGE_BYTES, aligned_empty
from fivefold.gnn.storage._requests import Work, deliver

#: Codes: all well; a system call failed; the file ended; a page is damaged; told to stop.
DONE, FAILED, ENDED, DAMAGED, STOPPED = 0, 1, 2, 3, 4
_EINTR = 4


@njit
def read_whole(direct: Any, plain: Any, address: Any, count: Any, offset: Any, status: Any) -> Any:
    """Read ``count`` bytes, however many calls it takes; False with the status set on failure.

    Direct reads need aligned places. Where a short one ended elsewhere, the rest is read through
    the other descriptor, which goes through the page cache.
    """
    done = np.int64(0)
    while done < count:
        descriptor = direct if done % PAGE_BYTES == 0 else plain
        got = pread(descriptor, address + done, np.uint64(count - done), offset + done)
        if got > 0:
            done += got
            continue
        number = read_errno() if got < 0 else 0
        if got < 0 and number == _EINTR:
            continue
        status[0] = FAILED if got < 0 else ENDED
        status[1], status[2] = number, offset + done
        return False
    return True


@njit
def stopped(shared: Any) -> Any:
    """Return whether another worker has failed, or the reader is being closed."""
    return atomic_add(shared + 8, np.int64(0)) != 0


@njit
def halt(shared: Any) -> None:
    """Tell all workers to stop."""
    atomic_add(shared + 8, np.int64(1))


@njit
def deliver_checked(buffer: Any, request: Any, work: Any, status: Any) -> Any:
    """Check and copy one request; False with the status set if a page is damaged."""
    page = deliver(buffer, request, work)
    if page < 0:
        return True
    status[0], status[2] = DAMAGED, page
    return False


@njit
def take(work: Any, status: Any) -> Any:
    """Number of the next request, or -1: none is left, or all shall stop (see the status)."""
    request = atomic_add(work.shared, np.int64(1))
    if request >= len(work.requests.first_pages):
        return -1
    if stopped(work.shared):
        if status[0] == DONE:
            status[0] = STOPPED
        return -1
    return request


@njit
def read_share(direct: Any, plain: Any, buffer: Any, work: Any, status: Any) -> None:
    """Read, check and copy until nothing is left, as one worker of the threads back end."""
    status[0] = DONE
    request = take(work, status)
    while request >= 0:
        count = work.requests.num_pages[request] * PAGE_BYTES
        offset = work.requests.first_pages[request] * PAGE_BYTES
        if not read_whole(direct, plain, buffer, count, offset, status) or not deliver_checked(
            buffer, request, work, status
        ):
            halt(work.shared)
            return
        request = take(work, status)


@njit
def serve_share(base: Any, work: Any, status: Any) -> None:
    """Check and copy straight from the mapped file, as one worker of the map back end."""
    status[0] = DONE
    request = take(work, status)
    while request >= 0:
        buffer = base + work.requests.first_pages[request] * PAGE_BYTES
        if not deliver_checked(buffer, request, work, status):
            halt(work.shared)
            return
        request = take(work, status)


class Files(NamedTuple):
    """The descriptors of one reader.

    Attributes:
        path: For messages.
        direct: Reads past the page cache where the file system can; else equal to ``plain``.
        plain: Reads through the page cache.
        is_direct: Whether the two differ.
        why: How that came about.
    """

    path: Path
    direct: int
    plain: int
    is_direct: bool
    why: str

    def close(self) -> None:
        """Close both."""
        os.close(self.plain)
        if self.is_direct:
            os.close(self.direct)


def open_files(path: Path, descriptor: int, *, direct: bool | None) -> Files:
    """Open an open file again, for reading past the page cache if that works."""
    same = f"/proc/self/fd/{descriptor}"
    try:
        plain = os.open(same, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise storage_error(error.errno or 0, path, "opening") from error
    if direct is False:
        return Files(path, plain, plain, is_direct=False, why="direct I/O was not wanted")
    flag = getattr(os, "O_DIRECT", 0)
    other = -1
    try:
        other = os.open(same, os.O_RDONLY | os.O_CLOEXEC | flag)
        page = aligned_empty(PAGE_BYTES)
        os.preadv(other, [page.data], 0)
    except OSError as error:
        if other >= 0:
            os.close(other)
        if direct:
            os.close(plain)
            raise UnsupportedError(
                f"the file system of {path} has no direct I/O ({error.strerror})",
                hint="use direct=None to read through the page cache",
            ) from error
        why = f"the file system has no direct I/O ({error.strerror})"
        return Files(path, plain, plain, is_direct=False, why=why)
    return Files(path, other, plain, is_direct=True, why="the file system has direct I/O")


class Backend(Protocol):
    """One way to get pages.

    Attributes:
        name: As it is chosen.
        buffer_bytes: Memory that it may use beside the output.
    """

    name: str
    buffer_bytes: int

    def share(self, worker: int, work: Work, status: NDArray[np.int64]) -> None:
        """Do requests of a job until none is left; called by several workers at once."""

    def close(self) -> None:
        """Release what it holds, the descriptors excepted."""


class ThreadsBackend:
    """Compiled ``pread`` into a small buffer per worker."""

    name = "threads"

    def __init__(self, files: Files, *, workers: int, block_bytes: int) -> None:
        self._files = files
        self._buffers = [aligned_empty(block_bytes) for _ in range(workers)]
        self.buffer_bytes = workers * block_bytes

    def share(self, worker: int, work: Work, status: NDArray[np.int64]) -> None:
        """Do requests of a job until none is left."""
        read_share(
            self._files.direct,
            self._files.plain,
            self._buffers[worker].ctypes.data,
            work,
            status[worker],
        )

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class PythonBackend(ThreadsBackend):
    """``os.preadv`` into a small buffer per worker."""

    name = "python"

    def share(self, worker: int, work: Work, status: NDArray[np.int64]) -> None:
        """Do requests of a job until none is left."""
        own, buffer = status[worker], self._buffers[worker]
        own[0] = DONE
        while (request := take(work, own)) >= 0:
            pages = buffer[: work.requests.num_pages[request] * PAGE_BYTES]
            try:
                self._read(pages, int(work.requests.first_pages[request]) * PAGE_BYTES)
            except StorageError:
                halt(work.shared)
                raise
            if not deliver_checked(buffer.ctypes.data, request, work, own):
                halt(work.shared)
                return

    def _read(self, pages: NDArray[np.uint8], offset: int) -> None:
        done = 0
        if self._files.is_direct:
            try:
                done = os.preadv(self._files.direct, [pages.data], offset)
            except OSError as error:
                number, action = error.errno or 0, f"reading {len(pages)} bytes"
                raise storage_error(number, self._files.path, action, offset=offset) from error
        # The rest of a short read may begin anywhere, which direct reads do not like.
        read_into(self._files.plain, pages[done:], offset + done, self._files.path)


class MapBackend:
    """The mapped file: no requests are made, the system pages in what is touched."""

    name = "mmap"
    buffer_bytes = 0

    def __init__(self, files: Files, *, file_bytes: int) -> None:
        self._map = mmap.mmap(files.plain, file_bytes, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        # Without this each fault would read megabytes around it.
        self._map.madvise(mmap.MADV_RANDOM)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._files = files

    def share(self, worker: int, work: Work, status: NDArray[np.int64]) -> None:
        """Do requests of a job until none is left."""
        size = os.fstat(self._files.plain).st_size
        if size < len(self._bytes):
            raise truncated_error(self._files.path, size)
        serve_share(
            self._bytes.ctypes.data,
            work,
            status[worker],
        )

    def close(self) -> None:
        """Unmap the file."""
        del self._bytes
        self._map.close()
