"""One iteration of a job that is split along several axes, as a task graph.

Rotated: the backward pass of the last micro-batch, the reductions beside it, the optimizer, the
forward pass of the first micro-batch that waits for them, then what the other micro-batches compute
and send, run by run of layers. The pipeline bubble is compute of that length. Messages of different
axes have channels of their own, as communicators do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fivefold.collectives.pricing.fabric import Quote
from fivefold.tasks._graph import CommunicationTask, ComputeTask, TaskGraph
from fivefold.tasks._iteration import bucket_is_full, bucket_name

Phase = Literal["forward", "backward", "reduce", "gather"]
_STATE_AXES = {"data", "expert_data", "shard", "replica"}


@dataclass(frozen=True, kw_only=True)
class Message:
    """A collective that a run of layers needs.

    Attributes:
        axis: Axis of the mesh, as ``ParallelPlan.group`` names it.
        kind: ``"all_reduce"``, ``"reduce_scatter"``, ``"all_gather"``, ``"all_to_all"``,
            ``"send"`` (to the next stage) or ``"return"`` (to the one before).
        size_bytes: The logical buffer per GPU; of an all-gather its output.
        phase: Once per micro-batch in ``"forward"`` or ``"backward"``; once per iteration after
            the last backward (``"reduce"``) or before the first forward (``"gather"``).
        hidden: Whether it runs beside compute instead of holding it up; of local updates, beside
            the whole iteration.
    """

    axis: str
    kind: str
    size_bytes: int
    phase: Phase
    hidden: bool = False


@dataclass(frozen=True, kw_only=True)
class IterationDemand:
    """What one rank computes and sends in one iteration of a split job.

    A rank runs ``micro_batches`` times through ``segments`` equal runs of layers.

    Attributes:
        segments: How many runs of layers.
        micro_batches: How many micro-batches a rank works on.
        forward_s: Compute of a segment's forward, per micro-batch.
        backward_s: Compute of its backward, recomputation included.
        messages: What each segment sends.
        p2p: What the last segment sends to its neighbour stage, per micro-batch.
        bubble_s: Waiting in the pipeline, on free links.
        optimizer_s: The optimizer's step.
        overhead_s: Everything else, such as transfers to the host.
    """

    segments: int
    micro_batches: int
    forward_s: float
    backward_s: float
    messages: tuple[Message, ...]
    p2p: tuple[Message, ...] = ()
    bubble_s: float = 0.0
    optimizer_s: float = 0.0
    overhead_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """Return seconds of an iteration in which the rank does not wait for links."""
        once_s = self.segments * (self.forward_s + self.backward_s)
        return self.micro_batches * once_s + self.bubble_s + self.optimizer_s + self.overhead_s


def mesh_iteration(
    demand: IterationDemand, quote: Quote, *, bucket_bytes: int | None, overlap_forward: bool
) -> TaskGraph:
    """Return the rotated iteration of a split job.

    Args:
        demand: What a rank computes and sends.
        quote: Price of a collective, named by kind and axis, such as ``"all_reduce over data"``.
        bucket_bytes: Bytes from which a bucket of gradients is full; None sends each run of layers
            by itself, 0 all of them together.
        overlap_forward: Whether a forward pass waits for its own gradients only.

    Examples:
        >>> send = Message(axis="data", kind="all_reduce", size_bytes=8, phase="reduce")
        >>> demand = IterationDemand(segments=1, micro_batches=1, forward_s=0.1, backward_s=0.2,
        ...                          messages=(send,), optimizer_s=0.1)
        >>> graph = mesh_iteration(demand, lambda kind, size: 0.0, bucket_bytes=None,
        ...                        overlap_forward=True)
        >>> [task.task_id for task in graph.tasks]
        ['backward 0', 'reduce 0 data', 'update 0', 'forward 0']
    """
    return _Builder(demand, quote, bucket_bytes, overlap_forward=overlap_forward).graph()


class _Builder:
    def __init__(
        self,
        demand: IterationDemand,
        quote: Quote,
        bucket_bytes: int | None,
        *,
        overlap_forward: bool,
    ) -> None:
        self._demand, self._quote, self._bucket_bytes = demand, quote, bucket_bytes
        self._overlap_forward = overlap_forward
        self._tasks: list[ComputeTask | CommunicationTask] = []
        self._last: tuple[str, ...] = ()
        self._reduced: dict[int, list[str]] = {i: [] for i in range(demand.segments)}
        self._states = [m for m in demand.messages if m.phase in {"reduce", "gather"}]
        self._updated: dict[int, list[str]] = {}

    def graph(self) -> TaskGraph:
        """Backward, reductions, update, forward, the other micro-batches."""
        demand = self._demand
        segments = range(demand.segments)
        last_of_all = demand.segments - 1
        for m in self._states:
            if m.hidden:
                self._message(f"{m.phase} beside, {m.axis} {m.kind}", m, demand.segments, ())
        self._states = [m for m in self._states if not m.hidden]
        if demand.micro_batches == 1:
            self._p2p("return")
        bucket: list[int] = []
        for i in reversed(segments):
            self._block(f"backward {i}", demand.backward_s, "backward")
            bucket.append(i)
            if i == 0 or self._is_full(bucket):
                self._reduce(bucket)
                bucket = []
        self._update()
        for i in segments:
            awaited = self._updated[i]
            if not self._overlap_forward:
                awaited = [name for names in self._updated.values() for name in names]
            self._block(f"forward {i}", demand.forward_s, "forward", awaited=awaited)
        others = demand.micro_batches - 1
        if others:
            self._others(others)
        else:
            self._p2p("send")
        waiting_s = demand.bubble_s + demand.overhead_s
        if waiting_s:
            self._compute(f"wait after {last_of_all}", waiting_s, self._last)
        return TaskGraph(tuple(self._tasks))

    def _others(self, count: int) -> None:
        """Forward and backward of the micro-batches between the first and the last."""
        demand = self._demand
        before = self._last
        p2p = [
            self._message(f"p2p {m.phase}", m, demand.micro_batches, before)
            for m in demand.p2p
            if m.hidden
        ]
        for i in range(demand.segments):
            self._block(f"forward {i}, others", count * demand.forward_s, "forward", times=count)
        for m in demand.p2p:
            if not m.hidden:
                name = f"p2p {m.phase}"
                self._last = (self._message(name, m, demand.micro_batches, self._last),)
        for i in reversed(range(demand.segments)):
            self._block(f"backward {i}, others", count * demand.backward_s, "backward", times=count)
        self._last = (*self._last, *p2p)

    def _p2p(self, kind: str) -> None:
        for m in self._demand.p2p:
            if m.kind == kind:
                self._last = (self._message(f"p2p {m.phase}", m, 1, self._last),)

    def _block(
        self, name: str, seconds: float, phase: str, *, times: int = 1, awaited: Sequence[str] = ()
    ) -> None:
        """Compute of a run of layers, what it sends beside that, and what it waits for after."""
        before = (*self._last, *awaited)
        own = [m for m in self._demand.messages if m.phase == phase]
        beside = [
            self._message(f"{name}, {m.axis} {m.kind}", m, times, before) for m in own if m.hidden
        ]
        self._compute(name, seconds, before)
        for m in own:
            if not m.hidden:
                message = self._message(f"{name}, {m.axis} {m.kind}", m, times, self._last)
                self._last = (message,)
        self._last = (*self._last, *beside)

    def _is_full(self, bucket: Sequence[int]) -> bool:
        each = sum(m.size_bytes for m in self._states if m.phase == "reduce")
        return bucket_is_full(self._bucket_bytes, len(bucket) * each)

    def _reduce(self, bucket: Sequence[int]) -> None:
        after: tuple[str, ...] = self._last
        for m in self._states:
            if m.phase != "reduce":
                continue
            name = self._message(f"reduce {bucket_name(bucket)} {m.axis}", m, len(bucket), after)
            if m.kind == "reduce_scatter" and m.axis == "shard":
                after = (name,)  # replicas sum what was scattered
            for i in bucket:
                self._reduced[i].append(name)

    def _update(self) -> None:
        """The optimizer: all at once, or run by run where forward waits for its own only."""
        demand, segments = self._demand, range(self._demand.segments)
        together = not self._overlap_forward
        everything = tuple(dict.fromkeys(n for names in self._reduced.values() for n in names))
        share_s = demand.optimizer_s / demand.segments
        for i in segments:
            awaited = everything if together else tuple(self._reduced[i])
            self._updated[i] = list(awaited)
            if share_s:
                name = f"update {i}"
                # Beside the compute stream's order: an update waits for nothing but its sums.
                self._tasks.append(
                    ComputeTask(task_id=name, duration_s=share_s, resource="compute",
                                depends_on=(*self._last, *awaited))
                )  # fmt: skip
                self._updated[i] = [name]
            for m in self._states:
                if m.phase == "gather":
                    after = (*self._last, *self._updated[i])
                    self._updated[i].append(self._message(f"gather {i} {m.axis}", m, 1, after))

    def _compute(self, name: str, seconds: float, after: Sequence[str]) -> None:
        self._tasks.append(
            ComputeTask(task_id=name, duration_s=seconds, depends_on=tuple(dict.fromkeys(after)))
        )
        self._last = (name,)

    def _message(self, name: str, message: Message, times: int, after: Sequence[str]) -> str:
        kind, size = f"{message.kind} over {message.axis}", times * message.size_bytes
        channel = "network" if message.axis in _STATE_AXES else f"network {message.axis}"
        self._tasks.append(
            CommunicationTask(
                task_id=name,
                kind=kind,
                size_bytes=size,
                cost_s_per_byte=0.0,
                latency_s=self._quote(kind, size),
                resource=channel,
                depends_on=tuple(dict.fromkeys(after)),
            )
        )
        return name
