"""Hot loops that put a schedule's transfers in the order in which they take effect."""

from __future__ import annotations

from typing import Any

import numpy as np

from fivefold._compiler import njit
from fivefold.collectives.schedules._arrays import Array, Longs


@njit
def group_by_key(keys: Array, count: int) -> tuple[Longs, Longs]:
    """Positions of the keys 0..count-1, grouped and in their old order: (offsets, positions)."""
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

    Args:
        members: Transfers of the chunk, in listed order.
        steps: Step of every transfer.
        times: Starts and ends of every transfer.
        mode: 0 listed order, 1 by steps, 2 by times.
        slack_s: Rounding that times may have.

    Returns:
        2 * m for the read and 2 * m + 1 for the write of member m.
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
