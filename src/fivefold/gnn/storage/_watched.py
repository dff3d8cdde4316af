"""Noticing that a file which is mapped into memory has been written to."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from fivefold.errors import DataError


class WatchedFile:
    """The length and the time of the last change of a file, kept to compare with.

    A memory map shows what is written to its file afterwards, which no checksum guards. Looking
    at the file's time costs about a microsecond.

    Args:
        path: For messages.
        descriptor: Of the file, open; it may be closed afterwards.

    Examples:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     watched = WatchedFile(Path("a"), file.fileno())
        ...     watched.check()
        ...     _ = file.write(b"more"), file.flush()
        ...     watched.check()
        Traceback (most recent call last):
            ...
        fivefold.errors.DataError: a was changed while it was mapped; ...
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
