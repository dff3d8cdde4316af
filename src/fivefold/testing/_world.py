"""A world of n ranks in one process: each rank a thread, sums in rank order.

``InMemoryTransport`` satisfies ``fivefold.optim.Transport``. Sums are exact functions of the
contributions (rank 0 first), so results can be compared with a reference to the last bit, and a
delay can be injected to show that nothing depends on timing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from fivefold.errors import CommunicationError

T = TypeVar("T")


class _Board:
    """Values that the ranks have put up, by the running number of their collective."""

    def __init__(self, world_size: int, *, timeout_s: float) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.failed = False
        self._changed = threading.Condition()
        self._entries: dict[int, dict[int, Any]] = {}
        self._readers: dict[int, set[int]] = {}

    def put(self, number: int, rank: int, value: Any) -> None:
        """Put up one rank's value for a collective."""
        with self._changed:
            self._entries.setdefault(number, {})[rank] = value
            self._changed.notify_all()

    def take(self, number: int, rank: int, *, what: str) -> list[Any]:
        """Return all ranks' values, once to each rank; what all have taken is forgotten."""

        def complete() -> bool:
            return self.failed or len(self._entries.get(number, {})) == self.world_size

        with self._changed:
            if not self._changed.wait_for(complete, self.timeout_s) or self.failed:
                here = sorted(self._entries.get(number, {}))
                message = f"{what} failed: only ranks {here} of {self.world_size} took part"
                raise CommunicationError(message, hint="a rank ended early or is stuck")
            values = self._entries[number]
            readers = self._readers.setdefault(number, set())
            readers.add(rank)
            if len(readers) == self.world_size:
                del self._entries[number], self._readers[number]
            return [values[each] for each in range(self.world_size)]

    def fail(self) -> None:
        """Let all who wait know that a rank failed."""
        with self._changed:
            self.failed = True
            self._changed.notify_all()


class _InMemoryAllReduce:
    def __init__(
        self, board: _Board, number: int, rank: int, tensors: Sequence[torch.Tensor], *, what: str
    ) -> None:
        self._board = board
        self._number = number
        self._rank = rank
        self._tensors = tensors
        self._what = what
        self.launched_at_s = time.perf_counter()
        self.completed_at_s: float | None = None
        payload_bytes = sum(tensor.nbytes for tensor in tensors)
        self.sent_bytes = round(2 * (board.world_size - 1) * payload_bytes / board.world_size)

    def wait(self) -> bool:
        """Add up what all ranks contributed, once; return True."""
        if self.completed_at_s is not None:
            return True
        contributions = self._board.take(self._number, self._rank, what=self._what)
        for index, tensor in enumerate(self._tensors):
            total = contributions[0][index].clone()
            for other in contributions[1:]:
                total += other[index]
            tensor.copy_(total)
        self.completed_at_s = time.perf_counter()
        return True


class InMemoryTransport:
    """One rank's end of an in-memory world; made by ``run_world``.

    Args:
        board: Shared by all ranks.
        rank: This rank's number.
        launch_delay_s: Called before each launch; the returned seconds are slept.

    Examples:
        >>> run_world(2, lambda transport: transport.rank)
        [0, 1]
    """

    def __init__(
        self, board: _Board, rank: int, *, launch_delay_s: Callable[[], float] | None = None
    ) -> None:
        self._board = board
        self._launch_delay_s = launch_delay_s
        self._next = 0
        self.rank = rank
        self.world_size = board.world_size

    def prepare(self, payloads: Sequence[torch.Tensor], *, fragment: int) -> None:
        """Do nothing: nothing is kept between all-reduces."""

    def launch(
        self, payloads: Sequence[torch.Tensor], *, metadata: torch.Tensor, fragment: int, what: str
    ) -> _InMemoryAllReduce:
        """Put a copy of the tensors up; the all-reduce's ``wait`` writes the sums into them."""
        del fragment  # nothing is kept between all-reduces
        tensors = [*payloads, metadata]
        if self._launch_delay_s is not None:
            time.sleep(self._launch_delay_s())
        number = self._put([tensor.detach().clone() for tensor in tensors])
        return _InMemoryAllReduce(self._board, number, self.rank, tensors, what=what)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: nothing is kept between all-reduces."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: nothing is kept between all-reduces."""

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite the tensors with rank 0's."""
        number = self._put([tensor.detach().clone() for tensor in tensors])
        first = self._board.take(number, self.rank, what="broadcast")[0]
        for tensor, value in zip(tensors, first, strict=True):
            tensor.copy_(value)

    def gather_objects(self, value: object) -> list[Any]:
        """Return every rank's value, in rank order."""
        return self._board.take(self._put(value), self.rank, what="gather")

    def _put(self, value: Any) -> int:
        number = self._next
        self._next += 1
        self._board.put(number, self.rank, value)
        return number


def run_world(
    world_size: int,
    work: Callable[[InMemoryTransport], T],
    *,
    timeout_s: float = 60.0,
    launch_delay_s: Callable[[], float] | None = None,
) -> list[T]:
    """Run ``work`` on every rank of an in-memory world and return the results by rank.

    Args:
        world_size: Number of ranks, each a thread.
        work: Called with the rank's transport.
        timeout_s: Longest wait for another rank, in seconds.
        launch_delay_s: Injected before each launch, for tests of races.

    Returns:
        What ``work`` returned on each rank.

    Raises:
        Exception: The first failing rank's, after all ranks have ended.

    Examples:
        >>> def total(transport):
        ...     value = torch.tensor([float(transport.rank + 1)])
        ...     metadata = torch.zeros(1, dtype=torch.float64)
        ...     transport.launch([value], metadata=metadata, fragment=0, what="sum").wait()
        ...     return value.item()
        >>> run_world(3, total)
        [6.0, 6.0, 6.0]
    """
    board = _Board(world_size, timeout_s=timeout_s)
    results: list[Any] = [None] * world_size
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        transport = InMemoryTransport(board, rank, launch_delay_s=launch_delay_s)
        try:
            results[rank] = work(transport)
        except BaseException as error:  # noqa: BLE001 - handed to the caller below
            errors.append((rank, error))
            board.fail()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0][1]
    return results
