"""Times for transfers whose routes are known: whoever is ready and finds its links free goes.

A schedule by steps has no order within a step, and behind switches the listed order makes
transfers wait needlessly. Here every rank keeps the transfers that it could send now, in order of
priority, and sends the first whose whole route is free.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fivefold._compiler import njit
from fivefold.collectives.schedules import Schedule
from fivefold.collectives.schedules.arrays import group_by_key, pop_event, push_event
from fivefold.collectives.schedules.routes import route_table
from fivefold.collectives.schedules.timing import dependencies

_WINDOW = 256  # ready transfers of one port that are looked at for a free route


def dispatch(schedule: Schedule, *, size_bytes: float, by_load: bool = False) -> Schedule:
    """Return the same transfers with times in the serial model, listed by their starts."""
    topology, offsets, links = schedule.topology, schedule.route_offsets, schedule.route_links
    assert topology is not None, "transfers are dispatched on their topology"
    assert offsets is not None, "on their own routes"
    assert links is not None, "on their own routes"
    assert not schedule.collective.reducing, "sums are inverses of what is dispatched"
    waits = dependencies(schedule)
    before = np.full(schedule.num_transfers, -1, np.int64)
    waiting = np.diff(waits.offsets) > 0
    before[waiting] = waits.transfers[waits.offsets[:-1][waiting]]
    sizes = schedule.collective.chunk_bytes(size_bytes)[schedule.chunks]
    routes = route_table(schedule, topology)
    latencies_s = routes.latencies_s(topology.latencies_s)
    lasts_s = sizes / routes.capacities_bytes_per_s(topology.capacities_bytes_per_s) + latencies_s
    owner = np.repeat(np.arange(schedule.num_transfers), np.diff(offsets))
    busy_s = latencies_s[owner] + sizes[owner] / topology.capacities_bytes_per_s[links]
    left_s = np.bincount(links, busy_s, topology.num_links) if by_load else np.zeros(0)
    starts_s, ends_s = _run(
        before, (offsets, links, busy_s), lasts_s, left_s.astype(np.float64), topology.num_links
    )
    order = np.argsort(starts_s, kind="stable")
    return schedule.selected(
        order,
        reduces=None,
        steps=None,
        starts_s=starts_s[order],
        ends_s=ends_s[order],
        attributes={**schedule.attributes, "model": "serial", "size_bytes": float(size_bytes)},
    )


@njit
def _insert(queues: Any, ends: tuple[Any, Any, Any], port: int, number: int) -> None:
    """Put a transfer into its port's queue, which is sorted by number, from the nearer side."""
    begins, heads, tails = ends
    low, high = heads[port], tails[port]
    while low < high:
        middle = (low + high) // 2
        if queues[middle] < number:
            low = middle + 1
        else:
            high = middle
    if heads[port] > begins[port] and low - heads[port] < tails[port] - low:
        heads[port] -= 1
        for place in range(heads[port], low - 1):
            queues[place] = queues[place + 1]
        queues[low - 1] = number
    else:
        for place in range(tails[port], low, -1):
            queues[place] = queues[place - 1]
        queues[low] = number
        tails[port] += 1


@njit
def _first_free(
    queues: Any,
    span: tuple[int, int],
    routes: tuple[Any, Any, Any],
    free_s: Any,
    now_s: float,
    left: Any,
) -> int:
    """Return the place of a queue's transfer to start, all links of which are free; -1: none.

    The first, or where ``left`` is given the one over the link with most left to carry.
    """
    offsets, links, _ = routes
    best, most = -1, -1.0
    for place in range(span[0], min(span[1], span[0] + _WINDOW)):
        number = queues[place]
        ready, load = True, 0.0
        for hop in range(offsets[number], offsets[number + 1]):
            if free_s[links[hop]] > now_s:
                ready = False
                break
            # The first link is the same for all of them.
            if len(left) and hop > offsets[number]:
                load = max(load, left[links[hop]])
        if ready and len(left) == 0:
            return place
        if ready and load > most:
            best, most = place, load
    return best


@njit
def _serve(
    port: int,
    now_s: float,
    ready: tuple[Any, Any],
    routes: tuple[Any, Any, Any],
    lasts_s: Any,
    result: tuple[Any, Any, Any, Any],
    events: tuple[Any, int],
) -> int:
    """Start what the port can send now; the number of events then."""
    queues, (_, heads, tails) = ready
    starts_s, ends_s, free_s, left = result
    heap, waiting = events
    while heads[port] < tails[port] and free_s[port] <= now_s:
        span = (heads[port], tails[port])
        place = _first_free(queues, span, routes, free_s, now_s, left)
        if place < 0:
            break
        number = queues[place]
        for later in range(place, heads[port], -1):  # it stands near the front
            queues[later] = queues[later - 1]
        heads[port] += 1
        starts_s[number], ends_s[number] = now_s, now_s + lasts_s[number]
        waiting = push_event(heap, waiting, ends_s[number], number)
        for hop in range(routes[0][number], routes[0][number + 1]):
            link = routes[1][hop]
            free_s[link] = now_s + routes[2][hop]
            if len(left):
                left[link] -= routes[2][hop]
            if free_s[link] < ends_s[number]:
                waiting = push_event(heap, waiting, free_s[link], -1)
    return waiting


@njit
def _run(
    before: Any, routes: tuple[Any, Any, Any], lasts_s: Any, left: Any, num_links: int
) -> tuple[Any, Any]:
    """Return the starts and arrivals of all transfers."""
    count = len(before)
    after, members = group_by_key(before + 1, count + 1)  # key 0: wait for nobody
    port_of = routes[1][routes[0][:-1]]
    begins, _ = group_by_key(port_of, num_links)
    queues, ends = np.empty(count, np.int64), (begins, begins[:-1].copy(), begins[:-1].copy())
    for number in range(count):
        if before[number] < 0:
            _insert(queues, ends, port_of[number], number)
    result = (np.zeros(count), np.zeros(count), np.zeros(num_links), left)
    room = len(routes[1]) + count + 1
    heap, waiting, now_s = (np.empty(room), np.empty(room, np.int64)), 0, 0.0
    while True:
        # Whoever has most left to send goes first where that counts.
        ports = np.argsort(-left) if len(left) else np.arange(num_links)
        for port in ports:
            waiting = _serve(port, now_s, (queues, ends), routes, lasts_s, result, (heap, waiting))
        if waiting == 0:
            return result[0], result[1]
        # What differs by rounding only happens together, and now is the last of it.
        together_s = heap[0][0] * (1 + 1e-12)
        while waiting and heap[0][0] <= together_s:
            now_s, item = heap[0][0], heap[1][0]
            waiting = pop_event(heap, waiting)
            if item >= 0:
                for place in range(after[item + 1], after[item + 2]):
                    _insert(queues, ends, port_of[members[place]], members[place])
