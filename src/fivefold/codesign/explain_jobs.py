"""Which layer limits several jobs on one cluster: each change is simulated for all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from fivefold.codesign.arbiter import objective_s
from fivefold.codesign.baselines import null_plan, routed_one_by_one
from fivefold.codesign.coordinator import collective_options, plan_cluster, task_options
from fivefold.codesign.explain import LEAST_SHARE, Change, Explanation, Kind
from fivefold.codesign.jobs import JobSpec, check_jobs
from fivefold.codesign.plans import ClusterPlan, CoDesigns, JobPlan
from fivefold.codesign.simulate import alone_quote, run_plan, schedule_iteration
from fivefold.errors import FivefoldError
from fivefold.network.topology import Topology

_ITERATIONS = 12  # of each job in a simulation
_MOST_FACTOR = 1e6  # of the rate of links that are as good as infinitely fast


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
        ConfigurationError: The jobs are not allowed.
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
    asked = _Question(topology, tuple(jobs), plan or null_plan(topology, jobs, seed=seed))
    makers = (_strategy, _tasks, _collectives, _flows, _network, _compute)
    changes = [one for make in makers for one in make(asked)]
    counted = [one for one in changes if abs(one.saves_s) >= LEAST_SHARE * asked.now_s]
    free_s = asked.seconds(_scaled(topology, _MOST_FACTOR), asked.plan)
    how = "as planned" if plan else "as today, uncoordinated"
    return Explanation(
        subject=f"{len(jobs)} jobs on {topology.name}, {how}",
        what="mean completion",
        seconds=asked.now_s,
        parts_s={"compute_s": free_s, "data_s": max(asked.now_s - free_s, 0.0)},
        changes=tuple(sorted(counted, key=lambda one: -one.saves_s)),
        notes=(
            "each line is all jobs simulated again with that one change; savings do not add up",
        ),
    )


class _Question:
    """All jobs under a plan, simulated again with something changed."""

    def __init__(self, topology: Topology, jobs: tuple[JobSpec, ...], plan: ClusterPlan) -> None:
        self.topology, self.jobs, self.plan = topology, jobs, plan
        self.now_s = self.seconds(topology, plan)

    def seconds(self, topology: Topology, plan: ClusterPlan) -> float:
        """Return the objective of a plan, simulated for a few iterations."""
        found = run_plan(topology, self.jobs, plan, iterations=_ITERATIONS)
        return objective_s(self.jobs, found.completion_s)

    def change(self, layer: str, action: str, seconds: float, kind: Kind = "setting") -> Change:
        """Return a change by the objective that it leads to."""
        return Change(
            layer=layer, action=action, seconds=seconds, saves_s=self.now_s - seconds, kind=kind
        )

    def best_alone(
        self, layer: str, action: str, options: Sequence[tuple[JobSpec, Sequence[JobPlan]]]
    ) -> Iterator[Change]:
        """Yield all jobs with the option that each finds best for itself, if that is another."""
        plan = self.plan
        for job, choices in options:
            best = min(
                choices,
                key=lambda one, job=job: (  # type: ignore[misc]
                    schedule_iteration(job, one, alone_quote(self.topology, job, one)).end_s
                ),
            )
            plan = ClusterPlan({**plan.jobs, job.job_id: best})
        if plan != self.plan:
            yield self.change(layer, action, self.seconds(self.topology, plan))


def _strategy(asked: _Question) -> Iterator[Change]:
    options = []
    for job in asked.jobs:
        start = asked.plan.jobs[job.job_id]
        options.append((job, [
            start,
            *(
                dataclasses.replace(start, split=number, order=split.ranks, paths={})
                for number, split in enumerate(job.splits)
                if number != start.split
            ),
        ]))  # fmt: skip
    yield from asked.best_alone("strategy", "the split that each job's prices favour", options)


def _tasks(asked: _Question) -> Iterator[Change]:
    options = [(job, list(task_options(asked.plan.jobs[job.job_id]))) for job in asked.jobs]
    yield from asked.best_alone("tasks", "buckets and order of need, as each job's best", options)


def _collectives(asked: _Question) -> Iterator[Change]:
    for action, co_designs in (
        ("rings along the topology", CoDesigns(vertical=True)),
        ("hierarchical all-reduces", CoDesigns(vertical=True, intra_inter=True)),
        (
            "in-network aggregation where switches can",
            CoDesigns(vertical=True, intra_inter=True, host_net=True),
        ),
    ):
        options = []
        for job in asked.jobs:
            start = asked.plan.jobs[job.job_id]
            found = collective_options(asked.topology, job, start, co_designs)
            options.append((job, [option.plan for option in found]))
        yield from asked.best_alone("collectives", action, options)


def _flows(asked: _Question) -> Iterator[Change]:
    routed = routed_one_by_one(asked.topology, asked.jobs, asked.plan)
    yield asked.change(
        "flows", "paths by load instead of by hash", asked.seconds(asked.topology, routed)
    )
    try:
        found = plan_cluster(asked.topology, asked.jobs, CoDesigns(horizontal=True))
    except FivefoldError:  # what cannot be planned together is planned alone
        return
    together_s = asked.seconds(asked.topology, found.plan)
    yield asked.change("flows", "paths, classes and offsets planned over all jobs", together_s)
    alone = {
        job.job_id: run_plan(
            asked.topology, [job], ClusterPlan({job.job_id: asked.plan.jobs[job.job_id]}),
            iterations=_ITERATIONS,
        ).completion_s[job.job_id]
        for job in asked.jobs
    }  # fmt: skip
    yield asked.change("flows", "every job alone", objective_s(asked.jobs, alone), "bound")


def _network(asked: _Question) -> Iterator[Change]:
    twice = _scaled(asked.topology, 2.0)
    yield asked.change(
        "network", "all links twice as fast", asked.seconds(twice, asked.plan), "purchase"
    )


def _compute(asked: _Question) -> Iterator[Change]:
    jobs = tuple(
        dataclasses.replace(
            job,
            layers=tuple(
                dataclasses.replace(x, forward_s=x.forward_s / 2, backward_s=x.backward_s / 2)
                for x in job.layers
            ),
        )
        for job in asked.jobs
        if not job.splits
    )
    if len(jobs) == len(asked.jobs):
        seconds = _Question(asked.topology, jobs, asked.plan).now_s
        yield asked.change("compute", "GPUs twice as fast", seconds, "purchase")


def _scaled(topology: Topology, factor: float) -> Topology:
    links = tuple(
        dataclasses.replace(link, bandwidth_bytes_per_s=factor * link.bandwidth_bytes_per_s)
        for link in topology.links
    )
    return dataclasses.replace(topology, links=links)
