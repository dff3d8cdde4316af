"""What a simulation found: times of tasks and jobs, and what each link carried."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fivefold.errors import ConfigurationError
from fivefold.network.simulation._tasks import FlowTable

FloatArray = npt.NDArray[np.float64]


class Span(NamedTuple):
    """One task on the timeline."""

    name: Hashable
    kind: str
    job: int
    start_s: float
    sent_s: float
    finish_s: float


class RateRecord(NamedTuple):
    """Every change of a bundle's level, in order of time."""

    times_s: FloatArray
    bundles: npt.NDArray[np.int64]
    levels: FloatArray
    of_task: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class SimulationResult:
    """Times in seconds from the start; NaN is what did not happen.

    Attributes:
        table: The tasks.
        start_s: When each task began; float64 [tasks].
        sent_s: When its last byte had been sent, or its work was done; float64 [tasks].
        finish_s: When its last byte had arrived; float64 [tasks].
        moved_bytes: What each flow has sent; float64 [tasks].
        skipped: Whether a task was a fallback that was not needed; bool [tasks].
        total_s: End of the last task, or the time at which the simulation was stopped.
        stopped: Whether tasks were left when it ended.
        link_bytes: What each link carried; float64 [links].
        link_busy_s: How long at least one flow was under way on it; float64 [links].
        over_capacity_s: How long the flows on it would, each alone, have asked for more than it
            has: what queues and congestion marks would show; float64 [links].
        iteration_finish_s: End of every iteration, by job.
        waits: In-network aggregations that had to wait for slots.
        refusals: In-network aggregations whose fallback ran.
        events: Number of events that were processed.
        solves: Number of times that rates were solved.
        filled: Bundles whose level was found anew, over all solves.
        rates: Changes of rate, where they were recorded.
    """

    table: FlowTable
    start_s: FloatArray
    sent_s: FloatArray
    finish_s: FloatArray
    moved_bytes: FloatArray
    skipped: npt.NDArray[np.bool_]
    total_s: float
    stopped: bool
    link_bytes: FloatArray
    link_busy_s: FloatArray
    over_capacity_s: FloatArray
    iteration_finish_s: Mapping[Hashable, FloatArray] = field(default_factory=dict)
    waits: int = 0
    refusals: int = 0
    events: int = 0
    solves: int = 0
    filled: int = 0
    rates: RateRecord | None = None

    @cached_property
    def _positions(self) -> dict[Hashable, int]:
        return {self.table.name_of(task): task for task in range(len(self.table))}

    def position_of(self, name: Hashable) -> int:
        """Return the position of a task by its id.

        Raises:
            ConfigurationError: There is no such task.
        """
        if name not in self._positions:
            raise ConfigurationError(f"there is no task {name!r}", hint="use the id it was given")
        return self._positions[name]

    def start_of(self, name: Hashable) -> float:
        """Return when a task began."""
        return float(self.start_s[self.position_of(name)])

    def finish_of(self, name: Hashable) -> float:
        """Return when a task ended."""
        return float(self.finish_s[self.position_of(name)])

    def job_finish_s(self, job: Hashable) -> float:
        """Return when the last iteration of a job ended.

        Raises:
            ConfigurationError: There is no such job.
        """
        if job not in self.iteration_finish_s:
            raise ConfigurationError(
                f"there is no job {job!r}", hint=f"jobs are {list(self.iteration_finish_s)}"
            )
        return float(self.iteration_finish_s[job][-1])

    def timeline(self) -> Iterator[Span]:
        """Yield every task that began, in order of its start."""
        for task in np.argsort(self.start_s, kind="stable").tolist():
            if np.isnan(self.start_s[task]):
                return
            yield Span(
                name=self.table.name_of(task),
                kind="compute" if self.table.is_compute[task] else "flow",
                job=int(self.table.jobs[task]),
                start_s=float(self.start_s[task]),
                sent_s=float(self.sent_s[task]),
                finish_s=float(self.finish_s[task]),
            )

    def rates_of(self, name: Hashable) -> tuple[FloatArray, FloatArray]:
        """Return a flow's rate over time.

        Args:
            name: Its id.

        Returns:
            Times in seconds, and the rate in bytes per second from each time to the next.

        Raises:
            ConfigurationError: Rates were not recorded.
        """
        return self._rates_at(self.position_of(name))

    def link_rates(self, link: int) -> tuple[FloatArray, FloatArray]:
        """Return the load of a link over time.

        Args:
            link: Its index.

        Returns:
            Times in seconds, and bytes per second from each time to the next.

        Raises:
            ConfigurationError: Rates were not recorded.
        """
        routes = self.table.routes
        owners = np.searchsorted(routes.offsets, np.flatnonzero(routes.links == link), "right") - 1
        times, steps = [np.zeros(0)], [np.zeros(0)]
        for task in owners.tolist():
            at_s, rate = self._rates_at(task)
            times.append(at_s)
            steps.append(np.diff(rate, prepend=0.0))
        moments, places = np.unique(np.concatenate(times), return_inverse=True)
        load = np.cumsum(np.bincount(places, np.concatenate(steps), len(moments)))
        return moments, np.maximum(load, 0.0)

    def _rates_at(self, task: int) -> tuple[FloatArray, FloatArray]:
        record = self.rates
        if record is None:
            msg = "rates were not recorded"
            raise ConfigurationError(msg, hint="pass record_rates=True")
        start, end = self.start_s[task], self.sent_s[task]
        if np.isnan(start) or record.of_task[task] < 0:
            return np.zeros(0), np.zeros(0)
        end = self.total_s if np.isnan(end) else end
        own = np.flatnonzero(record.bundles == record.of_task[task])
        times, levels = record.times_s[own], record.levels[own]
        # From the last change up to the start, to the last before the end.
        first = max(0, int(np.searchsorted(times, start, side="right")) - 1)
        last = int(np.searchsorted(times, end, side="left"))
        moments = np.maximum(times[first:last], start)
        rates = levels[first:last] * self.table.weights[task]
        return np.append(moments, end), np.append(rates, 0.0)
