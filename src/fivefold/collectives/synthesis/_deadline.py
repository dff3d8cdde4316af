"""Time limits of the searches: loops that may take long ask here whether there is time left.

A limit holds for everything that runs inside it, however deep, and an inner one never extends an
outer one. What runs in compiled code or in a solver gets the time that is left as its own limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fivefold.errors import InfeasibleError

SLACK_S = 2.0
"""Seconds past its limit in which a method may complete a first schedule, where it has none."""

_LIMIT: ContextVar[tuple[float, float]] = ContextVar("limit", default=(math.inf, math.inf))
"""When the time is over, on the clock of ``time.perf_counter``, and how long it was."""


class OutOfTime(InfeasibleError):  # noqa: N818 - what happened, not whose fault it is
    """The time was over before there was a schedule."""


@contextmanager
def time_limit(limit_s: float | None, *, slack_s: float = 0.0) -> Iterator[None]:
    """Within it ``check_time`` raises once the time and the slack are over."""
    outer = _LIMIT.get()
    own = math.inf if limit_s is None else limit_s
    token = _LIMIT.set(min(outer, (time.perf_counter() + own + slack_s, own)))
    try:
        yield
    finally:
        _LIMIT.reset(token)


@contextmanager
def off_the_clock() -> Iterator[None]:
    """Within it time does not count: for what is compiled at its first use on a machine."""
    started_s = time.perf_counter()
    yield
    ends_s, limit_s = _LIMIT.get()
    _LIMIT.set((ends_s + time.perf_counter() - started_s, limit_s))


def time_left_s() -> float:
    """Seconds until the time is over, negative afterwards, infinite where there is no limit."""
    return _LIMIT.get()[0] - time.perf_counter()


def check_time() -> None:
    """Do nothing while there is time."""
    ends_s, limit_s = _LIMIT.get()
    if time.perf_counter() > ends_s:
        raise OutOfTime(
            f"no schedule was found within {limit_s:.3g} s",
            hint="allow more time, fewer chunks, or ask for method='library' or 'matching'",
        )
