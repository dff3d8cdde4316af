"""Hot loops that put a schedule's transfers in the order in which they take effect.

A table over all chunks and ranks would have 68 billion entries for an all-to-all of 4,096 ranks;
the pairs that are really read or written are as many as transfers. So each transfer gets the slot
it reads and the slot it writes, and whoever follows values through a schedule keeps one number
for each slot.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fivefold._compiler import njit
from fivefold.collectives.schedules._arrays import Array, Longs

LISTED, BY_STEPS, BY_TIMES = 0, 1, 2  # what orders the transfers


@njit
def group_by_key(keys: Array, count: int) -> tuple[Longs, Longs]:
    """Group the positions of the keys 0..count-1, in their old order: (offsets, positions)."""
    offsets = np.zeros(count + 1, np.int64)
    for key in keys:
        offsets[key + 1] += 1
    for key in range(count):
        offsets[key + 1] += offsets[key]
    fill = offsets[:-1].copy()
    positions = np.empty(keys.size, np.int64)
    for index in range(keys.size):
        positions[fill[keys[index]]] = index
        fill[keys[index]] += 1
    return offsets, positions


@njit
def _by_steps(members: Any, steps: Any, events: Any) -> None:
    """Reads of a step before its writes: events 2 * m + (0 reads, 1 writes) of member m."""
    count = members.size
    sorted_already = True
    for m in range(1, count):
        if steps[members[m]] < steps[members[m - 1]]:
            sorted_already = False
    order = np.arange(count)
    if not sorted_already:
        keys = np.empty(count, np.int64)
        for m in range(count):
            keys[m] = np.int64(steps[members[m]]) * count + m
        order = np.argsort(keys)
    first, place = 0, 0
    while first < count:
        last = first
        while last < count and steps[members[order[last]]] == steps[members[order[first]]]:
            last += 1
        for half in range(2):
            for m in range(first, last):
                events[place] = 2 * order[m] + half
                place += 1
        first = last


@njit
def _by_times(members: Any, times: tuple[Any, Any], slack_s: float, events: Any) -> None:
    """In order of time; a write counts before a read that starts within the slack after it."""
    starts_s, ends_s = times
    count = members.size
    instants = np.empty(2 * count, np.float64)
    for m in range(count):
        instants[2 * m] = starts_s[members[m]] + slack_s
        instants[2 * m + 1] = ends_s[members[m]]
        # Too short to tell: both at one instant, where the stable sort keeps the listed order.
        instants[2 * m + 1] = max(instants[2 * m + 1], instants[2 * m])
    order = np.argsort(instants, kind="mergesort")
    for place in range(2 * count):
        events[place] = order[place]


@njit
def order_events(
    members: Any, steps: Any, times: tuple[Any, Any], mode: int, slack_s: float
) -> Any:
    """Reads and writes of one chunk's transfers in the order in which they take effect.

    2 * m is the read and 2 * m + 1 the write of member m.
    """
    events = np.empty(2 * members.size, np.int64)
    if mode == 1:
        _by_steps(members, steps, events)
    elif mode == 2:
        _by_times(members, times, slack_s, events)
    else:
        for place in range(2 * members.size):
            events[place] = place
    return events


@njit
def number_slots(
    grouped: tuple[Any, Any], sources: Any, targets: Any, pre: tuple[Any, Any], num_ranks: int
) -> tuple[Any, Any, Any]:
    """Number the slots that transfers read and write, and note which are filled at first."""
    offsets, positions = grouped
    count = sources.size
    read, written = np.empty(count, np.int32), np.empty(count, np.int32)
    filled = np.zeros(2 * count, np.bool_)
    slot_of = np.full(num_ranks, -1, np.int32)
    last = 0
    for chunk in range(offsets.size - 1):
        members = positions[offsets[chunk] : offsets[chunk + 1]]
        first = last
        for index in members:
            for source in (True, False):
                rank = sources[index] if source else targets[index]
                if slot_of[rank] < 0:
                    slot_of[rank] = last
                    last += 1
                if source:
                    read[index] = slot_of[rank]
                else:
                    written[index] = slot_of[rank]
        if last > first:
            for holder in pre[1][pre[0][chunk] : pre[0][chunk + 1]]:
                if slot_of[holder] >= 0:
                    filled[slot_of[holder]] = True
        for index in members:
            slot_of[sources[index]] = -1
            slot_of[targets[index]] = -1
    return read, written, filled[:last].copy()
