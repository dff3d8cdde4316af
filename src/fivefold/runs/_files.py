"""A run's shared files, written by rank 0: manifest, metrics, result; TensorBoard by option.

``metrics.jsonl`` is only ever appended to, one line per event; a resumed run first drops the
lines of steps that it will do again. The other files are written whole, under a temporary name,
synced and renamed. This module knows nothing of the loop.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TextIO

from fivefold.errors import CheckpointError, UnsupportedError
from fivefold.files import write_atomically


class MetricsWriter:
    """Appends events to ``metrics.jsonl``.

    Args:
        path: The file.
        resumed_step: Step that the run begins from; None empties the file.
        tensorboard: Folder of TensorBoard event files; None for none.

    Raises:
        UnsupportedError: TensorBoard is asked for and not installed.
        CheckpointError: The folder cannot be written.
    """

    def __init__(
        self, path: Path, *, resumed_step: int | None, tensorboard: Path | None = None
    ) -> None:
        self._board = None if tensorboard is None else _open_board(tensorboard)
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
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{event}/{name}", value, step)

    def close(self) -> None:
        """Close the files.

        Raises:
            CheckpointError: The disk refused the last lines.
        """
        try:
            self._file.close()
        except OSError as error:
            raise cannot_write(self._path, error) from error
        if self._board is not None:
            self._board.close()


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
    """Return the error to raise for a run's file that the disk refused.

    Args:
        path: The file.
        error: What the operating system said.

    Returns:
        The error, with what to do.

    Examples:
        >>> from pathlib import Path
        >>> cannot_write(Path("run/a.txt"), OSError(28, "No space left on device")).message
        'cannot write run/a.txt: No space left on device'
    """
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


def _open_board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        message = "run.tensorboard is true, but tensorboard is not installed"
        raise UnsupportedError(message, hint="pip install 'fivefold[tensorboard]'") from error
    return SummaryWriter(str(folder))
