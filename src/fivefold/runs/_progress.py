"""Progress of long work on standard error: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_LOG = logging.getLogger(__name__)


class ProgressBar:
    """Show how far each named stage of some work is; a context manager.

    Args:
        line_every_s: Seconds between two lines where there is no terminal.
        shown: Whether anything is shown: False on all ranks but the first.
        unit: What is counted, such as "step"; empty shows percentages.
    """

    def __init__(self, *, line_every_s: float = 10.0, shown: bool = True, unit: str = "") -> None:
        self._line_every_s, self._shown, self._unit = line_every_s, shown, unit
        self._last_line_s = time.monotonic()
        self._tasks: dict[str, TaskID] = {}
        self._bar: Progress | None = None
        if shown and sys.stderr.isatty():
            count = "{task.completed:.0f}/{task.total:.0f}" if unit else "{task.percentage:>3.0f} %"
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn(count),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, done: int, total: int, text: str = "") -> None:
        """Show that a part of a stage is done."""
        if self._bar is not None:
            if stage not in self._tasks:
                self._tasks[stage] = self._bar.add_task(stage, total=total, text=text)
            self._bar.update(self._tasks[stage], completed=done, total=total, text=text)
        elif self._shown and time.monotonic() - self._last_line_s >= self._line_every_s:
            self._last_line_s = time.monotonic()
            percent = f"{100 * done / max(total, 1):.0f} %"
            count = f"{self._unit} {done}/{total}" if self._unit else percent
            _LOG.info("%s: %s", stage, f"{count}  {text}".rstrip())
