"""Greedy matching: TACOS' own regression values, validity everywhere, thousands of ranks."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.networks import looped_networks

from fivefold.collectives.schedules import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    evaluate,
    lower_bound,
    reduce,
    reduce_scatter,
    verify_schedule,
)
from fivefold.collectives.schedules.bounds import discrete_ingress_bound
from fivefold.collectives.synthesis import matching
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.topology import (
    Link,
    Node,
    Topology,
    dragonfly,
    fat_tree,
    mesh,
    named_topology,
    ring,
    switch,
    torus,
)
from helpers.night import number_of

GIB, MIB = 2**30, 2**20


def grid(make, shape, rate, latency_us):
    rates = [value * GIB for value in rate] if isinstance(rate, tuple) else rate * GIB
    return make(shape, bandwidth=rates, latency=latency_us * 1e-6)


# Topology, MiB in all, chunks per node, microseconds. A mesh "x by y" has shape (y, x) here.
PUBLISHED = [
    (mesh, (3, 3, 3), 50.0, 0.5, 1024, 1, 6671.17),
    (mesh, (3, 4, 5), 50.0, 0.5, 2048, 2, 13353.33),
    (mesh, (4, 2, 3), 50.0, 0.5, 3072, 3, 19178.17),
    (mesh, (5, 5), 50.0, 0.5, 1024, 1, 9606.0),
    (mesh, (10, 10), 100.0, 1.0, 1024, 2, 5049.0),
    (mesh, (5, 5), (75.0, 50.0), 0.5, 1024, 1, 8005.0),
    (mesh, (5, 8), (35.0, 80.0), 1.0, 1024, 2, 8595.43),
    (torus, (3, 3, 3), 50.0, 0.5, 1024, 1, 3706.20),
    (torus, (4, 2, 3), 50.0, 0.5, 3072, 3, 11673.67),
    (mesh, (3, 4), 50.0, 0.5, 12, 3, 119.18),
]


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: f"{case[0].__name__}{case[1]}")
def test_published_times(case):
    make, shape, rate, latency_us, size_mib, chunks, expected_us = case
    topology = grid(make, shape, rate, latency_us)
    collective, size_bytes = all_gather(math.prod(shape), chunks), size_mib * MIB
    schedule = matching(collective, topology, size_bytes=size_bytes)
    verify_schedule(schedule, check_times=True)
    found_us = evaluate(schedule, size_bytes=size_bytes).total_s * 1e6
    assert found_us == pytest.approx(expected_us, rel=0.01)
    bound = discrete_ingress_bound(collective, topology, size_bytes)
    assert found_us >= bound.seconds * 1e6 * (1 - 1e-9)


def test_the_4x4_torus_takes_four_link_times():
    schedule = matching(all_gather(16), torus((4, 4), bandwidth=1.0), size_bytes=16.0)
    assert schedule.ends_s.max() == 4.0


def test_no_chunk_passes_through_a_rank_that_stands_between_switches():
    # Over g1, which is next to s0, g0 is as near to s0 as over s1; but ranks do not forward.
    ways = [("g1", "s0"), ("s0", "s1"), ("s1", "g0"), ("s0", "g1"), ("g1", "g0"), ("g0", "g1")]
    nodes = [Node(name, "gpu" if name[0] == "g" else "switch") for name in ("g0", "g1", "s0", "s1")]
    links = [Link(source, target, bandwidth_bytes_per_s=1.0) for source, target in ways]
    topology = Topology("between", nodes, links)
    for seed in range(20):
        schedule = matching(all_gather(2, 3), topology, size_bytes=6.0, seeds=1, seed=seed)
        verify_schedule(schedule, check_times=True)
        inner = np.delete(schedule.route_links, schedule.route_offsets[1:] - 1)
        assert not topology.is_rank[topology.link_targets[inner]].any()


@settings(max_examples=number_of(15, 1000), deadline=None)
@given(
    looped_networks(
        most_ranks=6, rates=(1.0, 2.5, 40.0), latencies_s=(0.0, 0.1, 30.0), most_links=2
    ),
    st.integers(1, 3),
    st.sampled_from([0.0, 6.0, 100.0]),
)
def test_every_collective_on_random_networks(topology, chunks, size_bytes):
    ranks = topology.num_ranks
    for collective in (
        all_gather(ranks, chunks),
        reduce_scatter(ranks, chunks),
        all_reduce(ranks, chunks * ranks),
        broadcast(ranks, chunks, root=ranks - 1),
        reduce(ranks, chunks),
    ):
        schedule = matching(collective, topology, size_bytes=size_bytes, seeds=3)
        verify_schedule(schedule, check_times=True)
        total_s = float(schedule.ends_s.max(initial=0.0))
        if size_bytes:
            total_s = evaluate(schedule, size_bytes=size_bytes).total_s
        assert total_s >= lower_bound(collective, topology, size_bytes).seconds * (1 - 1e-9)


@pytest.mark.parametrize(
    ("topology", "most"),
    [
        (switch(16, bandwidth=1e9, latency=1e-6), 1.001),
        (fat_tree(4), 1.001),
        (named_topology("dgx_a100").scaled(latency=0.0), 1.001),
        (named_topology("dgx_a100", boxes=2).scaled(latency=0.0), 1.15),
        (named_topology("ndv2", boxes=2), 1.15),
        (dragonfly(2), None),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_switches(topology, most):
    collective = all_gather(topology.num_ranks, 4)
    schedule = matching(collective, topology, size_bytes=1e9)
    verify_schedule(schedule, check_times=True)
    if most is not None:
        bound_s = lower_bound(collective, topology, 1e9).seconds
        assert schedule.ends_s.max() <= most * bound_s


def test_a_slow_edge_does_not_hold_up_the_end():
    links = []
    for place in range(6):
        for ends in ((place, (place + 1) % 6), ((place + 1) % 6, place)):
            rate = 1.0 if place == 0 else 10.0
            links.append(Link(f"g{ends[0]}", f"g{ends[1]}", bandwidth_bytes_per_s=rate))
    topology = Topology("slow edge", [Node(f"g{n}", "gpu") for n in range(6)], links)
    schedule = matching(reduce_scatter(6), topology, size_bytes=60.0)
    assert schedule.ends_s.max() <= 6.0  # six chunks over the fast edges, the slow one unused


@pytest.mark.nightly
def test_a_thousand_ranks_in_seconds():
    collective = all_gather(1024)
    for topology in (torus((32, 32), bandwidth=1.0), fat_tree(16, bandwidth=1.0)):
        started_s = time.perf_counter()
        schedule = matching(collective, topology, size_bytes=1024.0, seeds=1)
        assert time.perf_counter() - started_s < 60
        assert schedule.num_transfers == 1024 * 1023
        degree = len(topology.in_links(topology.node_of_rank(0)))
        assert 1023 / degree <= schedule.ends_s.max() <= 1.02 * 1023 / degree


def test_the_same_seed_gives_the_same_schedule():
    topology = mesh((3, 4), bandwidth=1.0)
    found = [
        matching(all_gather(12), topology, size_bytes=12.0, seeds=2, seed=seed)
        for seed in (0, 0, 1)
    ]
    assert found[0] == found[1]
    assert found[0] != found[2]
    assert np.array_equal(np.sort(found[0].chunks), np.sort(found[2].chunks))


def test_time_limit_still_gives_a_schedule():
    schedule = matching(all_gather(9), torus((3, 3)), size_bytes=9.0, seeds=100, time_limit_s=0.0)
    verify_schedule(schedule, check_times=True)


def test_one_rank():
    topology = Topology("one", [Node("g", "gpu")], [])
    for collective in (all_gather(1), all_reduce(1), broadcast(1)):
        assert matching(collective, topology, size_bytes=8.0).num_transfers == 0


@pytest.mark.parametrize(
    ("collective", "options"),
    [
        (all_to_all(4), {}),
        (all_gather(5), {}),
        (all_gather(4), {"seeds": 0}),
        (all_gather(4), {"size_bytes": -1.0}),
        (all_gather(4), {"size_bytes": math.nan}),
    ],
)
def test_bad_arguments(collective, options):
    with pytest.raises(ConfigurationError):
        matching(collective, ring(4), **{"size_bytes": 8.0, **options})


def test_a_rank_that_cannot_be_reached():
    nodes = [Node(f"g{number}", "gpu") for number in range(3)]
    links = [
        Link("g0", "g1", bandwidth_bytes_per_s=1.0),
        Link("g1", "g0", bandwidth_bytes_per_s=1.0),
    ]
    with pytest.raises(InfeasibleError, match="g2"):
        matching(all_gather(3), Topology("apart", nodes, links), size_bytes=3.0)
