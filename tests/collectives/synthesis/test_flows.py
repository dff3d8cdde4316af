"""All-to-all flows: the published optima, a plain linear program beside, verified schedules."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from tests.helpers.networks import looped_networks

from fivefold.collectives.schedules import (
    all_gather,
    all_to_all,
    all_to_allv,
    evaluate,
    gather,
    reduce,
    scatter,
    verify_schedule,
)
from fivefold.collectives.synthesis import _flow as flow_module
from fivefold.collectives.synthesis import all_to_all_flow, all_to_all_optimum
from fivefold.collectives.synthesis._flow import symmetry_of
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.topology import (
    Link,
    Node,
    Topology,
    fat_tree,
    hypercube,
    mesh,
    named_topology,
    ring,
    star,
    torus,
)
from helpers.night import number_of

# Time for one unit chunk between each ordered pair.
PUBLISHED = {
    "dgx1": (lambda: named_topology("dgx1").scaled(latency=0.0), 8 / 3 / 25e9),
    "ring 8": (lambda: ring(8, bandwidth=1.0), 8.0),
    "torus 4x4": (lambda: torus((4, 4), bandwidth=1.0), 8.0),
    "torus 8x8": (lambda: torus((8, 8), bandwidth=1.0), 64.0),
    "hypercube 6": (lambda: hypercube(6, bandwidth=1.0), 32.0),
    "mesh 4x4": (lambda: mesh((4, 4), bandwidth=1.0), 16.0),
    "mesh 8x8": (lambda: mesh((8, 8), bandwidth=1.0), 128.0),
    "dgx_a100:2": (lambda: named_topology("dgx_a100", boxes=2).scaled(latency=0.0), 0.32 / 1e9),
    "dgx2:2": (lambda: named_topology("dgx2", boxes=2), 2.56 / 1e9),  # 320 epochs of 8 ms
    "ndv2:2": (lambda: named_topology("ndv2", boxes=2), 64 / 12.5e9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_optima_with_proof(name):
    make, expected_s = PUBLISHED[name]
    topology = make()
    optimum = all_to_all_optimum(topology)
    assert optimum.seconds == pytest.approx(expected_s, rel=1e-6)
    assert optimum.bound_s == pytest.approx(expected_s, rel=1e-6)
    loads_s = optimum.flows.sum(axis=0) / topology.capacities_bytes_per_s
    assert loads_s.max() <= optimum.seconds * (1 + 1e-12)


def plain_program(topology, demands):
    """One variable per pair of ranks and link; no symmetry, no grouping by source."""
    ranks, links, nodes = topology.num_ranks, topology.num_links, topology.num_nodes
    pairs = [(s, t) for s in range(ranks) for t in range(ranks) if s != t and demands[s, t] > 0]
    size = len(pairs) * links + 1
    equal, values = [], []
    for number, (source, target) in enumerate(pairs):
        for node in range(nodes):
            row = np.zeros(size)
            row[number * links + topology.in_links(node)] += 1
            row[number * links + topology.out_links(node)] -= 1
            ends = (topology.node_of_rank(source), topology.node_of_rank(target))
            equal.append(row)
            values.append(demands[source, target] * ((node == ends[1]) - (node == ends[0])))
    loads = np.zeros((links, size))
    for link in range(links):
        loads[link, link : size - 1 : links] = 1.0
        loads[link, -1] = -topology.capacities_bytes_per_s[link]
    costs = np.zeros(size)
    costs[-1] = 1.0
    result = linprog(costs, A_ub=loads, b_ub=np.zeros(links), A_eq=equal, b_eq=values)
    assert result.status == 0
    return result.fun


@settings(max_examples=number_of(15, 1000), deadline=None)
@given(looped_networks(), st.data())
def test_random_networks_agree_with_the_plain_program(topology, data):
    ranks = topology.num_ranks
    even = np.ones((ranks, ranks)) - np.eye(ranks)
    numbers = data.draw(st.lists(st.integers(0, 3), min_size=ranks**2, max_size=ranks**2))
    uneven = np.array(numbers, float).reshape(ranks, ranks) * even
    for demands in (even, uneven):
        if not demands.any():
            continue
        optimum = all_to_all_optimum(topology, demands)
        assert optimum.seconds == pytest.approx(plain_program(topology, demands), rel=1e-6)
        assert optimum.bound_s <= optimum.seconds * (1 + 1e-9)
        collective = all_to_allv(demands)
        schedule = all_to_all_flow(collective, topology, size_bytes=collective.buffer_weight)
        verify_schedule(schedule, check_times=True)
        assert schedule.ends_s.max() >= optimum.seconds * (1 - 1e-6)


@pytest.mark.parametrize(
    ("make", "chunks", "most"),
    [
        (lambda: named_topology("dgx1").scaled(latency=0.0), 3, 1.10),
        (lambda: ring(8, bandwidth=1.0), 4, 1.07),
        (lambda: torus((4, 4), bandwidth=1.0), 3, 1.08),
        (lambda: hypercube(4, bandwidth=1.0), 2, 1.10),
        (lambda: mesh((4, 4), bandwidth=1.0), 1, 1.01),
        (lambda: named_topology("dgx_a100", boxes=2).scaled(latency=0.0), 3, 1.12),
        (lambda: named_topology("ndv2", boxes=2), 1, 1.01),
    ],
    ids=["dgx1", "ring", "torus", "hypercube", "mesh", "dgx_a100", "ndv2"],
)
def test_schedules_come_near_the_optimum(make, chunks, most):
    topology = make()
    collective = all_to_all(topology.num_ranks, chunks)
    optimum = all_to_all_optimum(topology)
    schedule = all_to_all_flow(collective, topology, size_bytes=1e9, optimum=optimum)
    verify_schedule(schedule, check_times=True)
    total_s = evaluate(schedule, size_bytes=1e9).total_s
    ideal_s = optimum.seconds * 1e9 / topology.num_ranks
    assert ideal_s * (1 - 1e-6) <= total_s <= most * ideal_s


@pytest.mark.parametrize("size_bytes", [None, 0.0, 1e6])
@pytest.mark.parametrize("collective", [scatter(6, 2, root=3), gather(6), all_to_all(6, 2)])
def test_other_exchanges(collective, size_bytes):
    for topology in (ring(6), star(6), mesh((2, 3))):
        schedule = all_to_all_flow(collective, topology, size_bytes=size_bytes)
        verify_schedule(schedule, check_times=size_bytes is not None)
        assert schedule.attributes["routing"] == "flow"


def test_large_programs_give_way_to_shortest_routes(monkeypatch):
    monkeypatch.setattr(flow_module, "_MOST_FLOWS", 10)
    schedule = all_to_all_flow(all_to_all(16), torus((4, 4)), size_bytes=1e6)
    verify_schedule(schedule, check_times=True)
    assert schedule.attributes["routing"] == "shortest"


@pytest.mark.parametrize(
    ("make", "unlike"),
    [
        (lambda: torus((4, 4)), 1),
        (lambda: hypercube(4), 1),
        (lambda: fat_tree(4), 1),
        (lambda: ring(7), 1),
        (lambda: mesh((4, 4)), 3),
        (lambda: mesh((3, 5)), 6),
        (lambda: star(5), 2),
        (lambda: named_topology("dgx_a100", boxes=2).scaled(latency=0.0), 1),
    ],
    ids=["torus", "hypercube", "fat tree", "ring", "mesh", "oblong mesh", "star", "dgx_a100"],
)
def test_symmetries_map_links_to_links(make, unlike):
    topology = make()
    ranks = topology.num_ranks
    symmetry = symmetry_of(topology, np.ones((ranks, ranks)))
    assert len(symmetry.representatives) == unlike
    rows = np.stack([topology.link_sources, topology.link_targets])
    for rank in range(ranks):
        links = symmetry.link_maps[rank]
        nodes = np.full(topology.num_nodes, -1)
        nodes[rows] = rows[:, links]
        assert nodes[topology.node_of_rank(symmetry.of_rank[rank])] == topology.node_of_rank(rank)
        assert np.array_equal(nodes[rows], rows[:, links])
        assert sorted(links) == list(range(topology.num_links))
        capacities = topology.capacities_bytes_per_s
        assert np.array_equal(capacities, capacities[links])


def test_uneven_demands_break_the_symmetry():
    demands = np.ones((6, 6))
    demands[0, 1] = 2.0
    assert len(symmetry_of(ring(6), demands).representatives) > 1


@pytest.mark.parametrize("slow", [1e3, 1.0, 1e-3])
def test_a_link_far_slower_than_the_others_has_its_optimum(slow):
    fast = ring(4, bandwidth=25e9)
    links = [
        replace(link, bandwidth_bytes_per_s=slow) if link.target == "gpu0" else link
        for link in fast.links
    ]
    found = all_to_all_optimum(fast.with_links(links))
    assert found.seconds == pytest.approx(3 / (2 * slow))
    assert found.bound_s == pytest.approx(found.seconds)


def test_nothing_to_send():
    optimum = all_to_all_optimum(ring(4), np.zeros((4, 4)))
    assert (optimum.seconds, optimum.bound_s) == (0.0, 0.0)
    alone = Topology("one", [Node("g", "gpu")], [])
    assert all_to_all_flow(all_to_all(1), alone, size_bytes=8.0).num_transfers == 0


def test_only_demands_need_paths():
    links = [Link("g0", "g1", bandwidth_bytes_per_s=2.0)]
    line = Topology("one way", [Node("g0", "gpu"), Node("g1", "gpu")], links)
    demands = np.array([[0.0, 4.0], [0.0, 0.0]])
    assert all_to_all_optimum(line, demands).seconds == 2.0
    with pytest.raises(InfeasibleError, match=r"'g1' sends to 'g0'"):
        all_to_all_optimum(line)


def test_bad_arguments():
    for demands in (np.ones((3, 3)), -np.ones((4, 4)), np.full((4, 4), np.inf)):
        with pytest.raises(ConfigurationError):
            all_to_all_optimum(ring(4), demands)
    for collective in (all_gather(4), reduce(4), all_to_all(5)):
        with pytest.raises(ConfigurationError):
            all_to_all_flow(collective, ring(4))
