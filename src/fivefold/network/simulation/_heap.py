"""Two binary heaps over plain arrays, for compiled loops.

The event queue is indexed: each slot (a task or a bundle) has at most one pending event, which can
be moved or taken out. The pair heap keeps (key, id) in a slice of a shared array, so that
thousands of small heaps need no memory of their own. Both break ties by the smaller id, which
makes every run repeatable. Neither knows what it holds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fivefold._compiler import njit
from fivefold.network.simulation._records import BLANK, EVENT, PENDING


def empty_queue(slots: int) -> Any:
    """A queue for the events of so many slots; EVENT [slots]."""
    events = np.zeros(slots, EVENT)
    events["place"] = BLANK
    return events


@njit
def _is_before(events: Any, left: int, right: int) -> bool:
    if events[left].time_s != events[right].time_s:
        return bool(events[left].time_s < events[right].time_s)
    return left < right


@njit
def _rise(events: Any, place: int) -> None:
    slot = events[place].order
    while place > 0:
        parent = (place - 1) >> 1
        other = events[parent].order
        if not _is_before(events, slot, other):
            break
        events[place].order = other
        events[other].place = place
        place = parent
    events[place].order = slot
    events[slot].place = place


@njit
def _sink(events: Any, place: int, size: int) -> None:
    slot = events[place].order
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and _is_before(events, events[child + 1].order, events[child].order):
            child += 1
        other = events[child].order
        if not _is_before(events, other, slot):
            break
        events[place].order = other
        events[other].place = place
        place = child
    events[place].order = slot
    events[slot].place = place


@njit
def schedule_event(events: Any, counts: Any, slot: int, time_s: float) -> None:
    """Set or move the event of a slot."""
    events[slot].time_s = time_s
    if events[slot].place < 0:
        place = counts[PENDING]
        counts[PENDING] += 1
        events[place].order = slot
        events[slot].place = place
    _rise(events, events[slot].place)
    _sink(events, events[slot].place, counts[PENDING])


@njit
def remove_event(events: Any, counts: Any, slot: int) -> None:
    """Take the event of a slot out, if it has one."""
    place = events[slot].place
    if place < 0:
        return
    counts[PENDING] -= 1
    size = counts[PENDING]
    events[slot].place = BLANK
    last = events[size].order
    if last != slot:
        events[place].order = last
        events[last].place = place
        _rise(events, place)
        _sink(events, events[last].place, size)


@njit
def push_pair(pairs: Any, start: int, size: int, pair: tuple[float, int]) -> None:
    """Add (key, id) to the heap of ``size`` pairs that begins at ``start``."""
    place = size
    while place > 0:
        parent = (place - 1) >> 1
        key, other = pairs[start + parent].key, pairs[start + parent].id
        if key < pair[0] or (key == pair[0] and other < pair[1]):
            break
        pairs[start + place].key = key
        pairs[start + place].id = other
        place = parent
    pairs[start + place].key = pair[0]
    pairs[start + place].id = pair[1]


@njit
def pop_pair(pairs: Any, start: int, size: int) -> None:
    """Take the least pair from the front of the heap; the caller has read it there."""
    last_key, last_id = pairs[start + size - 1].key, pairs[start + size - 1].id
    size -= 1
    place = 0
    while 2 * place + 1 < size:
        child = 2 * place + 1
        at = start + child
        if child + 1 < size and (
            pairs[at + 1].key < pairs[at].key
            or (pairs[at + 1].key == pairs[at].key and pairs[at + 1].id < pairs[at].id)
        ):
            child += 1
            at += 1
        if last_key < pairs[at].key or (last_key == pairs[at].key and last_id < pairs[at].id):
            break
        pairs[start + place].key = pairs[at].key
        pairs[start + place].id = pairs[at].id
        place = child
    pairs[start + place].key = last_key
    pairs[start + place].id = last_id
