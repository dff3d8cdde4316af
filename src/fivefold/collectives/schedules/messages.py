"""Which transfers travel together: one message pays its latency once, however many chunks it has.

In a schedule the transfers of a message are listed one after another; here it is checked that they
may be one, found which a step could join, and read from times where a schedule says no more. What
is called ``schedule`` is a `Schedule`, whose module imports this one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fivefold._compiler import njit
from fivefold.collectives.schedules.arrays import Array, Ints, Longs, frozen, of_one_kind
from fivefold.errors import ConfigurationError


def runs_of(numbers: Array) -> Ints:
    """Number the runs of equal numbers from 0 up, int32."""
    found = np.zeros(numbers.size, dtype=np.int32)
    np.cumsum(numbers[1:] != numbers[:-1], out=found[1:])
    return found


def checked_messages(messages: ArrayLike, schedule: Any) -> Ints:
    """Return the messages, read-only; refuse transfers that cannot be one."""
    given = frozen(messages, np.int32)
    if given.shape != (schedule.num_transfers,):
        raise ConfigurationError(
            f"messages has the shape {given.shape}, but there are {schedule.num_transfers} chunks",
            hint="give one entry for each transfer",
        )
    if not np.array_equal(given, runs_of(given)):
        raise ConfigurationError(
            f"messages are {given!r:.80}, not numbered as listed",
            hint="list the transfers of a message one after another; number messages from 0",
        )
    later = np.flatnonzero(given[1:] == given[:-1]) + 1  # in the message of the one before
    for name, key in _shared(schedule):
        apart = later[key[later] != key[later - 1]]
        if apart.size:
            at = int(apart[0])
            raise ConfigurationError(
                f"transfers {at - 1} and {at} are one message, but differ in {name}",
                hint="a message has one source, target, step, time and route, and adds or copies",
            )
    return given


def _shared(schedule: Any) -> list[tuple[str, Array]]:
    """Return what the transfers of a message have in common; routes as numbers."""
    names = ("sources", "targets", "steps", "reduces", "starts_s", "ends_s")
    found = [(name, array) for name in names if (array := getattr(schedule, name)) is not None]
    return [*found, *[("routes", keys) for keys in _route_keys(schedule)]]


def _route_keys(schedule: Any) -> list[Array]:
    """Return numbers that are equal only where routes are; none where all are the shortest."""
    offsets, links = schedule.route_offsets, schedule.route_links
    if offsets is None or links is None:
        return []
    lengths = np.diff(offsets)
    place = np.arange(links.size) - np.repeat(offsets[:-1], lengths)
    keys = []
    for hop in range(int(lengths.max(initial=0))):
        key = np.full(lengths.size, -1, dtype=np.int32)
        key[lengths > hop] = links[place == hop]
        keys.append(key)
    return keys


def step_messages(schedule: Any) -> tuple[Longs, Ints] | None:
    """Join what each step sends from one rank to another, over one route, adding or copying.

    Returns:
        The order in which the transfers of a message follow one another, messages by their first
        transfer, int64 [T]; the message of each, in that order, int32 [T]. None for nothing to
        join.
    """
    keys = [schedule.reduces, *_route_keys(schedule)]
    plain = not schedule.has_routes and (schedule.reduces == schedule.reduces[:1]).all()
    if plain and (schedule.steps[1:] >= schedule.steps[:-1]).all():
        ends = of_one_kind(schedule.steps, schedule.sources, schedule.targets)
        leaders = _leaders_of_sorted_steps(*ends, schedule.collective.num_ranks)
    else:
        keys += [schedule.targets, schedule.sources, schedule.steps]
        order = np.lexsort(keys)
        changes = np.zeros(order.size, dtype=np.bool_)
        for key in keys:
            changes[1:] |= key[order][1:] != key[order][:-1]
        changes[0] = True
        leaders = np.empty(order.size, dtype=np.int64)
        leaders[order] = order[np.maximum.accumulate(np.where(changes, np.arange(order.size), 0))]
    if (leaders == np.arange(leaders.size)).all():
        return None
    order = np.argsort(leaders, kind="stable")
    return order, runs_of(leaders[order])


@njit
def _leaders_of_sorted_steps(steps: Any, sources: Any, targets: Any, num_ranks: int) -> Any:
    """Return the first transfer of each transfer's step, source and target."""
    count = steps.size
    leaders = np.empty(count, np.int64)
    newest = np.full(num_ranks, -1, np.int64)  # of a source, the last of this step
    before = np.empty(count, np.int64)  # of the same source and step
    seen = np.full(num_ranks, -1, np.int64)  # of a target, the leader from the source at hand
    first = 0
    while first < count:
        last = first
        while last < count and steps[last] == steps[first]:
            before[last] = newest[sources[last]]
            newest[sources[last]] = last
            last += 1
        for index in range(last - 1, first - 1, -1):
            source = sources[index]
            if newest[source] != index:
                continue
            place = index  # backwards, so that the first of a target is noted last
            while place >= 0:
                seen[targets[place]] = place
                place = before[place]
            place = index
            while place >= 0:
                leaders[place] = seen[targets[place]]
                place = before[place]
            newest[source] = -1
        first = last
    return leaders


def messages_of(schedule: Any) -> Longs:
    """Return the leader of each transfer, the first one of its message, int64 [T].

    Where a schedule does not say so itself, transfers of the same source, target, start and end
    that leave on the same link are one.
    """
    count = schedule.num_transfers
    leaders = np.arange(count, dtype=np.int64)
    if schedule.messages is not None:
        numbers: Ints = schedule.messages
        first = np.flatnonzero(np.diff(numbers, prepend=-1))
        return first[numbers].astype(np.int64)
    if schedule.starts_s is None or schedule.ends_s is None or count == 0:
        return leaders
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
    return leaders
