"""Which layer limits what runs already: several jobs on one cluster, or a run that was measured.

Of several jobs each change is simulated for all. Of a run, the measured parts of a step (compute,
messages in flight, waits) are put through layer 2's own law of what stays exposed
(``fivefold.tasks``), with one part changed. Nothing is measured again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from fivefold.codesign.arbiter import objective_s
from fivefold.codesign.baselines import null_plan, routed_one_by_one
from fivefold.codesign.coordinator import collective_options, plan_cluster, task_options
from fivefold.codesign.explain import Change, Explanation, worth_saying
from fivefold.codesign.jobs import JobSpec, check_jobs
from fivefold.codesign.plans import ClusterPlan, CoDesigns, JobPlan
from fivefold.codesign.simulate import alone_quote, run_plan, schedule_iteration
from fivefold.errors import ConfigurationError, DataError, FivefoldError
from fivefold.network.topology import Topology
from fivefold.report import build_report
from fivefold.tasks.schedule import exposed_s

_ITERATIONS = 12  # of each job in a simulation
_MOST_FACTOR = 1e6  # of the rate of links that are as good as infinitely fast
_MARGIN = 1.1  # of a round over its messages, as tau="auto" has it
_HOW = (
    "steps are means of rank 0 without validation and checkpoints; each line puts the measured "
    "parts through the law of overlap with that one change"
)
_PARTS = {
    "compute": "compute_s", "exposed_communication": "data_s", "boundary": "optimizer_s",
    "data": "loading_s", "other": "overhead_s",
}  # fmt: skip


def explain_jobs(
    topology: Topology, jobs: Sequence[JobSpec], *, plan: ClusterPlan | None = None, seed: int = 0
) -> Explanation:
    """Say which layer limits several jobs, and what each change would bring.

    Args:
        topology: The cluster.
        jobs: The jobs.
        plan: How they run; None for today's practice (B0: rings in rank order, hashed paths).
        seed: Seed of the hashed paths.

    Returns:
        The explanation, of the weighted mean completion of all jobs.

    Raises:
        ConfigurationError: The jobs are not allowed, or the plan is of other jobs or links.
        InfeasibleError: A job does not fit the cluster.

    Examples:
        >>> from fivefold.network.topology import switch
        >>> from fivefold.tasks import LayerCost
        >>> layers = (LayerCost(forward_s=0.1, backward_s=0.2, gradient_bytes=10**9),)
        >>> jobs = [JobSpec(job_id="a", ranks=(0, 1), layers=layers, iterations=3)]
        >>> explain_jobs(switch(2, bandwidth="1 GB/s"), jobs).limit
        'network'
    """
    check_jobs(topology, jobs)
    if plan is not None:
        _check_plan(topology, jobs, plan)
    asked = _Question(topology, tuple(jobs), plan or null_plan(topology, jobs, seed=seed))
    makers = (_own_layers, _flows, _network, _compute)
    changes = [one for make in makers for one in make(asked)]
    free_s = asked.seconds(_scaled(topology, _MOST_FACTOR), asked.plan)
    how = "as planned" if plan else "as today, uncoordinated"
    return Explanation(
        subject=f"{len(jobs)} jobs on {topology.name}, {how}",
        what="mean completion",
        seconds=asked.now_s,
        parts_s={"compute_s": free_s, "data_s": max(asked.now_s - free_s, 0.0)},
        changes=worth_saying(changes, asked.now_s),
        notes=(
            "each line is all jobs simulated again with that one change; savings do not add up",
        ),
    )


def _check_plan(topology: Topology, jobs: Sequence[JobSpec], plan: ClusterPlan) -> None:
    """Refuse a plan that was made for other jobs, or for another cluster."""
    hint = "plan these jobs on this cluster: fivefold simulate JOBS --cluster ... --output FOLDER"
    names = sorted(job.job_id for job in jobs)
    if names != sorted(plan.jobs):
        message = f"the plan is of jobs {', '.join(sorted(plan.jobs))}, not of {', '.join(names)}"
        raise ConfigurationError(message, hint=hint)
    for job in jobs:
        own = plan.jobs[job.job_id]
        if sorted(own.order) != sorted(job.split_as(own.split).ranks):
            message = f"the plan has job {job.job_id!r} on other ranks than its own: {own.order}"
            raise ConfigurationError(message, hint=hint)
        roots = {own.root, *own.roots} - {None}
        known = roots <= {node.name for node in topology.nodes}
        if not known or not all(_leads(topology, edge, path) for edge, path in own.paths.items()):
            message = f"the plan of job {job.job_id!r} uses links that {topology.name!r} has not"
            raise ConfigurationError(message, hint=hint)


def _leads(topology: Topology, edge: tuple[int, int], path: Sequence[int]) -> bool:
    """Return whether links lead from one rank to another."""
    known = all(0 <= link < len(topology.links) for link in path)
    if not known or not all(0 <= rank < topology.num_ranks for rank in edge):
        return False
    at, end = (topology.ranks[rank] for rank in edge)
    for link in path:
        if topology.links[link].source != at:
            return False
        at = topology.links[link].target
    return at == end


class _Question:
    """All jobs under a plan, simulated again with something changed."""

    def __init__(self, topology: Topology, jobs: tuple[JobSpec, ...], plan: ClusterPlan) -> None:
        self.topology, self.jobs, self.plan = topology, jobs, plan
        self.now_s = self.seconds(topology, plan)

    def seconds(self, topology: Topology, plan: ClusterPlan) -> float:
        """Return the objective of a plan, simulated for a few iterations."""
        found = run_plan(topology, self.jobs, plan, iterations=_ITERATIONS)
        return objective_s(self.jobs, found.completion_s)

    def best_alone(self, layer: str, action: str, choices: _Choices) -> Iterator[Change]:
        """Yield all jobs with the choice that each finds best for itself, if that is another."""
        best = {}
        for job in self.jobs:
            priced = [
                (schedule_iteration(job, one, alone_quote(self.topology, job, one)).end_s, one)
                for one in choices(job, self.plan.jobs[job.job_id])
            ]
            best[job.job_id] = min(priced, key=itemgetter(0))[1]
        if (plan := ClusterPlan(best)) != self.plan:
            yield Change(layer, action, self.seconds(self.topology, plan))


_Choices = Callable[[JobSpec, JobPlan], Iterable[JobPlan]]
"""What a job may choose among; the plan so far comes first."""


def _splits(job: JobSpec, start: JobPlan) -> Iterator[JobPlan]:
    yield start
    for number, split in enumerate(job.splits):
        if number != start.split:
            yield replace(start, split=number, order=split.ranks, paths={})


def _own_layers(asked: _Question) -> Iterator[Change]:
    """Yield what each job would choose for itself in layers 1 to 3."""
    yield from asked.best_alone("strategy", "the split that each job's prices favour", _splits)
    buckets = "buckets and order of need, as each job's best"
    yield from asked.best_alone("tasks", buckets, lambda _, start: task_options(start))
    vertical = CoDesigns(vertical=True)
    for action, allowed in (
        ("rings along the topology", vertical),
        ("hierarchical all-reduces", replace(vertical, intra_inter=True)),
        ("in-network aggregation where switches can",
         replace(vertical, intra_inter=True, host_net=True)),
    ):  # fmt: skip

        def choices(
            job: JobSpec, start: JobPlan, allowed: CoDesigns = allowed
        ) -> Iterator[JobPlan]:
            options = collective_options(asked.topology, job, start, allowed)
            return (option.plan for option in options)

        yield from asked.best_alone("collectives", action, choices)


def _flows(asked: _Question) -> Iterator[Change]:
    topology, jobs, plan = asked.topology, asked.jobs, asked.plan
    routed_s = asked.seconds(topology, routed_one_by_one(topology, jobs, plan))
    yield Change("flows", "paths by load instead of by hash", routed_s)
    try:
        found = plan_cluster(topology, jobs, CoDesigns(horizontal=True))
    except FivefoldError:  # what cannot be planned together is planned alone
        return
    together_s = asked.seconds(topology, found.plan)
    yield Change("flows", "paths, classes and offsets planned over all jobs", together_s)
    alone: dict[str, float] = {}
    for job in jobs:
        own = ClusterPlan({job.job_id: plan.jobs[job.job_id]})
        alone |= run_plan(topology, [job], own, iterations=_ITERATIONS).completion_s
    yield Change("flows", "every job alone", objective_s(jobs, alone), "bound")


def _network(asked: _Question) -> Iterator[Change]:
    twice_s = asked.seconds(_scaled(asked.topology, 2.0), asked.plan)
    yield Change("network", "all links twice as fast", twice_s, "purchase")


def _compute(asked: _Question) -> Iterator[Change]:
    if any(job.splits for job in asked.jobs):
        return
    jobs = [
        replace(job, layers=tuple(
            replace(x, forward_s=x.forward_s / 2, backward_s=x.backward_s / 2) for x in job.layers
        ))
        for job in asked.jobs
    ]  # fmt: skip
    seconds = _Question(asked.topology, tuple(jobs), asked.plan).now_s
    yield Change("compute", "GPUs twice as fast", seconds, "purchase")


def _scaled(topology: Topology, factor: float) -> Topology:
    links = tuple(
        replace(link, bandwidth_bytes_per_s=factor * link.bandwidth_bytes_per_s)
        for link in topology.links
    )
    return replace(topology, links=links)


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """Mean parts of a run's steps.

    Args:
        rest_s: All but waits for messages and for data.
        loading_s: Waits for data.
        waits_s: Waits for messages.
        sent_s: Messages in flight, waited for or not.
        least_sent_s: What the link's rate allows for their bytes; None where it is not known.
        tau: Steps between synchronisations; 1 for DDP.
    """

    rest_s: float
    loading_s: float
    waits_s: float
    sent_s: float
    least_sent_s: float | None
    tau: int = 1

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        return self.rest_s + self.loading_s + self.waits_s

    def with_messages(self, sent_s: float, *, beside_s: float | None = None) -> float:
        """Return the step's seconds if messages took ``sent_s`` and hid behind ``beside_s``.

        None: behind as much compute as they did.
        """
        hidden_s = max(self.sent_s - self.waits_s, 0.0) if beside_s is None else beside_s
        left_s = self.waits_s - max(self.sent_s - hidden_s, 0.0)  # waits for no message of ours
        waits_s = float(exposed_s(sent_s, hidden_s)) + (left_s if beside_s is None else 0.0)
        return self.rest_s + self.loading_s + max(waits_s, 0.0)


def explain_run(folder: Path | str) -> Explanation:
    """Say which layer limits a training run, from what its folder holds.

    Raises:
        DataError: The folder holds no run, several, or none of whose time anything is recorded.
    """
    report = build_report([folder])
    if report.graph_runs and not report.runs:
        raise DataError(
            f"{folder} is a run on a graph, and only language models are explained",
            hint=f"fivefold report {folder} says where its time went",
        )
    if len(report.runs) != 1:
        raise DataError(
            f"{folder} holds {len(report.runs)} runs of a language model, and one is explained",
            hint="name the folder of one run; fivefold report compares several",
        )
    summary = report.summaries[0]
    seconds = summary.step_seconds
    if seconds is None:
        raise DataError(
            f"{folder} does not say where its time went: {summary.steps} steps are recorded",
            hint="let the run take a few steps first",
        )
    parts = {name: seconds[name] for name in _PARTS}
    lab = report.runs[0].manifest.lab
    rate = lab.rate_bytes_per_s if lab is not None and lab.shaped else None
    least_bytes = summary.least_link_bytes_per_step
    step = MeasuredStep(
        rest_s=parts["compute"] + parts["boundary"] + parts["other"],
        loading_s=parts["data"],
        waits_s=parts["exposed_communication"],
        sent_s=max((summary.in_flight_s or 0.0) / summary.steps, parts["exposed_communication"]),
        least_sent_s=least_bytes / rate if least_bytes and rate else None,
        tau=_tau_of(report.runs[0].config, [point.tau for point in report.runs[0].metrics.sync]),
    )
    return Explanation(
        subject=f"{summary.label}, {report.runs[0].manifest.world_size} ranks, "
        f"{summary.steps} steps, measured",
        what="step",
        seconds=step.seconds,
        parts_s={_PARTS[name]: value for name, value in parts.items() if value > 0},
        changes=worth_saying(_changes(step, summary.method), step.seconds),
        notes=(_HOW, *report.caveats),
    )


def _tau_of(config: dict[str, Any], logged: Sequence[int | None]) -> int:
    """Return the last tau of a run: "auto" changes it."""
    tau = config.get("sync", {}).get("tau")
    chosen = [tau, *logged][-1]
    return chosen if isinstance(chosen, int) and chosen > 0 else 1


def _changes(step: MeasuredStep, method: str) -> Iterator[Change]:
    if step.sent_s > 0:
        least_s = step.with_messages(step.sent_s, beside_s=step.rest_s)
        if least_s < step.seconds:
            yield Change("tasks", "all communication beside compute", least_s, "bound")
        if method == "ddp" and step.rest_s > 0:  # else nothing is there to hide behind
            tau = max(2, math.ceil(_MARGIN * step.sent_s / step.rest_s))
            seconds = step.with_messages(step.sent_s / tau, beside_s=step.rest_s)
            action = f'local updates: method = "delay_corrected", tau = {tau}'
            yield Change("strategy", action, seconds, "convergence")
        elif step.waits_s > 0 and step.rest_s > 0 and method not in {"ddp", "none"}:
            tau = max(step.tau + 1, math.ceil(_MARGIN * step.tau * step.sent_s / step.rest_s))
            seconds = step.with_messages(step.sent_s * step.tau / tau)
            yield Change("strategy", f"tau = {tau} instead of {step.tau}", seconds, "convergence")
        if step.least_sent_s is not None and step.least_sent_s < step.sent_s:
            yield Change(
                "collectives", "all-reduces at the link's full rate",
                step.with_messages(step.least_sent_s), "bound",
            )  # fmt: skip
        half_s = step.with_messages(step.sent_s / 2)
        yield Change("collectives", "half as many bytes (16 bits for 32)", half_s, "convergence")
        yield Change("network", "links twice as fast", half_s, "purchase")
        crowded_s = step.with_messages(2 * step.sent_s)
        yield Change("flows", "a neighbour takes half of the links", crowded_s, "risk")
    if step.loading_s > 0:
        ready_s = replace(step, loading_s=0.0).seconds
        yield Change("compute", "data that is there in time", ready_s, "bound")
    yield Change("compute", "a processor twice as fast", step.seconds - step.rest_s / 2, "purchase")
