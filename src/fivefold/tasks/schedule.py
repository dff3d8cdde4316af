"""When everything happens, and what of the communication is left exposed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.tasks.graph import CommunicationTask, TaskGraph


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

    def _last_awaited(self, name: str) -> str | None:
        return max(
            self.graph.by_id[name].depends_on, key=lambda other: self.ends_s[other], default=None
        )


Floats = npt.NDArray[np.float64]


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
