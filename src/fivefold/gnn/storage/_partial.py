"""The unfinished file under a writer: one owner, space set aside, large writes past the page cache.

Whole pages of a large piece are copied through a small aligned buffer, hashed there and written
with direct I/O, in compiled code that does not hold the interpreter's lock. So a file of any size
neither fills the page cache nor stalls in its write-back. What is left at the two ends of a piece,
and small pieces, go through the page cache. Both agree, for a page goes either way as a whole.
"""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import StorageError
from fivefold.files import free_bytes, storage_error
from fivefold.gnn.storage._buffers import aligned_empty
from fivefold.gnn.storage._files import read_into, write_all
from fivefold.gnn.storage._ledger import PageLedger
from fivefold.gnn.storage._machine import compiled, copy_bytes, pwrite, read_errno
from fivefold.gnn.storage._xxhash import PAGE_BYTES, hash_page
from fivefold.units import format_bytes

_BOUNCE_BYTES = 4 << 20  # one write at a time: long ones, so that its latency does not count
_COPY_BYTES = 256 << 10  # copied and hashed while they are in the second-level cache
_LEAST_DIRECT_BYTES = 1 << 20  # below this the page cache is faster and holds it easily
_LEAST_PAGES_BYTES = 256 << 10  # the same for whole pages in aligned memory, written as they are
_EINTR = 4
_NO_RESERVATION = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@compiled
def _write_whole(direct: Any, plain: Any, address: Any, count: Any, offset: Any) -> Any:
    """Write all bytes; returns (bytes done, error number)."""
    done = np.int64(0)
    while done < count:
        descriptor = direct if done % PAGE_BYTES == 0 else plain
        put = pwrite(descriptor, address + done, np.uint64(count - done), offset + done)
        if put > 0:
            done += put
            continue
        number = read_errno() if put < 0 else 0
        if put < 0 and number == _EINTR:
            continue
        return done, number
    return done, 0


@compiled
def _hash_into(address: Any, count: Any, offset: Any, file_id: Any, checksums: Any) -> None:
    for page in range(count // PAGE_BYTES):
        seed = file_id + np.uint64(offset // PAGE_BYTES + page)
        checksums[page] = hash_page(address + page * PAGE_BYTES, seed)


@compiled
def _fill(bounce: Any, source: Any, count: Any, offset: Any, file_id: Any, checksums: Any) -> None:
    """Copy pages into the buffer and hash them, a piece at a time."""
    for begin in range(0, count, _COPY_BYTES):
        length = min(count - begin, _COPY_BYTES)
        copy_bytes(bounce + begin, source + begin, length)
        _hash_into(
            bounce + begin, length, offset + begin, file_id, checksums[begin // PAGE_BYTES :]
        )


@compiled
def _write_pages(
    descriptors: Any,
    bounce: Any,
    source: Any,
    offset: Any,
    file_id: Any,
    checksums: Any,
) -> Any:
    """Write whole pages and hash them; returns (bytes done, error number).

    Direct writes need memory on a page boundary: from elsewhere pages go through the buffer.
    """
    total = len(checksums) * PAGE_BYTES
    done = np.int64(0)
    while done < total:
        count: Any = min(total - done, _BOUNCE_BYTES)
        place, address = offset + done, source + done
        sums = checksums[done // PAGE_BYTES :]
        if address % PAGE_BYTES == 0:
            _hash_into(address, count, place, file_id, sums)
        else:
            _fill(bounce, address, count, place, file_id, sums)
            address = bounce
        put, number = _write_whole(descriptors[0], descriptors[1], address, count, place)
        done += put
        if put < count:
            return done, number
    return done, 0


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class PartialFile:
    """An unfinished file that this process alone writes.

    Attributes:
        direct: Whether large writes go past the page cache.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.direct = False
        self._direct_descriptor = -1
        self._open: list[int] = []
        self._finalizer = weakref.finalize(self, _close_all, self._open)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._open.append(self.descriptor)
        except OSError as error:
            raise storage_error(error.errno or 0, path, "opening") from error
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise StorageError(
                f"{path} is being written by another process",
                hint="wait for it to end, or choose another path",
            ) from None

    def begin(self, num_bytes: int) -> None:
        """Empty the file and set space aside."""
        self.cut(0)
        free = free_bytes(self.path.parent)
        if free < num_bytes:
            raise StorageError(
                f"{self.path} needs {format_bytes(num_bytes)}, {format_bytes(free)} are free",
                hint="free some space or choose another disk",
            )
        try:
            # Space that is set aside now cannot run out in the middle of the work.
            os.posix_fallocate(self.descriptor, 0, num_bytes)
        except OSError as error:
            if error.errno in _NO_RESERVATION:
                self.cut(num_bytes)  # the space was counted above; that must do here
                return
            action = f"setting aside {num_bytes} bytes"
            raise storage_error(error.errno or 0, self.path, action) from error

    def try_direct(self) -> None:
        """Use direct I/O from now on if the file system has it."""
        flag = getattr(os, "O_DIRECT", 0)
        try:
            self._direct_descriptor = os.open(
                f"/proc/self/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC | flag
            )
            self._open.append(self._direct_descriptor)
            page = aligned_empty(PAGE_BYTES)
            os.preadv(self._direct_descriptor, [page.data], 0)
        except OSError:
            return
        self._bounce = aligned_empty(_BOUNCE_BYTES)
        self.direct = True

    def takes_pages(self, data: NDArray[np.uint8], offset: int) -> bool:
        """Whether ``put_pages`` takes these bytes."""
        aligned = (offset | len(data) | data.ctypes.data) % PAGE_BYTES == 0
        return self.direct and aligned and len(data) >= _LEAST_PAGES_BYTES

    def put_pages(
        self, pages: NDArray[np.uint8], offset: int, *, file_id: int
    ) -> NDArray[np.uint32]:
        """Write whole pages from aligned memory, as several threads may at the same time."""
        checksums = np.empty(len(pages) // PAGE_BYTES, np.uint32)
        descriptors = np.array([self._direct_descriptor, self.descriptor], np.int32)
        done, number = _write_pages(
            descriptors,
            self._bounce.ctypes.data,
            pages.ctypes.data,
            offset,
            np.uint64(file_id),
            checksums,
        )
        if done < len(pages):
            action = f"writing {len(pages) - done} bytes"
            code = number or errno.ENOSPC  # a write that takes nothing and says nothing
            raise storage_error(code, self.path, action, offset=offset + done)
        return checksums

    def put(self, data: NDArray[np.uint8], offset: int, ledger: PageLedger | None) -> None:
        """Write bytes at an offset and note them; one thread at a time."""
        first = -(-offset // PAGE_BYTES) * PAGE_BYTES
        last = (offset + len(data)) // PAGE_BYTES * PAGE_BYTES
        if not self.direct or ledger is None or last - first < _LEAST_DIRECT_BYTES:
            write_all(self.descriptor, data, offset, self.path)
            if ledger is not None:
                ledger.note(offset, data)
            return
        for begin, end in ((offset, first), (last, offset + len(data))):
            if begin < end:
                piece = data[begin - offset : end - offset]
                write_all(self.descriptor, piece, begin, self.path)
                ledger.note(begin, piece)
        pages = data[first - offset : last - offset]
        checksums = self.put_pages(pages, first, file_id=ledger.file_id)
        ledger.set_checksums(first // PAGE_BYTES, checksums)

    def get(self, buffer: NDArray[np.uint8], offset: int) -> None:
        """Fill a buffer from an offset."""
        read_into(self.descriptor, buffer, offset, self.path)

    @property
    def size(self) -> int:
        """Length of the file in bytes."""
        return os.fstat(self.descriptor).st_size

    def cut(self, num_bytes: int) -> None:
        """Set the length of the file."""
        try:
            os.ftruncate(self.descriptor, num_bytes)
        except OSError as error:
            action = f"setting the length to {num_bytes} bytes"
            raise storage_error(error.errno or 0, self.path, action) from error

    def sync(self) -> None:
        """Wait until all is on the disk."""
        try:
            os.fsync(self.descriptor)
        except OSError as error:
            raise storage_error(error.errno or 0, self.path, "syncing") from error

    def close(self) -> None:
        """Let go of the file."""
        self._finalizer()
        self.descriptor = self._direct_descriptor = -1
        self.direct = False
        self._bounce = aligned_empty(0)  # a name may hold on to this for a while
