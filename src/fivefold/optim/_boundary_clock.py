"""What boundaries take, where the host only queues the work of a device.

The host waits for sums, and once for what it is about to send; where local steps end is marked by
events, so that waits and seconds per step are the device's all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from fivefold.errors import CommunicationError
from fivefold.optim._update import PieceStatistics, all_finite

_POLL_S = 0.0005


class BoundaryClock:
    """The clock of one fragment.

    Args:
        device: Where its outer state is.
    """

    def __init__(self, device: torch.device) -> None:
        self._side: Any = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch
        self._began_s = self._blocked_s = 0.0
        self._launched_s: float | None = None
        # Events of the compute stream, on CUDA.
        self._began: Any = None
        self._launched: Any = None

    def begin(self) -> None:
        """Mark where a boundary begins."""
        self._began_s, self._blocked_s = time.perf_counter(), 0.0
        self._began = self._mark()

    def launch(self) -> None:
        """Mark where the boundary of a launch ends."""
        self._launched_s, self._launched = time.perf_counter(), self._mark()

    def forget(self) -> None:
        """Know of no launch."""
        self._launched_s = None

    def since_launch_s(self) -> float | None:
        """Return the seconds from the last launch to where this boundary began; None without."""
        if self._launched_s is None:
            return None
        if self._side is None:
            return self._began_s - self._launched_s
        self._launched.synchronize()  # of another stream, where the loop has changed it
        self._began.synchronize()  # long past: what is sent was looked at since
        seconds: float = self._launched.elapsed_time(self._began) / 1000
        return seconds

    def own_s(self) -> float:
        """Return the seconds of this boundary in which the host waited for nothing."""
        return time.perf_counter() - self._began_s - self._blocked_s

    def all_finite(self, *parts: PieceStatistics) -> bool:
        """Return whether all elements of what is to be sent are finite."""
        started_s = time.perf_counter()
        found = all_finite(*parts)
        if self._side is not None:
            self._blocked_s += time.perf_counter() - started_s
        return found

    def wait(
        self, handle: Any, *, fetch: Callable[[], None], what: str, rank: int, timeout_s: float
    ) -> tuple[bool, float, float]:
        """Wait for a sum.

        Args:
            handle: The transport's all-reduce.
            fetch: Copies what the ranks wrote to the host, on the current stream.
            what: The all-reduce, for an error.
            rank: This rank, for an error.
            timeout_s: Longest wait on CUDA, where the backend reports no failure.

        Returns:
            Whether it counts, and from when to when compute waited, in ``time.perf_counter()``.

        Raises:
            CommunicationError: It did not end in time.
        """
        started_s = time.perf_counter()
        if self._side is None:
            arrived = bool(handle.wait())
            ended_s = time.perf_counter()
            self._blocked_s += ended_s - started_s
            return arrived, started_s, ended_s
        steps_end = self._mark()
        # The host waits for the all-reduce alone: on a stream of its own, so that the steps queued
        # on the compute stream run on meanwhile.
        with torch.cuda.stream(self._side):
            arrived = bool(handle.wait())
            fetch()
            landed = _record(self._side)
        # Polled: NCCL reports no failure here, and a wait for the stream would have no end.
        deadline_s = time.monotonic() + timeout_s
        while not landed.query():
            if time.monotonic() > deadline_s:
                message = f"rank {rank}: {what} did not end in time"
                hint = f"a peer ended, or takes more than timeout_s={timeout_s:g} s"
                raise CommunicationError(message, hint=hint)
            time.sleep(_POLL_S)
        torch.cuda.current_stream(self._side.device).wait_stream(self._side)
        ended_s = time.perf_counter()
        self._blocked_s += ended_s - started_s
        # Steps that have not ended by now have hidden all of it.
        exposed_ms = steps_end.elapsed_time(landed) if steps_end.query() else 0.0
        return arrived, ended_s - max(exposed_ms, 0.0) / 1000, ended_s

    def _mark(self) -> Any:
        if self._side is None:
            return None
        return _record(torch.cuda.current_stream(self._side.device))


def _record(stream: Any) -> Any:
    make: Any = torch.cuda.Event  # torch does not type it
    event = make(enable_timing=True)
    event.record(stream)
    return event
