"""The one command, ``fivefold``: every room's work from a shell.

Each command group lives in a file of its own, which is imported when it is called, so that
``fivefold --help`` loads no torch. Errors become two lines and an exit code in one place.
"""

from __future__ import annotations

import os
import signal
from importlib import import_module
from types import FrameType
from typing import NoReturn


def main() -> None:
    """Run the command line; the only place that ends the process.

    Raises:
        SystemExit: Always, with 0 for success, 1 for a failure, 2 for a wrong command line, 3
            for a request that nothing satisfies and 130 after Ctrl-C.

    Examples:
        $ fivefold --version
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:  # until the commands are loaded there is nothing to tidy up
        signal.signal(signal.SIGINT, leave_at_once)
    entry = import_module("fivefold.cli._main")
    if usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    entry.main()


def leave_at_once(_number: int, _frame: FrameType | None) -> NoReturn:
    """Answer Ctrl-C where nothing has to be tidied up."""
    os.write(2, b"interrupted\n")
    os._exit(130)


__all__ = ["main"]
