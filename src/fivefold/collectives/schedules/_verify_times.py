"""Times against links: no transfer faster than its route, no link above its capacity.

The rule holds for all models of `evaluate`: a link that carries b bytes needs b / capacity
seconds for them, and a message needs the latency of its route besides. So for each link the
transfers that use it must fit between their starts and ends; in particular two that the serial
model puts one after another pass, and so do several that share a link at lower rates.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fivefold._compiler import njit
from fivefold.collectives.schedules._arrays import Array, Floats, Ints, Longs, rows_of
from fivefold.collectives.schedules._order import BY_TIMES
from fivefold.collectives.schedules._routes import RouteTable
from fivefold.collectives.schedules._schedule import Schedule, ScheduleError
from fivefold.errors import ConfigurationError
from fivefold.network.topology import Topology

_SLACK = 1e-6  # of a message's own time: solvers round more than sums of floats do


def size_of(schedule: Schedule, size_bytes: float | None) -> float:
    """Return the size given, or the one that the schedule was made for."""
    found = schedule.attributes.get("size_bytes") if size_bytes is None else size_bytes
    if found is None:
        message = "the schedule does not say for which size it was made"
        raise ConfigurationError(message, hint="pass size_bytes")
    return float(found)


Messages = tuple[Longs, Floats]


def messages_of(schedule: Schedule, transfer_bytes: Floats) -> Messages:
    """Find what travels as one message: (leader of each transfer, bytes of each leader).

    Transfers of the same source, target, start and end that leave on the same link are one; the
    first of them leads. Bytes of followers are 0.
    """
    count = schedule.num_transfers
    leaders = np.arange(count, dtype=np.int64)
    if schedule.starts_s is None or schedule.ends_s is None or count == 0:
        return leaders, transfer_bytes
    keys: tuple[Array, ...]
    keys = (schedule.ends_s, schedule.starts_s, schedule.targets, schedule.sources)
    if schedule.route_offsets is not None and schedule.route_links is not None:
        filled = np.minimum(schedule.route_offsets[:-1], schedule.route_links.size - 1)
        keys = (schedule.route_links[filled], *keys)  # parallel links carry messages side by side
    order = np.lexsort((leaders, *keys))
    changes = np.zeros(count, dtype=np.bool_)
    changes[0] = True
    for key in keys:
        changes[1:] |= key[order][1:] != key[order][:-1]
    # What takes no time needs no company, and may well carry on what came at the same instant.
    changes |= (schedule.starts_s == schedule.ends_s)[order]
    leaders[order] = order[np.maximum.accumulate(np.where(changes, np.arange(count), 0))]
    return leaders, np.bincount(leaders, transfer_bytes, count).astype(np.float64)


def check_times_against_order(schedule: Schedule) -> None:
    """Refuse a transfer that starts before what it sends has arrived.

    Where the times fix the order there is nothing to compare: the replay itself went by them.
    """
    if schedule.starts_s is None or schedule.ends_s is None or schedule.order_mode == BY_TIMES:
        return
    at = _first_hurried(
        schedule.slots(),
        schedule.starts_s,
        schedule.ends_s,
        np.ascontiguousarray(schedule.steps),
        (schedule.collective.reducing, 1e-9 * float(schedule.ends_s.max(initial=0.0))),
    )
    if at >= 0:
        move = schedule.transfer(at)
        raise ScheduleError(
            f"transfer {at} of chunk {move.chunk} starts at {move.start_s:.6g} s, before all that "
            f"rank {move.source} has to send has arrived",
            hint="a transfer starts when those of earlier steps that it needs have ended",
            transfer=at,
        )


def check_times_against_links(
    schedule: Schedule, topology: Topology, routes: RouteTable, *, size_bytes: float | None
) -> None:
    """Refuse times that no network of these latencies and capacities can keep."""
    if schedule.starts_s is None or schedule.ends_s is None:
        message = "the schedule has no times to check"
        raise ConfigurationError(message, hint="evaluate() gives some")
    size = size_of(schedule, size_bytes)
    transfer_bytes = schedule.collective.chunk_bytes(size)[schedule.chunks]
    leaders, message_bytes = messages_of(schedule, transfer_bytes)
    legs, first_legs = routes.legs()
    latencies_s = _running(legs.latencies_s(topology.latencies_s))
    per_byte_s = _running(1.0 / legs.capacities_bytes_per_s(topology.capacities_bytes_per_s))
    begins, ends = first_legs[routes.rows], first_legs[routes.rows + 1]
    least_s = latencies_s[ends] - latencies_s[begins]
    least_s = least_s + message_bytes * (per_byte_s[ends] - per_byte_s[begins])
    lasts_s = schedule.ends_s - schedule.starts_s
    horizon_s = float(schedule.ends_s.max(initial=0.0))
    leading = leaders == np.arange(leaders.size)
    fast = leading & (lasts_s < least_s * (1 - _SLACK) - 1e-12 * horizon_s)
    if fast.any():
        at = int(np.argmax(fast))
        raise ScheduleError(
            f"transfer {at} takes {lasts_s[at]:.6g} s, but its route needs {least_s[at]:.6g} s",
            hint="a message needs its route's latency, and its bytes over the least capacity; a "
            "rank on its way receives all of it before it sends it on",
            transfer=at,
        )
    _check_room(schedule, topology, routes, np.flatnonzero(leading), message_bytes)


def _check_room(
    schedule: Schedule,
    topology: Topology,
    routes: RouteTable,
    leading: Longs,
    message_bytes: Floats,
) -> None:
    """On every link the messages must fit one after another between their starts and ends."""
    assert schedule.starts_s is not None, "times were checked before"
    assert schedule.ends_s is not None, "times were checked before"
    offsets, places = rows_of(routes.offsets, routes.rows[leading])
    owner = np.repeat(leading, np.diff(offsets))
    links = routes.links[places]
    legs, first_legs = routes.legs()
    leg = np.repeat(legs.rows, np.diff(legs.offsets))[places]
    begins, last = first_legs[routes.rows[owner]], first_legs[routes.rows[owner] + 1]
    latencies_s = _running(legs.latencies_s(topology.latencies_s))
    per_byte_s = _running(1.0 / legs.capacities_bytes_per_s(topology.capacities_bytes_per_s))
    needs_s = message_bytes[owner] / topology.capacities_bytes_per_s[links]
    # After the legs before, and early enough for its own latency and the legs behind.
    before_s = latencies_s[leg] - latencies_s[begins]
    before_s += message_bytes[owner] * (per_byte_s[leg] - per_byte_s[begins])
    behind_s = latencies_s[last] - latencies_s[leg]
    behind_s += message_bytes[owner] * (per_byte_s[last] - per_byte_s[leg + 1])
    starts_s = schedule.starts_s[owner] + before_s
    ends_s = np.maximum(schedule.ends_s[owner] - behind_s, starts_s)  # the last byte left by then
    order = np.lexsort((starts_s, links))
    late = first_overload(links[order], starts_s[order], ends_s[order], needs_s[order])
    if late[0] >= 0:
        at, link = int(owner[order[late[0]]]), int(links[order[late[0]]])
        name = f"{topology.links[link].source} -> {topology.links[link].target}"
        raise ScheduleError(
            f"link {link}, {name}, cannot carry all that is on it by the end of transfer {at}: "
            f"{late[1]:.6g} s more are needed",
            hint="start the transfer later, or take another link",
            transfer=at,
        )


def _running(values: Floats) -> Floats:
    """Return the sums of the first 0, 1, 2, ... values."""
    return np.concatenate([[0.0], np.cumsum(values)])


@njit
def _sift(heap: Any, size: int, ends_s: Any) -> None:
    """Restore the heap of earliest ends after its first entry changed."""
    place = 0
    while 2 * place + 1 < size:
        below = 2 * place + 1
        if below + 1 < size and ends_s[heap[below + 1]] < ends_s[heap[below]]:
            below += 1
        if ends_s[heap[place]] <= ends_s[heap[below]]:
            return
        heap[place], heap[below] = heap[below], heap[place]
        place = below


@njit
def _push(heap: Any, size: int, ends_s: Any) -> None:
    place = size - 1
    while place > 0 and ends_s[heap[place]] < ends_s[heap[(place - 1) // 2]]:
        above = (place - 1) // 2
        heap[place], heap[above] = heap[above], heap[place]
        place = above


@njit
def first_overload(links: Array, starts_s: Array, ends_s: Array, needs_s: Array) -> Any:
    """Return the first message that cannot be done by its end, link by link, earliest end first.

    Earliest deadline first with interruption is optimal on one machine: if it fails, no sharing of
    the link's capacity keeps the times.
    """
    count = links.size
    heap = np.empty(count, np.int64)
    left_s = needs_s.copy()
    first = 0
    while first < count:
        last = first
        while last < count and links[last] == links[first]:
            last += 1
        size, following, now_s = 0, first, 0.0
        while size > 0 or following < last:
            if size == 0:
                now_s = max(now_s, starts_s[following])
            while following < last and starts_s[following] <= now_s:
                heap[size] = following
                size += 1
                _push(heap, size, ends_s)
                following += 1
            top = heap[0]
            until_s = now_s + left_s[top]
            if following < last and starts_s[following] < until_s:
                left_s[top] -= starts_s[following] - now_s
                now_s = starts_s[following]
                continue
            now_s = until_s
            late_s = now_s - ends_s[top]
            if late_s > _SLACK * (needs_s[top] + 1e-6 * now_s) + 1e-12 * now_s:
                return top, late_s
            size -= 1
            heap[0] = heap[size]
            _sift(heap, size, ends_s)
        first = last
    return -1, 0.0


@njit
def _first_hurried(
    slots: tuple[Any, Any, Any, Any],
    starts_s: Floats,
    ends_s: Floats,
    steps: Ints,
    shape: tuple[int, float],
) -> int:
    """Find the first transfer that starts before what it reads has arrived; -1 for none.

    A copied chunk is there from its first arrival; a sum is whole when all that was added in
    earlier steps has arrived.
    """
    read, written, filled, order = slots
    reducing, slack_s = shape
    ready_s = np.where(filled, 0.0, np.inf)
    first = 0
    while first < order.size:
        last = first + 1
        if steps[order[first]] >= 0:
            while last < order.size and steps[order[last]] == steps[order[first]]:
                last += 1
        for place in range(first, last):
            index = order[place]
            if starts_s[index] + slack_s < ready_s[read[index]]:
                return int(index)
        for place in range(first, last):
            index = order[place]
            slot = written[index]
            if reducing and np.isfinite(ready_s[slot]):
                ready_s[slot] = max(ready_s[slot], ends_s[index])
            else:
                ready_s[slot] = min(ready_s[slot], ends_s[index])
        first = last
    return -1
