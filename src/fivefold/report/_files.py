"""Writes a file whole or not at all."""

from __future__ import annotations

from pathlib import Path

from fivefold.errors import DataError
from fivefold.files import write_atomically


def write_text_atomically(path: Path, text: str) -> Path:
    """Write text whole or not at all, with the folder where it is missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror}",
            hint="check the folder, its permissions and the free space of the disk",
        ) from error
    return path
