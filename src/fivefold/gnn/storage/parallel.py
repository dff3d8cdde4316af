"""Work that runs ahead of whoever takes its results, in order and a bounded number at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")


def in_threads(calls: Iterable[Callable[[], Result]], *, threads: int) -> Iterator[Result]:
    """Yield what the calls return, in order; one more than there are threads is under way."""
    with ThreadPoolExecutor(threads, thread_name_prefix="fivefold") as pool:
        running: deque[Future[Result]] = deque()
        try:
            for call in calls:
                running.append(pool.submit(call))
                if len(running) > threads:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()


def read_ahead(
    requests: Iterable[Request], read: Callable[[Request, Any], Result], buffers: tuple[Any, Any]
) -> Iterator[tuple[Result, Any]]:
    """Yield what ``read`` returns for each request, with the buffer that it has filled.

    The next request is being read meanwhile. A buffer is overwritten when the one after the next
    is asked for.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="fivefold-ahead") as pool:
        waiting: tuple[Future[Result], Any] | None = None
        for number, request in enumerate(requests):
            buffer = buffers[number % 2]
            ahead = pool.submit(read, request, buffer)
            if waiting is not None:
                yield waiting[0].result(), waiting[1]
            waiting = ahead, buffer
        if waiting is not None:
            yield waiting[0].result(), waiting[1]
