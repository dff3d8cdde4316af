"""What each layer does by itself: as today (null), and at its best without asking any other.

B0 is the null form of every layer. B1 is every layer at its best alone: each may read the static
cluster graph, none receives another layer's intent or state, and no job knows of another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fivefold.codesign.jobs import JobSpec
from fivefold.codesign.plans import ClusterPlan, JobPlan
from fivefold.codesign.simulate import iteration_of, phases_of
from fivefold.flows import FlowDemand, JobTraffic, route_flows
from fivefold.flows.routing import RoutePolicy
from fivefold.network.topology import Topology


def null_plan(topology: Topology, jobs: Sequence[JobSpec], *, seed: int = 0) -> ClusterPlan:
    """B0: tensors as they become ready, ring in rank order, hashed paths, fair share."""
    plain = ClusterPlan(
        {job.job_id: JobPlan(order=job.split_as(0).ranks, bucket_bytes=None) for job in jobs}
    )
    return routed(topology, jobs, plain, policy="hash", seed=seed)


def best_alone_plan(topology: Topology, jobs: Sequence[JobSpec], *, seed: int = 0) -> ClusterPlan:
    """B1: order of need, ring along the topology, paths by the job's own load."""
    best = {
        job.job_id: JobPlan(
            order=local_order(topology, job.split_as(0).ranks),
            ordering="priority",
            bucket_bytes=None,
            overlap_forward=True,
        )
        for job in jobs
    }
    return routed_one_by_one(topology, jobs, ClusterPlan(best), seed=seed)


def local_order(topology: Topology, ranks: Sequence[int]) -> tuple[int, ...]:
    """Ranks such that neighbours in the ring are near: each followed by the nearest one left.

    Near is fewest links, then the least latency; equals keep the order given.
    """
    return topology.router.nearest_tour(ranks)


def job_traffic(topology: Topology, job: JobSpec, plan: JobPlan) -> JobTraffic:
    """Return what a job's iteration puts on the network, as layer 4 sees it: bytes per edge.

    In-network aggregation has no paths to choose and are left out.
    """
    sizes: dict[tuple[int, int], float] = {}
    chosen = job.split_as(plan.split)
    plan = replace(plan, split=0)
    totals: Counter[str] = Counter()
    for task in iteration_of(chosen, plan, lambda _kind, _size: 0.0).communication:
        totals[task.kind] += task.size_bytes
    for kind, size_bytes in totals.items():
        for phases in phases_of(topology, chosen, plan, kind=kind, size_bytes=size_bytes):
            for phase in phases:
                if phase.tree is None:
                    for edge in phase.edges:
                        sizes[edge] = sizes.get(edge, 0.0) + phase.edge_bytes
    return JobTraffic(
        job_id=job.job_id,
        compute_s=chosen.compute_s,
        flows=tuple(FlowDemand(*edge, size) for edge, size in sizes.items()),
        iterations=job.iterations,
        arrival_s=job.arrival_s,
        weight=job.weight,
        work=chosen.compute_s * len(job.ranks),
    )


def routed(
    topology: Topology,
    jobs: Sequence[JobSpec],
    plan: ClusterPlan,
    *,
    policy: RoutePolicy,
    seed: int = 0,
) -> ClusterPlan:
    """Return the plan with paths for all jobs, chosen together."""
    traffic = [job_traffic(topology, job, plan.jobs[job.job_id]) for job in jobs]
    routing = route_flows(topology, traffic, policy=policy, seed=seed)
    paths: Mapping[str, dict[tuple[int, int], tuple[int, ...]]] = {
        job.job_id: {
            (flow.source, flow.target): path
            for flow, path in zip(job.flows, routing.paths[job.job_id], strict=True)
        }
        for job in traffic
    }
    changed = {name: replace(old, paths=paths.get(name, {})) for name, old in plan.jobs.items()}
    return ClusterPlan(changed)


def routed_one_by_one(
    topology: Topology, jobs: Sequence[JobSpec], plan: ClusterPlan, *, seed: int = 0
) -> ClusterPlan:
    """Return the plan with paths by load, each job as if it were alone."""
    for job in jobs:
        alone = ClusterPlan({job.job_id: plan.jobs[job.job_id]})
        chosen = routed(topology, [job], alone, policy="least_loaded", seed=seed)
        plan = plan.changed(job.job_id, paths=chosen.jobs[job.job_id].paths)
    return plan
