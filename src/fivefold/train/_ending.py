"""How the process of one rank ends: with the right exit code, and without waiting for peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.runs import end_without_waiting, exit_code
from fivefold.train._config import load_config
from fivefold.train._loop import train

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fivefold.train._result import RunResult


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

    Examples:
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
