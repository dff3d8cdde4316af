"""The unfinished file under a writer, and what is known of its pages.

Whole pages of a large piece are hashed and written with direct I/O, without the interpreter's lock:
a file of any size neither fills the page cache nor stalls in its write-back. The rest goes through
the page cache. A page that is written in parts is dirty: ``commit`` reads it back.
"""

from __future__ import annotations

import errno
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold._compiler import njit
from fivefold.errors import StorageError
from fivefold.files import free_bytes, lock_file, storage_error
from fivefold.gnn.storage._machine import copy_bytes
from fivefold.gnn.storage.files import check_written, move_bytes, open_direct, read_into, write_all
from fivefold.gnn.storage.pages import PAGE_BYTES, Bytes, Ids, aligned_empty, hash_into
from fivefold.units import format_bytes

_BOUNCE_BYTES = 4 << 20  # one write at a time: long ones, so that its latency does not count
_COPY_BYTES = 256 << 10  # copied and hashed while they are in the second-level cache
_LEAST_DIRECT_BYTES = 1 << 20  # below this the page cache is faster and holds it easily
_LEAST_PAGES_BYTES = 256 << 10  # the same for whole pages in aligned memory, written as they are
NEVER, DIRTY, CLEAN = 0, 1, 2
_CHUNK_PAGES = 4096
_CHUNK = np.dtype([("checksums", "<u4", _CHUNK_PAGES), ("states", "u1", _CHUNK_PAGES)])
_NO_RESERVATION = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@njit
def _fill(bounce: Any, source: Any, count: Any, offset: Any, file_id: Any, checksums: Any) -> None:
    """Copy pages into the buffer and hash them, a piece at a time."""
    for begin in range(0, count, _COPY_BYTES):
        length = min(count - begin, _COPY_BYTES)
        copy_bytes(bounce + begin, source + begin, length)
        done, pages = begin // PAGE_BYTES, length // PAGE_BYTES
        sums = checksums[done : done + pages]
        hash_into(bounce + begin, offset // PAGE_BYTES + done, file_id, sums)


@njit
def _write_pages(
    descriptors: Any, bounce: Any, source: Any, offset: Any, file_id: Any, checksums: Any
) -> Any:
    """Write whole pages and hash them; returns (bytes done, error number).

    Direct writes need memory on a page boundary: from elsewhere pages go through the buffer.
    """
    total = len(checksums) * PAGE_BYTES
    done = np.int64(0)
    while done < total:
        count: Any = min(total - done, _BOUNCE_BYTES)
        place, address = offset + done, source + done
        sums = checksums[done // PAGE_BYTES : (done + count) // PAGE_BYTES]
        if address % PAGE_BYTES == 0 or descriptors[0] == descriptors[1]:
            hash_into(address, place // PAGE_BYTES, file_id, sums)
        else:
            _fill(bounce, address, count, place, file_id, sums)
            address = bounce
        put, number = move_bytes(True, descriptors[0], descriptors[1], address, count, place)
        done += put
        if put < count:
            return done, number
    return done, 0


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class PartialFile:
    """An unfinished file that this process alone writes, and what is known of its pages."""

    def __init__(self, path: Path, file_id: int) -> None:
        self.path, self.file_id = path, file_id
        self.checksums: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self.states: Bytes = np.zeros(0, np.uint8)
        self._changed: set[int] = set()  # chunks of these since they were saved
        self.direct = False
        self._direct_descriptor = -1
        self._bounce = aligned_empty(0)
        self._open: list[int] = []
        self._finalizer = weakref.finalize(self, _close_all, self._open)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._open.append(self.descriptor)
        except OSError as error:
            raise storage_error(error.errno or 0, path, "opening") from error
        if not lock_file(self.descriptor, path, patience_s=0):
            self.close()
            raise StorageError(
                f"{path} is being written by another process",
                hint="wait for it to end, or choose another path",
            )

    def grow(self, num_pages: int) -> None:
        """Make room for this many pages."""
        have = len(self.states)
        if num_pages > have:
            size = max(num_pages, have * 2)
            self.checksums = np.concatenate([self.checksums, np.zeros(size - have, np.uint32)])
            self.states = np.concatenate([self.states, np.zeros(size - have, np.uint8)])

    def drop(self, num_bytes: int) -> None:
        """Cut the file; pages after its end were never written."""
        self.cut(num_bytes)
        stop = -(-num_bytes // PAGE_BYTES)
        self.grow(stop)
        self.states[stop:], self.checksums[stop:] = NEVER, 0
        if num_bytes % PAGE_BYTES:
            self.touch({num_bytes // PAGE_BYTES})

    def touch(self, pages: set[int]) -> None:
        """Note that parts of pages were written."""
        for page in pages:
            self.grow(page + 1)
            self.states[page] = DIRTY
            self._changed.add(page // _CHUNK_PAGES)

    def set_checksums(self, first: int, checksums: NDArray[np.uint32]) -> None:
        """Note that consecutive pages are whole and have these checksums."""
        last = first + len(checksums)
        self.grow(last)
        self.checksums[first:last] = checksums
        self.states[first:last] = CLEAN
        self._changed.update(range(first // _CHUNK_PAGES, (last - 1) // _CHUNK_PAGES + 1))

    def pages_in(self, state: int, first: int, last: int) -> Ids:
        """Return the numbers of the pages of a range that are in this state."""
        return np.flatnonzero(self.states[first:last] == state) + first

    def save(self, path: Path) -> None:
        """Write what has changed since the last call, and wait until it is on the disk."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            for chunk in sorted(self._changed):
                pages = slice(chunk * _CHUNK_PAGES, (chunk + 1) * _CHUNK_PAGES)
                block, count = np.zeros(1, _CHUNK), len(self.states[pages])
                block["checksums"][0, :count] = self.checksums[pages]
                block["states"][0, :count] = self.states[pages]
                os.pwrite(descriptor, block.tobytes(), chunk * _CHUNK.itemsize)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        self._changed.clear()

    def load(self, path: Path) -> None:
        """Take over what another process had saved."""
        blocks = np.fromfile(path, _CHUNK)
        pages = len(blocks) * _CHUNK_PAGES
        self.grow(pages)
        self.checksums[:pages] = blocks["checksums"].reshape(-1)
        self.states[:pages] = blocks["states"].reshape(-1)

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
        try:
            self._direct_descriptor = open_direct(self.descriptor, os.O_RDWR)
        except OSError:
            return
        self._open.append(self._direct_descriptor)
        self._bounce = aligned_empty(_BOUNCE_BYTES)
        self.direct = True

    def takes_pages(self, data: Bytes, offset: int) -> bool:
        """Return whether ``put_pages`` takes these bytes."""
        aligned = (offset | len(data) | data.ctypes.data) % PAGE_BYTES == 0
        return self.direct and aligned and len(data) >= _LEAST_PAGES_BYTES

    def put_pages(self, pages: Bytes, offset: int) -> NDArray[np.uint32]:
        """Write whole pages; several threads may, from aligned memory. Return their checksums."""
        checksums = np.empty(len(pages) // PAGE_BYTES, np.uint32)
        aligned = pages.ctypes.data % PAGE_BYTES == 0
        least = _LEAST_PAGES_BYTES if aligned else _LEAST_DIRECT_BYTES
        use_direct = self.direct and len(pages) >= least
        direct = self._direct_descriptor if use_direct else self.descriptor
        descriptors = np.array([direct, self.descriptor], np.int32)
        done, number = _write_pages(
            descriptors,
            self._bounce.ctypes.data,
            pages.ctypes.data,
            offset,
            np.uint64(self.file_id),
            checksums,
        )
        check_written(done, number, len(pages), offset, self.path)
        return checksums

    def put(self, data: Bytes, offset: int) -> None:
        """Write bytes at an offset and note them; one thread at a time."""
        stop = offset + len(data)
        first, last = -(-offset // PAGE_BYTES) * PAGE_BYTES, stop // PAGE_BYTES * PAGE_BYTES
        if first >= last:
            write_all(self.descriptor, data, offset, self.path)
        else:
            for begin, end in ((offset, first), (last, stop)):
                if begin < end:
                    piece = data[begin - offset : end - offset]
                    write_all(self.descriptor, piece, begin, self.path)
            pages = data[first - offset : last - offset]
            self.set_checksums(first // PAGE_BYTES, self.put_pages(pages, first))
        self.touch({place // PAGE_BYTES for place in (offset, stop) if place % PAGE_BYTES})

    def get(self, buffer: Bytes, offset: int) -> None:
        """Fill a buffer from an offset."""
        read_into(self.descriptor, buffer, offset, self.path)

    @property
    def size(self) -> int:
        """Return the length of the file in bytes."""
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
