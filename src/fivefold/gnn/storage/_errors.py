"""What an error number of the operating system means for a file of ours, and what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from fivefold.errors import StorageError
from fivefold.units import format_bytes

_HINTS = {
    errno.EIO: "the disk or its driver failed: look into the kernel's log, copy the file "
    "elsewhere or make it again",
    errno.ENOSPC: "free some space or choose another disk; what was written stays for resuming",
    errno.EDQUOT: "free some space of your quota; what was written stays for resuming",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f); what was written stays for resuming",
    errno.EACCES: "check the permissions of the file and of its folder",
    errno.EROFS: "the file system is mounted read-only: choose another folder",
    errno.ENOENT: "check the path; the folder must exist",
    errno.EMFILE: "too many files are open: raise the limit (ulimit -n) or close some readers",
}


def free_bytes(folder: Path) -> int:
    """Bytes that an ordinary user may still write below a folder."""
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def storage_error(
    number: int, path: str | Path, action: str, *, offset: int | None = None
) -> StorageError:
    """The error to raise after a failed system call."""
    place = "" if offset is None else f" at offset {offset}"
    message = f"{action} of {path}{place} failed: {os.strerror(number)}"
    if number in {errno.ENOSPC, errno.EDQUOT}:
        message += f" ({format_bytes(free_bytes(Path(path).parent))} free)"
    error = StorageError(message, hint=_HINTS.get(number, "see the message of the system"))
    error.errno = number
    return error


def closed_error(path: str | Path) -> StorageError:
    """The error of a use after ``close``."""
    return StorageError(f"{path} has been closed", hint="open it again")


def truncated_error(path: str | Path, place: int) -> StorageError:
    """The error for a file that ends before what its header promised."""
    return StorageError(
        f"{path} ends at offset {place}, before the rows that were asked for: it has been "
        "truncated since it was opened",
        hint="make the file again",
    )
