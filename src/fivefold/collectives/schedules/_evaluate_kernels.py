"""List scheduling in one pass: each message starts when its chunks and all its links are free."""

from __future__ import annotations

from typing import Any

import numpy as np

from fivefold._compiler import njit


@njit
def _fold(slot: Any, step: Any, ready_s: Any, pending: tuple[Any, Any], reducing: int) -> float:
    """When the slot's value was whole, counting only what steps before this one wrote."""
    arrived_s, written_in = pending
    if written_in[slot] >= 0 and (step < 0 or written_in[slot] < step):
        if reducing and np.isfinite(ready_s[slot]):
            ready_s[slot] = max(ready_s[slot], arrived_s[slot])
        else:
            ready_s[slot] = min(ready_s[slot], arrived_s[slot])
        written_in[slot] = -1
    return float(ready_s[slot])


@njit
def _deliver(
    slot: Any, step: Any, end_s: float, ready_s: Any, pending: tuple[Any, Any], reducing: int
) -> None:
    arrived_s, written_in = pending
    _fold(slot, step, ready_s, pending, reducing)
    if written_in[slot] < 0:
        arrived_s[slot] = end_s
        written_in[slot] = max(step, 0)
    elif reducing:
        arrived_s[slot] = max(arrived_s[slot], end_s)
    else:
        arrived_s[slot] = min(arrived_s[slot], end_s)


@njit
def _occupy(
    route: Any, start_s: float, held_s: float, size: float, links: tuple[Any, Any, Any]
) -> None:
    free_s, busy_s, capacities = links
    for link in route:
        lasts_s = held_s + size / capacities[link]
        free_s[link] = start_s + lasts_s
        busy_s[link] += lasts_s


@njit
def list_schedule(
    messages: tuple[Any, Any],
    slots: tuple[Any, Any, Any],
    routes: tuple[Any, Any, Any, Any],
    costs: tuple[Any, Any, Any],
    transfers: tuple[Any, Any, Any],
    shape: tuple[int, int],
) -> tuple[Any, Any, Any, int]:
    """Times of all transfers, in the order of the messages.

    Args:
        messages: Offsets and members (transfers) of each message, in order of priority.
        slots: Slot read, slot written, slots filled at first.
        routes: Row of each transfer, first leg of each row, offsets and links of each leg.
        costs: Latency and smallest capacity of each leg, capacity of each link.
        transfers: Chunk and step of each transfer, bytes of each chunk.
        shape: Whether chunks are summed; whether latency keeps links busy (serial).

    Returns:
        Starts, ends, busy seconds of each link, and the first transfer whose source never held
        the chunk, or -1.
    """
    offsets, members = messages
    read, written, filled = slots
    rows, first_legs, leg_offsets, leg_links = routes
    latencies_s, narrowest, capacities = costs
    chunks, steps, chunk_bytes = transfers
    reducing, serial = shape
    starts_s, ends_s = np.zeros(rows.size), np.zeros(rows.size)
    ready_s = np.where(filled, 0.0, np.inf)
    pending = (np.zeros(filled.size), np.full(filled.size, -1, np.int32))
    last_read_s = np.zeros(filled.size if reducing else 0)
    links = (np.zeros(capacities.size), np.zeros(capacities.size), capacities)
    for message in range(offsets.size - 1):
        first, last = offsets[message], offsets[message + 1]
        row = rows[members[first]]
        start_s, size = 0.0, 0.0
        for place in range(first, last):
            index = members[place]
            start_s = max(start_s, _fold(read[index], steps[index], ready_s, pending, reducing))
            size += chunk_bytes[chunks[index]]
            if reducing:  # what is read must not be overwritten before
                start_s = max(start_s, last_read_s[written[index]])
        if not np.isfinite(start_s):
            return starts_s, ends_s, links[1], members[first]
        end_s = start_s
        for leg in range(first_legs[row], first_legs[row + 1]):
            route = leg_links[leg_offsets[leg] : leg_offsets[leg + 1]]
            for link in route:
                end_s = max(end_s, links[0][link])
            if leg == first_legs[row]:
                start_s = end_s
            _occupy(route, end_s, latencies_s[leg] if serial else 0.0, size, links)
            end_s += latencies_s[leg] + size / narrowest[leg]
        for place in range(first, last):
            index = members[place]
            starts_s[index], ends_s[index] = start_s, end_s
            _deliver(written[index], steps[index], end_s, ready_s, pending, reducing)
            if reducing:
                last_read_s[read[index]] = max(last_read_s[read[index]], start_s)
    return starts_s, ends_s, links[1], -1
