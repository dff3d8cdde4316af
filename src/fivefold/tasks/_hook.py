"""The running half: a DDP communication hook that follows a planned order of chunks.

With ``update`` the wait at the end of the backward pass is gone as well: the optimizer works bucket
by bucket as they arrive, and each layer's forward pass waits for its own buckets only.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fivefold.errors import (
    CommunicationError,
    ConfigurationError,
    FivefoldError,
    UnsupportedError,
    require_number,
    require_whole,
)
from fivefold.tasks.schedule import BucketCost, Ordering, SendOrder, plan_send_order


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
    error: Exception | None = None


class ChunkSender:
    """Sends what it is given, in the order that it is given."""

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
        """Return views of a bucket's chunks."""
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
        """Return the next chunk; None: none now (not blocking), or closed."""
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
                        f"rank {dist.get_rank()}: bucket "
                        f"{self._order[0][0] if self._order else '?'} was not ready within "
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
        shown = error
        if not isinstance(error, FivefoldError):
            shown = CommunicationError(
                f"rank {dist.get_rank()}: all-reduce of gradients failed: {error}",
                hint="look at the other ranks' output: one of them probably ended first",
            )
            shown.__cause__ = error
        with self._changed:
            self._closed = True
            waiting, self._ready = list(self._ready.values()), {}
        for bucket in waiting:
            bucket.error = shown
            bucket.done.set()
            if bucket.future is not None and not bucket.future.done():
                bucket.future.set_exception(shown)  # type: ignore[arg-type]


# DDP arranges its buckets anew in the forward pass after the first backward pass: the gradients
# move to other memory then, so nothing may be on its way.
_ARRANGED_AFTER = 2
_GRACE_S = 5.0  # the thread notices a silent peer after the timeout, and says more about it
Update = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


class ScheduledReduction:
    """All-reduces a DDP model's gradients in chunks, in an order that all ranks share.

    Until :meth:`plan` was called, buckets go as they become ready.

    Args:
        model: Wrapped with ``gradient_as_bucket_view=True``; on CPU, over gloo.
        update: Makes the optimizer of one parameter, given in a list. Where it is given, ``step``
            and the forward hooks of this object take the place of an optimizer: a parameter is
            updated when its gradient has arrived, at the latest before the next call of its
            module, or of the module around it where its own is never called. Nothing may use it
            earlier. Norms over all gradients are not to be had.
        chunk_bytes: Largest chunk; None for whole buckets.
        credit: Chunks in flight at once.
        timeout_s: Longest wait for gradients and for a peer.

    Raises:
        ConfigurationError: The model is not as required, or a number is not allowed.
        UnsupportedError: The model is not on CPU.

    Examples:
        >>> reduction = ScheduledReduction(ddp, chunk_bytes=1 << 20)   # doctest: +SKIP
        >>> for inputs, targets in data:                               # doctest: +SKIP
        ...     loss(ddp(inputs), targets).backward()
        ...     optimizer.step()

    References:
        P3, arXiv 1905.03960; ByteScheduler, SOSP 2019.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        *,
        update: Update | None = None,
        chunk_bytes: int | None = None,
        credit: int = 2,
        timeout_s: float = 300.0,
    ) -> None:
        _check(model, chunk_bytes, credit)
        require_number("timeout_s", timeout_s, positive=True)
        self._model, self._update, self._timeout_s = model, update, timeout_s
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._ranks = self._group.size()
        self._sender = ChunkSender(
            self._group, chunk_bytes=chunk_bytes, credit=credit, timeout_s=timeout_s
        )
        self._order: SendOrder | None = None
        self._flying: dict[int, Bucket] = {}  # those whose parameters are not updated yet
        # One per parameter: DDP arranges its buckets anew after the first pass.
        self._optimizers = {
            id(parameter): update([parameter])
            for parameter in (model.parameters() if update is not None else ())
            if update is not None and parameter.requires_grad
        }
        self._members: dict[int, list[torch.Tensor]] = {}  # of each bucket
        self._owner: dict[int, int] = {}  # parameter id to its bucket
        self._passes = 0
        self._ready: list[tuple[int, float]] = []  # bytes of each bucket, and when it was ready
        self._last_ready: list[tuple[int, float]] = []  # of the last whole pass
        self._forward_ends_s = time.perf_counter()
        self._waits: list[tuple[float, float]] = []
        self.handed_over_s = 0.0
        """When the last bucket of a backward pass was handed over, by ``time.perf_counter``."""
        self._entered_s: dict[int, float] = {}  # bucket to when its first layer began
        self._handles = [
            model.register_forward_pre_hook(self._before_forward),
            model.register_forward_hook(self._after_forward),
        ]
        # Parameters by the module whose call uses them first; the first pass finds out.
        self._used_by: dict[int, list[torch.nn.Parameter]] | None = None
        self._called: set[int] = set()
        self._handles += [
            module.register_forward_pre_hook(self._before_layer)
            for module in model.module.modules()
        ]
        # A lambda: DDP inspects a hook's annotations and refuses postponed ones, which are text.
        model.register_comm_hook(None, lambda state, bucket: self._reduce(bucket))  # noqa: ARG005 - DDP asks for these two names

    @property
    def order(self) -> SendOrder | None:
        """Return the planned order; None where buckets go as they become ready."""
        return self._order

    def sent(self) -> list[SentChunk]:
        """Return the all-reduces since the last call, with their times."""
        taken, self._sender.sent = self._sender.sent, []
        return taken

    def waited(self) -> list[tuple[float, float]]:
        """Return the times since the last call in which this rank stood still for gradients.

        With ``update`` only; without it the backward pass itself waits, from ``handed_over_s`` on.
        """
        taken, self._waits = self._waits, []
        return taken

    def measured(self) -> list[BucketCost]:
        """Return what this rank saw of each bucket in the last whole backward pass."""
        entered = sorted(self._entered_s.items(), key=lambda item: item[1])
        ends_s = [start_s for _, start_s in entered[1:]] + [self._forward_ends_s]
        forward_s = {
            number: max(0.0, end_s - start_s)
            for (number, start_s), end_s in zip(entered, ends_s, strict=False)
        }
        return [
            BucketCost(size_bytes=size, ready_s=ready_s, forward_s=forward_s.get(number, 0.0))
            for number, (size, ready_s) in enumerate(self._last_ready)
        ]

    def plan(
        self,
        *,
        cost_s_per_byte: float | None = None,
        latency_s: float = 0.0,
        ordering: Ordering = "priority",
        chunk_bytes: int | None = None,
    ) -> SendOrder:
        """Plan the order of all later passes from rank 0's measurements; all ranks call it.

        Args:
            cost_s_per_byte: Seconds per byte of an all-reduce; None takes the mean of the chunks
                sent since ``sent`` was last called.
            latency_s: Seconds of each all-reduce beside its bytes.
            ordering: What goes first where several wait.
            chunk_bytes: Largest chunk; None sends whole buckets.

        Returns:
            The order that all ranks follow from the next backward pass on.

        Raises:
            ConfigurationError: No backward pass was seen yet.
            CommunicationError: A peer died or did not answer.
        """
        self.finish()
        made: list[Any] = [None]
        if self._group.rank() == 0:
            made = [self._planned(cost_s_per_byte, latency_s, ordering, chunk_bytes)]
        try:
            dist.broadcast_object_list(made, group=self._group, group_src=0)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self._group.rank()}: the plan did not reach all ranks: {error}",
                hint="look at the other ranks' output: one of them probably ended first",
            ) from error
        if isinstance(made[0], ConfigurationError):
            raise made[0]
        order: SendOrder = made[0]
        self._sender.set_chunk_bytes(order.chunk_bytes)
        self._order = order
        return order

    def step(self) -> None:
        """Do what ``optimizer.step()`` and ``zero_grad()`` do, where ``update`` was given.

        Updates what has arrived; the rest is updated before the forward pass that needs it.

        Raises:
            ConfigurationError: ``update`` was not given.
            CommunicationError: A peer died or did not answer.
        """
        if self._update is None:
            message = "step() needs update=..."
            raise ConfigurationError(message, hint="or call your optimizer's own step()")
        for number in [n for n, bucket in self._flying.items() if bucket.done.is_set()]:
            self._apply(number)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that ``update`` made, one per parameter: for rate schedules."""
        return list(self._optimizers.values())

    def finish(self) -> None:
        """Wait for all gradients and apply them: before evaluation, checkpoints and the end.

        Raises:
            CommunicationError: A peer died or did not answer.
        """
        for number in list(self._flying):
            self._apply(number)

    def close(self) -> None:
        """Apply what is on its way and end the thread.

        Raises:
            CommunicationError: A peer died or did not answer.
        """
        try:
            self.finish()
        finally:
            for handle in self._handles:
                handle.remove()
            self._sender.close()

    def _planned(
        self,
        cost_s_per_byte: float | None,
        latency_s: float,
        ordering: Ordering,
        chunk_bytes: int | None,
    ) -> SendOrder | ConfigurationError:
        """Return the plan, or what is wrong, for the other ranks must hear of it too."""
        if not self._last_ready:
            message = "no backward pass was seen yet"
            return ConfigurationError(message, hint="train a step or two, then plan")
        try:
            return plan_send_order(
                self.measured(),
                cost_s_per_byte=(
                    _mean_cost(self._sender.sent) if cost_s_per_byte is None else cost_s_per_byte
                ),
                latency_s=latency_s,
                ordering=ordering,
                chunk_bytes=chunk_bytes,
                overlap_forward=self._update is not None,
            )
        except ConfigurationError as error:
            return error

    def _reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Take a bucket as DDP's hook, which is called when all its gradients are there."""
        number, buffer = bucket.index(), bucket.buffer()
        now_s = time.perf_counter()
        if number == 0:
            self._begin_pass()
        self._ready.append((buffer.nbytes, now_s - self._forward_ends_s))
        self._members[number] = bucket.parameters()
        self._owner |= {id(parameter): number for parameter in self._members[number]}
        buffer.div_(self._ranks)
        entry = Bucket(number, buffer, now_s)
        if self._order is None:
            chunks = range(len(self._sender.chunks_of(buffer)))
            self._sender.begin([(number, chunk) for chunk in chunks])
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        if self._update is None:
            entry.future = future
        else:
            self._flying[number] = entry
            future.set_result(buffer)  # DDP goes on; the sums come into the same memory
        self._sender.add(entry)
        if bucket.is_last():
            self.handed_over_s = now_s
            self._last_ready = self._ready
            self._passes += 1
        return future

    def _begin_pass(self) -> None:
        self.finish()  # nothing of the pass before may be left when gradients are overwritten
        self._ready = []
        if self._order is not None:
            chunks = {bucket for bucket, _ in self._order.chunks}
            if len(chunks) != len(self._last_ready):
                raise ConfigurationError(
                    f"the order is for {len(chunks)} buckets, the model has "
                    f"{len(self._last_ready)}",
                    hint="call plan() again",
                )
            self._sender.begin(self._order.chunks)

    def _apply(self, number: int) -> None:
        bucket = self._flying.pop(number)
        begun_s = time.perf_counter()
        there = bucket.done.is_set() or bucket.done.wait(self._timeout_s + _GRACE_S)
        self._waits.append((begun_s, time.perf_counter()))
        if not there:
            raise CommunicationError(
                f"rank {self._group.rank()}: the gradients of bucket {number} did not arrive "
                f"within {self._timeout_s:g} s",
                hint="look at the other ranks' output, or raise timeout_s if they are only slow",
            )
        if bucket.error is not None:
            raise bucket.error
        for parameter in self._members[number]:
            optimizer = self._optimizers[id(parameter)]
            optimizer.step()
            # In place: the memory is the bucket's, and the next pass adds to it.
            optimizer.zero_grad(set_to_none=False)

    def _before_layer(self, module: torch.nn.Module, _arguments: object) -> None:
        now_s = time.perf_counter()
        if self._used_by is None:
            self._called.add(id(module))
            return
        for parameter in self._used_by.get(id(module), ()):
            number = self._owner.get(id(parameter))
            if number is None:
                continue
            if number in self._flying:
                self._apply(number)
                now_s = time.perf_counter()
            self._entered_s.setdefault(number, now_s)

    def _before_forward(self, *_arguments: object) -> None:
        self._entered_s = {}
        if self._passes < _ARRANGED_AFTER:
            self.finish()

    def _after_forward(self, *_arguments: object) -> None:
        self._forward_ends_s = time.perf_counter()
        if self._used_by is None:
            self._used_by = {}
            self._find_users(self._model.module, self._model.module)

    def _find_users(self, module: torch.nn.Module, user: torch.nn.Module) -> None:
        """Note who uses which parameters; a module that only holds some is never called itself."""
        assert self._used_by is not None, "made by the caller"
        user = module if id(module) in self._called else user
        held = list(module.parameters(recurse=False))
        if held:
            self._used_by.setdefault(id(user), []).extend(held)
        for child in module.children():
            self._find_users(child, user)


def _mean_cost(sent: list[SentChunk]) -> float:
    """Return seconds per byte while anything was on its way."""
    if not sent:
        message = "nothing was sent since sent() was last called"
        raise ConfigurationError(message, hint="train a step, or give cost_s_per_byte")
    busy_s, until_s = 0.0, 0.0
    for chunk in sorted(sent, key=lambda chunk: chunk.start_s):
        busy_s += max(0.0, chunk.end_s - max(chunk.start_s, until_s))
        until_s = max(until_s, chunk.end_s)
    return busy_s / max(1, sum(chunk.size_bytes for chunk in sent))


def _check(model: DistributedDataParallel, chunk_bytes: int | None, credit: int) -> None:
    if not isinstance(model, DistributedDataParallel) or not model.gradient_as_bucket_view:
        raise ConfigurationError(
            f"ScheduledReduction needs DDP whose gradients live in its buckets; got {type(model)}",
            hint="wrap the model: DistributedDataParallel(model, gradient_as_bucket_view=True)",
        )
    if chunk_bytes is not None:
        require_whole("chunk_bytes", chunk_bytes)
    require_whole("credit", credit)
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices - {"cpu"}:
        raise UnsupportedError(
            f"ScheduledReduction sends from host memory over gloo; the model is on {devices}",
            hint="use DDP's own all-reduce there",
        )
