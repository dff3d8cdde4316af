"""A thread that all-reduces chunks of buckets in one order on all ranks.

It holds a window of chunks in flight, so that the next one starts the moment one ends. An error of
a collective reaches whoever waits for a bucket. This module knows nothing of DDP.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fivefold.errors import CommunicationError, ConfigurationError, FivefoldError


@dataclass(frozen=True)
class SentChunk:
    """One all-reduce as this rank saw it; times are those of ``time.perf_counter``."""

    bucket: int
    chunk: int
    size_bytes: int
    start_s: float
    end_s: float


@dataclass
class Bucket:
    """Gradients that are summed in place."""

    number: int
    buffer: torch.Tensor
    ready_s: float
    left: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    future: torch.futures.Future[torch.Tensor] | None = None
    error: FivefoldError | None = None


class ChunkSender:
    """Sends what it is given, in the order that it is given.

    Args:
        group: The ranks; used by this object alone.
        chunk_bytes: Largest chunk; None for whole buckets.
        credit: Chunks in flight at once.
        timeout_s: Longest wait for a bucket that the order wants next.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, chunk_bytes: int | None, credit: int, timeout_s: float
    ) -> None:
        self._group, self._chunk_bytes, self._credit = group, chunk_bytes, credit
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._order: collections.deque[tuple[int, int]] = collections.deque()
        self._ready: dict[int, Bucket] = {}
        self._closed = False
        self.sent: list[SentChunk] = []
        self._thread = threading.Thread(target=self._run, name="fivefold-chunks", daemon=True)
        self._thread.start()

    def begin(self, order: Sequence[tuple[int, int]]) -> None:
        """Announce the order of the chunks of the buckets to come."""
        with self._changed:
            self._order.extend(order)
            self._changed.notify_all()

    def add(self, bucket: Bucket) -> None:
        """Hand over a bucket whose gradients are there."""
        bucket.left = len(self.chunks_of(bucket.buffer))
        with self._changed:
            self._ready[bucket.number] = bucket
            self._changed.notify_all()

    def chunks_of(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of a bucket's chunks."""
        if self._chunk_bytes is None:
            return (buffer,)
        return torch.split(buffer, max(1, self._chunk_bytes // buffer.element_size()))

    def set_chunk_bytes(self, chunk_bytes: int | None) -> None:
        """Change the chunk size; nothing may be on its way."""
        with self._changed:
            if self._order or self._ready:
                message = "the chunk size was changed while chunks were on their way"
                raise ConfigurationError(message, hint="call finish() first")
            self._chunk_bytes = chunk_bytes

    def close(self) -> None:
        """End the thread; chunks that are still to be sent are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(self._timeout_s)

    def _run(self) -> None:
        flying: collections.deque[tuple[dist.Work, Bucket, int, float]] = collections.deque()
        while True:
            try:
                taken = self._next(block=not flying)
                if taken is None and not flying:
                    return
                if taken is not None:
                    bucket, chunk = taken
                    part = self.chunks_of(bucket.buffer)[chunk]
                    started_s = time.perf_counter()
                    work = self._group.allreduce([part])
                    flying.append((work, bucket, chunk, started_s))
                if taken is None or len(flying) >= self._credit:
                    self._land(flying)
            except Exception as error:  # noqa: BLE001 - handed to whoever waits
                self._fail(error)
                return

    def _next(self, *, block: bool) -> tuple[Bucket, int] | None:
        """The next chunk; None where there is none now (not blocking) or ever again (closed)."""
        with self._changed:
            waited_s = 0.0
            while not self._closed:
                if self._order and self._order[0][0] in self._ready:
                    number, chunk = self._order.popleft()
                    return self._ready[number], chunk
                if not block:
                    return None
                before_s = time.perf_counter()
                self._changed.wait(1.0)
                # Between passes there is nothing to wait for, however long.
                waited_s = waited_s + time.perf_counter() - before_s if self._ready else 0.0
                if waited_s > self._timeout_s:
                    raise CommunicationError(
                        f"bucket {self._order[0][0] if self._order else '?'} was not ready within "
                        f"{self._timeout_s:g} s of others",
                        hint="every backward pass must reach all parameters, as DDP needs too",
                    )
            return None

    def _land(self, flying: collections.deque[tuple[dist.Work, Bucket, int, float]]) -> None:
        work, bucket, chunk, started_s = flying.popleft()
        work.wait()
        ended_s = time.perf_counter()
        size_bytes = self.chunks_of(bucket.buffer)[chunk].nbytes
        self.sent.append(SentChunk(bucket.number, chunk, size_bytes, started_s, ended_s))
        bucket.left -= 1
        if bucket.left == 0:
            with self._changed:
                del self._ready[bucket.number]
            bucket.done.set()
            if bucket.future is not None:
                bucket.future.set_result(bucket.buffer)

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, FivefoldError):
            rank = dist.get_rank()
            shown = CommunicationError(
                f"rank {rank}: all-reduce of gradients failed: {error}",
                hint="look at the other ranks' output: one of them probably ended first",
            )
            shown.__cause__ = error
        else:
            shown = error  # type: ignore[assignment]
        with self._changed:
            self._closed = True
            waiting, self._ready = list(self._ready.values()), {}
        for bucket in waiting:
            bucket.error = shown
            bucket.done.set()
            if bucket.future is not None and not bucket.future.done():
                bucket.future.set_exception(shown)  # type: ignore[arg-type]
