"""When everything happens, and what of the communication is left exposed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from fivefold.tasks._graph import CommunicationTask, TaskGraph


@dataclass(frozen=True)
class TaskSpan:
    """One uninterrupted stretch of a task on its resource.

    Attributes:
        task_id: The task.
        resource: Where it ran.
        start_s: Seconds from the start of the graph.
        end_s: The same.
        chunk: Number of the chunk; 0 for whole tasks.
    """

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
    """Start and end of every task of a graph.

    Attributes:
        graph: What was scheduled.
        spans: Stretches in the order in which they start.
        ordering: What decided.
    """

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
        """Return seconds for which compute stood still, by the communication that it waited for.

        A gap on a compute resource is charged to the communication whose end allowed the task
        behind the gap to start; gaps that other compute tasks caused are charged to nobody.
        """
        charged = {task.task_id: 0.0 for task in self.graph.communication}
        for resource in {task.resource for task in self.graph.compute}:
            free_s = 0.0
            for span in (span for span in self.spans if span.resource == resource):
                gap_s = span.start_s - free_s
                cause = self._last_awaited(span.task_id)
                if gap_s > 0 and cause in charged and self.ends_s[cause] > free_s:
                    charged[cause] += min(gap_s, self.ends_s[cause] - free_s)
                free_s = max(free_s, span.end_s)
        return charged

    @property
    def exposed_by_kind_s(self) -> Mapping[str, float]:
        """Return the same, summed over tasks of one kind."""
        found: dict[str, float] = {}
        for task in self.graph.communication:
            found[task.kind] = found.get(task.kind, 0.0) + self.exposed_s[task.task_id]
        return found

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

    @cached_property
    def slack_s(self) -> Mapping[str, float]:
        """Return how much later each task could end without the whole ending later.

        The order on each resource is kept.
        """
        latest: dict[str, float] = {}
        following: dict[str, list[str]] = {}
        for spans in self._by_resource().values():
            for span, after in pairwise(spans):
                if after.task_id != span.task_id:
                    following.setdefault(span.task_id, []).append(after.task_id)
        for name in sorted(self.ends_s, key=lambda n: (-self.ends_s[n], -self.starts_s[n])):
            held = [*self.graph.followers[name], *following.get(name, [])]
            limits = [
                latest[other] - (self.ends_s[other] - self.starts_s[other])
                for other in held
                if other in latest
            ]
            latest[name] = min(limits, default=self.end_s)
        return {name: max(0.0, latest[name] - self.ends_s[name]) for name in latest}

    def timeline(self) -> list[dict[str, Any]]:
        """Spans as Chrome trace events (``ph`` X), microseconds, one thread per resource."""
        threads = sorted({span.resource for span in self.spans})
        return [
            {
                "name": span.task_id,
                "ph": "X",
                "ts": span.start_s * 1e6,
                "dur": span.duration_s * 1e6,
                "pid": 0,
                "tid": threads.index(span.resource),
                "args": {"chunk": span.chunk, "resource": span.resource},
            }
            for span in self.spans
        ]

    def _by_resource(self) -> dict[str, list[TaskSpan]]:
        found: dict[str, list[TaskSpan]] = {}
        for span in self.spans:
            found.setdefault(span.resource, []).append(span)
        return found

    def _last_awaited(self, name: str) -> str | None:
        return max(
            self.graph.by_id[name].depends_on, key=lambda other: self.ends_s[other], default=None
        )
