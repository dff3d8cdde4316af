"""Ranks for tests: threads of this process, or real processes that talk over gloo.

``InMemoryTransport`` satisfies ``fivefold.optim.Transport``. Sums are exact functions of the
contributions (rank 0 first). Processes are forked from this one, as a fresh interpreter needs
seconds to import torch: the parent must not have started torch's thread pools or process groups.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import pickle
import queue
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fivefold.errors import CommunicationError

T = TypeVar("T")


class _Board:
    """Values that the ranks have put up, by the running number of their collective."""

    def __init__(self, world_size: int, *, timeout_s: float) -> None:
        self.world_size, self.timeout_s = world_size, timeout_s
        self.failed = False
        self._changed = threading.Condition()
        self._entries: dict[int, dict[int, Any]] = {}
        self._taken: Counter[int] = Counter()

    def put(self, number: int, rank: int, value: Any) -> None:
        with self._changed:
            self._entries.setdefault(number, {})[rank] = value
            self._changed.notify_all()

    def take(self, number: int, *, what: str) -> list[Any]:
        """Return all ranks' values, once to each rank; what all have taken is forgotten."""

        def complete() -> bool:
            return self.failed or len(self._entries.get(number, {})) == self.world_size

        with self._changed:
            if not self._changed.wait_for(complete, self.timeout_s) or self.failed:
                here = sorted(self._entries.get(number, {}))
                message = f"{what} failed: only ranks {here} of {self.world_size} took part"
                raise CommunicationError(message, hint="a rank ended early or is stuck")
            values = self._entries[number]
            self._taken[number] += 1
            if self._taken[number] == self.world_size:
                del self._entries[number], self._taken[number]
            return [values[each] for each in range(self.world_size)]

    def fail(self) -> None:
        """Let all who wait know that a rank failed."""
        with self._changed:
            self.failed = True
            self._changed.notify_all()


def _finish(tensors: Sequence[torch.Tensor]) -> None:
    """Let what a GPU was told to do with them end.

    Other ranks' threads read them on streams of their own, which know nothing of this one; and the
    memory of what is let go is given away at once.
    """
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


class _InMemoryAllReduce:
    def __init__(
        self, board: _Board, number: int, tensors: Sequence[torch.Tensor], *, what: str
    ) -> None:
        self._board, self._number = board, number
        self._tensors, self._what = tensors, what
        self.launched_at_s = time.perf_counter()
        self.completed_at_s: float | None = None
        payload_bytes = sum(tensor.nbytes for tensor in tensors)
        self.sent_bytes = round(2 * (board.world_size - 1) * payload_bytes / board.world_size)

    def wait(self) -> bool:
        """Add up what all ranks contributed, once; return True."""
        if self.completed_at_s is not None:
            return True
        contributions = self._board.take(self._number, what=self._what)
        for index, tensor in enumerate(self._tensors):
            total = contributions[0][index].clone()
            for other in contributions[1:]:
                total += other[index]
            tensor.copy_(total)
        _finish(self._tensors)
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

    def prepare(
        self, payloads: Sequence[torch.Tensor], *, fragment: int, num_exact: int = 0
    ) -> None:
        """Do nothing: nothing is kept between all-reduces."""

    def launch(
        self, payloads: Sequence[torch.Tensor], *, metadata: torch.Tensor, fragment: int, what: str
    ) -> _InMemoryAllReduce:
        """Put a copy of the tensors up; the all-reduce's ``wait`` writes the sums into them."""
        del fragment  # nothing is kept between all-reduces
        tensors = [*payloads, metadata]
        if self._launch_delay_s is not None:
            time.sleep(self._launch_delay_s())
        number = self._put_copies(tensors)
        return _InMemoryAllReduce(self._board, number, tensors, what=what)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: nothing is kept between all-reduces."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: nothing is kept between all-reduces."""

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite the tensors with rank 0's."""
        number = self._put_copies(tensors)
        first = self._board.take(number, what="broadcast")[0]
        for tensor, value in zip(tensors, first, strict=True):
            tensor.copy_(value)
        _finish(tensors)

    def gather_objects(self, value: object) -> list[Any]:
        """Return every rank's value, in rank order."""
        return self._board.take(self._put(value), what="gather")

    def _put_copies(self, tensors: Sequence[torch.Tensor]) -> int:
        copies = [tensor.detach().clone() for tensor in tensors]
        _finish(copies)
        return self._put(copies)

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


_LOWEST = 10_000  # below it, services have ports of their own
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_turns = itertools.count()


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on or is likely to take before its user.

    The kernel hands the ports of its own range to everyone who asks for any port, and to every
    connection, so one of those may be gone by the time that a server starts. This one is from
    below that range, and processes that ask at the same time begin at different places.

    Raises:
        OSError: Every port below the kernel's range is in use.
    """
    span = max(_end() - _LOWEST, 1)
    for _ in range(span):
        # Neighbours in process numbers are neighbours in time: a prime keeps them far apart.
        port = _LOWEST + (os.getpid() * 1009 + next(_turns)) % span
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"all ports from {_LOWEST} to {_LOWEST + span - 1} of 127.0.0.1 are in use")


def _end() -> int:
    """Return where the kernel's own range begins; Linux's default where it cannot be asked."""
    try:
        return int(_RANGE_FILE.read_text().split()[0])
    except OSError:
        return 32_768


def run_processes(
    world_size: int,
    work: Callable[[int], T],
    *,
    timeout_s: float = 60.0,
    backend: str = "gloo",
) -> list[T]:
    """Run ``work(rank)`` in ``world_size`` processes joined by a process group.

    Args:
        world_size: Number of processes.
        work: Called with the rank; the result must be picklable.
        timeout_s: Bound on the whole run and on each collective, in seconds.
        backend: Backend of the group; it must be known to torch already.

    Raises:
        RuntimeError: A rank raised, died or ran past the time; holds its traceback.

    Examples:
        >>> run_processes(2, lambda rank: rank * 10)
        [0, 10]
    """
    # The first optimizer of a process imports it, for seconds: once here, not once a rank.
    importlib.import_module("torch._dynamo")
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    port = free_port()
    processes = [
        context.Process(
            target=_rank_main, args=(rank, world_size, port, work, results, timeout_s, backend)
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        return _collect(processes, results, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank_main(
    rank: int,
    world_size: int,
    port: int,
    work: Callable[[int], Any],
    results: Any,
    timeout_s: float,
    backend: str,
) -> None:
    parent = os.getppid()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    outcome: tuple[int, bool, bytes | str]
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        # Pickled here: a queue would hand tensors over as file descriptors of this process.
        outcome = (rank, True, pickle.dumps(work(rank)))
    except BaseException:  # noqa: BLE001 - handed to the parent
        outcome = (rank, False, traceback.format_exc())
    results.put(outcome)
    results.close()
    results.join_thread()
    while rank == 0 and os.getppid() == parent:
        # This rank serves the store of addresses. A peer that is still setting up a group would
        # fail if it were gone; the parent ends this process when it has all results.
        time.sleep(0.05)
    # Leaving without the interpreter's shutdown: gloo's threads may still wait for a dead peer.
    os._exit(0)


def _collect(processes: list[Any], results: Any, timeout_s: float) -> list[Any]:
    deadline_s = time.monotonic() + timeout_s
    by_rank: dict[int, Any] = {}
    while len(by_rank) < len(processes):
        try:
            rank, fine, value = results.get(timeout=0.2)
        except queue.Empty:
            dead = [r for r, p in enumerate(processes) if not p.is_alive() and r not in by_rank]
            if dead or time.monotonic() > deadline_s:
                state = f"ranks {dead} died" if dead else f"no result within {timeout_s} s"
                raise RuntimeError(state) from None
            continue
        if not fine:
            raise RuntimeError(f"rank {rank} raised:\n{value}")
        by_rank[rank] = pickle.loads(value)  # noqa: S301 - written by our own child
    return [by_rank[rank] for rank in range(len(processes))]
