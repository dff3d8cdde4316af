"""One synchronous O_DIRECT read per row: how Ginex gathers what its cache misses.

Of each row the pages that it touches are read, 4 KiB or 8 KiB for short rows, whatever else was
read a moment ago: no sorting, no merging, no page read once for two rows. Several threads keep the
disk busy. There are no checksums here, as in the published program.
"""

from __future__ import annotations

import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fivefold._compiler import njit, numba
from fivefold.errors import ConfigurationError, StorageError

__all__ = ["PageReader"]

PAGE_BYTES = 4096
_types = numba.types
_carray = numba.carray
_pread = _types.ExternalFunction(
    "pread", _types.int64(_types.int32, _types.voidptr, _types.uint64, _types.int64)
)
_errno_location = _types.ExternalFunction("__errno_location", _types.CPointer(_types.int32)())

Bytes = NDArray[np.uint8]
Ids = NDArray[np.int64]


@njit
def _read_each(
    descriptor: int, base: int, rows: Ids, places: Ids, out: Bytes, scratch: Bytes, report: Ids
) -> None:
    """Read rows into ``out[places]``; report: bytes read, failing row or -1, errno or 0."""
    row_bytes = out.shape[1]
    report[0], report[1], report[2] = 0, -1, 0
    for i in range(len(rows)):
        start = base + rows[i] * row_bytes
        first = start & ~np.int64(PAGE_BYTES - 1)
        wanted = (start + row_bytes - first + PAGE_BYTES - 1) & ~np.int64(PAGE_BYTES - 1)
        got = _pread(descriptor, scratch.ctypes, wanted, first)
        if got < wanted:
            report[1] = rows[i]
            report[2] = _carray(_errno_location(), 1)[0] if got < 0 else 0
            return
        report[0] += got
        skip = start - first
        out[places[i]] = scratch[skip : skip + row_bytes]


class PageReader:
    """Reads rows of a file one by one with many threads.

    Args:
        path: The file.
        base: Offset of row 0, a multiple of 4096.
        row_bytes: Bytes per row, any number.
        threads: Reads under way at once; the published program uses 8 per core.

    Raises:
        ConfigurationError: A number is out of range.
        StorageError: The file cannot be opened.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "rows"
        >>> _ = path.write_bytes(bytes(range(256)) * 32)
        >>> reader, out = PageReader(path, base=0, row_bytes=3, threads=2), np.zeros((2, 3), "u1")
        >>> reader.read(np.array([2000, 1]), np.array([1, 0]), out)
        8192
        >>> out.tolist()
        [[3, 4, 5], [112, 113, 114]]
        >>> reader.close()
    """

    def __init__(self, path: Path | str, *, base: int, row_bytes: int, threads: int = 16) -> None:
        if threads < 1 or row_bytes < 1 or base % PAGE_BYTES:
            raise ConfigurationError(
                f"threads and row_bytes must be positive and base a multiple of {PAGE_BYTES}; got "
                f"threads={threads}, row_bytes={row_bytes}, base={base}"
            )
        self.path, self.base, self.row_bytes = Path(path), base, row_bytes
        self._descriptor = _open(self.path)
        span = row_bytes + 2 * PAGE_BYTES
        span += -span % PAGE_BYTES
        # Anonymous maps begin at a page, as O_DIRECT asks.
        self._scratch = [np.frombuffer(mmap.mmap(-1, span), np.uint8) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="page-reads")
        self._lock = threading.Lock()

    def read(self, rows: Ids, places: Ids, out: Bytes) -> int:
        """Read rows into places of an array.

        Args:
            rows: Row numbers, in any order, repeated or not.
            places: Row of ``out`` for each.
            out: ``[any, row_bytes]``, C-contiguous.

        Returns:
            Bytes read.

        Raises:
            StorageError: A read failed or came back short.
        """
        with self._lock:
            bounds = np.linspace(0, len(rows), len(self._scratch) + 1).astype(np.int64).tolist()
            parts = [(bounds[i], bounds[i + 1], i) for i in range(len(self._scratch))]
            calls = [
                self._pool.submit(self._read_part, rows[a:b], places[a:b], out, i)
                for a, b, i in parts
                if b > a
            ]
            return sum([call.result() for call in calls])

    def _read_part(self, rows: Ids, places: Ids, out: Bytes, thread: int) -> int:
        report = np.zeros(3, np.int64)
        _read_each(self._descriptor, self.base, rows, places, out, self._scratch[thread], report)
        if report[1] >= 0:
            why = os.strerror(int(report[2])) if report[2] else "the file is shorter than it was"
            raise StorageError(
                f"reading row {report[1]} of {self.path} failed: {why}",
                hint="check the disk and make the file again",
            )
        return int(report[0])

    def close(self) -> None:
        """End the threads and close the file; a second call does nothing."""
        self._pool.shutdown(wait=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _open(path: Path) -> int:
    """Open for direct reads where the file system allows them (tmpfs does not)."""
    for flags in (os.O_RDONLY | os.O_DIRECT, os.O_RDONLY):
        try:
            return os.open(path, flags)
        except OSError as error:
            failure = error
    raise StorageError(
        f"{path} cannot be opened: {failure.strerror}", hint="check that it is there"
    ) from failure
