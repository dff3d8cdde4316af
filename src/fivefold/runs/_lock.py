"""One process at a time writes in a folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from fivefold.errors import ConfigurationError, StorageError

__all__ = ["FolderLock"]

_NAME = ".lock"


class FolderLock:
    """Keep other processes out of a folder while this one writes there.

    The lock is the system's, on the file ``.lock``: it goes with the process, however that ends.
    The file says who holds it, and is removed in the end; so is a folder that was made for it and
    in which nothing was written.

    Args:
        folder: The folder; made if missing.
        what: What writes there, for the message, such as "training".

    Raises:
        ConfigurationError: On entering: another process is at work there.
        StorageError: On entering: the folder cannot be written.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with FolderLock(folder, "a run"):
        ...     FolderLock(folder, "another run").__enter__()
        Traceback (most recent call last):
            ...
        fivefold.errors.ConfigurationError: ... is in use by a run (process ... on ...); ...
    """

    def __init__(self, folder: str | os.PathLike[str], what: str) -> None:
        self.folder = Path(folder)
        self._what = what
        self._file: IO[str] | None = None
        self._made = False

    def __enter__(self) -> Self:
        while self._file is None:
            file = self._open()
            try:
                self._lock(file)
            except BaseException:
                file.close()
                raise
            # Who held it before may have removed the file since it was opened: then once more.
            try:
                current = os.path.samestat(os.fstat(file.fileno()), self._path.stat())
            except FileNotFoundError:
                current = False
            if current:
                self._file = file
            else:
                file.close()
        with contextlib.suppress(OSError):  # a full disk: the lock holds, only its text is missing
            self._file.truncate(0)
            self._file.write(f"{self._what} (process {os.getpid()} on {socket.gethostname()})")
            self._file.flush()
        return self

    def _open(self) -> IO[str]:
        try:
            self._made = self._made or not self.folder.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                return self._path.open("a+", encoding="utf-8")
            except FileNotFoundError:  # whoever made the folder removed it meanwhile
                self.folder.mkdir(parents=True, exist_ok=True)
                return self._path.open("a+", encoding="utf-8")
        except OSError as error:
            raise StorageError(
                f"cannot write in {self.folder}: {error.strerror or error}",
                hint="choose a folder that you may write",
            ) from error

    @property
    def _path(self) -> Path:
        return self.folder / _NAME

    def _lock(self, file: IO[str]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(1000).strip() or "another process"
            raise ConfigurationError(
                f"{self.folder} is in use by {holder}",
                hint="wait until it ends, or choose another folder",
            ) from None
        except OSError as error:
            raise StorageError(
                f"cannot lock {self.folder}: {error.strerror or error}",
                hint="choose a folder on a file system with locks",
            ) from error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()  # while it is locked: who opens it afterwards makes another
                if self._made:
                    self.folder.rmdir()
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
