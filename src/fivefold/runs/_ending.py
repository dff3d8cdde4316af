"""How the process of one rank ends: with the right exit code, and without waiting for peers."""

from __future__ import annotations

import atexit
import logging
import os
import sys

from fivefold.errors import FivefoldError

_INTERRUPTED = 130


def exit_code(error: BaseException | None) -> int:
    """Exit code for how a run ended."""
    if error is None:
        return 0
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED
    return getattr(error, "exit_code", FivefoldError.exit_code)


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
