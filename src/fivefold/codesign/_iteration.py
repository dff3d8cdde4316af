"""One iteration of a job as a task graph, and the order of its communications.

The iteration is rotated: it begins with the backward pass, then come the reductions, then the
forward pass that waits for them. So the overlap of reductions with the next forward pass lies
within one iteration, and iterations can simply follow one another.
"""

from __future__ import annotations

from collections.abc import Callable

from fivefold.codesign._jobs import JobSpec
from fivefold.codesign._mesh_iteration import mesh_iteration
from fivefold.codesign._plans import JobPlan
from fivefold.tasks import (
    CommunicationTask,
    ComputeTask,
    LayerCost,
    TaskGraph,
    TaskSchedule,
    schedule_tasks,
)

Quote = Callable[[str, float], float]
"""Seconds of a collective, from its kind and bytes."""


def iteration_of(job: JobSpec, plan: JobPlan, quote: Quote) -> TaskGraph:
    """The rotated iteration.

    Args:
        job: What it computes and sends.
        plan: Buckets and what the forward pass waits for.
        quote: Price of a collective.

    Returns:
        Its tasks; compute tasks are named by pass and layer, reductions by their layers.

    Examples:
        >>> layer = LayerCost(forward_s=0.1, backward_s=0.2, gradient_bytes=10)
        >>> job = JobSpec(job_id="a", ranks=(0, 1), layers=(layer,) * 2)
        >>> plan = JobPlan(order=(0, 1), bucket_bytes=None)
        >>> [task.task_id for task in iteration_of(job, plan, lambda kind, size: 0.0).tasks]
        ['backward 1', 'reduce 1', 'backward 0', 'reduce 0', 'forward 0', 'forward 1']
    """
    chosen = job.split_as(plan.split)
    if chosen.mesh is not None:
        return mesh_iteration(chosen.mesh.demand, plan, quote)
    return _Builder(chosen, plan, quote).graph()


def schedule_iteration(job: JobSpec, plan: JobPlan, quote: Quote) -> TaskSchedule:
    """When everything happens where prices hold: the job's own prediction."""
    return schedule_tasks(iteration_of(job, plan, quote), ordering=plan.ordering)


def communication_order(schedule: TaskSchedule) -> list[str]:
    """Names of the communications in the order in which their channels take them."""
    return [span.task_id for span in schedule.spans if span.resource.startswith("network")]


class _Builder:
    def __init__(self, job: JobSpec, plan: JobPlan, quote: Quote) -> None:
        self._job, self._plan, self._quote = job, plan, quote
        self._tasks: list[ComputeTask | CommunicationTask] = []
        self._last: tuple[str, ...] = ()
        self._reduced: dict[int, str] = {}

    def graph(self) -> TaskGraph:
        """Backward, reductions, forward."""
        layers = self._job.layers
        bucket: list[int] = []
        for index in reversed(range(len(layers))):
            self._pass(f"backward {index}", layers[index], layers[index].backward_s, ())
            if layers[index].gradient_bytes:
                bucket.append(index)
            if bucket and (index == 0 or self._is_full(bucket)):
                self._reduce(bucket)
                bucket = []
        everything = tuple(dict.fromkeys(self._reduced.values()))
        for index, layer in enumerate(layers):
            own = (self._reduced[index],) if index in self._reduced else ()
            awaited = own if self._plan.overlap_forward else everything
            self._pass(f"forward {index}", layer, layer.forward_s, awaited)
        return TaskGraph(tuple(self._tasks))

    def _is_full(self, bucket: list[int]) -> bool:
        if self._plan.bucket_bytes is None:
            return True
        held = sum(self._job.layers[index].gradient_bytes for index in bucket)
        return self._plan.bucket_bytes > 0 and held >= self._plan.bucket_bytes

    def _pass(self, name: str, layer: LayerCost, seconds: float, awaited: tuple[str, ...]) -> None:
        if layer.all_to_all_bytes and len(self._job.ranks) > 1:
            self._compute(f"{name}, before", seconds / 4, awaited)
            self._send(f"{name}, dispatch", "all_to_all", layer.all_to_all_bytes)
            self._compute(f"{name}, experts", seconds / 2, ())
            self._send(f"{name}, combine", "all_to_all", layer.all_to_all_bytes)
            self._compute(name, seconds / 4, ())
        else:
            self._compute(name, seconds, awaited)

    def _compute(self, name: str, seconds: float, awaited: tuple[str, ...]) -> None:
        self._tasks.append(
            ComputeTask(task_id=name, duration_s=seconds, depends_on=(*self._last, *awaited))
        )
        self._last = (name,)

    def _send(self, name: str, kind: str, size_bytes: int) -> None:
        self._communicate(name, kind, size_bytes)
        self._last = (name,)

    def _reduce(self, bucket: list[int]) -> None:
        ends = [bucket[0]] if len(bucket) == 1 else [bucket[0], bucket[-1]]
        name = f"reduce {'-'.join(map(str, ends))}"
        size_bytes = sum(self._job.layers[index].gradient_bytes for index in bucket)
        if len(self._job.ranks) > 1:
            self._communicate(name, "all_reduce", size_bytes)
            self._reduced |= dict.fromkeys(bucket, name)

    def _communicate(self, name: str, kind: str, size_bytes: int) -> None:
        self._tasks.append(
            CommunicationTask(
                task_id=name,
                kind=kind,
                size_bytes=size_bytes,
                cost_s_per_byte=0.0,
                latency_s=self._quote(kind, size_bytes),
                depends_on=self._last,
            )
        )
