"""Open files: whole reads and writes over system calls that may do less, and seen changes."""

from __future__ import annotations

import os
import stat
import weakref
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from fivefold._compiler import njit
from fivefold.errors import DataError, StorageError
from fivefold.files import storage_error
from fivefold.gnn.storage._machine import pread, pwrite, read_errno
from fivefold.gnn.storage.pages import PAGE_BYTES, Bytes, aligned_empty

_EINTR = 4


@njit
def move_bytes(writing: Any, direct: Any, plain: Any, address: Any, count: Any, offset: Any) -> Any:
    """Read or write all bytes, however many calls it takes; returns (bytes done, error number).

    After a short direct call that ended off a page, the rest goes through the other descriptor.
    """
    done = np.int64(0)
    while done < count:
        descriptor = direct if done % PAGE_BYTES == 0 else plain
        left = np.uint64(count - done)
        if writing:
            moved = pwrite(descriptor, address + done, left, offset + done)
        else:
            moved = pread(descriptor, address + done, left, offset + done)
        if moved > 0:
            done += moved
            continue
        number = read_errno() if moved < 0 else 0
        if moved < 0 and number == _EINTR:
            continue
        return done, number
    return done, 0


class Closing:
    """Something to ``close``, which leaving a ``with`` block does, too."""

    def close(self) -> None:
        """Let go of what is held."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Files(NamedTuple):
    """The descriptors of one reader; the two are equal where there is no direct I/O."""

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


def open_files(path: Path, descriptor: int, *, direct: bool = True) -> Files:
    """Open an open file again, for reading past the page cache if that works."""
    try:
        plain = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise storage_error(error.errno or 0, path, "opening") from error
    if not direct:
        return Files(path, plain, plain, is_direct=False, why="direct I/O was not wanted")
    try:
        other = open_direct(descriptor, os.O_RDONLY)
    except OSError as error:
        why = f"the file system has no direct I/O ({error.strerror})"
        return Files(path, plain, plain, is_direct=False, why=why)
    return Files(path, other, plain, is_direct=True, why="the file system has direct I/O")


def open_direct(descriptor: int, flags: int) -> int:
    """Open an open file again, past the page cache, and try it; OSError where that fails."""
    direct = getattr(os, "O_DIRECT", 0)
    other = os.open(f"/proc/self/fd/{descriptor}", flags | os.O_CLOEXEC | direct)
    try:
        os.preadv(other, [aligned_empty(PAGE_BYTES).data], 0)
    except OSError:
        os.close(other)
        raise
    return other


def open_to_read(path: Path) -> int:
    """Open a regular file; anything else, such as a pipe, could make the reader wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{path} is no regular file", hint="check the path")
    os.set_blocking(descriptor, True)  # io_uring would answer EAGAIN instead of waiting
    return descriptor


def write_all(descriptor: int, data: Bytes, offset: int, path: Path) -> None:
    """Write bytes at an offset, all of them."""
    done, number = move_bytes(True, descriptor, descriptor, data.ctypes.data, len(data), offset)
    check_written(done, number, len(data), offset, path)


def check_written(done: int, number: int, count: int, offset: int, path: Path) -> None:
    """Raise where fewer bytes than wanted were written."""
    if done == count:
        return
    action = f"writing {count - done} bytes"
    if number:
        raise storage_error(number, path, action, offset=offset + done)
    raise StorageError(
        f"{action} of {path} at offset {offset + done} wrote nothing",
        hint="check the disk; what was written stays for resuming",
    )


def read_into(descriptor: int, buffer: Bytes, offset: int, path: str | Path) -> None:
    """Fill a buffer from an offset of a file."""
    count = len(buffer)
    done, number = move_bytes(False, descriptor, descriptor, buffer.ctypes.data, count, offset)
    if number:
        action = f"reading {count - done} bytes"
        raise storage_error(number, path, action, offset=offset + done)
    if done < count:
        raise truncated_error(path, offset + done)


def closed_error(path: str | Path) -> StorageError:
    """Return the error of a use after ``close``."""
    return StorageError(f"{path} has been closed", hint="open it again")


def truncated_error(path: str | Path, place: int) -> StorageError:
    """Return the error for a file that ends before what its header promised."""
    return StorageError(
        f"{path} ends at offset {place}, before the rows that were asked for: it has been "
        "truncated since it was opened",
        hint="make the file again",
    )


class WatchedFile:
    """The length and the time of the last change of an open file, kept to compare with.

    A memory map shows what is written to its file afterwards, which no checksum guards. Looking
    at the file's time costs about a microsecond.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor)
        self._seen = self._state()

    def check(self) -> None:
        """Raise where the file has been written to."""
        if self._state() != self._seen:
            raise DataError(
                f"{self._path} was changed while it was mapped",
                hint="leave the files of a data set alone while it is used; open it again",
            )

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns
