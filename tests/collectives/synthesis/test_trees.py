"""Spanning trees: published optima as fractions, brute-force cuts, schedules that are verified."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.collectives import schedules
from fivefold.collectives.synthesis import spanning_trees
from fivefold.collectives.synthesis._packing import integer_network
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
    switch,
    torus,
)

GIGA = 10**9


def both_ways(first, second, rate, **options):
    return [
        Link(first, second, bandwidth_bytes_per_s=rate, **options),
        Link(second, first, bandwidth_bytes_per_s=rate, **options),
    ]


def gpus(count):
    return [Node(f"g{number}", "gpu") for number in range(count)]


# Seconds per GB of one rank's shard, with k and U where they are stated.
OPTIMA = {
    "dgx_a100": (lambda: named_topology("dgx_a100"), Fraction(7, 300), 1, None),
    "dgx_a100:2": (
        lambda: named_topology("dgx_a100", boxes=2),
        Fraction(3, 65),
        13,
        Fraction(3, 5),
    ),
    "dgx_a100:4": (lambda: named_topology("dgx_a100", boxes=4), Fraction(3, 25), None, None),
    "mi250": (lambda: named_topology("mi250"), Fraction(7, 150), 3, None),
    "mi250:2": (lambda: named_topology("mi250", boxes=2), Fraction(15, 166), 83, Fraction(15, 2)),
    "dgx1": (lambda: named_topology("dgx1"), Fraction(7, 150), 6, Fraction(7, 25)),
    "dgx2": (lambda: named_topology("dgx2"), Fraction(3, 25), None, None),
    "dgx2:2": (lambda: named_topology("dgx2", boxes=2), Fraction(31, 125), None, None),
    "torus 4x4": (lambda: torus((4, 4), bandwidth=GIGA), Fraction(15, 4), 4, Fraction(15)),
    "torus 3x3x3": (lambda: torus((3, 3, 3), bandwidth=GIGA), Fraction(13, 3), 3, None),
    "mesh 4x4": (lambda: mesh((4, 4), bandwidth=GIGA), Fraction(15, 2), None, None),
    "mesh 5x5": (lambda: mesh((5, 5), bandwidth=GIGA), Fraction(12), None, None),
    "mesh 3x3x3": (lambda: mesh((3, 3, 3), bandwidth=GIGA), Fraction(26, 3), None, None),
    "mesh 4x2x3": (lambda: mesh((4, 2, 3), bandwidth=GIGA), Fraction(23, 3), None, None),
    "hypercube 4": (lambda: hypercube(4, bandwidth=GIGA), Fraction(15, 4), None, None),
    "fat tree 4": (lambda: fat_tree(4, bandwidth=GIGA), Fraction(15), None, None),
}


@pytest.mark.parametrize("name", OPTIMA)
def test_published_optima_are_reached_by_trees(name):
    make, inverse, k, u = OPTIMA[name]
    packing = spanning_trees(make())
    packing.check()
    assert packing.is_optimal
    assert packing.inverse_rate_s_per_byte * GIGA == inverse
    assert k is None or packing.k == k
    assert u is None or packing.u_s * GIGA == u


FIXED = {
    ("dgx_a100", 2): {1: 342.8571, 2: 342.8571, 3: 342.8571, 4: 342.8571, 5: 342.8571},
    ("mi250", 1): {1: 266.6667, 2: 320.0, 3: 342.8571, 4: 320.0, 5: 333.3333},
    ("mi250", 2): {1: 320.0, 3: 342.8571, 4: 341.3333},
}


@pytest.mark.parametrize("machine", FIXED, ids=str)
def test_published_bandwidths_of_a_fixed_number_of_trees(machine):
    topology = named_topology(machine[0], boxes=machine[1])
    for k, expected in FIXED[machine].items():
        packing = spanning_trees(topology, k=k)
        packing.check()
        assert packing.k == k
        rate = packing.algorithm_bandwidth_bytes_per_s / GIGA
        assert rate == pytest.approx(expected, abs=1e-4)


def least_time_by_all_cuts(topology):
    """Largest ranks-in-S over capacity-out-of-S, by trying every S."""
    network = integer_network(topology)
    terminals = set(network.terminals.tolist())
    worst = Fraction(0)
    for size in range(1, network.num_nodes):
        for chosen in combinations(range(network.num_nodes), size):
            inside = set(chosen)
            if not terminals - inside or not terminals & inside:
                continue
            leaving = sum(
                int(capacity)
                for tail, head, capacity in zip(
                    network.tails, network.heads, network.capacities, strict=True
                )
                if tail in inside and head not in inside
            )
            worst = max(worst, Fraction(len(terminals & inside), leaving))
    return worst / network.unit


@st.composite
def balanced_topologies(draw):
    """A ring through all nodes so that all is connected, and random links both ways."""
    ranks, switches = draw(st.integers(2, 5)), draw(st.integers(0, 2))
    nodes = [*gpus(ranks), *(Node(f"s{number}", "switch") for number in range(switches))]
    names = [node.name for node in nodes]
    links = []
    pairs = [(place, (place + 1) % len(names)) for place in range(len(names))]
    extra = draw(st.lists(st.tuples(*[st.integers(0, len(names) - 1)] * 2), max_size=4))
    for first, second in [*pairs, *extra]:
        if first != second:
            rate = float(draw(st.integers(1, 6)))
            links += both_ways(names[first], names[second], rate)
    return Topology("random", nodes, links)


@settings(max_examples=40, deadline=None)
@given(balanced_topologies())
def test_trees_reach_the_worst_cut_of_random_networks(topology):
    packing = spanning_trees(topology)
    packing.check()
    assert packing.inverse_rate_s_per_byte == least_time_by_all_cuts(topology)
    schedules.verify_schedule(packing.to_schedule("all_gather"))
    few = spanning_trees(topology, connections="few")
    few.check()
    assert few.is_optimal


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_trees_of_lopsided_networks_are_valid(data):
    count = data.draw(st.integers(2, 5))
    rates = st.floats(0.5, 8.0, allow_nan=False)
    links = []
    for place in range(count):
        for other in {(place + 1) % count, (place - 1) % count} - {place}:
            rate = data.draw(rates)
            links.append(Link(f"g{place}", f"g{other}", bandwidth_bytes_per_s=rate))
    topology = Topology("lopsided", gpus(count), links)
    packing = spanning_trees(topology, k=data.draw(st.integers(1, 4)))
    packing.check()
    bound = float(schedules.throughput_optimum(topology).inverse_rate)
    assert float(packing.inverse_rate_s_per_byte) >= bound * (1 - 1e-8)


def test_edmonds_trees_of_one_root():
    packing = spanning_trees(named_topology("dgx1"), root=0)
    packing.check()
    assert packing.inverse_rate_s_per_byte * 25 * GIGA == Fraction(1, 6)  # six links leave GPU 0
    for name in ("broadcast", "reduce"):
        schedules.verify_schedule(packing.to_schedule(name, chunks=12))


@pytest.mark.parametrize("name", ["dgx1", "dgx_a100:2", "torus 4x4", "fat tree 4"])
def test_many_chunks_approach_the_bound(name):
    packing = spanning_trees(OPTIMA[name][0]())
    for pieces in (1, 4, 16):
        schedule = packing.to_schedule("all_gather", chunks=pieces * packing.k)
        schedules.verify_schedule(schedule)
        shard = 1e9 / packing.topology.num_ranks
        bound_s = float(packing.optimum_s_per_byte) * shard
        timing = schedules.evaluate(schedule, size_bytes=1e9, model="synchronous")
        alpha_s = (pieces + packing.height) * packing.topology.latencies_s.max() * 8
        ramp = (pieces + packing.height - 1) / pieces
        assert bound_s * (1 - 1e-9) <= timing.total_s <= ramp * bound_s * (1 + 1e-9) + alpha_s


def test_times_are_close_to_the_bound_behind_switches():
    packing = spanning_trees(named_topology("dgx_a100", boxes=2).scaled(latency=0.0))
    schedule = packing.to_schedule("all_gather", size_bytes=1e9)
    schedules.verify_schedule(schedule, check_times=True)
    bound_s = float(packing.optimum_s_per_byte) * 1e9 / 16
    assert schedule.ends_s.max() <= 1.05 * bound_s
    assert schedules.evaluate(schedule, size_bytes=1e9).total_s <= schedule.ends_s.max() * (
        1 + 1e-9
    )


@pytest.mark.parametrize("name", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("size_bytes", [None, 0.0, 1e6])
def test_reductions_are_trees_run_backwards(name, size_bytes):
    links = [*both_ways("g0", "g1", 3.0), *both_ways("g1", "g2", 1.0)]
    links.append(Link("g2", "g0", bandwidth_bytes_per_s=2.0))
    packing = spanning_trees(Topology("lopsided", gpus(3), links))
    schedule = packing.to_schedule(name, size_bytes=size_bytes)
    schedules.verify_schedule(schedule, check_times=size_bytes is not None)


def test_any_number_of_chunks_finds_trees():
    packing = spanning_trees(named_topology("dgx1"))
    for chunks in (1, 2, 5, 7):
        schedule = packing.to_schedule(schedules.all_gather(8, chunks))
        schedules.verify_schedule(schedule)
        assert schedule.num_transfers == 8 * 7 * chunks
    schedules.verify_schedule(packing.to_schedule(schedules.all_reduce(8, 16)))


def test_parallel_links_and_chained_switches():
    nodes = [*gpus(4), Node("s0", "switch"), Node("s1", "switch"), Node("s2", "switch")]
    links = [
        *both_ways("g0", "s0", 1.0), *both_ways("g0", "s0", 2.0), *both_ways("g1", "s0", 3.0),
        *both_ways("s0", "s1", 2.0), *both_ways("s1", "s2", 2.0, count=2),
        *both_ways("g2", "s2", 1.0), *both_ways("g3", "s2", 1.0),
    ]  # fmt: skip
    topology = Topology("chained", nodes, links)
    packing = spanning_trees(topology)
    packing.check()
    assert packing.inverse_rate_s_per_byte == least_time_by_all_cuts(topology)
    assert max(len(route) for tree in packing.trees for route in tree.routes) == 4
    schedules.verify_schedule(packing.to_schedule("all_gather", size_bytes=64.0), check_times=True)


@pytest.mark.parametrize("ranks", [4, 12])
def test_a_switch_that_sends_more_than_it_receives_cannot_copy(ranks):
    links = []
    for number in range(ranks):
        links.append(Link(f"g{number}", "s0", bandwidth_bytes_per_s=1.0))
        links.append(Link("s0", f"g{number}", bandwidth_bytes_per_s=float(ranks)))
    packing = spanning_trees(Topology("fan", [*gpus(ranks), Node("s0", "switch")], links))
    packing.check()
    assert not packing.is_optimal
    # Each byte enters the switch once per receiver; rates are tried in steps.
    assert ranks - 1 <= packing.inverse_rate_s_per_byte <= 1.25 * (ranks - 1)


def test_one_rank_and_two():
    alone = spanning_trees(Topology("one", gpus(1), []))
    alone.check()
    assert (alone.trees, alone.inverse_rate_s_per_byte, alone.is_optimal) == ((), 0, True)
    assert alone.to_schedule("all_reduce", size_bytes=8.0).num_transfers == 0
    pair = spanning_trees(ring(2, bandwidth=4.0))
    assert pair.inverse_rate_s_per_byte == Fraction(1, 4)


def test_few_connections_give_few_peers():
    topology = switch(8, bandwidth=7.0)
    peers = []
    for connections in ("few", "many"):
        packing = spanning_trees(topology, connections=connections)
        pairs = {p for tree in packing.trees for p in zip(tree.sources, tree.targets, strict=True)}
        peers.append(len(pairs))
    assert peers[0] < peers[1] == 8 * 7


def test_capacities_without_a_common_unit():
    rates = (1e9 / 3, np.pi * 1e8, 1.7e9)
    links = [
        link
        for place, rate in enumerate(rates)
        for link in both_ways(f"g{place}", f"g{(place + 1) % 3}", rate)
    ]
    packing = spanning_trees(Topology("odd", gpus(3), links))
    packing.check()
    assert 1 <= packing.inverse_rate_s_per_byte / packing.optimum_s_per_byte < 1.02


@pytest.mark.parametrize(
    "options", [{"k": 0}, {"k": True}, {"k": 1.5}, {"root": 4}, {"connections": "all"}]
)
def test_bad_arguments(options):
    with pytest.raises(ConfigurationError):
        spanning_trees(ring(4), **options)


def test_what_trees_do_not_do():
    packing = spanning_trees(ring(4))
    for wanted in (
        "scatter",
        schedules.scatter(4),
        "broadcast",
        schedules.broadcast(4),
        schedules.all_gather(5),
        schedules.all_reduce(4, 3),
    ):
        with pytest.raises(ConfigurationError):
            packing.to_schedule(wanted)
    with pytest.raises(ConfigurationError):
        packing.to_schedule("all_gather", chunks=0)
    with pytest.raises(ConfigurationError, match="root"):
        spanning_trees(ring(4), root=1).to_schedule(schedules.broadcast(4, root=2))
    with pytest.raises(InfeasibleError, match="disconnected"):
        spanning_trees(Topology("apart", gpus(3), both_ways("g0", "g1", 1.0)))
