"""Replicas that one of them stands for, and rings as one task, against every flow by itself."""

import numpy as np
import pytest

from fivefold.codesign import ClusterPlan, JobPlan, JobSpec, run_plan
from fivefold.codesign.baselines import null_plan
from fivefold.codesign.jobs import Split
from fivefold.codesign.simulate import compile_job
from fivefold.codesign.steps import PlannedRoutes, merged_rows, steps_of
from fivefold.network.simulation import CoupledFlows, Flow, simulate
from fivefold.network.topology import Link, parse_topology
from fivefold.strategy import ParallelPlan
from fivefold.tasks.iteration import IterationDemand, Message

BOOKS = ("link_bytes", "link_busy_s", "over_capacity_s")
CLUSTERS = (
    "fat_tree:4,gpus=4,bandwidth=12.5GB/s,latency=2us",
    "rail_optimized:8,spines=4",
    "torus:4x4x4,bandwidth=50GB/s,latency=1us",
    "leaf_spine:8,leaves=4,spines=2,gpus=8,oversubscription=4,bandwidth=25GB/s,latency=1us",
)


def demand(*axes):
    """What a rank computes and sends: axis by axis, a gradient at the end."""
    sent = {"tensor": "all_reduce", "expert": "all_to_all"}
    return IterationDemand(
        segments=2,
        micro_batches=3,
        forward_s=0.01,
        backward_s=0.02,
        messages=(
            *(
                Message(axis=axis, kind=sent[axis], size_bytes=30_000_001, phase=phase)
                for axis in axes
                for phase in ("forward", "backward")
            ),
            Message(axis="data", kind="all_reduce", size_bytes=500_000_003, phase="reduce"),
        ),
        p2p=(
            Message(axis="pipeline", kind="send", size_bytes=10_000_019, phase="forward"),
            Message(axis="pipeline", kind="return", size_bytes=10_000_019, phase="backward"),
        ),
    )


def meshed(name, ranks, plan, *axes, **more):
    """Return a job whose mesh lies on some ranks."""
    split = Split(
        name="only", plan=plan, demand=demand(*axes), ranks=tuple(ranks), nominal_s=1.0,
        memory_bytes=1.0, reached=((0.8, 0.7), (0.9, 0.5)),
    )  # fmt: skip
    return JobSpec(job_id=name, ranks=tuple(ranks), splits=(split,), **more)


def slower(topology):
    """Return the topology with one link of a host at a third of its rate: nothing is symmetric."""
    links = list(topology.links)
    old = links[5]
    links[5] = Link(
        old.source, old.target, bandwidth_bytes_per_s=old.bandwidth_bytes_per_s / 3,
        latency_s=old.latency_s,
    )  # fmt: skip
    return topology.with_links(links)


def two_jobs():
    wide = ParallelPlan(global_batch=48, data=4, tensor=4, pipeline=2, micro_batch=4)
    routed = ParallelPlan(global_batch=96, data=16, pipeline=2, expert=4, micro_batch=2)
    return [
        meshed("a", range(32), wide, "tensor", iterations=3),
        meshed("b", range(32, 64), routed, "expert", iterations=3, arrival_s=0.03),
    ]


@pytest.mark.parametrize("changed", [lambda t: t, slower], ids=["even", "one link slower"])
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_replicas_take_what_each_by_itself_takes(cluster, changed):
    topology, jobs = changed(parse_topology(cluster)), two_jobs()
    hashed = null_plan(topology, jobs)
    straight = ClusterPlan({job.job_id: JobPlan(order=job.ranks) for job in jobs})
    by_host = ClusterPlan(
        {
            job.job_id: JobPlan(order=job.ranks, algorithm="hierarchical", priority=place)
            for place, job in enumerate(jobs)
        }
    )
    fewer = []
    for plan in (hashed, straight, by_host):
        found = run_plan(topology, jobs, plan)
        each = [t for job in jobs for t in compile_job(topology, job, plan.jobs[job.job_id])]
        wanted = simulate(topology, each, iterations={job.job_id: 3 for job in jobs})
        for job in jobs:
            ends = wanted.iteration_finish_s[job.job_id]
            assert found.result.iteration_finish_s[job.job_id] == pytest.approx(ends, rel=1e-9)
        for name in BOOKS:
            np.testing.assert_allclose(
                getattr(found.result, name), getattr(wanted, name), rtol=1e-9, atol=1e-12,
                err_msg=name,
            )  # fmt: skip
        fewer.append(len(found.result.table) < len(wanted.table))
    assert any(fewer)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("algorithm", ["ring", "hierarchical"])
def test_rings_as_one_task_take_what_their_edges_take(cluster, algorithm):
    """A step of a reduction, beside a flow that meets it: as tasks, and edge by edge."""
    topology, job = parse_topology(cluster), two_jobs()[0]
    plan = JobPlan(order=job.ranks, algorithm=algorithm)
    routes, ranks = PlannedRoutes(topology, plan), topology.ranks
    route = routes.route((0, 40))
    other = Flow("other", ranks[0], ranks[40], 3e8, route, release_s=1e-3)
    for groups in steps_of(topology, job, plan, kind="all_reduce over data", size_bytes=2e8):
        parts = {("a", group.edges, group.coupled): routes.of(group.edges) for group in groups}
        rows, representatives = merged_rows(parts, topology.capacities_bytes_per_s, single=[route])
        together = [
            CoupledFlows((n, m), group.edge_bytes, row.links, row.latency_s, group=(n, row.phase))
            for n, (group, own) in enumerate(zip(groups, rows.values(), strict=True))
            for m, row in enumerate(own)
        ]
        apart = [
            Flow((n, m, edge), ranks[edge[0]], ranks[edge[1]], phase.edge_bytes, routes.route(edge),
                 group=(n, m))
            for n, group in enumerate(groups)
            for m, phase in enumerate(group.phases())
            for edge in phase.edges
        ]  # fmt: skip
        found, wanted = (simulate(topology, [*own, other]) for own in (together, apart))
        assert len(found.table) < len(wanted.table)
        assert found.total_s == pytest.approx(wanted.total_s, rel=1e-9)
        assert found.finish_of("other") == pytest.approx(wanted.finish_of("other"), rel=1e-9)
        for name in BOOKS:
            np.testing.assert_allclose(
                getattr(found, name)[representatives],
                getattr(wanted, name),
                rtol=1e-9,
                err_msg=name,
            )


def test_a_symmetric_cluster_needs_few_tasks():
    """Tensor groups of 64 hosts, each inside its own: as many tasks as of one."""
    topology = parse_topology("leaf_spine:64,leaves=1,spines=1,gpus=4")
    plan = ParallelPlan(global_batch=192, data=64, tensor=4, micro_batch=1)
    job = meshed("a", range(256), plan, "tensor")
    found = run_plan(topology, [job], ClusterPlan({"a": JobPlan(order=job.ranks)}))
    few = parse_topology("leaf_spine:4,leaves=1,spines=1,gpus=4")
    small = meshed("a", range(16), ParallelPlan(global_batch=12, data=4, tensor=4), "tensor")
    like = run_plan(few, [small], ClusterPlan({"a": JobPlan(order=small.ranks)}))
    assert len(found.result.table) == len(like.result.table)
