"""SIGTERM and Ctrl-C as a request to write a checkpoint and end."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["StopRequest"]


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

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        self.requested = True
