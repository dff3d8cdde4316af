"""One array per batch, kept for several passes: in memory while small, else in a file.

A search for the segment size walks through the cold ids of all batches again and again, and
Belady's rule needs the next uses in the opposite order to that in which they are found. Beyond
``memory_bytes`` they go to a temporary file without a name, which the system removes with the
process. The file counts towards the disk budget, for which it is no more than the records of a
plan, which hold the same ids.
"""

from __future__ import annotations

import contextlib
import errno
import math
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from fivefold.errors import InfeasibleError, StorageError
from fivefold.gnn.planning._inputs import Array, Ids
from fivefold.units import format_bytes

_MEMORY_BYTES = 128 << 20


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """Where planning may put a file, and how large."""

    folder: Path | None = None  # None: the system's for temporary files
    most_bytes: float = math.inf


class KeptArrays:
    """Whole numbers below ``limit`` per batch, in a file from ``memory_bytes`` on."""

    def __init__(
        self,
        arrays: Iterable[Array],
        *,
        limit: int,
        scratch: Scratch | None = None,
        memory_bytes: int = _MEMORY_BYTES,
    ) -> None:
        self._scratch = scratch or Scratch()
        self._dtype = np.dtype(np.int32 if limit <= np.iinfo(np.int32).max else np.int64)
        self._kept: list[Array] = []
        self._file: IO[bytes] | None = None
        self._kept_bytes = 0
        sizes = []
        for array in arrays:
            narrow = array.astype(self._dtype)
            self._kept_bytes += narrow.nbytes
            sizes.append(len(narrow))
            self._kept.append(narrow)
            if self._file is not None or self._kept_bytes > memory_bytes:
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
        """Return the arrays of batches ``first`` to ``stop - 1``."""
        return [self[batch] for batch in range(first, stop)]

    def close(self) -> None:
        """Give memory and file back."""
        self._kept.clear()
        if self._file is not None:
            with contextlib.suppress(OSError):  # what a full disk did not take
                self._file.close()

    def _spill(self) -> None:
        if self._kept_bytes > self._scratch.most_bytes:
            self.close()
            raise InfeasibleError(
                f"the disk budget of {format_bytes(self._scratch.most_bytes)} does not hold the "
                "scratch file of planning, which has the node ids of all batches",
                hint="give more disk_bytes: the packed store would need more, too",
            )
        folder = self._scratch.folder or Path(tempfile.gettempdir())
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives with it
            for narrow in self._kept:
                self._file.write(narrow.data)
            self._file.flush()
        except OSError as error:
            self.close()
            raise StorageError(
                f"the scratch file of planning cannot be written in {folder}: "
                f"{error.strerror or error}{_free_text(folder, error)}",
                hint="free some space there, or plan elsewhere: scratch_folder of make_plan, "
                "data.store of a configuration, the samples' folder on the command line",
            ) from error
        self._kept.clear()


def _free_text(folder: Path, error: OSError) -> str:
    if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
        return ""
    return f" ({format_bytes(shutil.disk_usage(folder).free)} free)"
