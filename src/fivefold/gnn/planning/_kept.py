"""One array per batch, kept for several passes: in memory while small, else in a file.

A search for the segment size walks through the cold ids of all batches again and again, and
Belady's rule needs the next uses in the opposite order to that in which they are found. Beyond
``memory_bytes`` they go to a temporary file without a name, which the system removes with the
process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from typing import IO

import numpy as np

from fivefold.gnn.planning._sources import Array, Ids

__all__ = ["KeptArrays"]

_MEMORY_BYTES = 128 << 20


class KeptArrays:
    """Whole numbers per batch.

    Args:
        arrays: One array per batch; taken one by one.
        limit: All numbers are below it; 32 bits are kept where that is enough.
        memory_bytes: From this size on they are kept in a file.
    """

    def __init__(
        self, arrays: Iterable[Array], *, limit: int, memory_bytes: int = _MEMORY_BYTES
    ) -> None:
        self._dtype = np.dtype(np.int32 if limit <= np.iinfo(np.int32).max else np.int64)
        self._kept: list[Array] = []
        self._file: IO[bytes] | None = None
        sizes, kept_bytes = [], 0
        for array in arrays:
            narrow = array.astype(self._dtype)
            kept_bytes += narrow.nbytes
            sizes.append(len(narrow))
            self._kept.append(narrow)
            if self._file is not None or kept_bytes > memory_bytes:
                self._spill()
        self.sizes = np.array(sizes, np.int64)
        self._stops = np.cumsum(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, batch: int) -> Ids:
        if self._file is None:
            return self._kept[batch].astype(np.int64)
        size = int(self.sizes[batch])
        self._file.seek((int(self._stops[batch]) - size) * self._dtype.itemsize)
        narrow = np.frombuffer(self._file.read(size * self._dtype.itemsize), self._dtype)
        return narrow.astype(np.int64)

    def segment(self, first: int, stop: int) -> list[Ids]:
        """The arrays of batches ``first`` to ``stop - 1``."""
        return [self[batch] for batch in range(first, stop)]

    def close(self) -> None:
        """Give memory and file back."""
        self._kept.clear()
        if self._file is not None:
            self._file.close()

    def _spill(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the object
        for narrow in self._kept:
            self._file.write(narrow.tobytes())
        self._kept.clear()
