"""Proves that a program computes its collective: symbolic values, and no race.

Every slot holds a chunk and the set of ranks that have contributed to it. A reduction needs equal
chunks and disjoint sets, so that a contribution is neither lost nor added twice. Two operations of
a rank that touch one slot, one of them writing, must be ordered by what the program itself waits
for (blocks, dependencies and messages), not by luck: vector clocks tell. Most programs need only
the waits within a rank for that, so clocks of all blocks are kept only where those do not suffice.
It knows nothing of the schedule that a program was made from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fivefold.collectives.lowering._order import Executed, ProgramError, run_order
from fivefold.collectives.lowering._program import Buffer, Operation, Program


@dataclass(frozen=True)
class ProgramReport:
    """What a program is made of; it exists only for programs that are right.

    Args:
        num_ranks: Ranks.
        num_blocks: Largest number of thread blocks of a rank.
        num_channels: Channels.
        num_operations: Operations over all ranks.
        num_messages: Messages over all ranks.
        chunks_sent: Chunk slots sent over all ranks.
    """

    num_ranks: int
    num_blocks: int
    num_channels: int
    num_operations: int
    num_messages: int
    chunks_sent: int


class _Value(NamedTuple):
    chunk: int
    contributors: int  # one bit for each rank


class _Access(NamedTuple):
    block: int
    step: int


def check_program(program: Program, *, queue_slots: int | None = None) -> ProgramReport:
    """Run a program with symbolic values and require its collective's postcondition.

    Args:
        program: The program.
        queue_slots: As for :func:`run_order`; a number finds deadlocks of small queues. MSCCL's
            have 2 chunks in its protocol Simple and 8 in LL and LL128.

    Returns:
        What the program is made of.

    Raises:
        ProgramError: It deadlocks, races, reads what is not there, adds twice or the wrong
            chunks, or ends with an output that the collective does not allow.

    Examples:
        >>> from fivefold.collectives.algorithms import ring
        >>> from fivefold.collectives.lowering import lower
        >>> from fivefold.collectives.schedules import all_reduce
        >>> check_program(lower(ring(all_reduce(4)))).num_messages
        24
    """
    order = run_order(program, queue_slots=queue_slots)
    try:
        _Checker(program, across_ranks=False).run(order)
    except _RaceError:
        _Checker(program, across_ranks=True).run(order)
    sends = [step.operation.count for step in order if step.operation.kind.sends]
    return ProgramReport(
        num_ranks=program.num_ranks,
        num_blocks=max((len(rank.blocks) for rank in program.ranks), default=0),
        num_channels=program.num_channels,
        num_operations=program.num_operations,
        num_messages=len(sends),
        chunks_sent=sum(sends),
    )


class _RaceError(ProgramError):
    """Nothing says which of two operations comes first."""


class _Checker:
    def __init__(self, program: Program, *, across_ranks: bool) -> None:
        self._program = program
        self._across_ranks = across_ranks
        self._sums = program.collective.reducing
        counts = [
            rank.input_slots + rank.output_slots + rank.scratch_slots for rank in program.ranks
        ]
        self._memory: list[list[_Value | None]] = [[None] * count for count in counts]
        self._writer: list[list[_Access | None]] = [[None] * count for count in counts]
        self._readers: list[list[list[_Access]]] = [[[] for _ in range(n)] for n in counts]
        self._messages: dict[int, tuple[list[_Value | None], np.ndarray | None]] = {}
        # What each block knows to have ended: one number of operations for each block of its rank,
        # or of all ranks.
        blocks = [len(rank.blocks) for rank in program.ranks]
        starts = np.cumsum([0, *blocks]).tolist()
        self._first_block = starts if across_ranks else [0] * len(blocks)
        self._clocks = [
            np.zeros((count, starts[-1] if across_ranks else count), dtype=np.int32)
            for count in blocks
        ]
        self._ended: dict[tuple[int, int, int], np.ndarray] = {}
        self._awaited = {
            (rank, operation.wait_block, operation.wait_step)
            for rank, _, block in program.blocks()
            for operation in block.operations
            if operation.wait_block >= 0
        }
        self._fill_inputs()

    def _fill_inputs(self) -> None:
        collective = self._program.collective
        addresses = collective.input_address(collective.pre_chunks, collective.pre_ranks)
        pairs = zip(collective.pre_chunks, collective.pre_ranks, addresses, strict=True)
        for chunk, rank, address in pairs:
            cell = self._program.slots(int(rank))[Buffer.INPUT][int(address)]
            # A copied chunk is what it is, whoever held it first; only sums have contributors.
            contributors = 1 << int(rank) if self._sums else 1
            self._memory[int(rank)][int(cell)] = _Value(int(chunk), contributors)

    def run(self, order: list[Executed]) -> None:
        for place, executed in enumerate(order):
            self._step(place, executed)
        self._require_outputs()

    def _step(self, place: int, executed: Executed) -> None:
        rank, operation = executed.rank, executed.operation
        clock = self._clocks[rank][executed.block]
        if operation.wait_block >= 0:
            known = self._ended[rank, operation.wait_block, operation.wait_step]
            np.maximum(clock, known, out=clock)
        values: list[_Value | None] = []
        if operation.kind.receives:
            values, brought = self._messages.pop(executed.taken)
            if brought is not None:
                np.maximum(clock, brought, out=clock)
        values = self._compute(executed, values, clock)
        clock[self._first_block[rank] + executed.block] = executed.step + 1
        if operation.kind.sends:
            self._messages[place] = (values, clock.copy() if self._across_ranks else None)
        if (rank, executed.block, executed.step) in self._awaited:
            self._ended[rank, executed.block, executed.step] = clock.copy()

    def _compute(
        self, executed: Executed, values: list[_Value | None], clock: np.ndarray
    ) -> list[_Value | None]:
        """Read, reduce and write; what the operation sends."""
        operation, kind = executed.operation, executed.operation.kind
        if kind.reads_source:
            own = self._read(executed, operation.source, operation.source_offset, clock)
            values = self._summed(executed, values, own) if kind.reduces and values else own
        if kind.reads_target:
            kept = self._read(executed, operation.target, operation.target_offset, clock)
            values = self._summed(executed, values, kept)
        if kind.writes_target:
            self._write(executed, values, clock)
        return values

    def _cells(self, rank: int, buffer: Buffer, offset: int, operation: Operation) -> list[int]:
        cells = self._program.slots(rank)[buffer][offset : offset + operation.count]
        return [int(cell) for cell in cells]

    def _read(
        self, executed: Executed, buffer: Buffer, offset: int, clock: np.ndarray
    ) -> list[_Value | None]:
        rank = executed.rank
        values = []
        for cell in self._cells(rank, buffer, offset, executed.operation):
            self._require_before(executed, self._writer[rank][cell], clock, f"{buffer}{offset}")
            self._readers[rank][cell].append(_Access(executed.block, executed.step))
            if self._memory[rank][cell] is None:
                raise ProgramError(
                    f"{_where(executed)} reads '{buffer}' from slot {offset}, where nothing is yet"
                )
            values.append(self._memory[rank][cell])
        return values

    def _write(self, executed: Executed, values: list[_Value | None], clock: np.ndarray) -> None:
        rank, operation = executed.rank, executed.operation
        buffer, offset = operation.target, operation.target_offset
        cells = self._cells(rank, buffer, offset, operation)
        for cell, value in zip(cells, values, strict=True):
            for access in [self._writer[rank][cell], *self._readers[rank][cell]]:
                self._require_before(executed, access, clock, f"{buffer}{offset}")
            self._memory[rank][cell] = value
            self._writer[rank][cell] = _Access(executed.block, executed.step)
            self._readers[rank][cell] = []

    def _require_before(
        self, executed: Executed, access: _Access | None, clock: np.ndarray, slot: str
    ) -> None:
        if access is None or access.block == executed.block:
            return
        if clock[self._first_block[executed.rank] + access.block] <= access.step:
            raise _RaceError(
                f"{_where(executed)} and block {access.block} step {access.step} both use slot "
                f"{slot}, and nothing says which comes first"
            )

    def _summed(
        self, executed: Executed, first: list[_Value | None], second: list[_Value | None]
    ) -> list[_Value | None]:
        total: list[_Value | None] = []
        for one, other in zip(first, second, strict=True):
            assert one is not None, "only what is there is sent or read"
            assert other is not None, "only what is there is sent or read"
            if one.chunk != other.chunk:
                raise ProgramError(
                    f"{_where(executed)} adds chunk {one.chunk} to chunk {other.chunk}"
                )
            if one.contributors & other.contributors:
                twice = (one.contributors & other.contributors).bit_length() - 1
                raise ProgramError(
                    f"{_where(executed)} adds rank {twice}'s share of chunk {one.chunk} twice"
                )
            total.append(_Value(one.chunk, one.contributors | other.contributors))
        return total

    def _require_outputs(self) -> None:
        collective = self._program.collective
        addresses = collective.output_address(collective.post_chunks, collective.post_ranks)
        pairs = zip(collective.post_chunks, collective.post_ranks, addresses, strict=True)
        for chunk, rank, address in pairs:
            cell = self._program.slots(int(rank))[Buffer.OUTPUT][int(address)]
            value = self._memory[int(rank)][int(cell)]
            everyone = sum(1 << int(holder) for holder in collective.holders(int(chunk)))
            wanted = _Value(int(chunk), everyone if self._sums else 1)
            if value != wanted:
                raise ProgramError(
                    f"rank {rank} ends with {_in_words(value)} in output slot {address}, "
                    f"not with {_in_words(wanted)}"
                )


def _where(executed: Executed) -> str:
    return f"rank {executed.rank} block {executed.block} step {executed.step}"


def _in_words(value: _Value | None) -> str:
    if value is None:
        return "nothing"
    ranks = [
        str(bit) for bit in range(value.contributors.bit_length()) if value.contributors >> bit & 1
    ]
    shown = ", ".join(ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"chunk {value.chunk} (from rank{'s' if len(ranks) > 1 else ''} {shown})"
