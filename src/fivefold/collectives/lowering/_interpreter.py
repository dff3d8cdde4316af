"""Runs a program on numpy arrays: all ranks in one process, with real data.

Every chunk slot is an array; operations are carried out one after another in the order that
:func:`run_order` finds. It proves nothing that :func:`check_program` would not, but shows it with
numbers, and it is the reference that execution between processes is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fivefold.collectives.lowering._order import Executed, run_order
from fivefold.collectives.lowering._program import Buffer, Program
from fivefold.errors import ConfigurationError

_Array = np.ndarray
_REDUCTIONS: dict[str, Callable[[_Array, _Array], _Array]] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


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
        >>> from fivefold.collectives.algorithms import ring
        >>> from fivefold.collectives.lowering import lower
        >>> from fivefold.collectives.schedules import all_reduce
        >>> program = lower(ring(all_reduce(2)))
        >>> [out.tolist() for out in interpret(program, [np.array([1, 2]), np.array([10, 20])])]
        [[11, 22], [11, 22]]
    """
    if reduction not in _REDUCTIONS:
        raise ConfigurationError(
            f"there is no reduction {reduction!r}", hint=f"choose from {', '.join(_REDUCTIONS)}"
        )
    return _Machine(program, inputs, _REDUCTIONS[reduction]).run(run_order(program))


class _Machine:
    def __init__(
        self,
        program: Program,
        inputs: Sequence[_Array],
        combine: Callable[[_Array, _Array], _Array],
    ) -> None:
        self._program = program
        self._combine = combine
        self._messages: dict[int, _Array] = {}
        self._memory = _load(program, inputs)

    def run(self, order: list[Executed]) -> list[_Array]:
        for place, executed in enumerate(order):
            self._step(place, executed)
        return [
            memory[self._program.slots(rank)[Buffer.OUTPUT]]
            for rank, memory in enumerate(self._memory)
        ]

    def _step(self, place: int, executed: Executed) -> None:
        operation, kind = executed.operation, executed.operation.kind
        memory, slots = self._memory[executed.rank], self._program.slots(executed.rank)
        read = slots[operation.source][operation.source_offset :][: operation.count]
        write = slots[operation.target][operation.target_offset :][: operation.count]
        data = self._messages.pop(executed.taken) if kind.receives else None
        if kind.reads_source:
            data = memory[read] if data is None else self._combine(data, memory[read])
        if kind.reads_target:
            assert data is not None, "a reduction reads its source"
            data = self._combine(data, memory[write])
        if kind.writes_target:
            memory[write] = data
        if kind.sends:
            assert data is not None, "what is sent was read or received"
            self._messages[place] = data.copy()


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
        total = sizes.input_slots + sizes.output_slots + sizes.scratch_slots
        memory = np.zeros((total, *chunk), dtype=dtype)
        if array.size:
            memory[program.slots(rank)[Buffer.INPUT]] = array
        memories.append(memory)
    return memories
