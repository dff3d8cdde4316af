"""Proves that a program computes its collective: symbolic values, and no race.

Every slot holds a chunk and the set of ranks that have contributed to it. Two operations of a rank
that touch one slot, one of them writing, must be ordered by what the program itself waits for, not
by luck: vector clocks tell. Most programs need only the waits within a rank for that, so clocks of
all blocks are kept only where those do not suffice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fivefold.collectives.lowering.machine import Executed, Machine, ProgramError, run_order
from fivefold.collectives.lowering.program import Buffer, Program


@dataclass(frozen=True)
class ProgramReport:
    """Counts of a program's parts; it exists only for programs that are right."""

    num_ranks: int
    num_blocks: int
    num_channels: int
    num_operations: int
    num_messages: int
    chunks_sent: int


class _Value(NamedTuple):
    chunk: int
    contributors: int  # one bit for each rank


_Access = tuple[int, int]  # block and step


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
        >>> from fivefold.collectives.algorithms import build_algorithm
        >>> from fivefold.collectives.lowering import lower
        >>> from fivefold.collectives.schedules import all_reduce
        >>> check_program(lower(build_algorithm("ring", all_reduce(4)))).num_messages
        24
    """
    order = run_order(program, queue_slots=queue_slots)
    try:
        checker = _Checker(program, across_ranks=False)
        checker.run(order)
    except _RaceError:
        checker = _Checker(program, across_ranks=True)
        checker.run(order)
    checker.require_outputs()
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


class _Checker(Machine):
    def __init__(self, program: Program, *, across_ranks: bool) -> None:
        counts = [rank.num_slots for rank in program.ranks]
        # Of each cell a _Value, or None.
        super().__init__(program, [np.full(count, None) for count in counts], self._sum)
        self._across_ranks = across_ranks
        self._sums = program.collective.reducing
        self._writer: list[list[_Access | None]] = [[None] * count for count in counts]
        self._readers: list[list[list[_Access]]] = [[[] for _ in range(n)] for n in counts]
        self._sent_clocks: dict[int, np.ndarray] = {}
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
        for chunk, rank, cell, _ in program.held():
            # A copied chunk is what it is, whoever held it first; only sums have contributors.
            self.memory[rank][cell] = _Value(chunk, 1 << rank if self._sums else 1)

    def step(self, place: int, executed: Executed) -> None:
        """Run one operation and advance its block's vector clock."""
        rank, operation = executed.rank, executed.operation
        self._executed, self._clock = executed, self._clocks[rank][executed.block]
        clock = self._clock
        if operation.wait_block >= 0:
            known = self._ended[rank, operation.wait_block, operation.wait_step]
            np.maximum(clock, known, out=clock)
        if operation.kind.receives and self._across_ranks:
            np.maximum(clock, self._sent_clocks.pop(executed.taken), out=clock)
        super().step(place, executed)
        clock[self._first_block[rank] + executed.block] = executed.step + 1
        if operation.kind.sends and self._across_ranks:
            self._sent_clocks[place] = clock.copy()
        if (rank, executed.block, executed.step) in self._awaited:
            self._ended[rank, executed.block, executed.step] = clock.copy()

    def read(self, executed: Executed, buffer: Buffer, offset: int) -> list[_Value]:
        """Return the values of cells that were written before."""
        rank = executed.rank
        values = []
        for cell in self.cells(executed, buffer, offset).tolist():
            self._require_before(executed, self._writer[rank][cell], f"{buffer}{offset}")
            self._readers[rank][cell].append((executed.block, executed.step))
            value = self.memory[rank][cell]
            if value is None:
                raise ProgramError(
                    f"{_where(executed)} reads '{buffer}' from slot {offset}, where nothing is yet"
                )
            values.append(value)
        return values

    def write(self, executed: Executed, buffer: Buffer, offset: int, values: list[_Value]) -> None:
        """Write values to cells that nobody else uses at the time."""
        rank, cells = executed.rank, self.cells(executed, buffer, offset).tolist()
        for cell, value in zip(cells, values, strict=True):
            for access in [self._writer[rank][cell], *self._readers[rank][cell]]:
                self._require_before(executed, access, f"{buffer}{offset}")
            self.memory[rank][cell] = value
            self._writer[rank][cell] = (executed.block, executed.step)
            self._readers[rank][cell] = []

    def _require_before(self, executed: Executed, access: _Access | None, slot: str) -> None:
        if access is None or access[0] == executed.block:
            return
        block, step = access
        if self._clock[self._first_block[executed.rank] + block] <= step:
            raise _RaceError(
                f"{_where(executed)} and block {block} step {step} both use slot {slot}, and "
                "nothing says which comes first"
            )

    def _sum(self, first: list[_Value], second: list[_Value]) -> list[_Value]:
        """Add values of the same chunks from different ranks."""
        total = []
        for one, other in zip(first, second, strict=True):
            if one.chunk != other.chunk:
                raise ProgramError(
                    f"{_where(self._executed)} adds chunk {one.chunk} to chunk {other.chunk}"
                )
            if one.contributors & other.contributors:
                twice = (one.contributors & other.contributors).bit_length() - 1
                share = f"rank {twice}'s share of chunk {one.chunk}"
                raise ProgramError(f"{_where(self._executed)} adds {share} twice")
            total.append(_Value(one.chunk, one.contributors | other.contributors))
        return total

    def require_outputs(self) -> None:
        """Require the collective's result in every output slot."""
        for chunk, rank, cell, slot in self.program.wanted():
            value = self.memory[rank][cell]
            everyone = sum(1 << int(holder) for holder in self.program.collective.holders(chunk))
            wanted = _Value(chunk, everyone if self._sums else 1)
            if value != wanted:
                raise ProgramError(
                    f"rank {rank} ends with {_in_words(value)} in output slot {slot}, "
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
