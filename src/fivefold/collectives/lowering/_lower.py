"""Lowering: from a schedule to a program of thread blocks.

Transfers become messages between slots (`_legs`, `_joined`), messages become operations, which
are dealt to blocks, one peer, direction and channel a block (`_blocks`).

References: TACCL, arXiv 2111.04867, section 5 (its executor and lowering); MSCCLang, ASPLOS 2023.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from fivefold.collectives.lowering._check import check_program
from fivefold.collectives.lowering.machine import Hazards, QueueFullError
from fivefold.collectives.lowering.program import (
    Buffer,
    Operation,
    OpKind,
    Program,
    RankProgram,
    ThreadBlock,
)
from fivefold.collectives.schedules import Schedule
from fivefold.collectives.schedules.messages import messages_of
from fivefold.collectives.schedules.routes import relays_of
from fivefold.collectives.schedules.timing import event_order
from fivefold.errors import DataError, require_whole

_FUSED = {
    OpKind.RECEIVE: OpKind.RECEIVE_COPY_SEND,
    OpKind.RECEIVE_REDUCE_COPY: OpKind.RECEIVE_REDUCE_COPY_SEND,
}
_MAX_COUNT = 64  # MSCCL's interpreter refuses counts from 72 on
_MOST_PEERS = 32  # of a rank in one channel, each way
_Place = tuple[Buffer, int]  # a slot


def lower(  # noqa: PLR0913 - independent options, each with a default
    schedule: Schedule,
    *,
    channels: int = 1,
    instances: int = 1,
    in_place: bool = False,
    fuse: bool = True,
    max_count: int = _MAX_COUNT,
    queue_slots: int | None = 2,
    relay: bool = True,
) -> Program:
    """Turn a schedule into a program, and prove with :func:`check_program` that it is right.

    Small queues fill up: where ranks would wait for one another's room in a circle, chunks are
    taken in smaller groups, one group after another, until none does.

    Args:
        schedule: A verified schedule.
        channels: Channels over which the chunks between two ranks are dealt, so that they need
            not wait for one another.
        instances: Parts that every chunk is cut into; each part takes channels of its own.
        in_place: Whether a rank's slots of a chunk that it has and must have are one memory.
        fuse: Whether a receive and the send that follows it become one operation.
        max_count: Largest number of adjacent slots in one message.
        queue_slots: Chunks that a queue holds before the sender waits: 2 in MSCCL's protocol
            Simple, 8 in LL and LL128. None has no limit: fewer and longer messages, for runtimes
            that do not make senders wait.
        relay: Whether a transfer that passes other ranks on its way through the schedule's
            topology is received and sent on by them; False sends it straight, for runtimes whose
            network joins all ranks.

    Raises:
        ConfigurationError: An argument is not allowed.
        DataError: The schedule sends what is not there.
        ProgramError: The schedule does not do its collective, or no order of its chunks runs with
            queues so small.

    Examples:
        >>> from fivefold.collectives.algorithms import build_algorithm
        >>> from fivefold.collectives.schedules import all_gather
        >>> program = lower(build_algorithm("ring", all_gather(3)))
        >>> [op.kind.value for op in program.ranks[0].blocks[0].operations]
        ['s', 'rcs', 'r']
    """
    numbers = {"channels": channels, "instances": instances, "max_count": max_count}
    if queue_slots is not None:
        numbers["queue_slots"] = queue_slots
    for name, number in numbers.items():
        require_whole(name, number)
    if instances > 1:
        schedule = schedule.replicated(instances)
    windows = [None] if queue_slots is None else [None, queue_slots, 1, 0]
    for window in windows:
        places = _Places(schedule, in_place=in_place)
        legs = _legs(schedule, places, relay=relay, window=window)
        _choose_channels(
            legs, schedule.collective.num_ranks, channels=channels, instances=instances
        )
        messages = _joined(legs, max_count=max_count)
        copies = places.final_copies(max_count=max_count)
        shape = Program(
            schedule.collective,
            tuple(
                RankProgram((), int(inputs), int(outputs), scratch)
                for inputs, outputs, scratch in zip(
                    schedule.collective.input_slots,
                    schedule.collective.output_slots,
                    places.scratch_slots,
                    strict=True,
                )
            ),
            name=schedule.name or schedule.collective.name,
            in_place=in_place,
        )
        actions = _actions_by_rank(messages, copies, schedule.collective.num_ranks)
        program = replace(
            shape,
            ranks=tuple(
                replace(part, blocks=_blocks(shape.slots[rank], actions[rank], fuse=fuse))
                for rank, part in enumerate(shape.ranks)
            ),
        )
        try:
            check_program(program, queue_slots=queue_slots)
        except QueueFullError:
            if window == windows[-1]:
                raise
        else:
            break
    return program


# -- from transfers to messages ------------------------------------------------------------------
#
# A copied chunk lies in the input of who held it first and in the output (or, on its way through a
# rank that need not keep it, in the scratch) of everyone else. A partial sum starts in the input
# and moves to the output or the scratch when the first contribution is added to it, so that inputs
# stay as they are. A rank on a transfer's way through the topology keeps it in its scratch
# meanwhile. All of it follows one order of events (a transfer is read, a transfer is written),
# which is the verifier's.


@dataclass(slots=True)
class _Leg:
    """A transfer, or the part of it between two ranks on its way; or several as one message."""

    source: int
    target: int
    chunk: int
    moment: tuple[float, ...]  # legs of equal moments may be one message
    channel: int = 0
    sent: int = -1  # when it is read: its place in the order of events
    received: int = -1  # when it is written: its place in the order of events
    read: _Place = (Buffer.INPUT, -1)  # first slot that the sender reads
    write: _Place = (Buffer.INPUT, -1)  # first slot that the receiver writes
    add: _Place | None = None  # first slot whose contents the receiver adds; None to copy
    count: int = 1  # number of slots
    written: int = -1  # last write of what it reads: it may not be moved ahead of that
    touched: int = -1  # last access to what it writes: as above

    @property
    def queue(self) -> tuple[int, int, int]:
        return self.source, self.target, self.channel

    def goes_on_with(self, other: _Leg) -> bool:
        """Return whether another one of its moment and queue may be joined to its end."""
        return (
            self.moment == other.moment
            # It would be read and written when this one is: nothing that it must follow may lie
            # between (a write of what it reads; any use of what it writes).
            and other.written < self.sent
            and other.touched < self.received
            and _follows(self.read, other.read, self.count)
            and _follows(self.write, other.write, self.count)
            and _follows(self.add, other.add, self.count)
        )


def _follows(one: _Place | None, other: _Place | None, count: int) -> bool:
    if one is None or other is None:
        return one is other
    return one[0] == other[0] and one[1] + count == other[1]


def _legs(schedule: Schedule, places: _Places, *, relay: bool, window: int | None) -> list[_Leg]:
    """Find where every chunk lies when it is sent and received, in the order of sending.

    What happens to one chunk never touches another, so chunks may also be taken in groups, one
    after the other: then fewer of them are under way at once.
    """
    events = event_order(schedule)
    group = _groups(schedule, events, window)
    events = events[np.argsort(group[events >> 1], kind="stable")]
    legs = _bare_legs(schedule, group, relay=relay)
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
        leg.add, leg.write = places.arrive(key, reduces=bool(schedule.reduces[at]))
        _, leg.touched = touched.get(key, (-1, -1))
        touched[key] = (clock, clock)
    return sorted((leg for route in legs for leg in route), key=lambda leg: leg.sent)


def _bare_legs(schedule: Schedule, group: np.ndarray, *, relay: bool) -> list[list[_Leg]]:
    """Return the legs of each transfer, without places and times."""
    ways = relays_of(schedule) if relay else [()] * schedule.num_transfers
    ends = schedule.sources.tolist(), schedule.targets.tolist(), schedule.chunks.tolist()
    return [
        [
            _Leg(source, target, chunk, (*moment, number))
            for number, (source, target) in enumerate(pairwise((first, *way, last)))
        ]
        for first, last, chunk, way, moment in zip(
            *ends, ways, _moments(schedule, group.tolist()), strict=True
        )
    ]


def _groups(schedule: Schedule, events: np.ndarray, window: int | None) -> np.ndarray:
    """Group transfers: those of a chunk together, ``window`` chunks of a connection."""
    if window is None:
        return np.zeros(schedule.num_transfers, dtype=np.int64)
    if window == 0:
        return schedule.chunks.astype(np.int64)
    transfers = events >> 1
    chunks, first = np.unique(schedule.chunks[transfers], return_index=True)
    counts: Counter[tuple[int, int]] = Counter()
    group_of = np.zeros(schedule.collective.num_chunks, dtype=np.int64)
    for chunk, at in zip(chunks.tolist(), transfers[first].tolist(), strict=True):
        connection = (int(schedule.sources[at]), int(schedule.targets[at]))
        group_of[chunk] = counts[connection] // window
        counts[connection] += 1
    return group_of[schedule.chunks]


def _moments(schedule: Schedule, groups: list[int]) -> list[tuple[float, ...]]:
    """Number the messages of the transfers, as they are priced: those of one may be joined."""
    return list(zip(groups, messages_of(schedule).tolist(), strict=True))


def _choose_channels(legs: list[_Leg], num_ranks: int, *, channels: int, instances: int) -> None:
    # A channel has room for a number of peers each way: those further on get channels of their own.
    ends = {(leg.source, leg.target) for leg in legs}
    peers = max([0, *Counter(a for a, _ in ends).values(), *Counter(b for _, b in ends).values()])
    width = _MOST_PEERS if peers > _MOST_PEERS else num_ranks
    # A queue hands over in the order of sending: what overtakes another leg needs another one.
    last: dict[tuple[int, int, int], int] = {}
    for leg in legs:
        leg.channel = leg.chunk % instances * channels + leg.chunk // instances % channels
        leg.channel += (leg.target - leg.source) % num_ranks // width * channels * instances
        while last.get(leg.queue, -1) > leg.received:
            leg.channel += channels * instances
        last[leg.queue] = leg.received


def _joined(legs: list[_Leg], *, max_count: int) -> list[_Leg]:
    """Join legs of one moment over adjacent slots into messages, where no event is overtaken."""
    messages: list[_Leg] = []
    last: dict[tuple[int, int, int], _Leg] = {}
    for leg in legs:
        before = last.get(leg.queue)
        if before is not None and before.count < max_count and before.goes_on_with(leg):
            before.count += 1
        else:
            last[leg.queue] = leg
            messages.append(leg)
    return messages


class _Places:
    """Place of every chunk at every rank, as the transfers go by."""

    def __init__(self, schedule: Schedule, *, in_place: bool) -> None:
        one = schedule.collective
        self._in_place = in_place
        self.scratch_slots = [0] * one.num_ranks
        outputs = one.output_address(one.post_chunks, one.post_ranks)
        inputs = one.input_address(one.pre_chunks, one.pre_ranks)
        # By rank and chunk: where it belongs, and where it is.
        self._home: dict[tuple[int, int], _Place] = {
            (rank, chunk): (Buffer.OUTPUT, slot)
            for chunk, rank, slot in np.transpose(
                [one.post_chunks, one.post_ranks, outputs]
            ).tolist()
        }
        self._now: dict[tuple[int, int], _Place] = {
            (rank, chunk): (Buffer.INPUT, slot)
            for chunk, rank, slot in np.transpose([one.pre_chunks, one.pre_ranks, inputs]).tolist()
        }

    def held(self, rank: int, chunk: int, *, transfer: int) -> _Place:
        """Return where a rank holds a chunk that it sends."""
        place = self._now.get((rank, chunk))
        if place is None:
            raise DataError(
                f"transfer {transfer} sends chunk {chunk}, which rank {rank} does not hold then",
                hint="verify_schedule(schedule) says more",
            )
        return place

    def arrive(self, key: tuple[int, int], *, reduces: bool) -> tuple[_Place | None, _Place]:
        """Return what is added to a rank's chunk, and where the result is written."""
        before = self._now.get(key) if reduces else None
        if key not in self._home:
            self._home[key] = self.passing(key[0])
        self._now[key] = self._home[key]
        return before, self._home[key]

    def passing(self, rank: int) -> _Place:
        """Return a slot of its own for what a rank only passes on."""
        self.scratch_slots[rank] += 1
        return Buffer.SCRATCH, self.scratch_slots[rank] - 1

    def final_copies(self, *, max_count: int) -> list[tuple[int, _Action]]:
        """Return, by rank, copies to the outputs that no transfer writes: the rank's own chunks."""
        copies: list[tuple[int, _Action]] = []
        places = [
            (key[0], home[1], key) for key, home in self._home.items() if home[0] is Buffer.OUTPUT
        ]
        for rank, slot, key in sorted([] if self._in_place else places):
            now, home = self._now.get(key), (Buffer.OUTPUT, slot)
            if now is None or now == home:
                continue
            before, last = copies[-1] if copies else (-1, None)
            if (
                last is not None
                and before == rank
                and last.count < max_count
                and _follows(last.read, now, last.count)
                and _follows(last.write, home, last.count)
            ):
                last.count += 1
            else:
                copies.append((rank, _Action(OpKind.COPY, ("copy", -1, 0), now, home, 1)))
        return copies


# -- from messages to blocks ---------------------------------------------------------------------

_BlockKey = tuple[str, int, int]  # direction (send, receive or copy), peer, channel


@dataclass(slots=True)
class _Action:
    """One operation of a rank before it has a place in a block."""

    kind: OpKind  # what it does
    block: _BlockKey  # block it belongs to
    read: _Place | None  # first slot that is read; None where it reads none
    write: _Place | None  # first slot that is written; None where it writes none
    count: int  # number of slots
    send_block: _BlockKey | None = None  # of a fused operation
    reads: list[int] = field(default_factory=list)  # memory cells that are read; found later
    writes: list[int] = field(default_factory=list)  # memory cells that are written; found later


def _actions_by_rank(
    messages: list[_Leg], copies: list[tuple[int, _Action]], num_ranks: int
) -> list[list[_Action]]:
    """Return each rank's operations in the order of events."""
    events = [(one.sent, number, False) for number, one in enumerate(messages)]
    events += [(one.received, number, True) for number, one in enumerate(messages)]
    actions: list[list[_Action]] = [[] for _ in range(num_ranks)]
    for _, number, arrives in sorted(events):
        one = messages[number]
        if arrives:
            kind = OpKind.RECEIVE if one.add is None else OpKind.RECEIVE_REDUCE_COPY
            key = ("receive", one.source, one.channel)
            actions[one.target].append(_Action(kind, key, one.add, one.write, one.count))
        else:
            key = ("send", one.target, one.channel)
            actions[one.source].append(_Action(OpKind.SEND, key, one.read, None, one.count))
    for rank, copy in copies:
        actions[rank].append(copy)
    return actions


def _blocks(
    slots: dict[Buffer, np.ndarray], actions: list[_Action], *, fuse: bool
) -> tuple[ThreadBlock, ...]:
    """Return the thread blocks of a rank, with the waits that their order needs."""
    num_cells = sum(map(len, slots.values()))
    for action in actions:
        for place, cells in ((action.read, action.reads), (action.write, action.writes)):
            if place is not None:
                cells.extend(slots[place[0]][place[1] :][: action.count].tolist())
    if fuse:
        actions = _fused(actions, num_cells)
        _drop_unread_writes(actions, num_cells, outputs=set(slots[Buffer.OUTPUT].tolist()))
    keys = list(dict.fromkeys(action.block for action in actions))
    number = {key: at for at, key in enumerate(keys)}
    waits = _Waits(len(keys))
    peers: list[dict[str, int]] = [{} for _ in keys]
    for action in actions:
        at = number[action.block]
        for key in (action.block, action.send_block):
            if key is not None:
                peers[at][key[0]] = key[1]
        waits.add(action, at)
    return tuple(
        ThreadBlock(tuple(done), ways.get("send", -1), ways.get("receive", -1), key[2])
        for done, ways, key in zip(waits.operations, peers, keys, strict=True)
    )


def _fused(actions: list[_Action], num_cells: int) -> list[_Action]:
    """Join blocks, and make a receive and the send of the same slots one operation."""
    writer = _writers(actions, num_cells)
    joined = _joined_blocks(actions, writer)
    order: dict[_BlockKey, list[int]] = defaultdict(list)
    for at, action in enumerate(actions):
        order[joined.get(action.block, action.block)].append(at)
    gone: set[int] = set()
    for places in order.values():
        for first, second in pairwise(places):
            receive, send = actions[first], actions[second]
            if (
                send.kind is OpKind.SEND
                and receive.kind in _FUSED
                and writer[second] == first
                and receive.writes == send.reads
            ):
                receive.kind, receive.send_block = _FUSED[receive.kind], send.block
                gone.add(second)
    kept = [action for at, action in enumerate(actions) if at not in gone]
    for action in kept:
        if action.kind is OpKind.SEND and action.block in joined:
            action.send_block, action.block = action.block, joined[action.block]
    return kept


def _joined_blocks(actions: list[_Action], writer: list[int]) -> dict[_BlockKey, _BlockKey]:
    """Join blocks that mostly pass on what another one receives with it, the best matches first."""
    sends: Counter[_BlockKey] = Counter()
    pairs: Counter[tuple[_BlockKey, _BlockKey]] = Counter()
    for at, action in enumerate(actions):
        if action.kind is OpKind.SEND:
            sends[action.block] += 1
            source = actions[writer[at]].block if writer[at] >= 0 else None
            if source is not None and (source[0], source[2]) == ("receive", action.block[2]):
                pairs[source, action.block] += 1
    joined: dict[_BlockKey, _BlockKey] = {}
    for (receiving, sending), count in sorted(pairs.items(), key=lambda item: (-item[1], item[0])):
        taken = sending in joined or receiving in joined.values()
        if not taken and 2 * count >= sends[sending]:
            joined[sending] = receiving
    return joined


def _writers(actions: list[_Action], num_cells: int) -> list[int]:
    """Find for each operation the one that wrote all it reads; -1 where that is no single one."""
    last = [-1] * num_cells
    writers = []
    for at, action in enumerate(actions):
        sources = {last[cell] for cell in action.reads}
        writers.append(sources.pop() if len(sources) == 1 else -1)
        for cell in action.writes:
            last[cell] = at
    return writers


def _drop_unread_writes(actions: list[_Action], num_cells: int, *, outputs: set[int]) -> None:
    """Turn sums that are only passed on into operations that do not store them."""
    needed = [cell in outputs for cell in range(num_cells)]
    for action in reversed(actions):
        if action.kind is OpKind.RECEIVE_REDUCE_COPY_SEND and not any(
            needed[cell] for cell in action.writes
        ):
            action.kind = OpKind.RECEIVE_REDUCE_SEND
            action.write, action.writes = None, []
        for cell in action.writes:
            needed[cell] = False
        for cell in action.reads:
            needed[cell] = True


class _Waits:
    """Gives each operation its number and what it has to wait for.

    Waits that follow from others are left out, and several waits take ``nop`` operations.
    """

    def __init__(self, num_blocks: int) -> None:
        self.operations: list[list[Operation]] = [[] for _ in range(num_blocks)]
        self._hazards = Hazards()
        # How many operations of each block are known to have ended, by block and by operation.
        self._clock = np.zeros((num_blocks, num_blocks), dtype=np.int32)
        self._known: dict[tuple[int, int], np.ndarray] = {}

    def add(self, action: _Action, at: int) -> None:
        """Append an operation to a block, behind the waits that it needs."""
        needed = self._needed(action, at)
        for block, step in needed:
            np.maximum(self._clock[at], self._known[block, step], out=self._clock[at])
        for block, step in needed[:-1]:
            self._append(Operation(OpKind.NOP, wait_block=block, wait_step=step), at)
        # Files name slots that are not read or written, too.
        read = action.read or action.write or (Buffer.OUTPUT, 0)
        write = action.write or read
        wait = needed[-1] if needed else (-1, -1)
        step = self._append(Operation(action.kind, *read, *write, action.count, *wait), at)
        self._hazards.note((at, step), action.reads, action.writes)

    def _append(self, operation: Operation, at: int) -> int:
        self.operations[at].append(operation)
        step = len(self.operations[at]) - 1
        self._clock[at, at] = step + 1
        self._known[at, step] = self._clock[at].copy()
        return step

    def _needed(self, action: _Action, at: int) -> list[tuple[int, int]]:
        latest: dict[int, int] = {}
        for block, step in self._hazards.before(action.reads, action.writes):
            if block != at and self._clock[at, block] <= step:
                latest[block] = max(latest.get(block, -1), step)
        # One wait may imply another: the one whose operation knows of the other's.
        return [
            (block, step)
            for block, step in sorted(latest.items())
            if not any(
                other != block and self._known[other, last][block] > step
                for other, last in latest.items()
            )
        ]
