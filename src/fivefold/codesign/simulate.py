"""A plan as tasks of the simulator: layer 5 runs what layers 1 to 4 decided."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fivefold.codesign.jobs import JobSpec
from fivefold.codesign.plans import ClusterPlan, JobPlan
from fivefold.codesign.steps import (
    EdgeRoutes,
    Part,
    PhaseGroup,
    PlannedRoutes,
    Row,
    merged_rows,
    steps_of,
)
from fivefold.collectives.pricing.fabric import Quote
from fivefold.collectives.pricing.phases import tree_links
from fivefold.errors import ConfigurationError, require_whole
from fivefold.network.simulation import (
    AggregationRequest,
    Compute,
    CoupledFlows,
    Flow,
    SimulationResult,
    simulate,
)
from fivefold.network.topology import Topology
from fivefold.tasks import CommunicationTask, ComputeTask, TaskGraph, schedule_tasks
from fivefold.tasks.iteration import mesh_iteration, rotated_iteration
from fivefold.tasks.schedule import TaskSchedule

_FEWEST_STEPS = 2**10  # of rounding at a job's arrival that it must last, for three digits


def iteration_of(job: JobSpec, plan: JobPlan, quote: Quote) -> TaskGraph:
    """Return the rotated iteration of a job."""
    chosen = job.split_as(plan.split)
    bucket, overlap = plan.bucket_bytes, plan.overlap_forward
    if chosen.mesh is not None:
        demand = chosen.mesh.demand
        return mesh_iteration(demand, quote, bucket_bytes=bucket, overlap_forward=overlap)
    layers = chosen.layers
    if len(chosen.ranks) == 1:  # nobody to talk to
        layers = tuple(replace(x, gradient_bytes=0, all_to_all_bytes=0) for x in layers)
    return rotated_iteration(
        layers, lambda kind, size: (quote(kind, size), 0.0),
        bucket_bytes=bucket, overlap_forward=overlap,
    )  # fmt: skip


def schedule_iteration(job: JobSpec, plan: JobPlan, quote: Quote) -> TaskSchedule:
    """Schedule an iteration at given prices: the job's own prediction."""
    return schedule_tasks(iteration_of(job, plan, quote), ordering=plan.ordering)


def communication_order(schedule: TaskSchedule) -> list[str]:
    """Name the communications in the order in which their channels take them."""
    return [span.task_id for span in schedule.spans if span.resource.startswith("network")]


def channel_predecessors(schedule: TaskSchedule) -> dict[str, str]:
    """Return what each communication follows: a channel takes one at a time, as planned."""
    found: dict[str, str] = {}
    last: dict[str, str] = {}
    for name in communication_order(schedule):
        channel = schedule.graph.by_id[name].resource
        if channel in last:
            found[name] = last[channel]
        last[channel] = name
    return found


SimulatorTask = Flow | CoupledFlows | Compute | AggregationRequest


@dataclass(frozen=True)
class Outcome:
    """Result of a plan's simulation."""

    completion_s: Mapping[str, float]
    iteration_s: Mapping[str, float]
    result: SimulationResult


def run_plan(
    topology: Topology, jobs: Sequence[JobSpec], plan: ClusterPlan, *, iterations: int | None = None
) -> Outcome:
    """Simulate jobs under a plan.

    Args:
        topology: The cluster.
        jobs: The jobs that run.
        plan: Decisions for each of them.
        iterations: Most iterations per job; None for all.

    Returns:
        When each job ended. With fewer iterations than a job has, its completion is extrapolated
        from the mean iteration.

    Raises:
        InfeasibleError: A plan is not possible on this cluster.
        ConfigurationError: A job arrives so late that its own times are lost beside that number.

    Examples:
        >>> from fivefold.network.topology import switch
        >>> from fivefold.tasks import LayerCost
        >>> layer = LayerCost(forward_s=1.0, backward_s=1.0, gradient_bytes=10**9)
        >>> job = JobSpec(job_id="a", ranks=(0, 1), layers=(layer,), iterations=3)
        >>> plan = ClusterPlan({"a": JobPlan(order=(0, 1))})
        >>> run_plan(switch(2, bandwidth="1 GB/s"), [job], plan).completion_s
        {'a': 9.0}
    """
    if iterations is not None:
        require_whole("iterations", iterations)
    compilers = [_Compiler(topology, job, plan.jobs[job.job_id]) for job in jobs]
    parts = {part: routes for one in compilers for part, routes in one.parts().items()}
    single = [links for one in compilers for links in one.single()]
    rows, representatives = merged_rows(parts, topology.capacities_bytes_per_s, single=single)
    tasks = [task for one in compilers for task in one.tasks(rows)]
    counts: dict[Hashable, int] = {
        job.job_id: job.iterations if iterations is None else min(iterations, job.iterations)
        for job in jobs
    }
    result = simulate(topology, tasks, iterations=counts)
    books = ("link_bytes", "link_busy_s", "over_capacity_s")
    result = replace(result, **{name: getattr(result, name)[representatives] for name in books})
    completion_s, iteration_s = {}, {}
    for job in jobs:
        begun_s = job.arrival_s + plan.jobs[job.job_id].shift_s
        took_s = result.job_finish_s(job.job_id) - begun_s
        if took_s < _FEWEST_STEPS * math.ulp(begun_s):
            message = f"job {job.job_id!r} arrives at {job.arrival_s:g} s: its own times are lost"
            hint = "count arrivals from the first job: numbers so large have too few digits left"
            raise ConfigurationError(f"{message} in the rounding beside it", hint=hint)
        mean_s = took_s / counts[job.job_id]
        left = job.iterations - counts[job.job_id]
        end_s = result.job_finish_s(job.job_id) + left * mean_s
        completion_s[job.job_id] = end_s - job.arrival_s
        iteration_s[job.job_id] = mean_s
    return Outcome(completion_s, iteration_s, result)


def compile_job(topology: Topology, job: JobSpec, plan: JobPlan) -> list[SimulatorTask]:
    """Return the tasks of one iteration of a job: each phase of each of its groups."""
    compiler = _Compiler(topology, job, plan)
    return compiler.tasks(merged_rows(compiler.parts(), topology.capacities_bytes_per_s)[0])


def alone_quote(topology: Topology, job: JobSpec, plan: JobPlan) -> Quote:
    """Return a quote of the job's collectives with the network to themselves, in seconds.

    Side-by-side flows of a phase add up on the links that they share; phases follow one another.
    """
    found: dict[tuple[str, float], float] = {}
    job = job.split_as(plan.split)
    plan = replace(plan, split=0)
    routes = PlannedRoutes(topology, plan)

    def quote(kind: str, size_bytes: float) -> float:
        if (kind, size_bytes) not in found:
            steps = steps_of(topology, job, plan, kind=kind, size_bytes=size_bytes)
            found[kind, size_bytes] = sum(
                routes.step_time_s(groups, slots=plan.slots) for groups in steps
            )
        return found[kind, size_bytes]

    return quote


def planned_order(topology: Topology, job: JobSpec, plan: JobPlan) -> list[str]:
    """Name a job's communications in the order in which its channel takes them."""
    quote = alone_quote(topology, job, plan)
    return communication_order(schedule_iteration(job, plan, quote))


class _Compiler:
    """Turns the tasks of an iteration into those of the simulator."""

    def __init__(self, topology: Topology, job: JobSpec, plan: JobPlan) -> None:
        job, plan = job.split_as(plan.split), replace(plan, split=0)
        self._topology, self._job, self._plan = topology, job, plan
        self._schedule = schedule_iteration(job, plan, alone_quote(topology, job, plan))
        self._routes = PlannedRoutes(topology, plan)
        self._rows: Mapping[Part, list[Row]] = {}
        self._out: list[SimulatorTask] = []
        self._ends: dict[str, Hashable] = {}  # of each task, what stands for its end

    def parts(self) -> dict[Part, EdgeRoutes]:
        """Return the links of the job's different phases."""
        return {
            self._part(group): self._routes.of(group.edges)
            for group in self._groups()
            if group.tree is None
        }

    def single(self) -> Iterator[tuple[int, ...]]:
        """Yield the links of aggregation trees and of the rings that stand in for them."""
        for group in self._groups():
            if group.tree is not None:
                yield tree_links(self._topology, group.tree)
                yield from (self._routes.route(edge) for edge in _stand_in(group)[0])

    def _groups(self) -> Iterator[PhaseGroup]:
        for task in self._schedule.graph.communication:
            for groups in self._steps(task):
                yield from groups

    def _steps(self, task: CommunicationTask) -> list[list[PhaseGroup]]:
        kind, size_bytes = task.kind, task.size_bytes
        return steps_of(self._topology, self._job, self._plan, kind=kind, size_bytes=size_bytes)

    def _part(self, group: PhaseGroup) -> Part:
        return self._job.job_id, group.edges, group.coupled

    def tasks(self, rows: Mapping[Part, list[Row]]) -> list[SimulatorTask]:
        """Return the iteration, each part of it as the rows that stand for it."""
        self._rows, job_id = rows, self._job.job_id
        graph, before = self._schedule.graph, channel_predecessors(self._schedule)
        self._ends = {name: (job_id, name, "end") for name in graph.order}
        for name in graph.order:
            task = graph.by_id[name]
            after = [self._ends[other] for other in task.depends_on]
            if isinstance(task, ComputeTask):
                self._wait(self._ends[name], task.duration_s, after, processor=job_id)
                continue
            if name in before:
                after.append(self._ends[before[name]])
            self._communicate(task, after)
        return self._out

    def _communicate(self, task: CommunicationTask, after: Sequence[Hashable]) -> None:
        steps = self._steps(task)
        last = len(steps) - 1
        end = self._ends[task.task_id]
        if not steps:
            self._wait(end, 0.0, after)
        for number, groups in enumerate(steps):
            start = (self._job.job_id, task.task_id, number, "start")
            # A flow adds its route's latency once, at its end; the other steps pay it before.
            self._wait(start, self._waits_s(groups), after)
            flows = [
                name
                for place, group in enumerate(groups)
                for name in self._phases(group, (task.task_id, number, place), start)
            ]
            joint = end if number == last else (self._job.job_id, task.task_id, number, "end")
            self._wait(joint, 0.0, flows)
            after = [joint]

    def _wait(
        self,
        name: Hashable,
        seconds: float,
        after: Sequence[Hashable],
        processor: str | None = None,
    ) -> None:
        """Add compute, or what only takes time where no processor is given."""
        self._out.append(
            Compute(
                name, seconds, depends_on=tuple(after), job=self._job.job_id,
                release_s=self._job.arrival_s + self._plan.shift_s, processor=processor,
            )
        )  # fmt: skip

    def _waits_s(self, groups: Sequence[PhaseGroup]) -> float:
        paid = [g for g in groups if g.tree is None and (g.steps > 1 or g.wait_s > 0)]
        waits = (
            g.wait_s + (g.steps - 1) * self._routes.of(g.edges).latencies_s.max(initial=0.0)
            for g in paid
        )
        return float(max(waits, default=0.0))

    def _phases(
        self, group: PhaseGroup, name: tuple[Hashable, ...], start: Hashable
    ) -> list[Hashable]:
        if group.tree is not None:
            return [self._aggregate(group, name, start)]
        job_id, found = self._job.job_id, []
        for number, row in enumerate(self._rows[self._part(group)]):
            found.append((job_id, *name, number))
            self._out.append(
                CoupledFlows(
                    found[-1],
                    group.edge_bytes,
                    row.links,
                    row.latency_s,
                    depends_on=(start,),
                    group=(job_id, *name, "phase", row.phase) if group.coupled else None,
                    priority=self._plan.priority,
                    job=job_id,
                )
            )
        return list(found)

    def _aggregate(
        self, group: PhaseGroup, name: tuple[Hashable, ...], start: Hashable
    ) -> Hashable:
        """Return an in-network aggregation; a ring of the same ranks where slots are short."""
        assert group.tree is not None, "asked for trees only"
        ranks, job_id = self._topology.ranks, self._job.job_id
        edges, edge_bytes = _stand_in(group)
        request = (job_id, *name, "aggregation")
        ring = [
            Flow(
                (job_id, *name, "fallback", edge),
                ranks[edge[0]],
                ranks[edge[1]],
                edge_bytes,
                self._routes.route(edge),
                group=(job_id, *name, "fallback"),
                priority=self._plan.priority,
                job=job_id,
            )
            for edge in edges
        ]
        self._out.append(
            AggregationRequest(
                request,
                dict(group.tree),
                [ranks[leaf] for leaf in group.edges.ranks[0, :, 0].tolist()],
                group.edge_bytes,
                slots=self._plan.slots,
                depends_on=(start,),
                priority=self._plan.priority,
                job=job_id,
                fallback=ring or None,
            )
        )
        return request


def _stand_in(group: PhaseGroup) -> tuple[list[tuple[int, int]], float]:
    """Return the ring of a tree's leaves: its edges, and the bytes of each."""
    leaves = group.edges.ranks[0, :, 0].tolist()
    number = len(leaves)
    edges = list(itertools.pairwise([*leaves, leaves[0]])) if number > 1 else []
    return edges, 2 * group.edge_bytes * (number - 1) / number
