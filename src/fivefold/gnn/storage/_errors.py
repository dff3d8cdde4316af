"""Errors of files that are used after they were closed or truncated."""

from __future__ import annotations

from pathlib import Path

from fivefold.errors import StorageError


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
