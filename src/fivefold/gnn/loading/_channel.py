"""Queues between threads that can be closed, and that may be fed from a destructor.

``queue.SimpleQueue`` is the only queue whose ``put`` is safe inside a weakref callback, which is
where buffers come back from. It has no bound and no end; both are added here: a bound by handing
a token back for each item taken, an end by a mark that every waiter sees.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Sequence
from typing import Any

END = object()  # after the last item
_CLOSED = object()


class ClosedChannelError(Exception):
    """The channel was closed while somebody waited at it, or before."""


class Mailbox:
    """An unbounded queue with an end.

    Examples:
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


class Port:
    """One thread's end of a link: it puts to, or takes from, its channels in turn.

    Where one side of a link has several threads, thread i owns channel i and the other side goes
    round: items keep their order although the threads work side by side.

    Args:
        channels: Channels of this end, in turn.
    """

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels, self._turn = channels, 0

    def put(self, item: Any) -> None:
        """Put an item into the next channel."""
        self._advance().put(item)

    def take(self) -> Any:
        """Take an item from the next channel."""
        return self._advance().take()

    def end(self) -> None:
        """Say to all takers that there is no further item."""
        for _ in self._channels:
            self._advance().put(END)

    def _advance(self) -> Channel:
        channel = self._channels[self._turn % len(self._channels)]
        self._turn += 1
        return channel


def link(
    makers: int, takers: int, *, capacity: int
) -> tuple[list[Channel], list[Port], list[Port]]:
    """Channels between two groups of threads, and the end of each thread.

    One of the groups must be a single thread, or both of the same number.
    """
    assert makers == takers or 1 in (makers, takers), "no way to keep the order"
    channels = [Channel(capacity) for _ in range(max(makers, takers))]

    def ports(threads: int) -> list[Port]:
        if threads == 1:
            return [Port(channels)]
        return [Port([channel]) for channel in channels]

    return channels, ports(makers), ports(takers)
