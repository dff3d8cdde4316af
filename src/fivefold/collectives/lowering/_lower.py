"""Lowering: from a schedule to a program of thread blocks.

Each rank's messages are dealt to blocks, one peer, direction and channel a block. A block that
mostly passes on what another one receives is joined with it, and a receive followed by the send
of the same slots becomes one operation. What must follow an operation of another block waits for
it; waits that follow from others are left out, and several waits take ``nop`` operations.

References: TACCL, arXiv 2111.04867, section 5 (its executor and lowering); MSCCLang, ASPLOS 2023.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from fivefold.collectives.lowering._check import check_program
from fivefold.collectives.lowering._messages import Message, Moves, Place, plan_moves
from fivefold.collectives.lowering.machine import QueueFullError
from fivefold.collectives.lowering.program import (
    Buffer,
    Operation,
    OpKind,
    Program,
    RankProgram,
    ThreadBlock,
)
from fivefold.collectives.schedules import Schedule
from fivefold.errors import require_whole

_FUSED = {
    (OpKind.RECEIVE, False): OpKind.RECEIVE_COPY_SEND,
    (OpKind.RECEIVE_REDUCE_COPY, False): OpKind.RECEIVE_REDUCE_COPY_SEND,
    (OpKind.RECEIVE_REDUCE_COPY, True): OpKind.RECEIVE_REDUCE_SEND,
}
_MAX_COUNT = 64  # MSCCL's interpreter refuses counts from 72 on


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
    require_whole("channels", channels)
    require_whole("instances", instances)
    require_whole("max_count", max_count)
    if queue_slots is not None:
        require_whole("queue_slots", queue_slots)
    if instances > 1:
        schedule = schedule.replicated(instances)
    windows = [None] if queue_slots is None else [None, queue_slots, 1, 0]
    for window in windows:
        moves = plan_moves(
            schedule,
            channels=channels,
            instances=instances,
            in_place=in_place,
            max_count=max_count,
            relay=relay,
            window=window,
        )
        program = _program_of(schedule, moves, in_place=in_place, fuse=fuse)
        try:
            check_program(program, queue_slots=queue_slots)
        except QueueFullError:
            if window == windows[-1]:
                raise
        else:
            break
    return program


def _program_of(schedule: Schedule, moves: Moves, *, in_place: bool, fuse: bool) -> Program:
    actions = _actions_by_rank(moves, schedule.collective.num_ranks)
    shape = Program(
        schedule.collective,
        tuple(
            RankProgram(
                (),
                int(schedule.collective.input_slots[rank]),
                int(schedule.collective.output_slots[rank]),
                moves.scratch_slots[rank],
            )
            for rank in range(schedule.collective.num_ranks)
        ),
        name=schedule.name or schedule.collective.name,
        in_place=in_place,
    )
    ranks = tuple(
        replace(program, blocks=_RankLowering(shape, rank, actions[rank], fuse=fuse).blocks())
        for rank, program in enumerate(shape.ranks)
    )
    return replace(shape, ranks=ranks)


_BlockKey = tuple[str, int, int]  # direction, peer, channel


@dataclass(slots=True)
class _Action:
    """One operation of a rank before it has a place in a block."""

    kind: OpKind  # what it does
    block: _BlockKey  # block it belongs to: direction (send, receive or copy), peer and channel
    read: Place | None  # first slot that is read; None where it reads none
    write: Place | None  # first slot that is written; None where it writes none
    count: int  # number of slots
    send_block: _BlockKey | None = None  # of a fused operation
    reads: list[int] = field(default_factory=list)  # memory cells that are read; found later
    writes: list[int] = field(default_factory=list)  # memory cells that are written; found later


def _actions_by_rank(moves: Moves, num_ranks: int) -> list[list[_Action]]:
    """Return each rank's operations in the order of events."""
    events: list[tuple[int, int, bool]] = []
    for number, message in enumerate(moves.messages):
        events.append((message.sent, number, False))
        events.append((message.received, number, True))
    actions: list[list[_Action]] = [[] for _ in range(num_ranks)]
    for _, number, arrives in sorted(events):
        message = moves.messages[number]
        if arrives:
            actions[message.target].append(_receive(message))
        else:
            key = ("send", message.target, message.channel)
            actions[message.source].append(
                _Action(OpKind.SEND, key, message.read, None, message.count)
            )
    for copy in moves.copies:
        action = _Action(OpKind.COPY, ("copy", -1, 0), copy.read, copy.write, copy.count)
        actions[copy.rank].append(action)
    return actions


def _receive(message: Message) -> _Action:
    kind = OpKind.RECEIVE if message.add is None else OpKind.RECEIVE_REDUCE_COPY
    key = ("receive", message.source, message.channel)
    return _Action(kind, key, message.add, message.write, message.count)


class _RankLowering:
    """Blocks of one rank."""

    def __init__(self, shape: Program, rank: int, actions: list[_Action], *, fuse: bool) -> None:
        self._slots = shape.slots(rank)
        self._num_cells = sum(map(len, self._slots.values()))
        self._actions = actions
        for action in actions:
            action.reads = self._cells(action.read, action.count)
            action.writes = self._cells(action.write, action.count)
        self._outputs = {int(cell) for cell in self._slots[Buffer.OUTPUT]}
        if fuse:
            self._fuse()

    def _cells(self, place: Place | None, count: int) -> list[int]:
        if place is None:
            return []
        buffer, offset = place
        return [int(cell) for cell in self._slots[buffer][offset : offset + count]]

    # -- joining blocks and operations ---------------------------------------------------------

    def _fuse(self) -> None:
        joined = self._joined_blocks()
        if not joined:
            return
        order: dict[_BlockKey, list[int]] = defaultdict(list)
        for at, action in enumerate(self._actions):
            order[joined.get(action.block, action.block)].append(at)
        writer = self._writers()
        gone: set[int] = set()
        for places in order.values():
            for first, second in pairwise(places):
                if self._fusable(first, second, writer) and first not in gone:
                    self._merge(first, second)
                    gone.add(second)
        kept = [action for at, action in enumerate(self._actions) if at not in gone]
        for action in kept:
            if action.kind is OpKind.SEND and action.block in joined:
                action.send_block = action.block
                action.block = joined[action.block]
        self._actions = kept
        self._drop_unread_writes()

    def _joined_blocks(self) -> dict[_BlockKey, _BlockKey]:
        """Join sending blocks with receiving blocks, the best matches first."""
        writer = self._writers()
        sends: Counter[_BlockKey] = Counter()
        pairs: Counter[tuple[_BlockKey, _BlockKey]] = Counter()
        for at, action in enumerate(self._actions):
            if action.kind is not OpKind.SEND:
                continue
            sends[action.block] += 1
            source = writer[at]
            if source is not None:
                receiving = self._actions[source].block
                if receiving[0] == "receive" and receiving[2] == action.block[2]:
                    pairs[receiving, action.block] += 1
        joined: dict[_BlockKey, _BlockKey] = {}
        for (receiving, sending), count in sorted(
            pairs.items(), key=lambda item: (-item[1], item[0])
        ):
            taken = sending in joined or receiving in joined.values()
            if not taken and 2 * count >= sends[sending]:
                joined[sending] = receiving
        return joined

    def _writers(self) -> list[int | None]:
        """Find for each operation the one that wrote all it reads, where that is a single one."""
        last = [-1] * self._num_cells
        writers: list[int | None] = []
        for at, action in enumerate(self._actions):
            sources = {last[cell] for cell in action.reads}
            single = sources.pop() if len(sources) == 1 else -1
            writers.append(single if single >= 0 else None)
            for cell in action.writes:
                last[cell] = at
        return writers

    def _fusable(self, first: int, second: int, writer: list[int | None]) -> bool:
        one, two = self._actions[first], self._actions[second]
        return (
            two.kind is OpKind.SEND
            and (one.kind, False) in _FUSED
            and writer[second] == first
            and one.writes == two.reads
        )

    def _merge(self, first: int, second: int) -> None:
        receive, send = self._actions[first], self._actions[second]
        receive.kind = _FUSED[receive.kind, False]
        receive.send_block = send.block

    def _drop_unread_writes(self) -> None:
        """Turn sums that are only passed on into operations that do not store them."""
        needed = [cell in self._outputs for cell in range(self._num_cells)]
        for action in reversed(self._actions):
            if action.kind is OpKind.RECEIVE_REDUCE_COPY_SEND and not any(
                needed[cell] for cell in action.writes
            ):
                action.kind = OpKind.RECEIVE_REDUCE_SEND
                action.write, action.writes = None, []
            for cell in action.writes:
                needed[cell] = False
            for cell in action.reads:
                needed[cell] = True

    # -- numbering and waiting -----------------------------------------------------------------

    def blocks(self) -> tuple[ThreadBlock, ...]:
        """Return the thread blocks, with the waits that their order needs."""
        keys = list(dict.fromkeys(action.block for action in self._actions))
        number = {key: at for at, key in enumerate(keys)}
        waits = _Waits(self._num_cells, len(keys))
        peers = [[-1, -1] for _ in keys]  # send, receive
        for action in self._actions:
            at = number[action.block]
            _note_peers(peers[at], action)
            waits.add(action, at)
        return tuple(
            ThreadBlock(
                tuple(waits.operations[at]), send_peer=send, receive_peer=receive, channel=key[2]
            )
            for at, (key, (send, receive)) in enumerate(zip(keys, peers, strict=True))
        )


def _note_peers(peers: list[int], action: _Action) -> None:
    for key in (action.block, action.send_block):
        if key is not None and key[0] == "send":
            peers[0] = key[1]
        if key is not None and key[0] == "receive":
            peers[1] = key[1]


class _Waits:
    """Gives each operation its number and what it has to wait for."""

    def __init__(self, num_cells: int, num_blocks: int) -> None:
        self.operations: list[list[Operation]] = [[] for _ in range(num_blocks)]
        self._writer: list[tuple[int, int] | None] = [None] * num_cells
        self._readers: list[list[tuple[int, int]]] = [[] for _ in range(num_cells)]
        # How many operations of each block are known to have ended, by block and by operation.
        self._clock = np.zeros((num_blocks, num_blocks), dtype=np.int32)
        self._known: dict[tuple[int, int], np.ndarray] = {}

    def add(self, action: _Action, at: int) -> None:
        """Append an operation to a block, behind the waits that it needs."""
        for block, step in self._needed(action, at):
            self._append(Operation(OpKind.NOP, wait_block=block, wait_step=step), at)
            np.maximum(self._clock[at], self._known[block, step], out=self._clock[at])
        read, write = action.read or (Buffer.INPUT, 0), action.write or (Buffer.OUTPUT, 0)
        if action.read is None:
            read = write  # files name a slot there, which is not read
        if action.write is None:
            write = read
        operation = Operation(action.kind, *read, *write, action.count)
        own = self.operations[at]
        if own and own[-1].kind is OpKind.NOP and own[-1].wait_block >= 0:
            wait = own.pop()
            self._known.pop((at, len(own)), None)
            operation = replace(operation, wait_block=wait.wait_block, wait_step=wait.wait_step)
        step = self._append(operation, at)
        for cell in action.reads:
            self._readers[cell].append((at, step))
        for cell in action.writes:
            self._writer[cell] = (at, step)
            self._readers[cell] = []

    def _append(self, operation: Operation, at: int) -> int:
        self.operations[at].append(operation)
        step = len(self.operations[at]) - 1
        self._clock[at, at] = step + 1
        self._known[at, step] = self._clock[at].copy()
        return step

    def _needed(self, action: _Action, at: int) -> list[tuple[int, int]]:
        before: set[tuple[int, int]] = set()
        for cell in [*action.reads, *action.writes]:
            if (writer := self._writer[cell]) is not None:
                before.add(writer)
        for cell in action.writes:
            before.update(self._readers[cell])
        latest: dict[int, int] = {}
        for block, step in before:
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
