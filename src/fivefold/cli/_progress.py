"""Progress of long work: a bar on a terminal, a line now and then elsewhere; on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

StageProgress = Callable[[str, int, int], None]
_LINE_EVERY_S = 10.0


@contextmanager
def stage_progress() -> Iterator[StageProgress]:
    """Give a function that is called with a stage's name, what is done of it, and all of it."""
    console = Console(stderr=True)
    if console.is_terminal:
        with Progress(
            TextColumn("{task.description:>10}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(),
            console=console,
        ) as bars:
            yield _on_bars(bars)
    else:
        yield _in_lines()


def _on_bars(bars: Progress) -> StageProgress:
    tasks: dict[str, TaskID] = {}

    def show(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total)
        bars.update(tasks[stage], completed=done, total=total)

    return show


def _in_lines() -> StageProgress:
    last_s: dict[str, float] = {}

    def show(stage: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if done < total and now_s - last_s.setdefault(stage, now_s) < _LINE_EVERY_S:
            return
        last_s[stage] = now_s
        sys.stderr.write(f"{stage}: {done} of {total} ({100 * done // max(total, 1)} %)\n")
        sys.stderr.flush()

    return show
