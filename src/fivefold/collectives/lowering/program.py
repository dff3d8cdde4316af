"""What a program is: per rank thread blocks of operations over numbered chunk slots.

The model is that of MSCCL's interpreter, so that its files are read and written one to one: a
thread block sends to at most one peer and receives from at most one, its operations run in order,
and one that must follow an operation of another block of the same rank names it. Data passes
between ranks through one first-in first-out queue per (sender, receiver, channel). This module
knows nothing of files, topologies or torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np

from fivefold.collectives.schedules import Collective
from fivefold.errors import ConfigurationError, require_one_of

_IN_PLACE = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"}
_MOST_SLOTS = 1 << 27
_PROTOCOLS = ("Simple", "LL", "LL128")


@dataclass(frozen=True, kw_only=True)
class Target:
    """What builds of MSCCL's interpreter differ in.

    Args:
        name: Its name on the command line.
        most_steps: Steps of a thread block.
        most_blocks: Thread blocks of a rank.
        what: Which programs these are.
    """

    name: str
    most_steps: int
    most_blocks: int
    what: str


MSCCL_TARGETS = {
    target.name: target
    for target in (
        Target(
            name="executor", most_steps=64, most_blocks=1024,
            what="msccl-executor-nccl and RCCL's MSCCL as they are built by default",
        ),
        Target(
            name="executor-256", most_steps=256, most_blocks=1024,
            what="the same, built with MSCCL_MAX_NUM_STEPS=256",
        ),
        Target(name="msccl", most_steps=256, most_blocks=216, what="microsoft/msccl"),
    )
}  # fmt: skip


def can_run_in_place(collective: Collective) -> bool:
    """Return whether input and output of a collective may be one memory."""
    return collective.name in _IN_PLACE


class Buffer(StrEnum):
    """Kinds of buffers that slots lie in; the values are MSCCL's."""

    INPUT = "i"
    OUTPUT = "o"
    SCRATCH = "s"


class OpKind(StrEnum):
    """Kinds of operations; the values are MSCCL's."""

    SEND = "s"
    RECEIVE = "r"
    RECEIVE_COPY_SEND = "rcs"
    RECEIVE_REDUCE_SEND = "rrs"
    RECEIVE_REDUCE_COPY = "rrc"
    RECEIVE_REDUCE_COPY_SEND = "rrcs"
    COPY = "cpy"
    REDUCE = "re"
    NOP = "nop"

    def __init__(self, value: str) -> None:
        self.sends = value.endswith("s")  # puts chunks into the queue to the block's send peer
        self.receives = value in {"r", "rcs", "rrs", "rrc", "rrcs"}
        self.reduces = value in {"rrs", "rrc", "rrcs", "re"}
        self.reads_source = self.reduces or value in {"s", "cpy"}
        self.writes_target = value not in {"s", "rrs", "nop"}


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of a thread block, over ``count`` adjacent chunk slots."""

    kind: OpKind  # what it does
    source: Buffer = Buffer.INPUT  # buffer that is read, where the kind reads one
    source_offset: int = 0  # first slot that is read
    target: Buffer = Buffer.OUTPUT  # buffer that is written, where the kind writes one
    target_offset: int = 0  # first slot that is written
    count: int = 1  # number of slots
    wait_block: int = -1  # block of the same rank that is waited for; -1 none
    wait_step: int = -1  # its operation that must have ended; -1 none


@dataclass(frozen=True, slots=True)
class ThreadBlock:
    """A sequence of operations with at most one peer in each direction."""

    operations: tuple[Operation, ...]  # in order
    send_peer: int = -1  # rank that it sends to; -1 none
    receive_peer: int = -1  # rank that it receives from; -1 none
    channel: int = 0  # separates the queues of blocks with the same peers


@dataclass(frozen=True, slots=True)
class RankProgram:
    """Program of one rank."""

    blocks: tuple[ThreadBlock, ...]  # thread blocks; they run side by side
    input_slots: int  # number of chunk slots of the input buffer
    output_slots: int  # number of chunk slots of the output buffer
    scratch_slots: int = 0  # number of chunk slots of the scratch buffer

    @property
    def num_slots(self) -> int:
        """Return the number of slots over all buffers."""
        return self.input_slots + self.output_slots + self.scratch_slots

    @property
    def num_operations(self) -> int:
        """Return the number of operations over all blocks."""
        return sum(len(block.operations) for block in self.blocks)


@dataclass(frozen=True)
class Program:
    """A collective algorithm that a machine can run: one program per rank.

    Args:
        collective: What it computes.
        ranks: One program per rank.
        name: Name for people.
        in_place: Whether the slots of a chunk that a rank both has and must have are one and the
            same memory (all-reduce: output is input).
        protocol: MSCCL's wire protocol: ``Simple``, ``LL`` or ``LL128``.
        min_bytes: Smallest message that it is meant for.
        max_bytes: Largest message that it is meant for; 0 has no limit.

    Raises:
        ConfigurationError: The parts do not fit together.
    """

    collective: Collective
    ranks: tuple[RankProgram, ...]
    name: str = "program"
    in_place: bool = False
    protocol: str = "Simple"
    min_bytes: int = 0
    max_bytes: int = 0

    def __post_init__(self) -> None:
        if len(self.ranks) != self.collective.num_ranks:
            raise ConfigurationError(
                f"the program has {len(self.ranks)} ranks; "
                f"{self.collective.name} has {self.collective.num_ranks}"
            )
        require_one_of(self.protocol, _PROTOCOLS, f"the protocol is {self.protocol!r}")
        if not isinstance(self.in_place, bool):
            message = f"in_place is {self.in_place!r:.60}"
            raise ConfigurationError(message, hint="say True or False")
        if self.in_place and not can_run_in_place(self.collective):
            raise ConfigurationError(
                f"{self.collective.name} cannot run in place",
                hint=f"in place run {', '.join(sorted(_IN_PLACE))}",
            )
        for name in ("min_bytes", "max_bytes"):
            _require_whole(name, getattr(self, name), most=1 << 63)
        for rank in range(self.num_ranks):
            self._check_slots(rank)
        for rank, number, block in self.blocks():
            _check_block(f"rank {rank} block {number}", block)

    # Another process numbers the slots itself: they are many times as large as the program.
    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "slots"}

    def _check_slots(self, rank: int) -> None:
        program, collective = self.ranks[rank], self.collective
        for buffer, have, needed in (
            ("input", program.input_slots, int(collective.input_slots[rank])),
            ("output", program.output_slots, int(collective.output_slots[rank])),
            ("scratch", program.scratch_slots, 0),
        ):
            _require_whole(f"rank {rank}: the number of {buffer} slots", have, most=_MOST_SLOTS)
            if have < needed:
                raise ConfigurationError(
                    f"rank {rank} has {have} {buffer} slots; "
                    f"{collective.name} of {collective.num_chunks} chunks needs {needed}"
                )

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    @property
    def num_channels(self) -> int:
        """Channels are numbered from 0 to one less than this."""
        return max((block.channel for _, _, block in self.blocks()), default=-1) + 1

    @property
    def num_operations(self) -> int:
        """Return the number of operations over all ranks."""
        return sum(rank.num_operations for rank in self.ranks)

    def blocks(self) -> Iterator[tuple[int, int, ThreadBlock]]:
        """Return all thread blocks as (rank, number of the block, block)."""
        for rank, program in enumerate(self.ranks):
            for number, block in enumerate(program.blocks):
                yield rank, number, block

    def held(self) -> Iterator[tuple[int, int, int, int]]:
        """Return chunk, rank, memory cell and slot of all that lies in the inputs."""
        one = self.collective
        addresses = one.input_address(one.pre_chunks, one.pre_ranks)
        return self._found(Buffer.INPUT, one.pre_chunks, one.pre_ranks, addresses)

    def wanted(self) -> Iterator[tuple[int, int, int, int]]:
        """Return chunk, rank, memory cell and slot of all that must lie in the outputs."""
        one = self.collective
        addresses = one.output_address(one.post_chunks, one.post_ranks)
        return self._found(Buffer.OUTPUT, one.post_chunks, one.post_ranks, addresses)

    def _found(self, buffer: Buffer, *columns: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
        for chunk, rank, slot in np.transpose(columns).tolist():
            yield chunk, rank, int(self.slots[rank][buffer][slot]), slot

    @cached_property
    def slots(self) -> list[dict[Buffer, np.ndarray]]:
        """Memory cell of each slot, by rank: equal numbers are one memory (in place)."""
        return [self._number_slots(rank) for rank in range(self.num_ranks)]

    def _number_slots(self, rank: int) -> dict[Buffer, np.ndarray]:
        program = self.ranks[rank]
        sizes = [program.input_slots, program.output_slots]
        inputs, outputs, scratch = np.split(np.arange(program.num_slots), np.cumsum(sizes))
        if self.in_place:
            chunks = np.arange(self.collective.num_chunks)
            held = self.collective.input_address(chunks, rank)
            wanted = self.collective.output_address(chunks, rank)
            both = (held >= 0) & (wanted >= 0)
            outputs[wanted[both]] = inputs[held[both]]
        return {Buffer.INPUT: inputs, Buffer.OUTPUT: outputs, Buffer.SCRATCH: scratch}


def _require_whole(what: str, value: object, *, least: int = 0, most: int = 1 << 31) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        shown = repr(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "too large"
        raise ConfigurationError(
            f"{what} is {shown}", hint=f"use a whole number from {least} to {most}"
        )


def _check_block(where: str, block: ThreadBlock) -> None:
    """Check types and ranges; `run_order` checks that what is named exists."""
    for name in ("send_peer", "receive_peer"):
        _require_whole(f"{where}: {name}", getattr(block, name), least=-1)
    _require_whole(f"{where}: channel", block.channel, most=1 << 20)
    for step, operation in enumerate(block.operations):
        buffers = operation.source, operation.target
        if not isinstance(operation.kind, OpKind) or not all(
            isinstance(buffer, Buffer) for buffer in buffers
        ):
            raise ConfigurationError(
                f"{where} step {step} is {operation!r}", hint="kinds are OpKind, buffers Buffer"
            )
        for name in ("source_offset", "target_offset", "wait_block", "wait_step", "count"):
            value = getattr(operation, name)
            if type(value) is not int or not -1 <= value <= 1 << 31:
                _require_whole(f"{where} step {step}: {name}", value, least=-1)
