"""Iterations that are counted instead of run, against the same iterations run one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.network.simulation import AggregationRequest, Compute, Flow, simulate
from fivefold.network.topology import Aggregation, leaf_spine, ring, switch

LEAVES = leaf_spine(8, leaves=4, spines=2, bandwidth="1 GB/s")
CLUSTERS = (LEAVES, ring(8, bandwidth="1 GB/s", latency="1 ms"))
TIMES = ("start_s", "sent_s", "finish_s", "moved_bytes")
BOOKS = ("link_bytes", "link_busy_s", "over_capacity_s")


@st.composite
def jobs(draw):
    """Jobs on ranks of their own, or anywhere; some share links, some do not."""
    topology, tasks, iterations = draw(st.sampled_from(CLUSTERS)), [], {}
    apart = draw(st.booleans())
    for job in range(draw(st.integers(1, 4))):
        iterations[job] = draw(st.integers(1, 12))
        ranks = range(2 * job, 2 * job + 2) if apart else range(8)
        for number in range(draw(st.integers(1, 5))):
            common = {
                "job": job,
                "release_s": draw(st.sampled_from([0.0, 0.5, 3.0])),
                "depends_on": [(job, n) for n in range(number) if draw(st.booleans())],
            }
            seconds = draw(st.floats(0.1, 2.0))
            if draw(st.booleans()):
                processor = draw(st.sampled_from([None, "shared", job]))
                tasks.append(Compute((job, number), seconds, processor=processor, **common))
            else:
                a, b = draw(st.permutations(ranks))[:2]
                route, size = topology.shortest_route(a, b), 1e9 * seconds
                ends = topology.ranks[a], topology.ranks[b]
                tasks.append(Flow((job, number), *ends, size, route, **common))
    return topology, tasks, iterations


@given(jobs(), st.sampled_from([None, 4.3, 11.7]))
def test_what_repeats_is_what_running_it_gives(case, until_s):
    topology, tasks, iterations = case
    counted = simulate(topology, tasks, iterations=iterations, until_s=until_s)
    # With rates recorded every iteration is run.
    run = simulate(topology, tasks, iterations=iterations, until_s=until_s, record_rates=True)
    assert counted.events <= run.events
    assert counted.stopped == run.stopped
    for name in (*TIMES, *BOOKS):
        found, wanted = getattr(counted, name), getattr(run, name)
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9, err_msg=name)
    for job in iterations:
        found, wanted = counted.iteration_finish_s[job], run.iteration_finish_s[job]
        np.testing.assert_allclose(found, wanted, rtol=1e-9)


@pytest.mark.parametrize("others", [0, 1])
def test_a_million_iterations_of_a_job_alone_take_no_time(others):
    """One beside another job on links of its own, too; the closed form is exact."""
    tasks = []
    for job in range(1 + others):
        a, b = 2 * job, 2 * job + 1
        ends = LEAVES.ranks[a], LEAVES.ranks[b]
        route = LEAVES.shortest_route(a, b)
        tasks.append(Compute((job, "compute"), 1.0, job=job))
        tasks.append(Flow((job, "send"), *ends, 1e9, route, job=job, depends_on=[(job, "compute")]))
    found = simulate(LEAVES, tasks, iterations=10**6)
    assert found.job_finish_s(0) == pytest.approx(2e6)
    assert found.events < 40
    assert found.link_bytes[LEAVES.shortest_route(0, 1)[0]] == pytest.approx(1e15)


def test_jobs_that_share_a_link_are_run_until_one_of_them_ends():
    route, ends = LEAVES.shortest_route(0, 1), LEAVES.ranks[:2]
    tasks = [Flow(job, *ends, 1e9, route, job=job) for job in "ab"]
    found = simulate(LEAVES, tasks, iterations={"a": 10, "b": 1000})
    # Both at half the rate until a is through; then b alone, and what is left of it is counted.
    assert found.job_finish_s("a") == pytest.approx(20.0)
    assert found.job_finish_s("b") == pytest.approx(20.0 + 990.0)
    assert found.events < 100


def test_refusals_of_iterations_that_repeat_are_counted():
    network = switch(3, bandwidth="1 GB/s")
    (root,) = [node for node in network.nodes if not node.is_rank]
    network = network.with_aggregation(Aggregation(slots=1, slot_bytes=1000), kinds=[root.kind])
    leaves, tree = network.ranks, dict.fromkeys(network.ranks, root.name)
    route = network.shortest_route(0, 1)
    requests = []
    for number in range(2):
        flow = Flow(f"ring {number}", *leaves[:2], 1e6, route)
        requests.append(
            AggregationRequest(number, tree, leaves, 1e6, slots=1, fallback=[flow], job="a")
        )
    found = simulate(network, requests, iterations=50)
    run = simulate(network, requests, iterations=50, record_rates=True)
    assert found.refusals == run.refusals == 50
    assert found.job_finish_s("a") == pytest.approx(run.job_finish_s("a"))
