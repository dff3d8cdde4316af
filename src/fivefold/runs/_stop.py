"""SIGTERM and Ctrl-C as a request to write a checkpoint and end."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_LOG = logging.getLogger(__name__)


class StopRequest:
    """Whether this process was asked to write a checkpoint and end."""

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
        """Progress that ends the work where a stop was asked for.

        Before training there is no checkpoint to write; what was prepared stays to be gone on
        with.

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
        self.requested = True
