"""How the process of one rank ends: with the right exit code, and without waiting for peers."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import TYPE_CHECKING

from fivefold.errors import FivefoldError
from fivefold.train._config import load_config
from fivefold.train._loop import train

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fivefold.train._result import RunResult

__all__ = ["end_without_waiting", "exit_code", "run_rank"]

_INTERNAL_ERROR = 3
_INTERRUPTED = 130


def run_rank(config_file: str | Path, overrides: Sequence[str] = ()) -> RunResult:
    """Train as one rank whose process ends afterwards, as a command does.

    After an error the process is set to end at once when it gets to its end, with the error's
    exit code: the interpreter's own shutdown could wait for a dead peer.

    Args:
        config_file: The TOML configuration.
        overrides: Assignments such as ``"run.steps=50"`` on top of it.

    Returns:
        What was reached.

    Raises:
        FivefoldError: Whatever training met, as ``train`` raises it.

    Example:
        >>> run_rank("no such file.toml")  # doctest: +SKIP
        Traceback (most recent call last):
            ...
        fivefold.errors.ConfigurationError: ...
    """
    try:
        return train(load_config(config_file, overrides))
    except BaseException as error:
        end_without_waiting(exit_code(error))
        raise


def exit_code(error: BaseException | None) -> int:
    """Exit code for how a run ended."""
    if error is None:
        return 0
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED
    return error.exit_code if isinstance(error, FivefoldError) else _INTERNAL_ERROR


def end_without_waiting(code: int) -> None:
    """Make this process end at once when it gets to its end.

    The interpreter's own shutdown destroys process groups, whose threads may be in a collective
    with a peer that is dead or stopped: that would hang for another timeout, or for good. All
    files are flushed here first; no other exit handler of ours needs to run.
    """

    def leave() -> None:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    # Exit handlers run last in, first out, and before any object is destroyed.
    atexit.register(leave)
