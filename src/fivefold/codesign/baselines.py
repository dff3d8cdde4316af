"""What each layer does by itself: as today (null), and at its best without asking any other.

B0 is the null form of every layer. B1 is every layer at its best alone: each may read the static
cluster graph, none receives another layer's intent or state, and no job knows of another.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fivefold.codesign.jobs import JobSpec
from fivefold.codesign.plans import ClusterPlan, JobPlan
from fivefold.codesign.simulate import iteration_of
from fivefold.codesign.steps import FloatArray, IntArray, PhaseGroup, steps_of
from fivefold.collectives.pricing.phases import Algorithm
from fivefold.flows import FlowDemand, JobTraffic, route_flows
from fivefold.flows.routing import RoutePolicy, Routing
from fivefold.network.topology import Topology

_LIBRARY: Algorithm = "ring_or_tree"


def null_plan(
    topology: Topology, jobs: Sequence[JobSpec], *, seed: int = 0, algorithm: Algorithm = _LIBRARY
) -> ClusterPlan:
    """Return B0: tensors as they become ready, the library's algorithm, hashed paths, fair share.

    The library's is NCCL's: rings over every adapter in rank order, trees where messages are small.
    """
    plain = ClusterPlan(
        {
            job.job_id: JobPlan(order=job.split_as(0).ranks, bucket_bytes=None, algorithm=algorithm)
            for job in jobs
        }
    )
    return routed(topology, jobs, plain, policy="hash", seed=seed)


def best_alone_plan(
    topology: Topology, jobs: Sequence[JobSpec], *, seed: int = 0, algorithm: Algorithm = _LIBRARY
) -> ClusterPlan:
    """Return B1: order of need, the same along the topology, paths by the job's own load."""
    best = {
        job.job_id: JobPlan(
            order=local_order(topology, job.split_as(0).ranks),
            ordering="priority",
            bucket_bytes=None,
            overlap_forward=True,
            algorithm=algorithm,
        )
        for job in jobs
    }
    return routed_one_by_one(topology, jobs, ClusterPlan(best), seed=seed)


def local_order(topology: Topology, ranks: Sequence[int]) -> tuple[int, ...]:
    """Order ranks so that neighbours in the ring are near: each is followed by the nearest left.

    Near is fewest links, then the least latency; equals keep the order given.
    """
    return topology.router.nearest_tour(ranks)


def job_traffic(topology: Topology, job: JobSpec, plan: JobPlan) -> JobTraffic:
    """Return what a job's iteration puts on the network, as layer 4 sees it: bytes per edge.

    In-network aggregation has no paths to choose and are left out.
    """
    chosen = job.split_as(plan.split)
    plan = replace(plan, split=0)
    totals: Counter[str] = Counter()
    for task in iteration_of(chosen, plan, lambda _kind, _size: 0.0).communication:
        totals[task.kind] += task.size_bytes
    joined = [np.zeros((0, 2), np.int64)]
    sizes = [np.zeros(0)]
    for kind, size_bytes in totals.items():
        for groups in steps_of(topology, chosen, plan, kind=kind, size_bytes=size_bytes):
            edges, bytes_of = _edges_in_order([g for g in groups if g.tree is None])
            joined.append(edges)
            sizes.append(bytes_of)
    every = np.concatenate(joined)
    keys, firsts, of = np.unique(
        every[:, 0] * topology.num_ranks + every[:, 1], return_index=True, return_inverse=True
    )
    total = np.bincount(of, np.concatenate(sizes), len(keys))
    order = np.argsort(firsts)
    return JobTraffic(
        job_id=job.job_id,
        compute_s=chosen.compute_s,
        flows=tuple(
            FlowDemand(key // topology.num_ranks, key % topology.num_ranks, size)
            for key, size in zip(keys[order].tolist(), total[order].tolist(), strict=True)
        ),
        weight=job.weight,
        work=chosen.compute_s * len(job.ranks),
    )


def _edges_in_order(groups: Sequence[PhaseGroup]) -> tuple[IntArray, FloatArray]:
    """Return the edges of a step with their bytes, process group by process group."""
    if not groups:
        return np.zeros((0, 2), np.int64), np.zeros(0)
    edges = [group.edges.ranks.reshape(-1, 2) for group in groups]
    lengths = [len(own) for own in edges]
    each = [np.repeat(g.edges.places, g.edges.ranks.shape[1]) for g in groups]
    order = np.argsort(np.concatenate(each), kind="stable")
    sizes = np.repeat([group.edge_bytes for group in groups], lengths)
    return np.concatenate(edges)[order], sizes[order]


@functools.lru_cache(maxsize=16)
def _routing(
    topology: Topology, traffic: tuple[JobTraffic, ...], policy: RoutePolicy, seed: int
) -> Routing:
    return route_flows(topology, traffic, policy=policy, seed=seed)


def routed(
    topology: Topology,
    jobs: Sequence[JobSpec],
    plan: ClusterPlan,
    *,
    policy: RoutePolicy,
    seed: int = 0,
) -> ClusterPlan:
    """Return the plan with paths for all jobs, chosen together."""
    traffic = tuple(job_traffic(topology, job, plan.jobs[job.job_id]) for job in jobs)
    routing = _routing(topology, traffic, policy, seed)
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
