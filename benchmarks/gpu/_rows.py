"""Rows of a run, kept so that whoever ends it at any moment loses one line at most."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO

from benchmarks.gpu._stage import Line

__all__ = ["RowFiles", "read_rows"]

_MOST_BYTES = 15 * 2**20  # of a file: what carries them may take no more than 16 MiB


class RowFiles:
    """Files of lines of JSON; each run begins a new one, behind what a torn line may have ended.

    Args:
        folder: Made where it is missing.
        most_bytes: Of a file.
    """

    def __init__(self, folder: Path, *, most_bytes: int = _MOST_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._most_bytes = folder, most_bytes
        self._file: IO[str] | None = None

    def write(self, line: Line) -> None:
        """Add a line, which is on the disk when this returns."""
        text = json.dumps(line) + "\n"
        if self._file is not None and self._file.tell() + len(text) > self._most_bytes:
            self.close()
        if self._file is None:
            number = len(_files(self._folder))
            path = self._folder / f"rows-{number:03d}.jsonl"
            self._file = path.open("x", encoding="utf-8")
        self._file.write(text)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """End the file; the next line begins another."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_rows(folder: Path) -> list[Line]:
    """Return all lines of a folder in order, but for a last one of a file that was torn.

    Raises:
        ValueError: A line in the middle of a file is no JSON.
    """
    found = []
    for path in _files(folder):
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, text in enumerate(lines, 1):
            try:
                found.append(json.loads(text))
            except ValueError:
                if number == len(lines):
                    continue
                message = f"{path}, line {number} is no JSON: {text[:60]!r}"
                raise ValueError(message) from None
    return found


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("rows-*.jsonl"))
