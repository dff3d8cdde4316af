"""A run's shared files, written by rank 0: manifest, metrics, result.

``metrics.jsonl`` is only ever appended to, one line per event; a resumed run first drops the
lines of steps that it will do again. The other files are written whole, under a temporary name,
synced and renamed. This module knows nothing of the loop.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import socket
import sys
from pathlib import Path
from typing import Any, Self, TextIO

from fivefold.errors import CheckpointError, ConfigurationError
from fivefold.files import lock_file, write_atomically
from fivefold.runs.loggers import Loggers


class MetricsWriter:
    """Appends events to ``metrics.jsonl``.

    Args:
        path: The file.
        resumed_step: Step that the run begins from; None empties the file.
        loggers: Get the numbers of every event as well; None for none.

    Raises:
        CheckpointError: The folder cannot be written.
    """

    def __init__(
        self, path: Path, *, resumed_step: int | None, loggers: Loggers | None = None
    ) -> None:
        self._loggers = loggers
        kept = [] if resumed_step is None else _lines_until(path, resumed_step)
        write_text(path, "".join(kept))
        self._path = path
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, event: str, *, step: int, **values: Any) -> None:
        """Append one event and hand it to the operating system.

        Raises:
            CheckpointError: The disk is full.
        """
        record = {"event": event, "step": step, **values}
        try:
            self._file.write(json.dumps(_finite(record), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise cannot_write(self._path, error) from error
        if self._loggers is not None:
            self._loggers.write(event, step=step, values=values)

    def close(self) -> None:
        """Close the file and end the loggers.

        Raises:
            CheckpointError: The disk refused the last lines.
        """
        try:
            self._file.close()
        except OSError as error:
            raise cannot_write(self._path, error) from error
        finally:
            if self._loggers is not None:
                self._loggers.close()


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise cannot_write(path, error) from error


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a JSON file whole or not at all; numbers that are not finite become null.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    write_text(path, json.dumps(_finite(record), indent=1, allow_nan=False) + "\n")


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """Return the error to raise for a run's file that the disk refused."""
    message = f"cannot write {path}: {error.strerror or error}"
    hint = "check the folder and its permissions, or free space; then run the same command again"
    return CheckpointError(message, hint=hint)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _lines_until(path: Path, step: int) -> list[str]:
    if not path.is_file():
        return []
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            text = line.decode()
            done = json.loads(text)["step"] <= step
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # the line during which the run was killed, or a damaged one
        if done:
            kept.append(text)
    return kept


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

    def __exit__(self, *_: object) -> None:
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
