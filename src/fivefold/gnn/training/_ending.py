"""How the process of one rank ends: with the right exit code, and without waiting for peers."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable

from fivefold.errors import FivefoldError
from fivefold.gnn.training._config import GnnConfig
from fivefold.gnn.training._loop import train_graph
from fivefold.gnn.training._result import GnnResult

__all__ = ["run_rank"]

_INTERNAL_ERROR = 3
_INTERRUPTED = 130


def run_rank(config: GnnConfig, *, show: Callable[[str], None] | None = None) -> GnnResult:
    """Train as one rank whose process ends afterwards, as a command does.

    After an error among several ranks the process is set to end at once when it gets to its end,
    with the error's exit code: the interpreter's own shutdown could wait for a dead peer.

    Args:
        config: The whole configuration.
        show: Called with the plan's explanation before anything is packed; None logs it.

    Returns:
        What was reached.

    Raises:
        FivefoldError: Whatever training met, as ``train_graph`` raises it.

    Example:
        >>> run_rank.__name__
        'run_rank'
    """
    try:
        return train_graph(config, show=show)
    except BaseException as error:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            _end_without_waiting(_exit_code(error))
        raise


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED
    return error.exit_code if isinstance(error, FivefoldError) else _INTERNAL_ERROR


def _end_without_waiting(code: int) -> None:
    """Make this process end at once when it gets to its end.

    The interpreter's shutdown destroys process groups, whose threads may be in a collective with
    a peer that is dead: that would hang. Files are flushed here first.
    """

    def leave() -> None:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    # Exit handlers run last in, first out, and before any object is destroyed.
    atexit.register(leave)
