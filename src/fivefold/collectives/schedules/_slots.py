"""Slots: one number for each (chunk, rank) that a schedule touches, and what depends on what.

A table over all chunks and ranks would have 68 billion entries for an all-to-all of 4,096 ranks;
the pairs that are really read or written are as many as transfers. So each transfer gets the slot
it reads and the slot it writes, and whoever follows values through a schedule keeps one number
for each slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fivefold._compiler import njit
from fivefold.collectives.schedules._arrays import Array, Floats, Ints, Longs
from fivefold.collectives.schedules._order_kernels import group_by_key, order_events
from fivefold.collectives.schedules._schedule import Schedule


def order_of(schedule: Schedule) -> int:
    """What orders the transfers: 1 steps, 2 times, 0 the listed order."""
    if schedule.has_steps:
        return 1
    return 2 if schedule.has_times else 0


def event_order(schedule: Schedule) -> Longs:
    """Return the order in which a schedule's transfers read and write, as `verify` replays it.

    Args:
        schedule: The schedule.

    Returns:
        2 * t where transfer t reads its chunk at the source and 2 * t + 1 where it writes it at the
        target, int64 [2 T].

    Examples:
        >>> from fivefold.collectives.schedules import Transfer, all_gather
        >>> swap = [
        ...     Transfer(chunk=rank, source=rank, target=1 - rank, step=0) for rank in range(2)
        ... ]
        >>> event_order(Schedule.from_transfers(swap, collective=all_gather(2))).tolist()
        [0, 2, 1, 3]
    """
    times = (np.zeros(0), np.zeros(0))
    if schedule.starts_s is not None and schedule.ends_s is not None:
        # Times of one moment are sums formed in different ways. Made equal here, they keep the
        # listed order; the kernel's slack, a thousand times wider, decides as in `verify`.
        unit = max(float(schedule.ends_s.max(initial=0.0)), 1e-300)
        times = (np.round(schedule.starts_s / unit, 12), np.round(schedule.ends_s / unit, 12))
    events: Longs = order_events(
        np.arange(schedule.num_transfers, dtype=np.int64),
        np.ascontiguousarray(schedule.steps),
        times,
        order_of(schedule),
        1e-9,
    )
    return events


Slots = tuple[Ints, Ints, Array, Longs]


def slots_of(schedule: Schedule) -> Slots:
    """Slot that each transfer reads, slot that it writes, slots filled at first, and the order.

    Returns:
        int32 [T] and int32 [T]; bool [slots]; the transfers in listed order, or sorted by step or
        start where there are such, int64 [T].
    """
    collective = schedule.collective
    grouped = group_by_key(schedule.chunks, collective.num_chunks)
    read, written, filled = _number_slots(
        grouped,
        schedule.sources,
        schedule.targets,
        (collective.pre_offsets, collective.pre_ranks),
        collective.num_ranks,
    )
    keys = {0: None, 1: schedule.steps, 2: schedule.starts_s}[order_of(schedule)]
    order = np.arange(schedule.num_transfers, dtype=np.int64)
    if keys is not None and (keys[1:] < keys[:-1]).any():
        order = np.argsort(keys, kind="stable")
    return read, written, filled, order


def wanted_slots(schedule: Schedule) -> Array:
    """Whether the postcondition asks for each slot of `slots_of`; bool [slots]."""
    collective = schedule.collective
    _, _, wanted = _number_slots(
        group_by_key(schedule.chunks, collective.num_chunks),
        schedule.sources,
        schedule.targets,
        (collective.post_offsets, collective.post_ranks),
        collective.num_ranks,
    )
    return np.asarray(wanted)


@njit
def _number_slots(
    grouped: tuple[Any, Any], sources: Any, targets: Any, pre: tuple[Any, Any], num_ranks: int
) -> tuple[Any, Any, Any]:
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


@njit
def first_hurried(
    slots: tuple[Any, Any, Any, Any],
    starts_s: Floats,
    ends_s: Floats,
    steps: Ints,
    shape: tuple[int, float],
) -> int:
    """First transfer, in order, that starts before what it reads has arrived; -1 for none.

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


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """Which transfers must have arrived before each one may start.

    Args:
        offsets: Where the dependencies of each transfer begin in ``transfers``, int64 [T + 1].
        transfers: Indices of the transfers waited for, int64.

    Examples:
        >>> Dependencies(offsets=np.array([0, 0, 1]), transfers=np.array([0])).of(1).tolist()
        [0]
    """

    offsets: Longs
    transfers: Longs

    def of(self, transfer: int) -> Longs:
        """Transfers that this one waits for."""
        return self.transfers[self.offsets[transfer] : self.offsets[transfer + 1]]


def dependencies(schedule: Schedule) -> Dependencies:
    """What each transfer waits for at its source.

    A copied chunk waits for its first arrival in order, a sum for everything that was added to it
    since the last copy. A rank that holds a chunk at first waits for nothing to send it on.

    Args:
        schedule: A schedule that `verify` accepts.

    Returns:
        The dependencies, in the order in which they take effect.

    Examples:
        >>> from fivefold.collectives.schedules import Transfer, broadcast
        >>> moves = [Transfer(chunk=0, source=0, target=1), Transfer(chunk=0, source=1, target=2)]
        >>> waits = dependencies(Schedule.from_transfers(moves, collective=broadcast(3)))
        >>> waits.of(0).tolist(), waits.of(1).tolist()
        ([], [0])
    """
    collective = schedule.collective
    none = np.zeros(0)
    offsets, transfers = _find_dependencies(
        group_by_key(schedule.chunks, collective.num_chunks),
        (schedule.sources, schedule.targets, np.ascontiguousarray(schedule.reduces)),
        (
            np.ascontiguousarray(schedule.steps),
            none if schedule.starts_s is None else schedule.starts_s,
            none if schedule.ends_s is None else schedule.ends_s,
        ),
        (collective.pre_offsets, collective.pre_ranks),
        (
            collective.num_ranks,
            order_of(schedule),
            int(collective.reducing),
            0.0 if schedule.ends_s is None else 1e-9 * float(schedule.ends_s.max(initial=0.0)),
        ),
    )
    return Dependencies(offsets=offsets, transfers=transfers)


@njit
def _trace_chunk(
    events: Any,
    members: Any,
    transfers: tuple[Any, Any, Any, int],
    chains: tuple[Any, Any, Any, Any],
) -> None:
    """Chain the writes at each rank: what a read finds is the last write and how many count."""
    sources, targets, reduces, reducing = transfers
    newest, before, length, waits = chains
    for event in events:
        index = members[event >> 1]
        if event & 1 == 0:
            waits[index, 0] = max(length[sources[index]], 0)
            waits[index, 1] = newest[sources[index]]
            continue
        target = targets[index]
        if length[target] < 0 or (not reducing and length[target] > 0):
            continue  # a copy of what is there already
        if not reduces[index]:
            length[target] = 0
        before[index] = newest[target]
        newest[target] = index
        length[target] += 1


@njit
def _find_dependencies(
    grouped: tuple[Any, Any],
    transfers: tuple[Any, Any, Any],
    timing: tuple[Any, Any, Any],
    pre: tuple[Any, Any],
    shape: tuple[int, int, int, float],
) -> tuple[Any, Any]:
    """How many writes each transfer waits for and the last of them, then their chains as lists."""
    sources, targets, reduces = transfers
    num_ranks, mode, reducing, slack_s = shape
    offsets, positions = grouped
    newest = np.full(num_ranks, -1, np.int64)  # last write at each rank
    length = np.zeros(num_ranks, np.int64)  # writes that count; -1: held at first
    before = np.full(sources.size, -1, np.int64)  # the write before each write at the same rank
    waits = np.zeros((sources.size, 2), np.int64)  # how many, and the last of them
    for chunk in range(offsets.size - 1):
        members = positions[offsets[chunk] : offsets[chunk + 1]]
        if members.size == 0:
            continue
        holders = pre[1][pre[0][chunk] : pre[0][chunk + 1]]
        if not reducing:
            length[holders] = -1
        events = order_events(members, timing[0], (timing[1], timing[2]), mode, slack_s)
        moves = (sources, targets, reduces, reducing)
        _trace_chunk(events, members, moves, (newest, before, length, waits))
        length[holders] = 0
        for index in members:
            length[targets[index]], newest[targets[index]] = 0, -1
    found = np.zeros(sources.size + 1, np.int64)
    found[1:] = np.cumsum(waits[:, 0])
    listed = np.empty(found[-1], np.int64)
    for index in range(sources.size):
        writer = waits[index, 1]
        for place in range(waits[index, 0]):
            listed[found[index + 1] - 1 - place] = writer
            writer = before[writer]
    return found, listed
