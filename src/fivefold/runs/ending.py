"""How a run stops on request, and how the process of one rank ends."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from fivefold.errors import FivefoldError

_LOG = logging.getLogger(__name__)
_INTERRUPTED = 130


class StopRequest:
    """Flag of this process: whether it was asked to write a checkpoint and end."""

    def __init__(self) -> None:
        self.requested = False
        self._interrupted = False

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Turn SIGTERM and the first SIGINT into a request; the second SIGINT aborts.

        Python allows handlers in the main thread only; elsewhere nothing is installed.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in before:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def breaking(
        self, progress: Callable[[str, int, int], None]
    ) -> Callable[[str, int, int], None]:
        """Return progress that ends the work where a stop was asked for.

        Before training there is no checkpoint to write; what was prepared stays, to be continued.

        Raises:
            KeyboardInterrupt: From the function that is returned; a stop was asked for.
        """

        def show(name: str, done: int, total: int) -> None:
            if self.requested:
                _LOG.warning("stopped while preparing; the same command goes on from here")
                raise KeyboardInterrupt
            progress(name, done, total)

        return show

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
            if os.environ.get("RANK", "0") == "0":
                os.write(2, b"stopping where it can go on later; Ctrl-C again ends at once\n")
        self.requested = True


def exit_code(error: BaseException | None) -> int:
    """Return the exit code for how a run ended."""
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


@contextlib.contextmanager
def rank_process() -> Iterator[None]:
    """Do the work of a rank whose process ends afterwards, as a command does.

    After an error among several ranks the process ends without waiting for its peers, with the
    error's exit code.
    """
    try:
        yield
    except BaseException as error:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            end_without_waiting(exit_code(error))
        raise
