"""Work on consecutive ranges by several threads, results in order, few held at a time."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def default_threads() -> int:
    """Processors this process may use, at most 8: beyond that the disk is slower."""
    return min(8, len(os.sched_getaffinity(0)))


def ranges(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """The ranges (first, last + 1) of at most ``step`` from ``start`` to ``stop``."""
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


def in_order(
    function: Callable[[int, int], Result], parts: Iterator[tuple[int, int]], *, threads: int
) -> Iterator[Result]:
    """``function`` of every range, in order, at most ``threads + 1`` results ahead."""
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for first, stop in parts:
                waiting.append(pool.submit(function, first, stop))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
