"""Reading ahead and writing behind: the disk works while rows are put in order.

One thread reads the next window into a second buffer, one writes finished chunks; the caller's
thread gathers rows in between. All three release the GIL while they work. An error of a thread
comes out of the caller's next call, and both threads end with the ``with`` block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["WriteBehind", "read_ahead"]


def read_ahead(
    requests: Sequence[Any],
    read: Callable[[Any, NDArray[np.uint8]], None],
    buffers: tuple[NDArray[np.uint8], NDArray[np.uint8]],
) -> Iterator[tuple[Any, NDArray[np.uint8]]]:
    """Yield each request with its filled buffer while the next one is being read.

    A buffer is overwritten when the one after the next is asked for.

    Example:
        >>> buffers = (np.zeros(1, np.uint8), np.zeros(1, np.uint8))
        >>> [int(data[0]) for _, data in read_ahead([3, 5], lambda n, out: out.fill(n), buffers)]
        [3, 5]
    """
    with ThreadPoolExecutor(1, thread_name_prefix="fivefold-pack-read") as pool:
        ahead: Future[None] | None = None
        for number, request in enumerate(requests):
            current = ahead or pool.submit(read, request, buffers[number % 2])
            current.result()
            ahead = None
            if number + 1 < len(requests):
                ahead = pool.submit(read, requests[number + 1], buffers[(number + 1) % 2])
            yield request, buffers[number % 2]


class WriteBehind:
    """Two buffers that take turns: one is filled while the other is written.

    Args:
        buffers: Of one size.

    Example:
        >>> written = []
        >>> with WriteBehind((np.zeros(4, np.uint8), np.zeros(4, np.uint8))) as behind:
        ...     behind.take()[:] = 7
        ...     behind.put(lambda buffer: written.append(buffer.tolist()))
        >>> written
        [[7, 7, 7, 7]]
    """

    def __init__(self, buffers: tuple[NDArray[np.uint8], NDArray[np.uint8]]) -> None:
        self._buffers = buffers
        self._pending: deque[Future[None]] = deque()
        self._turn = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="fivefold-pack-write")

    def take(self) -> NDArray[np.uint8]:
        """The free buffer, as soon as what was put from it is written."""
        while len(self._pending) >= len(self._buffers):
            self._pending.popleft().result()
        return self._buffers[self._turn]

    def put(self, write: Callable[[NDArray[np.uint8]], None]) -> None:
        """Have ``write`` called with the buffer that was taken last."""
        self._pending.append(self._pool.submit(write, self._buffers[self._turn]))
        self._turn = (self._turn + 1) % len(self._buffers)

    def drain(self) -> None:
        """Wait until all that was put is written."""
        while self._pending:
            self._pending.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.drain()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
