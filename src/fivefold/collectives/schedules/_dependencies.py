"""The order of a schedule's reads and writes, and which transfers each one waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fivefold._compiler import njit
from fivefold.collectives.schedules._arrays import Longs
from fivefold.collectives.schedules._order import group_by_key, order_events
from fivefold.collectives.schedules._schedule import Schedule


def event_order(schedule: Schedule) -> Longs:
    """Return the order in which a schedule's transfers read and write, as `verify` replays it.

    Args:
        schedule: The schedule.

    Returns:
        2 * t where transfer t reads its chunk at the source and 2 * t + 1 where it writes it at the
        target, int64 [2 T].
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
        schedule.order_mode,
        1e-9,
    )
    return events


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """Which transfers must have arrived before each one may start.

    Args:
        offsets: Where the dependencies of each transfer begin in ``transfers``, int64 [T + 1].
        transfers: Indices of the transfers waited for, int64.
    """

    offsets: Longs
    transfers: Longs

    def of(self, transfer: int) -> Longs:
        """Return the transfers that this one waits for."""
        return self.transfers[self.offsets[transfer] : self.offsets[transfer + 1]]


def dependencies(schedule: Schedule) -> Dependencies:
    """Find what each transfer waits for at its source.

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
            schedule.order_mode,
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
    """Count the writes each transfer waits for, then list their chains."""
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
