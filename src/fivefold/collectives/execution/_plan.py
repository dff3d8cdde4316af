"""What one rank does for a program: its operations in the order of :func:`run_order`, with hazards.

A rank that does any operation whose hazards are over waits only for messages whose sending comes
earlier in the common order: no deadlock. Chunks need not be equal: n elements are cut into C chunks
of floor or ceiling of n / C elements in the same way on every rank, so nothing is padded.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from fivefold.collectives.lowering import Program
from fivefold.collectives.lowering.machine import Arrival, Executed, Hazards, Machine, run_order
from fivefold.collectives.lowering.program import Buffer, OpKind

_UNITS = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 2}  # powers of the number of ranks
_NOTHING = -2


@dataclass(frozen=True, slots=True)
class Span:
    """Adjacent chunk slots of a buffer: from ``first`` up to, and without, ``last``."""

    buffer: Buffer
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Task:
    kind: OpKind  # what it does
    read: Span | None  # slots that are read; None where it reads none
    write: Span | None  # slots that are written; None where it writes none
    receive_peer: int  # rank that it receives from; -1 none
    send_peer: int  # rank that it sends to; -1 none
    channel: int  # queue of what it receives and sends
    # earlier tasks that must be done first: they write what it reads, or use what it writes
    after: tuple[int, ...]
    sends_after: int  # the task that sends before it in the same queue; -1 for none
    settle: tuple[int, ...]  # earlier tasks whose sends read the slots that it writes
    level: int  # round in which it runs, where all ranks go in rounds
    sent_level: int  # round in which what it receives was sent; -1 where it receives nothing


@dataclass(frozen=True)
class RankPlan:
    tasks: tuple[Task, ...]  # in the order in which they are carried out
    layout: Layout  # where chunks lie for a given number of elements
    num_rounds: int  # rounds, where all ranks go in rounds


@dataclass(frozen=True)
class Layout:
    """Chunk of every slot, from which follows where each slot begins."""

    inputs: np.ndarray  # chunk of each input slot
    outputs: np.ndarray  # chunk of each output slot
    scratch: np.ndarray  # chunk of each scratch slot; -1 where it holds several over time
    parts: int  # chunks that one rank's unit of elements is cut into

    @property
    def even_only(self) -> bool:
        """Return whether ``parts`` must divide the unit: some slot holds chunks of two sizes."""
        return bool((self.scratch < 0).any())

    def offsets(self, unit: int) -> dict[Buffer, list[int]]:
        """Return the element at which each slot begins, and the end of the last one.

        The unit is an all-reduce's or a broadcast's buffer, one rank's share of an all-gather or a
        reduce-scatter, what goes from one rank to another in an all-to-all.
        """
        edges = np.arange(self.parts + 1, dtype=np.int64) * unit // self.parts
        widths = np.diff(edges)
        found = {}
        for buffer, chunks in (
            (Buffer.INPUT, self.inputs),
            (Buffer.OUTPUT, self.outputs),
            (Buffer.SCRATCH, np.maximum(self.scratch, 0)),
        ):
            ends = np.cumsum(widths[chunks % self.parts]) if chunks.size else np.zeros(0, int)
            found[buffer] = [0, *(int(end) for end in ends)]
        return found


def plan_rank(program: Program, *, rank: int, arrival_s: Arrival | None = None) -> RankPlan:
    """Compile a program for one rank."""
    order = run_order(program, arrival_s=arrival_s)
    tracer = _Tracer(program, rank)
    tracer.run(order)
    rounds = _rounds(order)
    compiler = _Compiler(program, rank)
    for place, executed in enumerate(order):
        if executed.rank == rank and executed.operation.kind is not OpKind.NOP:
            sent = rounds[executed.taken] if executed.taken >= 0 else -1
            compiler.add(executed, level=rounds[place], sent_level=sent)
    return RankPlan(
        tuple(compiler.tasks), _layout(program, rank, tracer.chunks), max(rounds, default=-1) + 1
    )


def _rounds(order: list[Executed]) -> list[int]:
    """Return the round of each operation if a message takes one round and all ranks go in step.

    An operation comes no earlier than those before it in its block and those it waits for.
    """
    rounds: list[int] = []
    last: dict[tuple[int, int], int] = defaultdict(int)
    ended: dict[tuple[int, int, int], int] = {}
    for executed in order:
        operation = executed.operation
        key = (executed.rank, executed.block)
        at = last[key]
        if operation.wait_block >= 0:
            at = max(at, ended[executed.rank, operation.wait_block, operation.wait_step])
        if executed.taken >= 0:
            at = max(at, rounds[executed.taken] + 1)
        rounds.append(at)
        last[key] = at
        ended[(*key, executed.step)] = at
    return rounds


class _Compiler:
    """Collects one rank's tasks and what each of them has to wait for."""

    def __init__(self, program: Program, rank: int) -> None:
        self.tasks: list[Task] = []
        self._slots = program.slots[rank]
        self._blocks = program.ranks[rank].blocks
        self._hazards = Hazards()
        self._last_sent: dict[tuple[int, int], int] = {}
        self._sent_from: dict[int, list[int]] = defaultdict(list)

    def add(self, executed: Executed, *, level: int, sent_level: int) -> None:
        operation, kind = executed.operation, executed.operation.kind
        block, number = self._blocks[executed.block], len(self.tasks)
        first, count = operation.source_offset, operation.count
        read = Span(operation.source, first, first + count) if kind.reads_source else None
        first = operation.target_offset
        write = Span(operation.target, first, first + count) if kind.writes_target else None
        used, cells = self._cells(read), self._cells(write)
        after = sorted(self._hazards.before(used, cells))
        self._hazards.note(number, used, cells)
        queue, before = (block.send_peer, block.channel), -1
        if kind.sends:
            before, self._last_sent[queue] = self._last_sent.get(queue, -1), number
        settle = sorted({sender for cell in cells for sender in self._sent_from.pop(cell, ())})
        self.tasks.append(
            Task(
                kind=kind,
                read=read,
                write=write,
                receive_peer=block.receive_peer if kind.receives else -1,
                send_peer=block.send_peer if kind.sends else -1,
                channel=block.channel,
                after=tuple(after),
                sends_after=before,
                settle=tuple(settle),
                level=level,
                sent_level=sent_level,
            )
        )
        if kind.sends:  # what it sends lies in what it writes, or else in what it reads
            for cell in cells or (used if kind is OpKind.SEND else []):
                self._sent_from[cell].append(number)

    def _cells(self, span: Span | None) -> list[int]:
        if span is None:
            return []
        return [int(cell) for cell in self._slots[span.buffer][span.first : span.last]]


class _Tracer(Machine):
    """Notes which chunk each memory cell of one rank holds; -1 where several do over time."""

    def __init__(self, program: Program, rank: int) -> None:
        memory = [np.full(part.num_slots, _NOTHING) for part in program.ranks]
        super().__init__(program, memory, lambda first, _: first)  # both hold the same chunks
        for chunk, holder, cell, _ in program.held():
            memory[holder][cell] = chunk
        self._rank, self.chunks = rank, memory[rank].copy()

    def write(self, executed: Executed, buffer: Buffer, offset: int, values: np.ndarray) -> None:
        super().write(executed, buffer, offset, values)
        if executed.rank == self._rank:
            cells = self.cells(executed, buffer, offset)
            alone = (self.chunks[cells] == _NOTHING) | (self.chunks[cells] == values)
            self.chunks[cells] = np.where(alone, values, -1)


def _layout(program: Program, rank: int, chunks: np.ndarray) -> Layout:
    collective = program.collective
    mine = collective.pre_ranks == rank
    wanted = collective.post_ranks == rank
    inputs = np.zeros(program.ranks[rank].input_slots, dtype=np.int64)
    inputs[: int(mine.sum())] = np.sort(collective.pre_chunks[mine])
    outputs = np.zeros(program.ranks[rank].output_slots, dtype=np.int64)
    outputs[: int(wanted.sum())] = np.sort(collective.post_chunks[wanted])
    scratch = chunks[program.slots[rank][Buffer.SCRATCH]]
    scratch[scratch == _NOTHING] = 0  # never used
    units = collective.num_ranks ** _UNITS.get(collective.name, 0)
    return Layout(inputs, outputs, scratch, parts=max(collective.num_chunks // units, 1))
