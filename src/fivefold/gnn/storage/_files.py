"""Whole reads and writes over system calls that may do less than was asked."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import DataError, StorageError
from fivefold.files import storage_error
from fivefold.gnn.storage._errors import truncated_error


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
