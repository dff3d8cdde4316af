"""One run per folder: a lock that the kernel takes back when its process ends, however it ends."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from fivefold.errors import ConfigurationError
from fivefold.files import lock_file
from fivefold.runs._files import cannot_write

_NAME = ".lock"
# A process that was killed holds its files until the kernel has taken it apart.
_PATIENCE_S = 2.0
_LONGEST_COMMAND = 200

_held: set[int] = set()


def _drop_in_child() -> None:
    # A forked child shares the lock: it would hold the folder for as long as it lives.
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_drop_in_child)


class FolderLock:
    """Keep other runs out of a folder that this process writes; a context manager.

    The lock is ``flock`` on the file ``.lock`` in the folder, which also says who holds it. It
    ends with the process, so a run can be resumed right after it was killed. A child that is
    forked while the lock is held does not hold it.

    Args:
        folder: The folder; made where it does not exist.
        what: The setting that names it, such as ``"run.output"``, for messages.

    Raises:
        ConfigurationError: On entering; another process writes there. Says which.
        CheckpointError: On entering; the folder cannot be written.

    Examples:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> with FolderLock(folder, "run.output"):
        ...     try:
        ...         FolderLock(folder, "run.output").__enter__()
        ...     except ConfigurationError as error:
        ...         print(error.message.startswith(f"run.output {folder} is in use by process"))
        True
    """

    def __init__(self, folder: str | os.PathLike[str], what: str) -> None:
        self._folder, self._what = Path(folder), what
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        path = self._folder / _NAME
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise cannot_write(path, error) from error
        try:
            self._lock(descriptor)
            me = {"pid": os.getpid(), "host": socket.gethostname()}
            content = json.dumps({**me, "command": shlex.join(sys.orig_argv)}).encode()
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, content, 0)
        except OSError as error:
            os.close(descriptor)
            raise cannot_write(path, error) from error
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        _held.add(descriptor)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The file stays: a run that waits for it may have it open.
        if self._descriptor in _held:  # not in a forked child, where the number may be another's
            _held.remove(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = None

    def _lock(self, descriptor: int) -> None:
        if not lock_file(descriptor, self._folder, patience_s=_PATIENCE_S):
            raise self._in_use(descriptor)

    def _in_use(self, descriptor: int) -> ConfigurationError:
        try:
            holder = json.loads(os.pread(descriptor, 1 << 16, 0))
            command = str(holder["command"])
            command = command[:_LONGEST_COMMAND] + "..." * (len(command) > _LONGEST_COMMAND)
            who = f"process {holder['pid']} on {holder['host']}: {command}"
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            who = "another process"  # which has not written its name yet
        return ConfigurationError(
            f"{self._what} {self._folder} is in use by {who}",
            hint=f"wait until it ends, or stop it; or choose another {self._what}",
        )
