"""A heap of events, the earliest first, for compiled loops: times and items in two arrays."""

from __future__ import annotations

from typing import Any

from fivefold._compiler import njit


@njit
def push_event(heap: tuple[Any, Any], size: int, time_s: float, item: int) -> int:
    """Put an event into a heap of this size; gives the new size."""
    times_s, items = heap
    place = size
    while place > 0:
        above = (place - 1) >> 1
        if times_s[above] <= time_s:
            break
        times_s[place], items[place] = times_s[above], items[above]
        place = above
    times_s[place], items[place] = time_s, item
    return size + 1


@njit
def pop_event(heap: tuple[Any, Any], size: int) -> int:
    """Remove the first event, which stands at place 0; gives the new size."""
    times_s, items = heap
    size -= 1
    time_s, item = times_s[size], items[size]
    place = 0
    while 2 * place + 1 < size:
        below = 2 * place + 1
        if below + 1 < size and times_s[below + 1] < times_s[below]:
            below += 1
        if times_s[below] >= time_s:
            break
        times_s[place], items[place] = times_s[below], items[below]
        place = below
    times_s[place], items[place] = time_s, item
    return size
