"""Runs a program, all ranks in one process: on values of any kind, and on numpy arrays.

Every chunk slot is an array; operations are carried out one after another in the order that
:func:`run_order` finds. It proves nothing that :func:`check_program` would not, but shows it with
numbers, and it is the reference that execution between processes is compared with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from fivefold.collectives.lowering._order import Executed, run_order
from fivefold.collectives.lowering._program import Buffer, Program
from fivefold.errors import ConfigurationError

_Array = np.ndarray
_Values = TypeVar("_Values")
_REDUCTIONS: dict[str, Callable[[_Array, _Array], _Array]] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


class Machine(ABC, Generic[_Values]):
    """Carries out a program's operations one after another, on values of any kind.

    What a memory cell holds, and what adding means, is for those who inherit to say.

    Args:
        program: The program.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._messages: dict[int, _Values] = {}

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
            values = own if values is None else self.add(executed, values, own)
        if kind.reads_target:
            assert values is not None, "a reduction reads its source"
            kept = self.read(executed, operation.target, operation.target_offset)
            values = self.add(executed, values, kept)
        if kind.writes_target:
            assert values is not None, "what is written was read or received"
            self.write(executed, operation.target, operation.target_offset, values)
        if kind.sends:
            assert values is not None, "what is sent was read or received"
            self._messages[place] = values

    def cells(self, executed: Executed, buffer: Buffer, offset: int) -> np.ndarray:
        """Return the memory cells of an operation's slots."""
        return self.program.slots(executed.rank)[buffer][offset : offset + executed.operation.count]

    @abstractmethod
    def read(self, executed: Executed, buffer: Buffer, offset: int) -> _Values:
        """Return what an operation's slots hold."""

    @abstractmethod
    def write(self, executed: Executed, buffer: Buffer, offset: int, values: _Values) -> None:
        """Put values into an operation's slots."""

    @abstractmethod
    def add(self, executed: Executed, first: _Values, second: _Values, /) -> _Values:
        """Return the sum of two operands."""


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
    if reduction not in _REDUCTIONS:
        raise ConfigurationError(
            f"there is no reduction {reduction!r}", hint=f"choose from {', '.join(_REDUCTIONS)}"
        )
    machine = _Interpreter(program, inputs, _REDUCTIONS[reduction])
    machine.run(run_order(program))
    return [
        memory[program.slots(rank)[Buffer.OUTPUT]] for rank, memory in enumerate(machine.memory)
    ]


class _Interpreter(Machine[_Array]):
    def __init__(
        self,
        program: Program,
        inputs: Sequence[_Array],
        combine: Callable[[_Array, _Array], _Array],
    ) -> None:
        super().__init__(program)
        self._combine = combine
        self.memory = _load(program, inputs)

    def read(self, executed: Executed, buffer: Buffer, offset: int) -> _Array:
        held: _Array = self.memory[executed.rank][self.cells(executed, buffer, offset)]
        return held

    def write(self, executed: Executed, buffer: Buffer, offset: int, values: _Array) -> None:
        self.memory[executed.rank][self.cells(executed, buffer, offset)] = values

    def add(self, _: Executed, first: _Array, second: _Array) -> _Array:
        return self._combine(first, second)


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
    chunk = shapes.pop()
    dtype = np.result_type(
        *[array.dtype for array in arrays if array.size] or [np.dtype(np.float64)]
    )
    memories = []
    for rank, array in enumerate(arrays):
        sizes = program.ranks[rank]
        if len(array) != sizes.input_slots:
            raise ConfigurationError(
                f"rank {rank} has {len(array)} input chunks; the program needs {sizes.input_slots}"
            )
        memory = np.zeros((sizes.num_slots, *chunk), dtype=dtype)
        if array.size:
            memory[program.slots(rank)[Buffer.INPUT]] = array
        memories.append(memory)
    return memories
