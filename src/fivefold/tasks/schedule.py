"""When everything happens, by list scheduling, and what of the communication is left exposed.

At the end of each chunk a channel takes the most urgent one that waits. Collectives must be issued
in one order everywhere, or they meet the wrong partners: so a ``SendOrder`` is planned before, from
one rank's measurements, and every rank follows it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from fivefold.errors import ConfigurationError, require_one_of, require_whole
from fivefold.tasks.graph import CommunicationTask, ComputeTask, Task, TaskGraph
from fivefold.tasks.iteration import LayerCost, rotated_iteration

Floats = npt.NDArray[np.float64]
Ordering = Literal["fifo", "priority", "all_to_all_first", "critical_path"]
"""``"fifo"``: as they become ready. ``"priority"``: what the program needs first (P3,
ByteScheduler). ``"all_to_all_first"``: all-to-all before anything else (Lina).
``"critical_path"``: what the longest chain of work waits for."""


@dataclass(frozen=True)
class TaskSpan:
    """One uninterrupted stretch of a task on its resource."""

    task_id: str
    resource: str
    start_s: float
    end_s: float
    chunk: int = 0

    @property
    def duration_s(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class TaskSchedule:
    """Start and end of every task of a graph."""

    graph: TaskGraph
    spans: tuple[TaskSpan, ...]
    ordering: str

    @cached_property
    def starts_s(self) -> Mapping[str, float]:
        """When each task begins."""
        found: dict[str, float] = {}
        for span in self.spans:
            found[span.task_id] = min(span.start_s, found.get(span.task_id, span.start_s))
        return found

    @cached_property
    def ends_s(self) -> Mapping[str, float]:
        """When each task has ended."""
        found: dict[str, float] = {}
        for span in self.spans:
            found[span.task_id] = max(span.end_s, found.get(span.task_id, 0.0))
        return found

    @property
    def end_s(self) -> float:
        """When all have ended."""
        return max(self.ends_s.values(), default=0.0)

    @property
    def iteration_s(self) -> float:
        """Seconds per iteration: between the last two marks, or the whole where there are none."""
        marks = self.graph.marks
        if len(marks) < 2:
            return self.end_s
        return self.ends_s[marks[-1]] - self.ends_s[marks[-2]]

    @cached_property
    def exposed_s(self) -> Mapping[str, float]:
        """Return seconds for which compute stood still, by the communication that it waited for."""
        # A gap is charged to the communication whose end allowed the task behind it to start; gaps
        # that other compute tasks caused are charged to nobody.
        charged = {task.task_id: 0.0 for task in self.graph.communication}
        for resource in dict.fromkeys(task.resource for task in self.graph.compute):
            free_s = 0.0
            for span in (span for span in self.spans if span.resource == resource):
                gap_s = span.start_s - free_s
                awaited = self.graph.by_id[span.task_id].depends_on
                cause = max(awaited, key=lambda other: self.ends_s[other], default="")
                if gap_s > 0 and cause in charged and self.ends_s[cause] > free_s:
                    charged[cause] += min(gap_s, self.ends_s[cause] - free_s)
                free_s = max(free_s, span.end_s)
        return charged

    @property
    def overlap_ratio(self) -> float:
        """Share of the communication's seconds that compute did not wait for; 1.0 with none."""
        total_s = sum(
            span.duration_s
            for span in self.spans
            if isinstance(self.graph.by_id[span.task_id], CommunicationTask)
        )
        if total_s <= 0:
            return 1.0
        return max(0.0, 1.0 - sum(self.exposed_s.values()) / total_s)


def exposed_s(
    sent_s: npt.ArrayLike,
    beside_s: npt.ArrayLike,
    *,
    pieces: float | npt.NDArray[Any] | None = None,
    slowdown: float = 0.0,
) -> Floats:
    """Return the seconds that communication adds to compute that runs beside it.

    All but one of its pieces can hide; while they do, compute is slower:
    ``sent - (1 - slowdown) * min(sent - sent / pieces, beside)``.
    """
    sent = np.asarray(sent_s, dtype=np.float64)
    hidden = np.minimum(sent if pieces is None else sent - sent / pieces, beside_s)
    exposed: Floats = sent - (1.0 - slowdown) * hidden
    return exposed


def communication_keys(graph: TaskGraph, ordering: Ordering) -> dict[str, float]:
    """Return the key of each communication; the smallest goes first."""
    require_one_of(ordering, get_args(Ordering), f"there is no ordering {ordering!r}")
    if ordering == "priority":
        return _by_need(graph)
    rules: dict[str, Callable[[CommunicationTask], float]] = {
        "fifo": lambda _: 0.0,
        "all_to_all_first": lambda task: float(task.kind != "all_to_all"),
        "critical_path": lambda task: -graph.tails_s[task.task_id],
    }
    return {task.task_id: rules[ordering](task) for task in graph.communication}


def _by_need(graph: TaskGraph) -> dict[str, float]:
    """Return the place of the first compute task that waits for each task, even indirectly."""
    place = {task.task_id: number for number, task in enumerate(graph.tasks)}
    needed: dict[str, float] = {}
    for name in reversed(graph.order):
        below = [
            place[follower] if isinstance(graph.by_id[follower], ComputeTask) else needed[follower]
            for follower in graph.followers[name]
        ]
        needed[name] = min(below, default=math.inf)  # what nobody waits for goes last
    return {task.task_id: needed[task.task_id] for task in graph.communication}


def schedule_tasks(
    graph: TaskGraph,
    *,
    ordering: Ordering = "fifo",
    chunk_bytes: int | None = None,
    credit: int = 1,
) -> TaskSchedule:
    """Say when every task runs.

    Args:
        graph: The tasks.
        ordering: Which of several waiting communications goes first.
        chunk_bytes: Largest chunk of a communication; None sends each in one piece.
        credit: Chunks that may be handed to a channel at once; those go in the order in which
            they were handed over. 1 decides anew for every chunk.

    Raises:
        ConfigurationError: The ordering, the chunk size or the credit is not allowed.

    References:
        ByteScheduler, SOSP 2019 (partition, priority, credit).

    Examples:
        >>> from fivefold.tasks import LayerCost, iteration_graph
        >>> layer = LayerCost(forward_s=1.0, backward_s=2.0, gradient_bytes=3)
        >>> graph = iteration_graph([layer] * 3, cost_s_per_byte=1.0, iterations=3)
        >>> schedule_tasks(graph).iteration_s, schedule_tasks(
        ...     graph, ordering="priority", chunk_bytes=1
        ... ).iteration_s
        (14.0, 12.0)
    """
    if chunk_bytes is not None:
        require_whole("chunk_bytes", chunk_bytes, hint="None sends whole tensors")
    require_whole("credit", credit, hint="1 decides anew for every chunk")
    run = _Run(graph, communication_keys(graph, ordering), chunk_bytes, credit)
    spans = run.until_done()
    return TaskSchedule(graph, tuple(sorted(spans, key=lambda s: (s.start_s, s.end_s))), ordering)


Entry = tuple[float, float, int, int]  # key, when it became ready, place in the program, chunk


@dataclass
class _Resource:
    """Who waits for a resource, what was handed to it, and whether it is busy."""

    waiting: list[Entry] = field(default_factory=list)
    handed: list[Entry] = field(default_factory=list)  # a queue: first in, first out
    busy: bool = False


class _Run:
    """One pass of events over a graph; ties are broken by the order of the program."""

    def __init__(
        self, graph: TaskGraph, keys: dict[str, float], chunk_bytes: int | None, credit: int
    ) -> None:
        self._tasks: tuple[Task, ...] = graph.tasks
        self._place = {task.task_id: number for number, task in enumerate(graph.tasks)}
        self._graph, self._keys, self._credit = graph, keys, credit
        self._chunks = [
            task.chunks(chunk_bytes) if isinstance(task, CommunicationTask) else (0,)
            for task in graph.tasks
        ]
        self._waits_for = [len(set(task.depends_on)) for task in graph.tasks]
        self._left = [len(chunks) for chunks in self._chunks]
        self._resources = {task.resource: _Resource() for task in graph.tasks}
        self._ends: list[tuple[float, int]] = []  # when a chunk ends, place of its task
        self._spans: list[TaskSpan] = []

    def until_done(self) -> list[TaskSpan]:
        """Handle events until no task is left; return all spans."""
        touched = {self._enter(p, 0.0) for p, number in enumerate(self._waits_for) if not number}
        now_s = 0.0
        while touched:
            for name in sorted(touched):
                self._start_next(self._resources[name], now_s)
            touched = set()
            now_s = self._ends[0][0] if self._ends else now_s
            while self._ends and self._ends[0][0] == now_s:
                touched |= self._end_chunk(heapq.heappop(self._ends)[1], now_s)
        return self._spans

    def _end_chunk(self, place: int, now_s: float) -> set[str]:
        """Free the resource and let followers in; gives the resources that may go on."""
        task = self._tasks[place]
        self._resources[task.resource].busy = False
        touched = {task.resource}
        self._left[place] -= 1
        for name in self._graph.followers[task.task_id] if self._left[place] == 0 else ():
            follower = self._place[name]
            self._waits_for[follower] -= 1
            if self._waits_for[follower] == 0:
                touched.add(self._enter(follower, now_s))
        return touched

    def _enter(self, place: int, now_s: float) -> str:
        """Put a task into the queue of its resource; gives the resource."""
        task = self._tasks[place]
        key = self._keys.get(task.task_id, 0.0)
        # Compute goes as the program has it; communication of one key as it became ready.
        ready_s = now_s if isinstance(task, CommunicationTask) else 0.0
        for chunk in range(len(self._chunks[place])):
            heapq.heappush(self._resources[task.resource].waiting, (key, ready_s, place, chunk))
        return task.resource

    def _start_next(self, resource: _Resource, now_s: float) -> None:
        while resource.waiting and len(resource.handed) + resource.busy < self._credit:
            resource.handed.append(heapq.heappop(resource.waiting))
        if resource.busy or not resource.handed:
            return
        _, _, place, chunk = resource.handed.pop(0)
        if resource.waiting and len(resource.handed) + 1 < self._credit:
            resource.handed.append(heapq.heappop(resource.waiting))
        task = self._tasks[place]
        duration_s = (
            task.time_s(self._chunks[place][chunk])
            if isinstance(task, CommunicationTask)
            else task.duration_s
        )
        end_s = now_s + duration_s
        resource.busy = True
        self._spans.append(TaskSpan(task.task_id, task.resource, now_s, end_s, chunk))
        heapq.heappush(self._ends, (end_s, place))


@dataclass(frozen=True, kw_only=True)
class BucketCost:
    """Size and times of a gradient bucket."""

    size_bytes: int
    ready_s: float
    forward_s: float = 0.0


@dataclass(frozen=True)
class SendOrder:
    """Chunks in the order in which all ranks send them."""

    chunks: tuple[tuple[int, int], ...]
    chunk_bytes: int | None
    predicted_s: float


def plan_send_order(
    buckets: Sequence[BucketCost],
    *,
    cost_s_per_byte: float,
    latency_s: float = 0.0,
    ordering: Ordering = "priority",
    chunk_bytes: int | None = None,
    overlap_forward: bool = True,
) -> SendOrder:
    """Plan the order from what was measured."""
    in_order = all(before.ready_s <= after.ready_s for before, after in pairwise(buckets))
    if not buckets or not in_order:
        message = "buckets must be given in the order in which they become ready"
        raise ConfigurationError(message, hint="the last layers of the model come first")
    # The last layers' gradients come first: bucket n is layer last - n of the rotated iteration.
    last = len(buckets) - 1
    begins_s = [0.0, *(bucket.ready_s for bucket in buckets)]
    layers = [
        LayerCost(
            forward_s=bucket.forward_s,
            backward_s=bucket.ready_s - begin_s,
            gradient_bytes=max(1, bucket.size_bytes),  # an empty bucket is sent as well
        )
        for bucket, begin_s in zip(buckets, begins_s, strict=False)
    ]
    graph = rotated_iteration(
        layers[::-1],
        lambda _kind, _size: (latency_s, cost_s_per_byte),
        bucket_bytes=None,
        overlap_forward=overlap_forward,
    )
    schedule = schedule_tasks(graph, ordering=ordering, chunk_bytes=chunk_bytes)
    chunks = tuple(
        (last - int(span.task_id.removeprefix("reduce ")), span.chunk)
        for span in schedule.spans
        if span.resource == "network"
    )
    return SendOrder(chunks, chunk_bytes, schedule.end_s)
