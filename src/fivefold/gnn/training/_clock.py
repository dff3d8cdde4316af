"""Where a run's seconds go, over resumes; the categories add up to the wall time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

CATEGORIES = ("compute", "data", "validation", "checkpoint")


class Clock:
    """Seconds per category.

    Args:
        seconds: Seconds of an earlier part of the run by category, with "other".

    Examples:
        >>> clock = Clock({"compute": 2.0, "other": 1.0})
        >>> clock.record()["compute"], clock.wall_s() >= 3.0
        (2.0, True)
    """

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        before = seconds or {}
        self._seconds = {name: before.get(name, 0.0) for name in CATEGORIES}
        self._before_s = sum(before.values())
        self._started_s = time.perf_counter()

    @contextlib.contextmanager
    def measure(self, category: str) -> Iterator[None]:
        """Count what happens inside under a category."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[category] += time.perf_counter() - started_s

    def wall_s(self) -> float:
        """Seconds since the run's first beginning, pauses not counted."""
        return self._before_s + time.perf_counter() - self._started_s

    def record(self) -> dict[str, float]:
        """Seconds by category; "other" is what none of them is."""
        rest = max(0.0, self.wall_s() - sum(self._seconds.values()))
        return {**self._seconds, "other": rest}
