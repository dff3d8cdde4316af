"""What rank 0 shows while it trains: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

_LOG = logging.getLogger(__name__)


class TrainingProgress:
    """Progress of a run; a context manager.

    Args:
        label: Name of the method.
        steps: Steps of the whole run.
        step: Step it begins from.
        line_every_s: Seconds between two lines where there is no terminal.
        shown: Whether this rank shows anything.
    """

    def __init__(
        self, label: str, *, steps: int, step: int, line_every_s: float, shown: bool
    ) -> None:
        self._label, self._steps = label, steps
        self._line_every_s = line_every_s
        self._last_line_s = time.monotonic()
        self._shown = shown
        self._text = ""
        self._bar: Progress | None = None
        if shown and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(label, total=steps, completed=step, text="")

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

    def describe(self, *, loss: float, tokens_per_s: float, tau: int | None = None) -> None:
        """Set the figures that are shown beside the step; tau where it changes by itself."""
        self._text = f"loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s"
        if tau is not None:
            self._text += f"  tau {tau}"

    def update(self, step: int) -> None:
        """Show that a step is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=self._text)
        elif self._shown and time.monotonic() - self._last_line_s >= self._line_every_s:
            self._last_line_s = time.monotonic()
            _LOG.info("%s: step %d/%d  %s", self._label, step, self._steps, self._text)
