"""One iteration of a job that is split along several axes, as a task graph.

Rotated as in ``_iteration``: the backward pass of the last micro-batch, the reductions beside it,
the optimizer, the forward pass of the first micro-batch that waits for them, then what the other
micro-batches compute and send, run by run of layers. Waiting in the pipeline is compute of that
length. Messages of different axes have channels of their own, as communicators do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fivefold.codesign._plans import JobPlan
from fivefold.strategy import Message, PlanDemand
from fivefold.tasks import CommunicationTask, ComputeTask, TaskGraph

Quote = Callable[[str, float], float]
_STATE_AXES = {"data", "expert_data", "shard", "replica"}


def mesh_iteration(demand: PlanDemand, plan: JobPlan, quote: Quote) -> TaskGraph:
    """The rotated iteration of a split.

    Args:
        demand: What a rank computes and sends.
        plan: Buckets, and what the forward pass waits for.
        quote: Price of a collective, named by kind and axis.

    Returns:
        Its tasks.

    Examples:
        >>> from fivefold.strategy import ParallelPlan
        >>> split = ParallelPlan(global_batch=2, data=2)
        >>> send = Message(axis="data", kind="all_reduce", size_bytes=8, phase="reduce")
        >>> demand = PlanDemand(plan=split, segments=1, micro_batches=1, forward_s=0.1,
        ...                     backward_s=0.2, messages=(send,), optimizer_s=0.1)
        >>> graph = mesh_iteration(demand, JobPlan(order=(0, 1)), lambda kind, size: 0.0)
        >>> [task.task_id for task in graph.tasks]
        ['backward 0', 'reduce 0 data', 'update 0', 'forward 0']
    """
    return _Builder(demand, plan, quote).graph()


class _Builder:
    def __init__(self, demand: PlanDemand, plan: JobPlan, quote: Quote) -> None:
        self._demand, self._plan, self._quote = demand, plan, quote
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
            self._boundary("return")
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
            if not self._plan.overlap_forward:
                awaited = [name for names in self._updated.values() for name in names]
            self._block(f"forward {i}", demand.forward_s, "forward", awaited=awaited)
        others = demand.micro_batches - 1
        if others:
            self._others(others)
        else:
            self._boundary("send")
        waiting_s = demand.idle_s + demand.overhead_s
        if waiting_s:
            self._compute(f"wait after {last_of_all}", waiting_s, self._last)
        return TaskGraph(tuple(self._tasks))

    def _others(self, count: int) -> None:
        """Forward and backward of the micro-batches between the first and the last."""
        demand = self._demand
        before = self._last
        boundary = [
            self._message(f"boundary {m.phase}", m, demand.micro_batches, before)
            for m in demand.boundary
            if m.hidden
        ]
        for i in range(demand.segments):
            self._block(f"forward {i}, others", count * demand.forward_s, "forward", times=count)
        for m in demand.boundary:
            if not m.hidden:
                name = f"boundary {m.phase}"
                self._last = (self._message(name, m, demand.micro_batches, self._last),)
        for i in reversed(range(demand.segments)):
            self._block(f"backward {i}, others", count * demand.backward_s, "backward", times=count)
        self._last = (*self._last, *boundary)

    def _boundary(self, kind: str) -> None:
        for m in self._demand.boundary:
            if m.kind == kind:
                self._last = (self._message(f"boundary {m.phase}", m, 1, self._last),)

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
        if self._plan.bucket_bytes is None:
            return True
        each = sum(m.size_bytes for m in self._states if m.phase == "reduce")
        return self._plan.bucket_bytes > 0 and len(bucket) * each >= self._plan.bucket_bytes

    def _reduce(self, bucket: Sequence[int]) -> None:
        ends = f"{bucket[0]}" if len(bucket) == 1 else f"{bucket[0]}-{bucket[-1]}"
        after: tuple[str, ...] = self._last
        for m in self._states:
            if m.phase != "reduce":
                continue
            name = self._message(f"reduce {ends} {m.axis}", m, len(bucket), after)
            if m.kind == "reduce_scatter" and m.axis == "shard":
                after = (name,)  # replicas sum what was scattered
            for i in bucket:
                self._reduced[i].append(name)

    def _update(self) -> None:
        """The optimizer: all at once, or run by run where forward waits for its own only."""
        demand, segments = self._demand, range(self._demand.segments)
        together = not self._plan.overlap_forward
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
