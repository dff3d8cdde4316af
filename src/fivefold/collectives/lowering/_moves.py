"""From transfers of chunks to messages between slots: where each chunk lies when it moves.

A copied chunk lies in the input of who held it first and in the output (or, on its way through a
rank that need not keep it, in the scratch) of everyone else. A partial sum starts in the input and
moves to the output or the scratch when the first contribution is added to it, so that inputs stay
as they are. Transfers that go between the same ranks at the same time over adjacent slots become
one message.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fivefold.collectives.lowering._program import Buffer
from fivefold.collectives.schedules import Schedule
from fivefold.errors import DataError

__all__ = ["Copy", "Message", "Moves", "plan_moves"]

Place = tuple[Buffer, int]
_TIME_DIGITS = 9  # times nearer than 1e-9 of the whole are one moment: ends and starts are sums


@dataclass(frozen=True, slots=True)
class Message:
    """Adjacent chunk slots that go from one rank to another as one.

    Args:
        source: Sending rank.
        target: Receiving rank.
        channel: Channel.
        read: First slot that the sender reads.
        write: First slot that the receiver writes.
        add: First slot whose contents the receiver adds; None to copy.
        count: Number of slots.
        sent: When it is read: a key of events.
        received: When it is written: a key of events.

    Example:
        >>> Message(0, 1, 0, (Buffer.INPUT, 0), (Buffer.OUTPUT, 0), None, 1, (0, 0), (0, 1)).count
        1
    """

    source: int
    target: int
    channel: int
    read: Place
    write: Place
    add: Place | None
    count: int
    sent: tuple[float, int]
    received: tuple[float, int]


@dataclass(frozen=True, slots=True)
class Copy:
    """Adjacent slots that a rank copies to its output when all else is done.

    Example:
        >>> Copy(0, (Buffer.INPUT, 0), (Buffer.OUTPUT, 0), 2).rank
        0
    """

    rank: int
    read: Place
    write: Place
    count: int


@dataclass(frozen=True)
class Moves:
    """All messages in the order of their transfers, copies, and scratch slots of each rank.

    Example:
        >>> Moves([], [], []).copies
        []
    """

    messages: list[Message]
    copies: list[Copy]
    scratch_slots: list[int]


def plan_moves(
    schedule: Schedule, *, channels: int, instances: int, in_place: bool, max_count: int
) -> Moves:
    """Where every chunk of a schedule lies when it is sent and received.

    Args:
        schedule: The schedule; replicated already where ``instances`` is more than one.
        channels: Channels over which the chunks between two ranks are dealt.
        instances: Consecutive chunks that are parts of one chunk, each on channels of its own.
        in_place: Whether a rank's held and wanted slots of a chunk are one memory.
        max_count: Largest number of slots in one message.

    Returns:
        The messages.

    Raises:
        DataError: A transfer sends what its source does not hold then.

    Example:
        >>> from fivefold.collectives.schedules import Schedule, Transfer, broadcast
        >>> to = [Transfer(chunk=0, source=0, target=1)]
        >>> schedule = Schedule.from_transfers(to, collective=broadcast(2))
        >>> moves = plan_moves(
        ...     schedule, channels=1, instances=1, in_place=False, max_count=64
        ... )
        >>> len(moves.messages), len(moves.copies)
        (1, 1)
    """
    sent, received = _keys(schedule)
    lanes = _lanes(schedule, channels=channels, instances=instances)
    places = _Places(schedule, in_place=in_place)
    single: list[Message | None] = [None] * schedule.num_transfers
    events = sorted(
        [(key, at, False) for at, key in enumerate(sent)]
        + [(key, at, True) for at, key in enumerate(received)]
    )
    read: dict[int, Place] = {}
    for _, at, arrives in events:
        chunk = int(schedule.chunks[at])
        source, target = int(schedule.sources[at]), int(schedule.targets[at])
        if not arrives:
            read[at] = places.held(source, chunk, transfer=at)
            continue
        if at not in read:
            raise DataError(
                f"transfer {at} of {schedule.name or 'the schedule'} ends before it starts"
            )
        add, write = places.arrive(target, chunk, reduces=bool(schedule.reduces[at]))
        single[at] = Message(
            source, target, lanes[at], read[at], write, add, 1, sent[at], received[at]
        )
    messages = _joined(_in_order(single), max_count=max_count)
    return Moves(messages, places.final_copies(max_count=max_count), places.scratch_slots)


def _keys(schedule: Schedule) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    """When each transfer reads and when it writes, so that sorting gives the schedule's meaning."""
    timed = not schedule.has_steps  # steps say more than times, where there are both
    if timed and schedule.starts_s is not None and schedule.ends_s is not None:
        unit = max(float(schedule.ends_s.max(initial=0.0)), 1e-300)
        starts = np.round(schedule.starts_s / unit, _TIME_DIGITS).tolist()
        ends = np.round(schedule.ends_s / unit, _TIME_DIGITS).tolist()
        # What has arrived by a moment may be sent on in that moment. Where a transfer takes no
        # time at all its own start comes first.
        sent = [(start, 1) for start in starts]
        received = [(end, 0 if end > start else 2) for start, end in zip(starts, ends, strict=True)]
        return sent, received
    moments = schedule.steps.tolist() if schedule.has_steps else range(schedule.num_transfers)
    return [(float(at), 0) for at in moments], [(float(at), 1) for at in moments]


def _lanes(schedule: Schedule, *, channels: int, instances: int) -> list[int]:
    parts = schedule.chunks % instances
    whole = schedule.chunks // instances
    dealt: list[int] = (parts * channels + whole % channels).tolist()
    if schedule.has_steps or not schedule.has_times:
        return dealt
    # A queue hands over in the order of sending. Transfers that overtake others need another one.
    last: dict[tuple[int, int, int], float] = {}
    lanes = [0] * schedule.num_transfers
    assert schedule.starts_s is not None, "it has times"
    assert schedule.ends_s is not None, "it has times"
    stride = channels * instances
    for at in np.argsort(schedule.starts_s, kind="stable").tolist():
        lane = dealt[at]
        pair = (int(schedule.sources[at]), int(schedule.targets[at]))
        while last.get((*pair, lane), -1.0) > schedule.ends_s[at] * (1 + 1e-9):
            lane += stride
        last[(*pair, lane)] = float(schedule.ends_s[at])
        lanes[at] = lane
    return lanes


def _in_order(messages: list[Message | None]) -> list[Message]:
    """By the moments of sending and receiving; those of one moment as they are listed."""
    whole = [message for message in messages if message is not None]
    return sorted(whole, key=lambda message: (message.sent, message.received))


def _joined(messages: list[Message], *, max_count: int) -> list[Message]:
    """Messages with those of adjacent slots at the same moments made one."""
    joined: list[Message] = []
    last: dict[tuple[int, int, int], int] = {}
    written: dict[tuple[int, Place], int] = {}
    for message in messages:
        queue = (message.source, message.target, message.channel)
        at, slot = last.get(queue, -1), (message.target, message.write)
        # A sum takes its parts in a fixed order: none may be drawn before an earlier one.
        keeps_order = written.get(slot, -1) < at
        if keeps_order and joined[at].count < max_count and _continues(joined[at], message):
            joined[at] = replace(joined[at], count=joined[at].count + 1)
        else:
            last[queue] = at = len(joined)
            joined.append(message)
        written[slot] = at
    return joined


def _continues(first: Message, second: Message) -> bool:
    def follows(one: Place | None, other: Place | None) -> bool:
        if one is None or other is None:
            return one is other
        return one[0] == other[0] and one[1] + first.count == other[1]

    return (
        (first.sent, first.received) == (second.sent, second.received)
        and follows(first.read, second.read)
        and follows(first.write, second.write)
        and follows(first.add, second.add)
    )


class _Places:
    """Where every rank holds every chunk, as the transfers go by."""

    def __init__(self, schedule: Schedule, *, in_place: bool) -> None:
        collective = schedule.collective
        self._collective = collective
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
        place = self._now.get((rank, chunk))
        if place is None:
            raise DataError(
                f"transfer {transfer} sends chunk {chunk}, which rank {rank} does not hold then",
                hint="verify(schedule) says more",
            )
        return place

    def arrive(self, rank: int, chunk: int, *, reduces: bool) -> tuple[Place | None, Place]:
        """What is added, and where the result is written."""
        before = self._now.get((rank, chunk)) if reduces else None
        home = self._home_of(rank, chunk)
        self._now[rank, chunk] = home
        return before, home

    def _home_of(self, rank: int, chunk: int) -> Place:
        key = (rank, chunk)
        if key not in self._home:
            if key in self._outputs:
                self._home[key] = (Buffer.OUTPUT, self._outputs[key])
            else:
                self._home[key] = (Buffer.SCRATCH, self.scratch_slots[rank])
                self.scratch_slots[rank] += 1
        return self._home[key]

    def final_copies(self, *, max_count: int) -> list[Copy]:
        """Outputs that no transfer wrote: the rank's own chunks."""
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
