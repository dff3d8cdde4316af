"""Runs a program, all ranks in one process: without data, on values of any kind, on numpy arrays.

:func:`run_order` finds one order of all operations in which each finds what it needs: whoever
carries out those of his own rank in it can wait for them one after the other without a deadlock.
:func:`interpret` carries them out, every chunk slot an array: the reference that execution between
processes is compared with.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fivefold.collectives.lowering.program import Buffer, Operation, OpKind, Program, ThreadBlock
from fivefold.errors import ConfigurationError, DataError, require_one_of, require_whole

Arrival = Callable[[float, int, int, int], float]
_SHOWN = 4


class ProgramError(DataError):
    """A program is not what it claims: it deadlocks, races, or computes something else."""


class QueueFullError(ProgramError):
    """A program deadlocks because its queues are too small; with larger ones it might not."""


@dataclass(frozen=True, slots=True)
class Executed:
    """One operation in the order of execution."""

    rank: int
    block: int
    step: int
    operation: Operation
    taken: int  # place in the order of the operation that sent what it received; -1 none
    end_s: float  # virtual time


def run_order(
    program: Program, *, arrival_s: Arrival | None = None, queue_slots: int | None = None
) -> list[Executed]:
    """Find an order in which every operation of the program can be carried out, by virtual time.

    ``arrival_s`` says when a message arrives, as a function of (time of sending, sender, receiver,
    chunks), called in the order of time; None takes one second each. A queue holds ``queue_slots``
    chunks before its sender waits; None has no limit. With one, a message of several chunks goes
    chunk by chunk, as in MSCCL's kernel.
    """
    return _Runner(program, arrival_s=arrival_s, queue_slots=queue_slots).run()


@dataclass(frozen=True, slots=True)
class _Parcel:
    """Chunks of a message in a queue."""

    arrival_s: float
    sender: tuple[int, int]  # block and step
    message_count: int


class _Runner:
    """State of one run: how far each block is, what is in each queue, who waits for what."""

    def __init__(
        self, program: Program, *, arrival_s: Arrival | None, queue_slots: int | None
    ) -> None:
        self._arrival_s = arrival_s or (lambda sent_s, *_: sent_s + 1.0)
        if queue_slots is not None:
            require_whole("queue_slots", queue_slots)
        self._queue_slots = queue_slots
        self._blocks: list[tuple[int, int, ThreadBlock]] = list(program.blocks())
        self._place = {(rank, number): at for at, (rank, number, _) in enumerate(self._blocks)}
        self._next = [0] * len(self._blocks)
        self._moved = [0] * len(self._blocks)  # chunks of the next operation that have moved
        self._ended_s: list[list[float]] = [[] for _ in self._blocks]
        self._queues: dict[tuple[int, int, int], deque[_Parcel]] = {}
        self._places: dict[tuple[int, int], int] = {}  # of sends, by block and step
        self._waiting: dict[object, list[int]] = {}
        self._order: list[Executed] = []
        self._ready = [(0.0, at) for at in range(len(self._blocks))]
        _check_queues(program)

    def run(self) -> list[Executed]:
        """Run all operations; return them in the order of their times."""
        while self._ready:
            now_s, at = heapq.heappop(self._ready)
            self._advance(now_s, at)
        lengths = [len(block.operations) for _, _, block in self._blocks]
        stuck = [at for at, length in enumerate(lengths) if self._next[at] < length]
        if stuck:
            raise self._deadlock(stuck)
        for (source, target, channel), queue in self._queues.items():
            if queue:
                raise ProgramError(
                    f"{len(queue)} messages from rank {source} to rank {target} on channel "
                    f"{channel} are never received"
                )
        return self._order

    def _advance(self, now_s: float, at: int) -> None:
        """Carry out the block's next operation, or note what it waits for."""
        (rank, number, block), step = self._blocks[at], self._next[at]
        if step == len(block.operations):
            return
        operation = block.operations[step]
        cause, from_s = self._obstacle(rank, block, operation)
        if cause is not None:
            self._waiting.setdefault(cause, []).append(at)
            return
        if from_s > now_s:  # what it needs is under way: come back when it is there
            heapq.heappush(self._ready, (from_s, at))
            return
        kind = operation.kind
        single = self._queue_slots is not None and (kind.sends or kind.receives)
        count = 1 if single else operation.count
        sender = self._receive(rank, block, operation, step=step) if kind.receives else None
        self._moved[at] += count
        if self._moved[at] == operation.count:
            self._moved[at] = 0
            self._places[at, step] = len(self._order)
            taken = -1 if sender is None else self._places[sender]
            self._order.append(Executed(rank, number, step, operation, taken, now_s))
            self._next[at] += 1
            self._ended_s[at].append(now_s)
            self._wake(("step", rank, number), now_s)
        if kind.sends:
            key = (rank, block.send_peer, block.channel)
            arrival_s = self._arrival_s(now_s, rank, block.send_peer, count)
            queue = self._queues.setdefault(key, deque())
            # One queue keeps its order, whatever the time of each message.
            arrival_s = max(arrival_s, queue[-1].arrival_s) if queue else arrival_s
            queue.append(_Parcel(arrival_s, (at, step), operation.count))
            self._wake(("message", *key), now_s)
        heapq.heappush(self._ready, (now_s, at))

    def _obstacle(
        self, rank: int, block: ThreadBlock, operation: Operation
    ) -> tuple[object, float]:
        """Return what the operation waits for, or from when on it can run."""
        from_s = 0.0
        if operation.wait_block >= 0:
            other = self._place[rank, operation.wait_block]
            if self._next[other] <= operation.wait_step:
                return ("step", rank, operation.wait_block), 0.0
            from_s = self._ended_s[other][operation.wait_step]
        if operation.kind.receives:
            key = (block.receive_peer, rank, block.channel)
            queue = self._queues.get(key)
            if not queue:
                return ("message", *key), 0.0
            from_s = max(from_s, queue[0].arrival_s)
        if operation.kind.sends and self._queue_slots is not None:
            key = (rank, block.send_peer, block.channel)
            if len(self._queues.get(key, ())) >= self._queue_slots:
                return ("room", *key), 0.0
        return None, from_s

    def _receive(
        self, rank: int, block: ThreadBlock, operation: Operation, *, step: int
    ) -> tuple[int, int]:
        """Take the next chunks off the queue; block and step that sent them."""
        key = (block.receive_peer, rank, block.channel)
        parcel = self._queues[key].popleft()
        if parcel.message_count != operation.count:
            raise ProgramError(
                f"rank {rank} expects {operation.count} chunks from rank {block.receive_peer} on "
                f"channel {block.channel} in step {step}, but {parcel.message_count} were sent"
            )
        self._wake(("room", *key), parcel.arrival_s)
        return parcel.sender

    def _wake(self, cause: object, now_s: float) -> None:
        for at in self._waiting.pop(cause, ()):
            heapq.heappush(self._ready, (now_s, at))

    def _deadlock(self, stuck: list[int]) -> ProgramError:
        lines, full = [], False
        for at in stuck:
            rank, number, block = self._blocks[at]
            operation = block.operations[self._next[at]]
            cause, _ = self._obstacle(rank, block, operation)
            assert isinstance(cause, tuple), "a block that waits for nothing has run to its end"
            full = full or cause[0] == "room"
            kind, source, *rest = cause
            if kind == "step":
                what = f"block {rest[0]}"
            elif kind == "message":
                what = f"a message from rank {source} on channel {rest[1]}"
            else:
                what = f"room in the queue to rank {rest[0]} on channel {rest[1]}"
            lines.append(f"rank {rank} block {number} step {self._next[at]} waits for {what}")
        more = f", and {len(stuck) - _SHOWN} more" if len(stuck) > _SHOWN else ""
        message = f"the program deadlocks: {'; '.join(lines[:_SHOWN])}{more}"
        if not full:
            return ProgramError(message)
        return QueueFullError(
            f"{message}; each queue holds {self._queue_slots} chunks",
            hint=f"lower its schedule with queue_slots={self._queue_slots}, use more channels, or "
            "send fewer chunks before the first is received",
        )


def _check_queues(program: Program) -> None:
    """Require peers and steps that exist, and one sending and one receiving block per queue."""
    users: dict[tuple[str, int, int, int], int] = {}
    for rank, number, block in program.blocks():
        where = f"rank {rank} block {number}"
        for what, peer in (("send", block.send_peer), ("receive", block.receive_peer)):
            if peer == rank or not -1 <= peer < program.num_ranks:
                raise ProgramError(f"{where} has the {what} peer {peer}")
            key = (what, rank, peer, block.channel)
            if peer >= 0 and users.setdefault(key, number) != number:
                raise ProgramError(
                    f"{where} and block {users[key]} both {what} with rank {peer} on channel "
                    f"{block.channel}: the order of their messages is not defined"
                )
        for step, operation in enumerate(block.operations):
            _check_operation(program, rank, block, operation, where=f"{where} step {step}")


def _check_operation(
    program: Program, rank: int, block: ThreadBlock, operation: Operation, *, where: str
) -> None:
    kind, ranks = operation.kind, program.ranks[rank]
    if kind.sends and block.send_peer < 0:
        raise ProgramError(f"{where} sends, but its block has no send peer")
    if kind.receives and block.receive_peer < 0:
        raise ProgramError(f"{where} receives, but its block has no receive peer")
    if operation.count < 1 and kind != "nop":
        raise ProgramError(f"{where} has the count {operation.count}")
    if operation.wait_block >= 0:
        others = ranks.blocks
        if operation.wait_block >= len(others) or not (
            0 <= operation.wait_step < len(others[operation.wait_block].operations)
        ):
            raise ProgramError(
                f"{where} waits for step {operation.wait_step} of block {operation.wait_block}, "
                "which does not exist"
            )
    sizes = {"i": ranks.input_slots, "o": ranks.output_slots, "s": ranks.scratch_slots}
    used = [(operation.source, operation.source_offset)] if kind.reads_source else []
    used += [(operation.target, operation.target_offset)] if kind.writes_target else []
    for buffer, offset in used:
        if offset < 0 or offset + operation.count > sizes[buffer]:
            raise ProgramError(
                f"{where} uses slots {offset} to {offset + operation.count - 1} of a buffer "
                f"'{buffer}' with {sizes[buffer]} slots"
            )


class Hazards:
    """Who wrote each memory cell last, and who has read it since."""

    def __init__(self) -> None:
        self._writer: dict[int, Any] = {}
        self._readers: dict[int, list[Any]] = {}

    def before(self, reads: list[int], writes: list[int]) -> set[Any]:
        """Return whom an access to cells must follow."""
        found = {self._writer[cell] for cell in (*reads, *writes) if cell in self._writer}
        return found.union(*(self._readers.get(cell, ()) for cell in writes))

    def note(self, who: Any, reads: list[int], writes: list[int]) -> None:
        """Note an access."""
        for cell in reads:
            self._readers.setdefault(cell, []).append(who)
        for cell in writes:
            self._writer[cell] = who
            self._readers.pop(cell, None)


_Array = np.ndarray
_REDUCTIONS: dict[str, Callable[[_Array, _Array], _Array]] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


class Machine:
    """Carries out a program's operations one after another, on values of any kind.

    ``memory`` has an array of cells for each rank, and ``add`` says what adding means.
    """

    def __init__(
        self, program: Program, memory: list[_Array], add: Callable[[Any, Any], Any]
    ) -> None:
        self.program, self.memory, self.add = program, memory, add
        self._messages: dict[int, Any] = {}

    def run(self, order: Sequence[Executed]) -> None:
        """Carry out all operations, in the order that `run_order` found."""
        for place, executed in enumerate(order):
            self.step(place, executed)

    def step(self, place: int, executed: Executed) -> None:
        """Read or receive, add, write and send, as one operation says."""
        operation, kind = executed.operation, executed.operation.kind
        values = self._messages.pop(executed.taken) if kind.receives else None
        if kind.reads_source:
            own = self.read(executed, operation.source, operation.source_offset)
            values = own if values is None else self.add(values, own)
        if kind is OpKind.REDUCE:  # a local one adds to its target slots
            kept = self.read(executed, operation.target, operation.target_offset)
            values = self.add(values, kept)
        if kind.writes_target:
            self.write(executed, operation.target, operation.target_offset, values)
        if kind.sends:
            self._messages[place] = values

    def cells(self, executed: Executed, buffer: Buffer, offset: int) -> _Array:
        """Return the memory cells of an operation's slots."""
        return self.program.slots[executed.rank][buffer][offset : offset + executed.operation.count]

    def read(self, executed: Executed, buffer: Buffer, offset: int) -> Any:
        """Return what an operation's slots hold."""
        return self.memory[executed.rank][self.cells(executed, buffer, offset)]

    def write(self, executed: Executed, buffer: Buffer, offset: int, values: Any) -> None:
        """Put values into an operation's slots."""
        self.memory[executed.rank][self.cells(executed, buffer, offset)] = values


def interpret(
    program: Program, inputs: Sequence[_Array], *, reduction: str = "sum"
) -> list[_Array]:
    """Execute a program.

    Args:
        program: The program.
        inputs: Input buffer of each rank: an array whose first axis counts chunk slots; a rank
            without input takes an empty array. They are not changed.
        reduction: ``"sum"``, ``"product"``, ``"min"`` or ``"max"``.

    Returns:
        Output buffer of each rank, in the same form. Slots that nothing was written to are zero.

    Raises:
        ConfigurationError: Inputs do not fit the program, or there is no such reduction.
        ProgramError: The program cannot be run to its end.

    Examples:
        >>> from fivefold.collectives.algorithms import build_algorithm
        >>> from fivefold.collectives.lowering import lower
        >>> from fivefold.collectives.schedules import all_reduce
        >>> program = lower(build_algorithm("ring", all_reduce(2)))
        >>> [out.tolist() for out in interpret(program, [np.array([1, 2]), np.array([10, 20])])]
        [[11, 22], [11, 22]]
    """
    require_one_of(reduction, _REDUCTIONS, f"there is no reduction {reduction!r}")
    memories = _load(program, inputs)
    Machine(program, memories, _REDUCTIONS[reduction]).run(run_order(program))
    return [
        memory[slots[Buffer.OUTPUT]] for memory, slots in zip(memories, program.slots, strict=True)
    ]


def _load(program: Program, inputs: Sequence[_Array]) -> list[_Array]:
    if len(inputs) != program.num_ranks:
        raise ConfigurationError(
            f"there are {len(inputs)} inputs for {program.num_ranks} ranks",
            hint="give one array for each rank",
        )
    arrays = [np.asarray(array) for array in inputs]
    shapes = {array.shape[1:] for array in arrays if array.size} or {()}
    if len(shapes) > 1:
        raise ConfigurationError(
            f"chunks have the shapes {sorted(shapes)}", hint="give all ranks chunks of one shape"
        )
    chunk, memories = shapes.pop(), []
    dtype = np.result_type(*[array.dtype for array in arrays if array.size] or [np.dtype(float)])
    for rank, array in enumerate(arrays):
        sizes = program.ranks[rank]
        if len(array) != sizes.input_slots:
            raise ConfigurationError(
                f"rank {rank} has {len(array)} input chunks; the program needs {sizes.input_slots}"
            )
        memory = np.zeros((sizes.num_slots, *chunk), dtype=dtype)
        if array.size:
            memory[program.slots[rank][Buffer.INPUT]] = array
        memories.append(memory)
    return memories
