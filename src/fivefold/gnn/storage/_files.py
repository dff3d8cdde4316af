"""Whole reads and writes over system calls that may do less than asked; files seen to change."""

from __future__ import annotations

import os
import stat
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import DataError, StorageError
from fivefold.files import storage_error


def open_to_read(path: Path) -> int:
    """Open a regular file; anything else, such as a pipe, could make the reader wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{path} is no regular file", hint="check the path")
    os.set_blocking(descriptor, True)  # io_uring would answer EAGAIN instead of waiting
    return descriptor


def write_all(descriptor: int, data: NDArray[np.uint8], offset: int, path: Path) -> None:
    """Write bytes at an offset, all of them."""
    view = memoryview(data.data)
    done = 0
    while done < len(view):
        action = f"writing {len(view) - done} bytes"
        try:
            count = os.pwrite(descriptor, view[done:], offset + done)
        except OSError as error:
            number = error.errno or 0
            raise storage_error(number, path, action, offset=offset + done) from error
        if count == 0:
            raise StorageError(
                f"{action} of {path} at offset {offset + done} wrote nothing",
                hint="check the disk; what was written stays for resuming",
            )
        done += count


def read_into(descriptor: int, buffer: NDArray[np.uint8], offset: int, path: str | Path) -> None:
    """Fill a buffer from an offset of a file."""
    view = memoryview(buffer.data)
    done = 0
    while done < len(view):
        action = f"reading {len(view) - done} bytes"
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise storage_error(error.errno or 0, path, action, offset=offset + done) from error
        if count == 0:
            raise truncated_error(path, offset + done)
        done += count


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
    """The length and the time of the last change of a file, kept to compare with.

    A memory map shows what is written to its file afterwards, which no checksum guards. Looking
    at the file's time costs about a microsecond.

    Args:
        path: For messages.
        descriptor: Of the file, open; it may be closed afterwards.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor)
        self._seen = self._state()

    def check(self) -> None:
        """Compare.

        Raises:
            DataError: The file has been written to.
        """
        if self._state() != self._seen:
            raise DataError(
                f"{self._path} was changed while it was mapped",
                hint="leave the files of a data set alone while it is used; open it again",
            )

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns
