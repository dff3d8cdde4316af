"""Bounds against all cuts of small graphs, and against the published tables."""

import itertools
from dataclasses import replace
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.collectives import schedules
from fivefold.collectives.schedules.bounds import (
    bandwidth_bound,
    discrete_ingress_bound,
    latency_bound,
)
from fivefold.collectives.schedules.constructors import COLLECTIVES
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network import topology
from helpers.night import by_day


def test_an_all_reduce_over_a_copying_switch_is_not_bound_by_what_leaves_the_ranks():
    # Ranks send 1 GB/s and receive 3. By turns each sends three quarters of its buffer to be summed
    # elsewhere, then its own sum once, which the switch copies to all: one buffer each, 1 s.
    ranks = [topology.Node(f"g{rank}", "gpu") for rank in range(4)]
    up = [topology.Link(node.name, "s", bandwidth_bytes_per_s=1e9) for node in ranks]
    down = [topology.Link("s", node.name, bandwidth_bytes_per_s=3e9) for node in ranks]
    ability = topology.SwitchAbility("s", multicast=True)
    network = topology.Topology(
        "copying", [*ranks, topology.Node("s", "switch")], up + down, switches=[ability]
    )
    assert schedules.lower_bound(schedules.all_reduce(4), network, 1e9).seconds <= 1.0 + 1e-9
    plain = topology.Topology("plain", network.nodes, network.links)
    assert schedules.lower_bound(schedules.all_reduce(4), plain, 1e9).seconds == pytest.approx(1.5)


def graph(edges, num_ranks, num_switches=0):
    names = [*(f"r{i}" for i in range(num_ranks)), *(f"s{i}" for i in range(num_switches))]
    nodes = [topology.Node(name, "gpu" if name[0] == "r" else "switch") for name in names]
    links = [
        topology.Link(names[a], names[b], bandwidth_bytes_per_s=float(width), latency_s=delay)
        for a, b, width, delay in edges
    ]
    return topology.Topology("graph", nodes, links)


@st.composite
def graphs(draw):
    ranks, switches = draw(st.integers(2, 4)), draw(st.integers(0, 2))
    count = ranks + switches
    width = st.integers(1, 6)
    delay = st.sampled_from([0.0, 1.0, 2.5])
    edges = [(i, (i + 1) % count, draw(width), draw(delay)) for i in range(count)]
    for _ in range(draw(st.integers(0, 6))):
        a, b = draw(st.integers(0, count - 1)), draw(st.integers(0, count - 1))
        if a != b:
            edges.append((a, b, draw(width), draw(delay)))
    return graph(edges, ranks, switches)


def subsets(network):
    for chosen in itertools.product([False, True], repeat=network.num_nodes):
        yield np.array(chosen)


def capacity_out(network, inside):
    leaving = inside[network.link_sources] & ~inside[network.link_targets]
    return int(network.capacities_bytes_per_s[leaving].sum())


def slow_optimum(network, starts, ends):
    """Largest bytes over capacity of all sets: bytes of rank i start there and go to ``ends``."""
    best = Fraction(0)
    nodes = network.rank_nodes
    for inside in subsets(network):
        outside = [rank for rank in ends if not inside[nodes[rank]]]
        if outside and (weight := sum(w for rank, w in starts.items() if inside[nodes[rank]])):
            best = max(best, Fraction(weight, capacity_out(network, inside)))
    return best


@pytest.mark.parametrize(("fastest", "exact"), [(2.0**31, True), (2.0**31 + 1, False)])
def test_rates_whose_ratio_is_no_number_of_31_bits_are_rounded(fastest, exact):
    nodes = [topology.Node(name, "gpu") for name in "abc"]
    ends = [("a", "b", 1.0), ("b", "a", 1.0), ("b", "c", fastest), ("c", "b", fastest)]
    links = [topology.Link(a, b, bandwidth_bytes_per_s=rate) for a, b, rate in ends]
    found = schedules.throughput_optimum(topology.Topology("line", nodes, links))
    assert found.exact is exact
    assert float(found.inverse_rate) == pytest.approx(2.0)  # a gathers two others' over its link


@given(network=graphs(), data=st.data())
def test_the_optimum_is_the_worst_of_all_cuts(network, data):
    n = network.num_ranks
    ranks = range(n)
    starts = dict.fromkeys(ranks, 1)
    optimum = schedules.throughput_optimum(network)
    assert optimum.inverse_rate == slow_optimum(network, starts, ranks)
    assert optimum.exact
    inside = np.isin(np.arange(network.num_nodes), optimum.cut)
    weight = inside[network.rank_nodes].sum()
    assert Fraction(int(weight), capacity_out(network, inside)) == optimum.inverse_rate
    root = data.draw(st.integers(0, n - 1))
    spread = schedules.throughput_optimum(network, collective="broadcast", root=root)
    assert spread.inverse_rate == slow_optimum(network, {root: 1}, ranks)
    collected = schedules.throughput_optimum(network, collective="reduce", root=root)
    assert collected.inverse_rate == slow_optimum(network.reversed(), {root: 1}, ranks)
    summed = schedules.throughput_optimum(network, collective="reduce_scatter")
    outside = ~np.isin(np.arange(network.num_nodes), summed.cut)  # what must enter it
    weight, wide = outside[network.rank_nodes].sum(), capacity_out(network, ~outside)
    assert Fraction(int(weight), wide) == summed.inverse_rate
    assert summed.inverse_rate == slow_optimum(network.reversed(), starts, ranks)
    others = {rank: weight for rank, weight in starts.items() if rank != root}
    gathered = schedules.throughput_optimum(network, collective="gather", root=root)
    expected = slow_optimum(network, others, [root])
    assert gathered.inverse_rate == expected
    scattered = schedules.throughput_optimum(network, collective="scatter", root=root)
    assert scattered.inverse_rate == slow_optimum(network.reversed(), others, [root])


def slow_cut_bound(collective, network, size):
    """Largest time of all cuts, by the definition of what must cross."""
    best, sizes = 0.0, collective.chunk_bytes(size)
    for inside in subsets(network):
        side = inside[network.rank_nodes]
        crossing = 0.0
        for chunk in range(collective.num_chunks):
            starts, ends = collective.holders(chunk), collective.receivers(chunk)
            leaves = side[starts].any() if collective.reducing else side[starts].all()
            if starts.size and leaves and not side[ends].all():
                crossing += sizes[chunk]
        if crossing > 0:
            leaving = inside[network.link_sources] & ~inside[network.link_targets]
            best = max(best, crossing / float(network.capacities_bytes_per_s[leaving].sum()))
    return best


@given(network=graphs(), name=st.sampled_from(COLLECTIVES), data=st.data())
def test_the_bandwidth_bound_never_exceeds_a_true_cut(network, name, data):
    root = data.draw(st.integers(0, network.num_ranks - 1))
    collective = schedules.named_collective(name, network.num_ranks, chunks=2, root=root)
    scale = data.draw(st.sampled_from([1, 2.5, 1 / 3]))  # capacities need not be whole numbers
    quick = network.with_links([_without_latency(link, scale) for link in network.links])
    best = slow_cut_bound(collective, quick, 60.0)
    for exact in (False, True):
        bound = bandwidth_bound(collective, quick, 60.0, exact=exact)
        if bound.kind == "messages":
            assert name == "all_reduce"
            continue
        assert bound.seconds <= best * (1 + 1e-12)
        if exact and name not in ("all_to_all", "all_reduce"):
            assert bound.optimal_cut
            assert bound.seconds == pytest.approx(best)
        inside = np.isin(np.arange(network.num_nodes), bound.certificate)
        assert 0 < inside.sum() < network.num_nodes


@st.composite
def wide_graphs(draw):
    """Networks of 13 to 15 nodes: too many for all cuts to be tried unasked."""
    ranks, switches = draw(st.integers(9, 11)), 4
    count = ranks + switches
    width, delay = st.integers(1, 6), st.sampled_from([0.0, 1.0, 2.5, 40.0])
    node = st.integers(0, count - 1)
    pairs = [(i, (i + 1) % count) for i in range(count)]
    pairs += draw(st.lists(st.tuples(node, node), max_size=20))
    edges = [(a, b, draw(width), draw(delay)) for a, b in pairs if a != b]
    return graph(edges, ranks, switches)


def worst_cut_with_latency(collective, network, size):
    """Return the largest of bytes / capacity + least latency of all cuts, all at once."""
    sets = np.arange(2**network.num_nodes)
    side = (sets[:, None] >> np.arange(network.num_nodes) & 1).astype(bool)
    ranks = side[:, network.rank_nodes]
    carried = np.zeros(sets.size)
    for chunk, size_bytes in enumerate(collective.chunk_bytes(size)):
        starts, ends = collective.holders(chunk), collective.receivers(chunk)
        if starts.size:
            some = ranks[:, starts].any(1) if collective.reducing else ranks[:, starts].all(1)
            carried += size_bytes * (some & ~ranks[:, ends].all(1))
    crossing = side[:, network.link_sources] & ~side[:, network.link_targets]
    capacity = crossing @ network.capacities_bytes_per_s
    latency = np.where(crossing, network.latencies_s, np.inf).min(1)
    used = carried > 0
    return (carried[used] / capacity[used] + latency[used]).max()


@by_day(12)
@given(network=wide_graphs(), name=st.sampled_from(COLLECTIVES), data=st.data())
def test_max_flows_find_the_worst_cut_with_its_latency(network, name, data):
    root = data.draw(st.integers(0, network.num_ranks - 1))
    collective = schedules.named_collective(name, network.num_ranks, root=root)
    worst = worst_cut_with_latency(collective, network, 60.0)
    for exact in (False, True):
        bound = bandwidth_bound(collective, network, 60.0, exact=exact)
        if bound.kind == "messages":
            continue
        assert bound.seconds <= worst * (1 + 1e-9)
        if exact and name != "all_to_all":
            assert bound.seconds == pytest.approx(worst, rel=1e-9)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_far_switch_that_nothing_must_reach_costs_nothing(name):
    """Nine shares of 60 bytes, added and taken away again, leave 7e-15 bytes over."""
    ranks, switches = ([f"{kind}{i}" for i in range(n)] for kind, n in (("r", 9), ("s", 4)))
    nodes = [topology.Node(one, "gpu") for one in ranks] + [
        topology.Node(one, "switch") for one in switches
    ]
    pairs = [(ranks[i], ranks[(i + 1) % 9], 0.0) for i in range(9)]
    pairs += [(a, b, 1e3) for a, b in itertools.pairwise([ranks[0], *switches])]
    links = [
        topology.Link(*ends, bandwidth_bytes_per_s=1.0, latency_s=latency)
        for a, b, latency in pairs for ends in ((a, b), (b, a))
    ]  # fmt: skip
    found = bandwidth_bound(
        schedules.named_collective(name, 9),
        topology.Topology("far", nodes, links),
        60.0,
        exact=False,
    )
    assert found.seconds < 100


@given(
    network=st.one_of(graphs(), wide_graphs()), name=st.sampled_from(COLLECTIVES), data=st.data()
)
def test_bounds_do_not_depend_on_names_and_order(network, name, data):
    root = data.draw(st.integers(0, network.num_ranks - 1))
    nodes = data.draw(st.permutations(network.nodes))
    links = data.draw(st.permutations(network.links))
    other = topology.Topology("shuffled", nodes, links)
    moved_root = other.ranks.index(network.ranks[root])
    for exact in (None, False):
        before, after = (
            bandwidth_bound(
                schedules.named_collective(name, of.num_ranks, root=at), of, 60.0, exact=exact
            )
            for of, at in ((network, root), (other, moved_root))
        )
        assert after.seconds == pytest.approx(before.seconds, rel=1e-9)
        assert after.kind == before.kind
    if name not in ("all_reduce", "all_to_all"):
        rates = [
            schedules.throughput_optimum(of, collective=name, root=at).inverse_rate
            for of, at in ((network, root), (other, moved_root))
        ]
        assert rates[0] == rates[1]


@by_day(20)
@given(
    network=st.one_of(graphs(), wide_graphs()), name=st.sampled_from(COLLECTIVES), data=st.data()
)
def test_a_slower_link_never_gives_a_better_bound(network, name, data):
    root = data.draw(st.integers(0, network.num_ranks - 1))
    collective = schedules.named_collective(name, network.num_ranks, root=root)
    for exact in (None, False):
        _check_slower(network, collective, data.draw(st.integers(0, network.num_links - 1)), exact)


@pytest.mark.parametrize("seed", [21, 184, 194, 221])
def test_a_slower_link_does_not_hide_the_worst_cut(seed):
    random = Random(seed)  # noqa: S311 - no secret
    pairs = [(i, (i + 1) % 13) for i in range(13)]
    pairs += [(random.randrange(13), random.randrange(13)) for _ in range(random.randint(4, 16))]
    edges = [(a, b, random.randint(1, 6), 0.0) for a, b in pairs if a != b]
    network = graph(edges, 10, 3)
    for link in range(network.num_links):
        _check_slower(network, schedules.all_to_all(10), link, exact=None)


def _check_slower(network, collective, at, exact):
    before = schedules.lower_bound(collective, network, 60.0, exact=exact).seconds
    for share, more_s in ((0.9, 0.0), (0.5, 1.0), (0.01, 0.0), (1.0, 3.0)):
        links = [*network.links]
        links[at] = replace(
            links[at],
            bandwidth_bytes_per_s=links[at].bandwidth_bytes_per_s * share,
            latency_s=links[at].latency_s + more_s,
        )
        slower = network.with_links(links)
        after = schedules.lower_bound(collective, slower, 60.0, exact=exact).seconds
        assert after >= before * (1 - 1e-9)
        if collective.name not in ("all_reduce", "all_to_all"):
            best, worse = (
                schedules.throughput_optimum(
                    of, collective=collective.name, root=collective.root or 0
                ).inverse_rate
                for of in (network, slower)
            )
            assert worse >= best * (1 - 1e-8)  # capacities that are no integers are rounded


def _without_latency(link, scale):
    bandwidth = link.bandwidth_bytes_per_s * scale
    return topology.Link(link.source, link.target, bandwidth_bytes_per_s=bandwidth)


@given(network=graphs(), name=st.sampled_from(COLLECTIVES), data=st.data())
def test_the_latency_bound_is_the_farthest_pair(network, name, data):
    n = network.num_ranks
    collective = schedules.named_collective(name, n, root=data.draw(st.integers(0, n - 1)))
    away = np.full((network.num_nodes, network.num_nodes), np.inf)
    np.fill_diagonal(away, 0.0)
    for link in range(network.num_links):
        ends = network.link_sources[link], network.link_targets[link]
        away[ends] = min(away[ends], network.latencies_s[link])
    for k in range(network.num_nodes):
        away = np.minimum(away, away[:, k, None] + away[None, k, :])
    nodes = network.rank_nodes
    farthest = 0.0
    for chunk in range(collective.num_chunks):
        for end in collective.receivers(chunk):
            ways = [away[nodes[start], nodes[end]] for start in collective.holders(chunk)]
            farthest = max(farthest, max(ways) if collective.reducing else min(ways))
    bound = latency_bound(collective, network)
    assert bound.seconds == pytest.approx(farthest)
    if farthest:
        assert away[bound.certificate] == pytest.approx(farthest)


GB = 10**9

# 1/x* of the reference's table of throughput optima: seconds for each GB of a node's share, or
# link times for each chunk where links have 1 GB/s.
OPTIMA = [
    ("dgx_a100:1", Fraction(7, 300), Fraction(2400, 7)),
    ("dgx_a100:2", Fraction(3, 65), Fraction(1040, 3)),
    ("dgx_a100:4", Fraction(3, 25), Fraction(800, 3)),
    ("dgx_a100:16", Fraction(3, 5), Fraction(640, 3)),
    ("dgx_a100:32", Fraction(31, 25), Fraction(6400, 31)),
    ("mi250:1", Fraction(7, 150), Fraction(2400, 7)),
    ("mi250:2", Fraction(15, 166), Fraction(5312, 15)),
    ("mi250:8", Fraction(7, 16), Fraction(2048, 7)),
    ("mi250:16", Fraction(15, 16), Fraction(4096, 15)),
    ("dgx2:1", Fraction(3, 25), Fraction(400, 3)),
    ("dgx2:2", Fraction(31, 125), Fraction(4000, 31)),
]


@pytest.mark.parametrize(("machine", "inverse_rate", "bandwidth"), OPTIMA)
def test_throughput_optima_of_machines_are_the_published_fractions(
    machine, inverse_rate, bandwidth
):
    name, boxes = machine.split(":")
    network = topology.named_topology(name, boxes=int(boxes))
    optimum = schedules.throughput_optimum(network)
    assert optimum.inverse_rate * GB == inverse_rate
    assert network.num_ranks / optimum.inverse_rate == bandwidth * GB
    summed = schedules.throughput_optimum(network, collective="reduce_scatter")
    if name != "dgx2" or boxes == "1":  # all others look the same backwards
        assert summed.inverse_rate == optimum.inverse_rate


def test_the_optimum_of_dgx1_is_seven_sixths_of_a_link_time():
    optimum = schedules.throughput_optimum(topology.named_topology("dgx1"))
    assert optimum.inverse_rate * 25 * GB == Fraction(7, 6)


@pytest.mark.parametrize("dims", [(4, 4), (8, 8), (16, 16), (4, 4, 4), (3, 3, 3), (3, 4, 5)])
def test_a_torus_is_limited_by_what_enters_a_node(dims):
    n = int(np.prod(dims))
    optimum = schedules.throughput_optimum(topology.torus(dims, bandwidth="1 GB/s"))
    assert optimum.inverse_rate * GB == Fraction(n - 1, 2 * len(dims))


@pytest.mark.parametrize("dims", [(4, 4), (5, 5), (8, 8), (10, 10), (7, 12), (3, 3, 3), (4, 2, 3)])
def test_a_mesh_is_limited_by_its_corner(dims):
    optimum = schedules.throughput_optimum(topology.mesh(dims, bandwidth="1 GB/s"))
    assert optimum.inverse_rate * GB == Fraction(int(np.prod(dims)) - 1, len(dims))


def test_large_regular_networks_have_their_optimum_in_seconds():
    assert schedules.throughput_optimum(
        topology.torus((32, 32), bandwidth="1 GB/s")
    ).inverse_rate * GB == Fraction(1023, 4)
    cube = schedules.throughput_optimum(topology.hypercube(10, bandwidth="1 GB/s"))
    assert cube.inverse_rate * GB == Fraction(1023, 10)


# Time of an all-to-all of one unit chunk for each ordered pair: the reference's table.
EXCHANGES = [
    (topology.named_topology("dgx1").scaled(latency=0.0), 25e9, 8 / 3),
    (topology.ring(8, bandwidth=1.0), 1.0, 8.0),
    (topology.torus((4, 4), bandwidth=1.0), 1.0, 8.0),
    (topology.torus((8, 8), bandwidth=1.0), 1.0, 64.0),
    (topology.hypercube(6, bandwidth=1.0), 1.0, 32.0),
    (topology.mesh((4, 4), bandwidth=1.0), 1.0, 16.0),
    (topology.mesh((8, 8), bandwidth=1.0), 1.0, 128.0),
    (topology.named_topology("dgx_a100", boxes=2).scaled(latency=0.0), 1e9, 0.32),
]


@pytest.mark.parametrize(("network", "chunk", "seconds"), EXCHANGES)
def test_all_to_all_cuts_reach_the_concurrent_flow_optimum(network, chunk, seconds):
    n = network.num_ranks
    assert bandwidth_bound(schedules.all_to_all(n), network, n * chunk).seconds == pytest.approx(
        seconds
    )


GIB, US, MIB = 2**30, 1e-6, 2**20

# TACOS' own regression values (v. its repository), each the discrete ingress bound.
TACOS = [
    (topology.mesh((3, 3, 3), bandwidth=50.0 * GIB, latency=0.5 * US), 1024, 1, 6671.17),
    (topology.mesh((3, 4, 5), bandwidth=50.0 * GIB, latency=0.5 * US), 2048, 2, 13353.33),
    (topology.mesh((4, 2, 3), bandwidth=50.0 * GIB, latency=0.5 * US), 3072, 3, 19178.17),
    (topology.mesh((5, 5), bandwidth=50.0 * GIB, latency=0.5 * US), 1024, 1, 9606.0),
    (topology.mesh((10, 10), bandwidth=100.0 * GIB, latency=US), 1024, 2, 5049.0),
    (topology.mesh((5, 5), bandwidth=[50.0 * GIB, 75.0 * GIB], latency=0.5 * US), 1024, 1, 8005.0),
    (topology.mesh((8, 5), bandwidth=[80.0 * GIB, 35.0 * GIB], latency=US), 1024, 2, 8595.43),
    (topology.torus((3, 3, 3), bandwidth=50.0 * GIB, latency=0.5 * US), 1024, 1, 3706.20),
    (topology.torus((4, 2, 3), bandwidth=50.0 * GIB, latency=0.5 * US), 3072, 3, 11673.67),
]


@pytest.mark.parametrize(("network", "mib", "chunks", "time_us"), TACOS)
def test_whole_chunks_give_the_values_of_tacos(network, mib, chunks, time_us):
    collective = schedules.all_gather(network.num_ranks, chunks)
    bound = discrete_ingress_bound(collective, network, mib * MIB)
    assert bound.seconds / US == pytest.approx(time_us, rel=2e-5)
    assert bound.kind == "chunks"


def test_an_all_reduce_needs_twice_the_messages():
    n, size = 8, 8e9
    one = topology.switch(n, bandwidth="1 GB/s")
    assert schedules.lower_bound(schedules.all_reduce(n), one, size).seconds == pytest.approx(
        2 * (n - 1) / n * 8
    )
    assert schedules.lower_bound(schedules.all_reduce(n), one, size).kind == "messages"
    boxes = topology.named_topology("dgx_a100", boxes=4)
    bound = schedules.lower_bound(schedules.all_reduce(32), boxes, 1e9)
    assert bound.seconds == pytest.approx(2 * 3 / 4 * 1e9 / 200e9)  # 4 boxes of 8 x 25 GB/s
    copying = topology.Topology(
        "copying",
        one.nodes,
        one.links,
        switches=[topology.SwitchAbility("switch0", multicast=True)],
    )
    assert schedules.lower_bound(schedules.all_reduce(n), copying, size).seconds == pytest.approx(
        14.0
    )


def test_bounds_say_why():
    bound = schedules.lower_bound(
        schedules.all_gather(4), topology.ring(4, bandwidth="1 GB/s", latency="1 us"), 4e9
    )
    assert bound.reason == "3 GB must go into gpu0 at 2 GB/s"
    assert bound.optimal_cut
    assert bound.seconds == pytest.approx(1.5 + 1e-6)  # the last byte pays its latency as well
    far = schedules.lower_bound(
        schedules.all_gather(4), topology.ring(4, bandwidth="1 GB/s", latency="1 s"), 4.0
    )
    assert far.kind == "ends"
    assert far.seconds == pytest.approx(2 + 0.5e-9)  # the last byte of the farthest two shares


def test_uneven_and_custom_collectives_are_bounded_too():
    network = topology.line(3, bandwidth=1.0, latency=0.0)
    sizes = [[0, 0, 6], [0, 0, 0], [2, 0, 0]]
    bound = bandwidth_bound(schedules.all_to_allv(sizes), network, 6.0)
    assert bound.seconds == pytest.approx(6.0)
    either = schedules.custom_collective(3, [(0, 0), (0, 2)], post=[(0, 1)])
    assert bandwidth_bound(either, network, 4.0).seconds == pytest.approx(2.0)  # from both sides
    assert latency_bound(either, topology.line(3, latency="1 s")).seconds == 1.0
    far = schedules.custom_collective(4, [(0, 0), (0, 1)], post=[(0, 3), (0, 1)])
    bound = latency_bound(far, topology.line(4, latency="1 s"))
    assert (bound.seconds, bound.certificate) == (2.0, (1, 3))


def test_odd_capacities_are_close_and_say_so():
    optimum = schedules.throughput_optimum(topology.ring(4, bandwidth=1e9 / 3))
    assert optimum.exact  # one rate is its own unit
    assert float(optimum.inverse_rate) == pytest.approx(4.5e-9, rel=1e-12)
    optimum = schedules.throughput_optimum(topology.mesh((2, 2), bandwidth=[1e9 / 3, 1e9 / 7]))
    assert not optimum.exact
    assert float(optimum.inverse_rate) == pytest.approx(7e-9, rel=1e-8)


def test_nothing_to_move_needs_no_time():
    alone = topology.Topology("alone", [topology.Node("a", "gpu")], [])
    for name in COLLECTIVES:
        bound = schedules.lower_bound(schedules.named_collective(name, 1), alone, 1e9)
        assert (bound.seconds, bound.kind) == (0.0, "none")
    assert schedules.throughput_optimum(alone).inverse_rate == 0
    assert (
        schedules.lower_bound(schedules.all_gather(3), topology.ring(3, latency=0.0), 0).seconds
        == 0.0
    )


def test_what_has_no_bound_is_refused():
    apart = graph([(0, 1, 1, 0.0)], 2)
    for make in (latency_bound, lambda c, t: schedules.lower_bound(c, t, 1.0)):
        with pytest.raises(InfeasibleError, match="disconnected"):
            make(schedules.all_gather(2), apart)
    with pytest.raises(InfeasibleError, match="disconnected"):
        schedules.throughput_optimum(apart)
    with pytest.raises(ConfigurationError, match="3 ranks, the topology 4"):
        schedules.lower_bound(schedules.all_gather(3), topology.ring(4), 1.0)
    with pytest.raises(ConfigurationError, match="no throughput optimum"):
        schedules.throughput_optimum(topology.ring(4), collective="all_to_all")
    with pytest.raises(ConfigurationError, match="from 0 to 3; got 4"):
        schedules.throughput_optimum(topology.ring(4), collective="broadcast", root=4)


def test_rooted_bounds_follow_the_direction_of_the_links():
    fast_out = topology.fully_connected(3, bandwidth=1.0)
    slow_in = [
        topology.Link(
            link.source,
            link.target,
            bandwidth_bytes_per_s=0.25 if link.target == "gpu0" else 1.0,
        )
        for link in fast_out.links
    ]
    network = fast_out.with_links(slow_in)
    assert bandwidth_bound(schedules.broadcast(3), network, 4.0).seconds == pytest.approx(2.0)
    assert bandwidth_bound(schedules.reduce(3), network, 4.0).seconds == pytest.approx(8.0)


def test_a_bound_counts_bytes_of_the_link_as_it_is():
    """The cut is found on a grid of capacities; what must cross it is not rounded with them."""
    network = topology.ring(3, bandwidth=2.0**31)
    links = [
        replace(link, bandwidth_bytes_per_s=1.7) if link.target == "gpu0" else link
        for link in network.links
    ]
    bound = schedules.lower_bound(schedules.all_gather(3), network.with_links(links), 3.0)
    assert bound.seconds == pytest.approx(2 / 3.4)
