"""The outside of the engine: one asynchronous sum over the ranks of a process group.

A *flight* is the sum of one round's payload, plus a *lane*: a few float64 numbers that travel
with it (norms, replica hashes). The sum of a lane is the same bit for bit on every rank, so
decisions made from it are made alike everywhere, whatever each rank's hardware rounds to.

The transport has a process group of its own. Two collectives of one group are matched by their
order, and the trainer's own collectives (validation, checkpoints) come at other moments on
different ranks; in a shared group they could be matched with a payload.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fivefold.errors import CommunicationError, ConfigurationError

__all__ = ["Flight", "ProcessGroupTransport", "Transport"]


class Flight(Protocol):
    """One sum over the ranks on its way."""

    @property
    def launched_at_s(self) -> float:
        """``time.perf_counter()`` at the launch."""
        ...

    @property
    def completed_at_s(self) -> float | None:
        """``time.perf_counter()`` at completion; None while under way."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends over the network for this flight, by the formula."""
        ...

    def wait(self) -> bool:
        """Block until the sums are in the tensors that were launched.

        Returns:
            True where the sums arrived. False where the flight was lost and every surviving rank
            knows that it was: the engine then sends the same work again with the next round.

        Raises:
            CommunicationError: A peer ended, the network failed, or the timeout passed.
        """
        ...


class Transport(Protocol):
    """What the engine needs of the world.

    ``world_size`` is the number of slots that ranks can have; a transport whose membership
    changes keeps it and leaves slots empty.
    """

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks that are summed over."""
        ...

    def launch(
        self, payloads: Sequence[torch.Tensor], *, lane: torch.Tensor, fragment: int, what: str
    ) -> Flight:
        """Start summing the tensors in place over all ranks; return at once.

        Args:
            payloads: Flat buffers that nobody touches until the flight has been waited for. A
                transport may send them compressed; their sums are then approximate, and equal
                on all ranks bit for bit.
            lane: A few float64 numbers, always summed exactly as they are.
            fragment: Which part of the model the payloads are, from 0; at most one flight of a
                fragment is under way at a time.
            what: What is sent, for error messages.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold of the transport (error feedback); its shape never varies."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``."""
        ...

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite the tensors with rank 0's."""
        ...

    def gather_objects(self, value: object) -> list[Any]:
        """Return every rank's value, in rank order."""
        ...


class ProcessGroupTransport:
    """A transport over ``torch.distributed`` (gloo or NCCL) in a process group of its own.

    Args:
        process_group: Ranks that take part; None for all. Only its membership is used.
        timeout_s: Longest wait for a collective, in seconds.

    Raises:
        ConfigurationError: ``torch.distributed`` is not initialised.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, *, timeout_s: float) -> None:
        if not dist.is_available() or not dist.is_initialized():
            message = "torch.distributed is not initialised"
            hint = "call torch.distributed.init_process_group first, or start with torchrun"
            raise ConfigurationError(message, hint=hint)
        members = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        with _named_errors(dist.get_rank(), "the set-up of the engine's process group"):
            self._group = dist.new_group(
                members,
                timeout=timedelta(seconds=timeout_s),
                use_local_synchronization=process_group is not None,
            )
        self._global_root = members[0]
        self._open_works: list[dist.Work] = []
        # Also at the interpreter's exit: gloo aborts the process when a collective is cut off.
        weakref.finalize(self, _let_land, self._open_works)

    @property
    def rank(self) -> int:
        """This rank's number within the group."""
        return dist.get_rank(self._group)

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return dist.get_world_size(self._group)

    def launch(
        self, payloads: Sequence[torch.Tensor], *, lane: torch.Tensor, fragment: int, what: str
    ) -> ProcessGroupFlight:
        """Start one asynchronous all-reduce (sum) per tensor; see ``Transport.launch``.

        Raises:
            CommunicationError: The collective could not be started.
        """
        del fragment  # nothing is kept between flights
        launched_at_s = time.perf_counter()
        tensors = [*payloads, lane]
        with _named_errors(self.rank, what):
            works = [dist.all_reduce(t, group=self._group, async_op=True) for t in tensors]
        self._open_works[:] = [work for work in self._open_works if not work.is_completed()]
        self._open_works.extend(works)
        sent_bytes = ring_bytes(sum(t.nbytes for t in tensors), world_size=self.world_size)
        return ProcessGroupFlight(
            works, rank=self.rank, launched_at_s=launched_at_s, sent_bytes=sent_bytes, what=what
        )

    def state_dict(self) -> dict[str, Any]:
        """Nothing is kept between flights."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is kept between flights."""

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite the tensors with the group's first rank's.

        Raises:
            CommunicationError: A peer ended or the network failed.
        """
        with _named_errors(self.rank, "broadcast of the initial parameters"):
            for tensor in tensors:
                dist.broadcast(tensor, src=self._global_root, group=self._group)

    def gather_objects(self, value: object) -> list[Any]:
        """Return every rank's value, in rank order.

        Raises:
            CommunicationError: A peer ended or the network failed.
        """
        values: list[Any] = [None] * self.world_size
        with _named_errors(self.rank, "comparison of the ranks' settings"):
            dist.all_gather_object(values, value, group=self._group)
        return values


@contextlib.contextmanager
def _named_errors(rank: int, what: str) -> Iterator[None]:
    """Turn the backends' errors into ours; they raise RuntimeErrors for peers and timeouts alike.

    Raises:
        CommunicationError: The body raised one.
    """
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        message = f"rank {rank}: {what} failed: {reason}"
        hint = (
            "a peer ended or the network failed; look at the other ranks' errors, then "
            "start again from the last checkpoint"
        )
        raise CommunicationError(message, hint=hint) from error


def _let_land(works: list[dist.Work], patience_s: float = 5.0) -> None:
    """Give collectives that nobody waits for any more a moment to end."""
    deadline_s = time.monotonic() + patience_s
    while any(not work.is_completed() for work in works) and time.monotonic() < deadline_s:
        time.sleep(0.01)


class ProcessGroupFlight:
    """All-reduces of one round on their way; completion is stamped by the backend's thread."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        *,
        rank: int,
        launched_at_s: float,
        sent_bytes: int,
        what: str,
    ) -> None:
        self.sent_bytes = sent_bytes
        self._works = works
        self._rank = rank
        self._what = what
        self._lock = threading.Lock()
        self._open = len(works)
        self.launched_at_s = launched_at_s
        self.completed_at_s: float | None = None
        for work in works:
            work.get_future().add_done_callback(self._on_done)

    def _on_done(self, _: object) -> None:
        now_s = time.perf_counter()
        with self._lock:
            self._open -= 1
            if self._open == 0:
                self.completed_at_s = now_s

    def wait(self) -> bool:
        """Block until every all-reduce has ended; see ``Flight.wait``.

        Raises:
            CommunicationError: A peer ended, the network failed, or the timeout passed.
        """
        with _named_errors(self._rank, self._what):
            for work in self._works:
                work.wait()
        if self.completed_at_s is None:
            # The callback may run just after wait() returns.
            self.completed_at_s = time.perf_counter()
        return True


def ring_bytes(payload_bytes: int, *, world_size: int) -> int:
    """Bytes that each rank sends in a ring all-reduce: 2 (G - 1) / G times the payload."""
    return round(2 * (world_size - 1) * payload_bytes / world_size)
