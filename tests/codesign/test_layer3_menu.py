"""What layer 3 may choose among: what each algorithm sends and costs, and that it is chosen."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.codesign import CoDesigns, JobSpec, PlanningOptions, plan_cluster
from fivefold.codesign.baselines import null_plan
from fivefold.codesign.plans import JobPlan
from fivefold.codesign.simulate import alone_quote, run_plan
from fivefold.codesign.steps import steps_of
from fivefold.codesign.synthesized import synthesized_phases
from fivefold.collectives.algorithms import build_algorithm
from fivefold.collectives.schedules import named_collective
from fivefold.collectives.synthesis import synthesize
from fivefold.errors import ConfigurationError
from fivefold.network.topology import named_topology, parse_topology, switch
from fivefold.tasks import LayerCost


def job(number, size_bytes):
    layer = LayerCost(forward_s=0.0, backward_s=1e-9, gradient_bytes=size_bytes)
    return JobSpec(job_id="a", ranks=tuple(range(number)), layers=(layer,), iterations=2)


def sent_of(topology, kind, size_bytes, algorithm):
    """Return bytes by edge, and the number of steps whose latency is paid."""
    number = topology.num_ranks
    plan = JobPlan(order=tuple(range(number)), algorithm=algorithm)
    steps = steps_of(topology, job(number, 1), plan, kind=kind, size_bytes=size_bytes)
    sent = np.zeros((number, number))
    for groups in steps:
        for phase in (phase for group in groups for phase in group.phases()):
            for edge in phase.edges:
                sent[edge] += phase.edge_bytes
    return sent, sum(max(group.steps for group in groups) for groups in steps)


def with_a_slow_host(number=8):
    """Return hosts on a switch, the fourth of which has a quarter of the others' rate."""
    network = switch(number, bandwidth="12.5 GB/s", latency="2 us")
    slow = network.ranks[3]
    return network.with_links(
        replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / 4)
        if slow in (link.source, link.target)
        else link
        for link in network.links
    )


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("number", [2, 3, 4, 6, 8, 13])
def test_halving_and_doubling_moves_what_the_schedule_moves(kind, number):
    """Each rank sends and takes as much as in the verified schedule, in as many steps."""
    power = 1 << (number.bit_length() - 1)
    chunks = power if kind == "all_reduce" else 1
    schedule = build_algorithm(
        "recursive_halving_doubling", named_collective(kind, number, chunks=chunks)
    )
    size_bytes = 12e9
    sizes = schedule.collective.chunk_bytes(size_bytes)[schedule.chunks]
    sent, steps = sent_of(switch(number), kind, size_bytes, "halving_doubling")
    if kind == "all_reduce" or power == number:  # the library folds other gathers chunk by chunk
        assert steps == schedule.num_steps
        totals = np.bincount(schedule.sources, sizes, number)
        assert sorted(sent.sum(axis=1)) == pytest.approx(sorted(totals))
    assert sent.sum() == pytest.approx(sizes.sum(), rel=0.3)


@pytest.mark.parametrize("number", [3, 4, 8, 13, 64])
def test_small_all_reduces_go_down_two_trees(number):
    """Of half the data each: 2 (n - 1) times the data in all, at most twice for one rank."""
    network = switch(number, bandwidth="25 GB/s", latency="2.5 us")
    sent, steps = sent_of(network, "all_reduce", 1e3, "ring_or_tree")
    ring, ring_steps = sent_of(network, "all_reduce", 1e9, "ring_or_tree")
    assert ring_steps == 2 * (number - 1)
    assert np.count_nonzero(ring) == number
    if number > 3:
        assert steps == 2 * int(np.log2(number))
        assert sent.sum() == pytest.approx(2 * (number - 1) * 1e3)
        assert sent.sum(axis=1).max() <= 2 * 1e3 + 1e-6
        assert (sent == sent.T).all()


@pytest.mark.parametrize(("boxes", "share"), [(2, 1.0), (3, 2 * 23 / 24), (4, 2 * 31 / 32)])
def test_every_adapter_of_a_box_carries_its_share(boxes, share):
    """NCCL has as many rings as adapters, 2 S (n - 1) / n; over two boxes trees, S."""
    network = named_topology("dgx_a100", boxes=boxes)
    sent, _ = sent_of(network, "all_reduce", 1e9, "ring_or_tree")
    across = sent[:8, 8:].sum(axis=1)
    assert across == pytest.approx(share * 1e9 / 8)


@given(
    number=st.integers(2, 12),
    exponent=st.floats(2, 9),
    latency=st.sampled_from(("0 s", "1 us", "20 us")),
)
def test_the_library_is_near_its_best(number, exponent, latency):
    """Never slower than the ring; a tree is left only where the ring is about as fast."""
    network = switch(number, bandwidth="25 GB/s", latency=latency)
    one, size_bytes = job(number, 1), 10**exponent

    def time_s(algorithm):
        plan = JobPlan(order=one.ranks, algorithm=algorithm)
        return alone_quote(network, one, plan)("all_reduce", size_bytes)

    assert time_s("ring_or_tree") <= time_s("ring") * (1 + 1e-9)


def test_small_buckets_on_many_hosts_need_no_ring():
    network, one = switch(64, bandwidth="25 GB/s", latency="2.5 us"), job(64, 64_000)
    ring = null_plan(network, [one], algorithm="ring")
    assert run_plan(network, [one], ring).iteration_s["a"] == pytest.approx(635e-6, rel=0.01)
    for flags in (CoDesigns.none(), CoDesigns.all()):
        found = plan_cluster(network, [one], flags, options=PlanningOptions(budget=2))
        assert found.outcome.iteration_s["a"] < 76e-6


def test_a_slow_host_is_a_leaf():
    """A ring sends all through it, twice; a schedule of its own sends it down and up once."""
    network, one = with_a_slow_host(), job(8, 10**9)
    found = plan_cluster(network, [one], options=PlanningOptions(budget=3))
    assert found.baseline_outcome.iteration_s["a"] == pytest.approx(0.560, rel=0.01)
    assert found.plan.jobs["a"].algorithm == "synthesized"
    assert 0.320 < found.outcome.iteration_s["a"] < 0.334  # 1 GB at 3.125 GB/s is 0.32 s
    ring = plan_cluster(network, [one], options=PlanningOptions(algorithms=("ring",), budget=3))
    assert ring.plan.jobs["a"].algorithm == "ring"


@pytest.mark.parametrize("size_bytes", [1e4, 1e6, 1e8])
def test_a_schedule_costs_alone_what_its_search_says(size_bytes):
    network, group = with_a_slow_host(), (3, 0, 5, 6)
    one = replace(job(8, 1), ranks=group)
    plan = JobPlan(order=group, algorithm="synthesized")
    searched = synthesize(
        "all_reduce", network.subset(group), size_bytes=size_bytes, method="paths"
    )
    quote_s = alone_quote(network, one, plan)("all_reduce", size_bytes)
    assert quote_s == pytest.approx(searched.time_s)
    again = synthesized_phases(network, group, "all_reduce", size_bytes)
    assert again is synthesized_phases(network, group, "all_reduce", size_bytes)


def test_alike_hosts_are_not_searched():
    network, one = parse_topology("switch:8,bandwidth=1GB/s,latency=1us"), job(8, 10**6)
    plans = [JobPlan(order=one.ranks, algorithm=name) for name in ("synthesized", "ring_or_tree")]
    first, second = (alone_quote(network, one, plan)("all_reduce", 1e6) for plan in plans)
    assert first == second


def test_an_algorithm_that_is_none_is_refused():
    with pytest.raises(ConfigurationError, match="no algorithm 'rings'"):
        PlanningOptions(algorithms=("rings",))
