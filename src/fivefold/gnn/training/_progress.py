"""What rank 0 shows: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_LOG = logging.getLogger(__name__)


class RunProgress:
    """Progress of steps that have names; a context manager.

    Args:
        line_every_s: Seconds between two lines where there is no terminal.
        shown: Whether anything is shown.
    """

    def __init__(self, *, line_every_s: float = 10.0, shown: bool = True) -> None:
        self._line_every_s, self._shown = line_every_s, shown
        self._last_line_s = time.monotonic()
        self._tasks: dict[str, TaskID] = {}
        self._bar: Progress | None = None
        if shown and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f} %"),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, name: str, done: int, total: int, text: str = "") -> None:
        """Show that a part of a step is done.

        Args:
            name: Name of the step.
            done: How much of it is done.
            total: How much there is.
            text: What else to show beside it.
        """
        if self._bar is not None:
            if name not in self._tasks:
                self._tasks[name] = self._bar.add_task(name, total=total, text=text)
            self._bar.update(self._tasks[name], completed=done, total=total, text=text)
        elif self._shown and time.monotonic() - self._last_line_s >= self._line_every_s:
            self._last_line_s = time.monotonic()
            _LOG.info("%s: %.0f %%  %s", name, 100 * done / max(total, 1), text)


@contextlib.contextmanager
def show_progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, plain lines elsewhere, for one step.

    Args:
        name: Name of the step.

    Yields:
        A function to call with what is done and what there is in all.

    Examples:
        >>> with show_progress("inference") as progress:
        ...     progress(1, 2)
    """
    with RunProgress() as progress:
        yield lambda done, total: progress(name, done, total)
