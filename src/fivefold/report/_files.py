"""Writes a file whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fivefold.errors import DataError


def write_text_atomically(path: Path, text: str) -> Path:
    """Write text under a temporary name beside the target, sync it, then rename it.

    Args:
        path: File to write; what was there is replaced.
        text: The content, written as UTF-8.

    Returns:
        The path.

    Raises:
        DataError: The file cannot be written; nothing of it is left behind.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            mode="w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise DataError(
            f"{path} cannot be written: {error.strerror}",
            hint="check the folder, its permissions and the free space of the disk",
        ) from error
    return path
