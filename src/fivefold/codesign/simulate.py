"""A plan as tasks of the simulator: layer 5 runs what layers 1 to 4 decided."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fivefold.codesign.jobs import JobSpec
from fivefold.codesign.plans import ClusterPlan, JobPlan
from fivefold.collectives.pricing.fabric import Quote
from fivefold.collectives.pricing.phases import (
    Phase,
    collective_phases,
    first_path,
    host_groups,
    phases_time_s,
    route_latency_s,
)
from fivefold.errors import ConfigurationError
from fivefold.network.simulation import (
    AggregationRequest,
    Compute,
    Flow,
    SimulationResult,
    simulate,
)
from fivefold.network.topology import Topology
from fivefold.tasks import CommunicationTask, ComputeTask, TaskGraph, schedule_tasks
from fivefold.tasks.iteration import mesh_iteration, rotated_iteration
from fivefold.tasks.schedule import TaskSchedule

_FEWEST_STEPS = 2**10  # of rounding at a job's arrival that it must last, for three digits
_AGGREGATED_AXES = {"", "data"}  # the empty one stands for all ranks of a job


def phases_of(
    topology: Topology, job: JobSpec, plan: JobPlan, *, kind: str, size_bytes: float
) -> list[list[Phase]]:
    """The phases of one collective, one after the other; those of one entry run side by side.

    ``kind`` is that of the collective, of a split job followed by ``" over "`` and the axis.
    """
    if size_bytes == 0:
        return []
    chosen = job.split_as(plan.split)
    how = (plan.order, plan.algorithm, plan.root, plan.roots)
    return _phases(topology, chosen, how, kind, size_bytes)


@functools.lru_cache(maxsize=256)  # plans that differ in paths, classes or times only ask the same
def _phases(
    topology: Topology, job: JobSpec, how: tuple[Any, ...], kind: str, size_bytes: float
) -> list[list[Phase]]:
    order, algorithm, root, roots = how
    plan = JobPlan(order=order, algorithm=algorithm, root=root, roots=roots, slots=1)
    collective, _, axis = kind.partition(" over ")
    if collective in {"send", "return"}:
        sent = _sent(job, axis, size_bytes, back=collective == "return")
        return _at_reached_rate(topology, job, sent, exchange=True)
    if algorithm == "in_network" and axis not in _AGGREGATED_AXES:
        algorithm = "hierarchical"
    found: list[list[list[Phase]]] = []
    trees = 0
    for group in job_groups(job, plan, axis):
        local = len((host_groups(topology, group) or [()])[0])
        chosen: tuple[str, ...] = ()
        if algorithm == "in_network" and len(group) > 1:
            chosen = tuple(plan.root_of(trees + place) for place in range(local))
            trees += local
        phases = collective_phases(
            topology, group, collective, size_bytes, algorithm=algorithm, roots=chosen,
            every_port=job.mesh is not None,
        )  # fmt: skip
        found.append(phases)
    steps = max(map(len, found), default=0)
    joint = [[phase for own in found if i < len(own) for phase in own[i]] for i in range(steps)]
    return _at_reached_rate(topology, job, joint, exchange=collective == "all_to_all")


def _at_reached_rate(
    topology: Topology, job: JobSpec, steps: list[list[Phase]], *, exchange: bool
) -> list[list[Phase]]:
    """Phases with as many bytes as take the time at the link's rate that they take in truth."""
    if job.mesh is None:
        return steps
    inside, across = (reached[exchange] for reached in job.mesh.reached)
    if inside == across == 1.0:
        return steps

    def slowed(phase: Phase) -> Phase:
        hosts = ((topology.host_of(a), topology.host_of(b)) for a, b in phase.edges)
        far = phase.tree is not None or any(a is None or a != b for a, b in hosts)
        return dataclasses.replace(phase, edge_bytes=phase.edge_bytes / (across if far else inside))

    return [[slowed(phase) for phase in phases] for phases in steps]


def job_groups(job: JobSpec, plan: JobPlan, axis: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of an axis (empty: all ranks), each in the order of the plan's ring."""
    if not axis or job.mesh is None:
        return (plan.order,)
    place = {rank: number for number, rank in enumerate(plan.order)}
    groups = job.mesh.groups(axis)
    return tuple(tuple(sorted(group, key=place.__getitem__)) for group in groups)


def _sent(job: JobSpec, axis: str, size_bytes: float, *, back: bool) -> list[list[Phase]]:
    """Return what every stage sends to the next one, or to the one before."""
    if job.mesh is None:
        return []
    chains = job.mesh.groups(axis)
    edges = tuple(
        (b, a) if back else (a, b) for chain in chains for a, b in itertools.pairwise(chain)
    )
    return [[Phase(edges, size_bytes, steps=1, coupled=False)]] if edges else []


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
    return rotated_iteration(layers, quote, bucket_bytes=bucket, overlap_forward=overlap)


def schedule_iteration(job: JobSpec, plan: JobPlan, quote: Quote) -> TaskSchedule:
    """When everything happens where prices hold: the job's own prediction."""
    return schedule_tasks(iteration_of(job, plan, quote), ordering=plan.ordering)


def communication_order(schedule: TaskSchedule) -> list[str]:
    """Names of the communications in the order in which their channels take them."""
    return [span.task_id for span in schedule.spans if span.resource.startswith("network")]


SimulatorTask = Flow | Compute | AggregationRequest


@dataclass(frozen=True)
class Outcome:
    """What a simulation of a plan found."""

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
    tasks: list[SimulatorTask] = []
    for job in jobs:
        tasks += compile_job(topology, job, plan.jobs[job.job_id])
    counts: dict[Hashable, int] = {
        job.job_id: job.iterations if iterations is None else min(iterations, job.iterations)
        for job in jobs
    }
    result = simulate(topology, tasks, iterations=counts)
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
    """Tasks of one iteration of a job."""
    return _Compiler(topology, job, plan).tasks()


def alone_quote(topology: Topology, job: JobSpec, plan: JobPlan) -> Quote:
    """Seconds of the job's collectives with the network to itself: the price that layer 3 quotes.

    Side-by-side flows of a phase add up on the links that they share; phases follow one another.
    """
    found: dict[tuple[str, float], float] = {}
    job = job.split_as(plan.split)
    plan = replace(plan, split=0)

    def quote(kind: str, size_bytes: float) -> float:
        if (kind, size_bytes) not in found:
            steps = phases_of(topology, job, plan, kind=kind, size_bytes=size_bytes)
            route = functools.partial(edge_route, topology, plan)
            found[kind, size_bytes] = sum(
                phases_time_s(topology, phases, route=route, slots=plan.slots) for phases in steps
            )
        return found[kind, size_bytes]

    return quote


def planned_order(topology: Topology, job: JobSpec, plan: JobPlan) -> list[str]:
    """Names of a job's communications in the order in which its channel takes them."""
    quote = alone_quote(topology, job, plan)
    return communication_order(schedule_iteration(job, plan, quote))


def edge_route(topology: Topology, plan: JobPlan, edge: tuple[int, int]) -> tuple[int, ...]:
    """Links of an edge: as planned, else the first of the shortest paths."""
    planned = plan.paths.get(edge)
    return planned if planned is not None else first_path(topology, *edge)


class _Compiler:
    """Turns the tasks of an iteration into those of the simulator."""

    def __init__(self, topology: Topology, job: JobSpec, plan: JobPlan) -> None:
        job, plan = job.split_as(plan.split), replace(plan, split=0)
        self._topology, self._job, self._plan = topology, job, plan
        self._schedule = schedule_iteration(job, plan, alone_quote(topology, job, plan))
        self._out: list[SimulatorTask] = []
        self._ends: dict[str, Hashable] = {}  # of each task, what stands for its end

    def tasks(self) -> list[SimulatorTask]:
        """Return the iteration."""
        graph = self._schedule.graph
        # A channel takes one communication at a time, in the planned order.
        before: dict[str, str] = {}
        channel: dict[str, str | None] = {}
        for name in communication_order(self._schedule):
            resource = graph.by_id[name].resource
            channel[name] = before.get(resource)
            before[resource] = name
        for name in graph.order:
            self._ends[name] = (self._job.job_id, name, "end")
        for name in graph.order:
            task = graph.by_id[name]
            after = [self._ends[other] for other in task.depends_on]
            if isinstance(task, ComputeTask):
                self._compute(task, after)
            else:
                previous = channel[name]
                if previous is not None:
                    after.append(self._ends[previous])
                self._communicate(task, after)
        return self._out

    def _compute(self, task: ComputeTask, after: Sequence[Hashable]) -> None:
        job = self._job
        self._out.append(
            Compute(
                self._ends[task.task_id],
                task.duration_s,
                processor=job.job_id,
                depends_on=tuple(after),
                release_s=job.arrival_s + self._plan.shift_s,
                job=job.job_id,
            )
        )

    def _communicate(self, task: CommunicationTask, after: Sequence[Hashable]) -> None:
        steps = phases_of(
            self._topology, self._job, self._plan, kind=task.kind, size_bytes=task.size_bytes
        )
        last = len(steps) - 1
        end = self._ends[task.task_id]
        if not steps:
            self._delay(end, 0.0, after)
        for number, phases in enumerate(steps):
            start = (self._job.job_id, task.task_id, number, "start")
            # A flow adds its route's latency once, at its end; the other steps pay it before.
            self._delay(start, self._waits_s(phases), after)
            flows = [
                name
                for place, phase in enumerate(phases)
                for name in self._phase(phase, (task.task_id, number, place), start)
            ]
            joint = end if number == last else (self._job.job_id, task.task_id, number, "end")
            self._delay(joint, 0.0, flows)
            after = [joint]

    def _delay(self, name: Hashable, seconds: float, after: Sequence[Hashable]) -> None:
        self._out.append(
            Compute(
                name,
                seconds,
                depends_on=tuple(after),
                job=self._job.job_id,
                release_s=self._job.arrival_s + self._plan.shift_s,
            )
        )

    def _waits_s(self, phases: Sequence[Phase]) -> float:
        waits_s = 0.0
        for phase in phases:
            if phase.tree is None and phase.steps > 1:
                for edge in phase.edges:
                    route = edge_route(self._topology, self._plan, edge)
                    delay_s = route_latency_s(self._topology, route)
                    waits_s = max(waits_s, (phase.steps - 1) * delay_s)
        return waits_s

    def _phase(self, phase: Phase, name: tuple[Hashable, ...], start: Hashable) -> list[Hashable]:
        if phase.tree is not None:
            return [self._aggregate(phase, name, start)]
        flows = self._flows(phase, name, after=(start,))
        self._out += flows
        return [flow.flow_id for flow in flows]

    def _flows(
        self, phase: Phase, name: tuple[Hashable, ...], *, after: tuple[Hashable, ...]
    ) -> list[Flow]:
        job = self._job
        group = (job.job_id, *name) if phase.coupled else None
        ranks = self._topology.ranks
        return [
            Flow(
                (job.job_id, *name, edge),
                ranks[edge[0]],
                ranks[edge[1]],
                phase.edge_bytes,
                edge_route(self._topology, self._plan, edge),
                depends_on=after,
                group=group,
                priority=self._plan.priority,
                job=job.job_id,
            )
            for edge in phase.edges
        ]

    def _aggregate(self, phase: Phase, name: tuple[Hashable, ...], start: Hashable) -> Hashable:
        """Return an in-network aggregation; a ring of the same ranks where slots are short."""
        assert phase.tree is not None, "asked for trees only"
        leaves = [edge[0] for edge in phase.edges]
        number = len(leaves)
        ring = Phase(
            tuple((leaves[i], leaves[(i + 1) % number]) for i in range(number)),
            2 * phase.edge_bytes * (number - 1) / number,
            steps=2 * (number - 1),
        )
        request = (self._job.job_id, *name, "aggregation")
        self._out.append(
            AggregationRequest(
                request,
                dict(phase.tree),
                [self._topology.ranks[leaf] for leaf in leaves],
                phase.edge_bytes,
                slots=self._plan.slots,
                depends_on=(start,),
                priority=self._plan.priority,
                job=self._job.job_id,
                fallback=self._flows(ring, (*name, "fallback"), after=()) if number > 1 else None,
            )
        )
        return request
