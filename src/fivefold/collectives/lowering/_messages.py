"""From transfers of chunks to messages between slots: where each chunk lies when it moves.

A copied chunk lies in the input of who held it first and in the output (or, on its way through a
rank that need not keep it, in the scratch) of everyone else. A partial sum starts in the input and
moves to the output or the scratch when the first contribution is added to it, so that inputs stay
as they are. A rank on a transfer's way through the topology keeps it in its scratch meanwhile.
Transfers that go between the same ranks at the same time over adjacent slots become one message.

All of it follows one order of events (a transfer is read, a transfer is written), which is the
verifier's. What happens to one chunk never touches another, so chunks may also be taken in groups,
one after the other: then fewer of them are under way at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from fivefold.collectives.lowering.program import Buffer
from fivefold.collectives.schedules import Schedule
from fivefold.collectives.schedules.routes import relays_of
from fivefold.collectives.schedules.timing import event_order
from fivefold.errors import DataError

Place = tuple[Buffer, int]
_TIME_DIGITS = 9  # times nearer than 1e-9 of the whole are one moment: ends and starts are sums


@dataclass(frozen=True, slots=True)
class Message:
    """Adjacent chunk slots that go from one rank to another as one."""

    source: int
    target: int
    channel: int
    read: Place  # first slot that the sender reads
    write: Place  # first slot that the receiver writes
    add: Place | None  # first slot whose contents the receiver adds; None to copy
    count: int  # number of slots
    sent: int  # when it is read: its place in the order of events
    received: int  # when it is written: its place in the order of events


@dataclass(frozen=True, slots=True)
class Copy:
    """Adjacent slots that a rank copies to its output when all else is done."""

    rank: int
    read: Place
    write: Place
    count: int


@dataclass(frozen=True)
class Moves:
    """All messages in the order in which they are sent, copies, and scratch slots of each rank."""

    messages: list[Message]
    copies: list[Copy]
    scratch_slots: list[int]


def plan_moves(
    schedule: Schedule,
    *,
    channels: int,
    instances: int,
    in_place: bool,
    max_count: int,
    relay: bool = False,
    window: int | None = None,
) -> Moves:
    """Find where every chunk of a schedule lies when it is sent and received."""
    events = event_order(schedule)
    group = _groups(schedule, events, window)
    events = events[np.argsort(group[events >> 1], kind="stable")]
    legs = _legs(schedule, group, relay=relay)
    places = _Places(schedule, in_place=in_place)
    touched: dict[tuple[int, int], tuple[int, int]] = {}  # last write, last access of any kind
    clock = -1
    for event in events.tolist():
        at, chunk = event >> 1, int(schedule.chunks[event >> 1])
        clock += 1
        if event & 1 == 0:
            leg = legs[at][0]
            key = (leg.source, chunk)
            leg.sent, leg.read = clock, places.held(leg.source, chunk, transfer=at)
            leg.written, _ = touched.get(key, (-1, -1))
            touched[key] = (leg.written, clock)
            for leg, following in pairwise(legs[at]):  # ranks on the way pass it on at once
                leg.write = following.read = places.passing(leg.target)
                leg.received, following.sent = clock + 1, clock + 2
                following.written = leg.received
                clock += 2
            continue
        leg = legs[at][-1]
        key = (leg.target, chunk)
        leg.received = clock
        leg.add, leg.write = places.arrive(key[0], chunk, reduces=bool(schedule.reduces[at]))
        _, leg.touched = touched.get(key, (-1, -1))
        touched[key] = (clock, clock)
    flat = sorted((leg for route in legs for leg in route), key=lambda leg: leg.sent)
    _choose_channels(flat, channels=channels, instances=instances)
    messages = _joined(flat, max_count=max_count)
    return Moves(messages, places.final_copies(max_count=max_count), places.scratch_slots)


@dataclass(slots=True)
class _Leg:
    """A transfer, or the part of it between two ranks on its way."""

    source: int
    target: int
    chunk: int
    moment: tuple[float, ...]  # legs of equal moments may be one message
    channel: int = 0
    sent: int = -1
    received: int = -1
    read: Place = (Buffer.INPUT, -1)
    write: Place = (Buffer.INPUT, -1)
    add: Place | None = None
    written: int = -1  # last write of what it reads: it may not be moved ahead of that
    touched: int = -1  # last access to what it writes: as above


def _legs(schedule: Schedule, group: np.ndarray, *, relay: bool) -> list[list[_Leg]]:
    """Return the legs of each transfer."""
    ways = relays_of(schedule) if relay else [()] * schedule.num_transfers
    moments = _moments(schedule, group)
    return [
        [
            _Leg(source, target, chunk, (*moments[at], number))
            for number, (source, target) in enumerate(pairwise((first, *ways[at], last)))
        ]
        for at, (first, last, chunk) in enumerate(
            zip(
                schedule.sources.tolist(),
                schedule.targets.tolist(),
                schedule.chunks.tolist(),
                strict=True,
            )
        )
    ]


def _groups(schedule: Schedule, events: np.ndarray, window: int | None) -> np.ndarray:
    """Group transfers: those of a chunk together, ``window`` chunks of a connection."""
    if window is None:
        return np.zeros(schedule.num_transfers, dtype=np.int64)
    if window == 0:
        return schedule.chunks.astype(np.int64)
    group_of: dict[int, int] = {}
    counts: dict[tuple[int, int], int] = {}
    first = dict.fromkeys(schedule.chunks[events >> 1].tolist(), -1)
    for at in (events >> 1).tolist():
        chunk = int(schedule.chunks[at])
        if first[chunk] < 0:
            first[chunk] = at
    for chunk in sorted(first):
        at = first[chunk]
        connection = (int(schedule.sources[at]), int(schedule.targets[at]))
        counts[connection] = counts.get(connection, 0) + 1
        group_of[chunk] = (counts[connection] - 1) // window
    return np.array([group_of[chunk] for chunk in schedule.chunks.tolist()], dtype=np.int64)


def _moments(schedule: Schedule, group: np.ndarray) -> list[tuple[float, ...]]:
    """Number the moments of the transfers: those of one moment may be one message."""
    groups = group.tolist()
    if schedule.has_steps:  # steps say more than times, where there are both
        return list(zip(groups, schedule.steps.tolist(), strict=True))
    if schedule.starts_s is None or schedule.ends_s is None:
        return [(at,) for at in range(schedule.num_transfers)]
    unit = max(float(schedule.ends_s.max(initial=0.0)), 1e-300)
    starts = np.round(schedule.starts_s / unit, _TIME_DIGITS).tolist()
    ends = np.round(schedule.ends_s / unit, _TIME_DIGITS).tolist()
    return list(zip(groups, starts, ends, strict=True))


def _choose_channels(legs: list[_Leg], *, channels: int, instances: int) -> None:
    """Deal the chunks to channels."""
    # A queue hands over in the order of sending: what overtakes another leg needs another one.
    last: dict[tuple[int, int, int], int] = {}
    for leg in legs:
        leg.channel = leg.chunk % instances * channels + leg.chunk // instances % channels
        while last.get((leg.source, leg.target, leg.channel), -1) > leg.received:
            leg.channel += channels * instances
        last[leg.source, leg.target, leg.channel] = leg.received


def _joined(legs: list[_Leg], *, max_count: int) -> list[Message]:
    """Join legs of one moment over adjacent slots into messages, where no event is overtaken."""
    joined: list[Message] = []
    last: dict[tuple[int, int, int], tuple[int, tuple[float, ...]]] = {}
    for leg in legs:
        message = Message(
            leg.source,
            leg.target,
            leg.channel,
            leg.read,
            leg.write,
            leg.add,
            1,
            leg.sent,
            leg.received,
        )
        queue = (leg.source, leg.target, leg.channel)
        place, moment = last.get(queue, (-1, ()))
        if (
            place >= 0
            and moment == leg.moment
            and joined[place].count < max_count
            # It would be read and written when the message's first part is: nothing that it
            # must follow may lie between (a write of what it reads; any use of what it writes).
            and leg.written < joined[place].sent
            and leg.touched < joined[place].received
            and _continues(joined[place], message)
        ):
            joined[place] = replace(joined[place], count=joined[place].count + 1)
        else:
            last[queue] = (len(joined), leg.moment)
            joined.append(message)
    return joined


def _continues(first: Message, second: Message) -> bool:
    def follows(one: Place | None, other: Place | None) -> bool:
        if one is None or other is None:
            return one is other
        return one[0] == other[0] and one[1] + first.count == other[1]

    return (
        follows(first.read, second.read)
        and follows(first.write, second.write)
        and follows(first.add, second.add)
    )


class _Places:
    """Place of every chunk at every rank, as the transfers go by."""

    def __init__(self, schedule: Schedule, *, in_place: bool) -> None:
        collective = schedule.collective
        self._in_place = in_place
        self.scratch_slots = [0] * collective.num_ranks
        self._home: dict[tuple[int, int], Place] = {}
        self._now: dict[tuple[int, int], Place] = {}
        self._outputs: dict[tuple[int, int], int] = {}
        outputs = collective.output_address(collective.post_chunks, collective.post_ranks)
        for chunk, rank, slot in zip(
            collective.post_chunks.tolist(),
            collective.post_ranks.tolist(),
            outputs.tolist(),
            strict=True,
        ):
            self._outputs[rank, chunk] = slot
        inputs = collective.input_address(collective.pre_chunks, collective.pre_ranks)
        for chunk, rank, slot in zip(
            collective.pre_chunks.tolist(),
            collective.pre_ranks.tolist(),
            inputs.tolist(),
            strict=True,
        ):
            self._now[rank, chunk] = (Buffer.INPUT, slot)

    def held(self, rank: int, chunk: int, *, transfer: int) -> Place:
        """Return where a rank holds a chunk that it sends."""
        place = self._now.get((rank, chunk))
        if place is None:
            raise DataError(
                f"transfer {transfer} sends chunk {chunk}, which rank {rank} does not hold then",
                hint="verify_schedule(schedule) says more",
            )
        return place

    def arrive(self, rank: int, chunk: int, *, reduces: bool) -> tuple[Place | None, Place]:
        """Return what is added, and where the result is written."""
        before = self._now.get((rank, chunk)) if reduces else None
        home = self._home_of(rank, chunk)
        self._now[rank, chunk] = home
        return before, home

    def passing(self, rank: int) -> Place:
        """Return a slot of its own for what a rank only passes on."""
        self.scratch_slots[rank] += 1
        return Buffer.SCRATCH, self.scratch_slots[rank] - 1

    def _home_of(self, rank: int, chunk: int) -> Place:
        key = (rank, chunk)
        if key not in self._home:
            if key in self._outputs:
                self._home[key] = (Buffer.OUTPUT, self._outputs[key])
            else:
                self._home[key] = self.passing(rank)
        return self._home[key]

    def final_copies(self, *, max_count: int) -> list[Copy]:
        """Return the outputs that no transfer writes: the rank's own chunks."""
        copies: list[Copy] = []
        for (rank, chunk), slot in sorted(
            self._outputs.items(), key=lambda item: (item[0][0], item[1])
        ):
            now = self._now.get((rank, chunk))
            if now is None or now[0] is Buffer.OUTPUT or self._in_place:
                continue
            last = copies[-1] if copies else None
            if (
                last is not None
                and last.rank == rank
                and last.count < max_count
                and last.read == (now[0], now[1] - last.count)
                and last.write[1] + last.count == slot
            ):
                copies[-1] = replace(last, count=last.count + 1)
            else:
                copies.append(Copy(rank, now, (Buffer.OUTPUT, slot), 1))
        return copies
