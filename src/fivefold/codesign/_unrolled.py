"""A stretch of a plan's simulation with every iteration kept, for charts.

The simulator repeats a job's tasks and keeps the times of the last iteration only, and jobs end at
different moments. Charts need several jobs at one time, so iterations are written out one after
the other here, as far as a window in which all jobs run.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from fivefold.codesign._compile import Outcome, SimulatorTask, compile_job
from fivefold.codesign._jobs import JobSpec
from fivefold.codesign._plans import ClusterPlan
from fivefold.network.simulation import (
    AggregationRequest,
    Compute,
    Flow,
    SimulationResult,
    simulate,
)
from fivefold.network.topology import Topology

_MOST_TASKS = 40_000  # of all iterations; more would take minutes to draw
_SHOWN = 2.5  # iterations of the slowest job


@dataclass(frozen=True, kw_only=True)
class Window:
    """A stretch of time, and the simulation that covers it.

    Attributes:
        result: Tasks are named ``(iteration, name)``; rates were recorded.
        start_s: Where the stretch begins.
        end_s: Where it ends.
        iterations: How many of each job were simulated.
        whole: Whether all jobs run within it.
    """

    result: SimulationResult
    start_s: float
    end_s: float
    iterations: Mapping[str, int]
    whole: bool


def unrolled(
    topology: Topology, jobs: Sequence[JobSpec], plan: ClusterPlan, outcome: Outcome
) -> Window | None:
    """Simulate as many iterations as a window needs in which all jobs run."""
    begins_s = {j.job_id: j.arrival_s + plan.jobs[j.job_id].shift_s for j in jobs}
    length_s = _SHOWN * max(outcome.iteration_s.values())
    once = {job.job_id: compile_job(topology, job, plan.jobs[job.job_id]) for job in jobs}
    last_s = max(begins_s.values())
    for start_s in (last_s, min(begins_s.values())):
        counts = {
            job.job_id: _iterations(job, begins_s[job.job_id], start_s + length_s, outcome)
            for job in jobs
        }
        if sum(counts[name] * len(once[name]) for name in once) <= _MOST_TASKS:
            break
    else:
        return None
    tasks: list[SimulatorTask] = []
    for job in jobs:
        tasks += _written_out(job.job_id, once[job.job_id], counts[job.job_id])
    result = simulate(topology, tasks, record_rates=True)
    whole = start_s == last_s and all(
        begins_s[name] + outcome.iteration_s[name] * counts[name] > start_s for name in begins_s
    )
    end_s = min(start_s + length_s, result.total_s)
    return Window(
        result=result,
        start_s=start_s if end_s > start_s else 0.0,
        end_s=end_s,
        iterations=counts,
        whole=whole,
    )


def _iterations(job: JobSpec, begin_s: float, until_s: float, outcome: Outcome) -> int:
    """Return how many iterations a job has begun until a moment, one more for safety."""
    if begin_s >= until_s:
        return 0
    started = math.ceil((until_s - begin_s) / outcome.iteration_s[job.job_id]) + 1
    return min(job.iterations, started)


def _written_out(job_id: str, once: Sequence[SimulatorTask], count: int) -> list[SimulatorTask]:
    """Iterations one after the other: each begins when all tasks of the one before have ended."""
    found: list[SimulatorTask] = []
    before: tuple[Hashable, ...] = ()
    for number in range(count):
        copies = [_copy(task, number, before) for task in once]
        end: Hashable = (number, (job_id, "iteration"))
        ids = tuple(_name(task) for task in copies)
        found += [*copies, Compute(end, 0.0, depends_on=ids, job=job_id)]
        before = (end,)
    return found


def _copy(task: SimulatorTask, number: int, before: tuple[Hashable, ...]) -> SimulatorTask:
    after = tuple((number, name) for name in task.depends_on) or before
    if isinstance(task, Compute):
        return replace(task, task_id=(number, task.task_id), depends_on=after)
    if isinstance(task, Flow):
        return _copied_flow(task, number, after)
    fallback = task.fallback
    if fallback is not None:
        fallback = [_copied_flow(flow, number, ()) for flow in fallback]
    name = (number, task.request_id)
    return replace(task, request_id=name, depends_on=after, fallback=fallback)


def _copied_flow(flow: Flow, number: int, after: tuple[Hashable, ...]) -> Flow:
    group = None if flow.group is None else (number, flow.group)
    return replace(flow, flow_id=(number, flow.flow_id), depends_on=after, group=group)


def _name(task: SimulatorTask) -> Hashable:
    if isinstance(task, Compute):
        return task.task_id
    return task.request_id if isinstance(task, AggregationRequest) else task.flow_id
