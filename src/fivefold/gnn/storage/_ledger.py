"""Which pages of a file being written are known, and their checksums; saved for resuming.

Whole pages are hashed from the caller's memory as they pass. A page that is written in parts is
kept aside until all of its bytes have come, and hashed then. Pages that stay incomplete, and those
that are written twice, are marked dirty: ``commit`` reads them back from the file.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fivefold.gnn.storage._xxhash import PAGE_BYTES, hash_pages

NEVER, DIRTY, CLEAN = 0, 1, 2
_PENDING_PAGES = 1024  # at most 8 MiB kept aside
_CHUNK_PAGES = 4096
_CHUNK_BYTES = _CHUNK_PAGES * 5  # a checksum of four bytes and a state of one


class PageLedger:
    """Checksums and states of the pages of one file."""

    def __init__(self, file_id: int, num_pages: int) -> None:
        self.file_id = file_id
        self.checksums: NDArray[np.uint32] = np.zeros(num_pages, np.uint32)
        self.states: NDArray[np.uint8] = np.zeros(num_pages, np.uint8)
        self._pending: dict[int, tuple[NDArray[np.uint8], NDArray[np.bool_]]] = {}
        self._changed: set[int] = set()

    def grow(self, num_pages: int) -> None:
        """Make room for this many pages."""
        have = len(self.states)
        if num_pages > have:
            size = max(num_pages, have * 2)
            self.checksums = np.concatenate([self.checksums, np.zeros(size - have, np.uint32)])
            self.states = np.concatenate([self.states, np.zeros(size - have, np.uint8)])

    def forget(self, first_page: int) -> None:
        """Pages from this one on are as if never written."""
        self.states[first_page:] = NEVER
        self.checksums[first_page:] = 0

    def note(self, offset: int, data: NDArray[np.uint8]) -> None:
        """These bytes are now in the file at this offset."""
        stop = offset + len(data)
        first, last = -(-offset // PAGE_BYTES), stop // PAGE_BYTES
        self.grow(-(-stop // PAGE_BYTES))
        if first < last:
            skip = first * PAGE_BYTES - offset
            whole = data[skip : skip + (last - first) * PAGE_BYTES]
            self.set_checksums(first, hash_pages(whole, self.file_id, first))
        head = min(first * PAGE_BYTES, stop) - offset
        if head:
            self._note_part(offset // PAGE_BYTES, offset % PAGE_BYTES, data[:head])
        if last >= first and stop % PAGE_BYTES:
            self._note_part(last, 0, data[len(data) - stop % PAGE_BYTES :])

    def set_checksums(self, first: int, checksums: NDArray[np.uint32]) -> None:
        """Consecutive pages are whole and have these checksums."""
        last = first + len(checksums)
        self.grow(last)
        self.checksums[first:last] = checksums
        self.states[first:last] = CLEAN
        self._changed.update(range(first // _CHUNK_PAGES, (last - 1) // _CHUNK_PAGES + 1))
        if self._pending:
            for page in [page for page in self._pending if first <= page < last]:
                del self._pending[page]

    def _note_part(self, page: int, begin: int, data: NDArray[np.uint8]) -> None:
        known = self.states[page] != NEVER
        part = self._pending.get(page)
        self.states[page] = DIRTY
        self._changed.add(page // _CHUNK_PAGES)
        if part is None:
            if known or len(self._pending) >= _PENDING_PAGES:
                return
            part = (np.zeros(PAGE_BYTES, np.uint8), np.zeros(PAGE_BYTES, np.bool_))
            self._pending[page] = part
        contents, filled = part
        contents[begin : begin + len(data)] = data
        filled[begin : begin + len(data)] = True
        if filled.all():
            self.set_checksums(page, hash_pages(contents, self.file_id, page))

    def pages_in(self, state: int, first: int, last: int) -> NDArray[np.int64]:
        """Numbers of the pages of a range that are in this state."""
        return np.flatnonzero(self.states[first:last] == state) + first

    def save(self, path: Path) -> None:
        """Write what has changed since the last call, and wait until it is on the disk."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
        try:
            for chunk in sorted(self._changed):
                pages = slice(chunk * _CHUNK_PAGES, (chunk + 1) * _CHUNK_PAGES)
                block = np.zeros(_CHUNK_BYTES, np.uint8)
                table = self.checksums[pages].astype("<u4").view(np.uint8)
                block[: len(table)] = table
                states = self.states[pages]
                block[4 * _CHUNK_PAGES :][: len(states)] = states
                os.pwrite(descriptor, block.tobytes(), chunk * _CHUNK_BYTES)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        self._changed.clear()

    def load(self, path: Path) -> None:
        """Take over what another process had saved."""
        blocks = np.fromfile(path, np.uint8)
        blocks = blocks[: len(blocks) // _CHUNK_BYTES * _CHUNK_BYTES].reshape(-1, _CHUNK_BYTES)
        pages = len(blocks) * _CHUNK_PAGES
        self.grow(pages)
        table = np.ascontiguousarray(blocks[:, : 4 * _CHUNK_PAGES]).reshape(-1)
        self.checksums[:pages] = table.view("<u4")[: len(self.checksums)]
        self.states[:pages] = blocks[:, 4 * _CHUNK_PAGES :].reshape(-1)[: len(self.states)]
