"""Queues between threads that can be closed, and that may be fed from a destructor.

``queue.SimpleQueue`` is the only queue whose ``put`` is safe inside a weakref callback, which is
where buffers come back from. It has no bound and no end; both are added here: a bound by handing
a token back for each item taken, an end by a mark that every waiter sees.
"""

from __future__ import annotations

import contextlib
import queue
from typing import Any

__all__ = ["Channel", "ClosedChannelError", "Mailbox"]

_CLOSED = object()


class ClosedChannelError(Exception):
    """The channel was closed while somebody waited at it, or before."""


class Mailbox:
    """An unbounded queue with an end.

    Example:
        >>> box = Mailbox()
        >>> box.put("a")
        >>> box.take()
        'a'
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, item: Any) -> None:
        """Add an item; never waits, safe in destructors."""
        self._items.put(item)

    def take(self, timeout_s: float | None = None) -> Any:
        """Wait for an item and take it.

        Raises:
            ClosedChannelError: The box was closed.
            queue.Empty: Nothing came within ``timeout_s`` seconds.
        """
        item = self._items.get(timeout=timeout_s)
        if item is _CLOSED:
            self._items.put(_CLOSED)  # for the next waiter
            raise ClosedChannelError
        return item

    def close(self) -> None:
        """Wake all waiters; items still inside may be taken before they see the end."""
        self._items.put(_CLOSED)


class Channel:
    """A queue of at most ``capacity`` items with an end.

    Args:
        capacity: Items that may wait inside, at least 1.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity >= 1, "a channel must hold something"
        self._full, self._room = Mailbox(), Mailbox()
        for _ in range(capacity):
            self._room.put(None)

    def put(self, item: Any) -> None:
        """Wait for room and add an item.

        Raises:
            ClosedChannelError: The channel was closed.
        """
        self._room.take()
        self._full.put(item)

    def take(self, timeout_s: float | None = None) -> Any:
        """Wait for an item and take it.

        Raises:
            ClosedChannelError: The channel was closed.
            queue.Empty: Nothing came within ``timeout_s`` seconds.
        """
        item = self._full.take(timeout_s)
        self._room.put(None)
        return item

    def wake(self, item: Any) -> None:
        """Add an item without waiting, whether or not there is room."""
        self._full.put(item)

    def drain(self) -> None:
        """Throw away what is inside a closed channel."""
        with contextlib.suppress(ClosedChannelError):
            while True:
                self._full.take()

    def close(self) -> None:
        """Wake all waiters on both sides."""
        self._room.close()
        self._full.close()
