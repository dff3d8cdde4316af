"""Small messages: joined messages, trees of shortest paths, roots, and bounds that know latency."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.collectives.algorithms import available_algorithms, build_algorithm
from fivefold.collectives.schedules import (
    Schedule,
    Transfer,
    all_reduce,
    broadcast,
    evaluate,
    lower_bound,
    named_collective,
    verify_schedule,
)
from fivefold.collectives.schedules.bounds import ends_bound, rounds_bound
from fivefold.collectives.schedules.constructors import COLLECTIVES
from fivefold.collectives.synthesis import synthesize
from fivefold.errors import ConfigurationError
from fivefold.network.topology import Link, Node, Topology, line, parse_topology, ring, switch
from helpers.night import number_of

SIZES = st.sampled_from([1e3, 64e3, 1e6, 16e6])


@st.composite
def networks(draw, most=6):
    """Trees with more links, both ways alike, rates and latencies of two decades."""
    count = draw(st.integers(2, most))
    ends = [(i, draw(st.integers(0, i - 1))) for i in range(1, count)]
    ends += draw(st.lists(st.tuples(*[st.integers(0, count - 1)] * 2), max_size=count))
    links = []
    for first, last in ends:
        rate = draw(st.sampled_from([1e9, 5e9, 25e9, 100e9]))
        delay = draw(st.sampled_from([5e-7, 2e-6, 1e-5, 5e-5]))
        for source, target in {(first, last), (last, first)} if first != last else ():
            one = {"bandwidth_bytes_per_s": rate, "latency_s": delay}
            links.append(Link(f"r{source}", f"r{target}", **one))
    return Topology("drawn", [Node(f"r{i}", "gpu") for i in range(count)], links)


def tree_all_reduce_s(network, root, size_bytes):
    """A reduce to the root and a broadcast from it over shortest paths, by Bellman and Ford."""
    graph, count = network.rank_graph, network.num_ranks
    away, above = np.full(count, np.inf), np.full(count, -1)
    away[root] = 0.0
    lasts = graph.latencies_s + size_bytes / graph.capacities_bytes_per_s
    for _ in range(count):
        for source, target, last in zip(graph.sources, graph.targets, lasts, strict=True):
            if away[source] + last < away[target] * (1 - 1e-12):
                away[target], above[target] = away[source] + last, source
    down = [
        Transfer(chunk=0, source=int(above[rank]), target=int(rank))
        for rank in np.argsort(away)[1:]
    ]
    up = [Transfer(chunk=0, source=m.target, target=m.source, reduces=True) for m in down[::-1]]
    schedule = Schedule.from_transfers([*up, *down], collective=all_reduce(count, 1))
    verify_schedule(schedule, topology=network)
    return evaluate(schedule, network, size_bytes=size_bytes).total_s


def best_s(name, network, size_bytes, *, methods=("library", "paths"), chunks=None):
    asked = name if chunks is None else named_collective(name, network.num_ranks, chunks=chunks)
    found = [synthesize(asked, network, size_bytes=size_bytes, method=one) for one in methods]
    for one in found:
        verify_schedule(one.schedule, topology=network, check_times=True)
        assert one.time_s >= one.bound.seconds * (1 - 1e-9)
    return min(one.time_s for one in found)


def test_joined_messages_take_log_steps_on_a_switch():
    """The textbook's 2 log2 64 latencies and 2 x 63/64 of the bytes, where a ring took 635 us."""
    network = switch(64, bandwidth="25 GB/s", latency="2.5 us")
    found = synthesize("all_reduce", network, size_bytes=64e3, method="library")
    assert found.time_s <= 12 * 5e-6 + 2 * 63 / 64 * 64e3 / 25e9
    assert found.gap < 1
    assert found.bound.seconds >= 6 * 5e-6


def test_two_ranks_swap_what_they_have_in_one_latency():
    found = synthesize("all_reduce", line(2, bandwidth=1e9, latency=50e-6), size_bytes=8)
    assert found.time_s == pytest.approx(50e-6 + 8e-9)
    assert found.optimal


def test_unequal_groups_on_one_link_have_a_root_each():
    """By hand: each side's stars sum at an end of the thin link, which then swap the sums."""
    ends = [(i, j) for i in range(8) for j in range(i) if (i < 3) == (j < 3)]
    links = [
        Link(f"r{a}", f"r{b}", bandwidth_bytes_per_s=rate, latency_s=delay)
        for pairs, rate, delay in ((ends, 50e9, 1e-6), ([(2, 3)], 5e9, 5e-6))
        for pair in pairs
        for a, b in (pair, pair[::-1])
    ]
    network = Topology("two sides", [Node(f"r{i}", "gpu") for i in range(8)], links)
    for size in (1e3, 64e3, 1e6):
        by_hand_s = 2 * (1e-6 + size / 50e9) + 5e-6 + size / 5e9
        found = synthesize("all_reduce", network, size_bytes=size, method="paths")
        assert found.time_s <= by_hand_s * (1 + 1e-9)


@settings(max_examples=number_of(8, 300), deadline=None)
@given(network=networks(), size=SIZES)
def test_no_answer_is_slower_than_a_tree_of_shortest_paths(network, size):
    trees_s = [tree_all_reduce_s(network, root, size) for root in range(network.num_ranks)]
    assert best_s("all_reduce", network, size) <= min(trees_s) * (1 + 1e-9)


@settings(max_examples=number_of(8, 300), deadline=None)
@given(network=networks(), size=SIZES, name=st.sampled_from(COLLECTIVES))
def test_no_answer_is_slower_than_the_library_or_another_number_of_chunks(network, size, name):
    count = network.num_ranks
    found_s = best_s(name, network, size)
    collective = named_collective(name, count)
    for algorithm in set(available_algorithms(collective)) - {"hierarchical"}:
        schedule = build_algorithm(algorithm, collective, network)
        assert found_s <= evaluate(schedule, size_bytes=size).total_s * (1 + 1e-9)
    # Between two powers a pipeline may be a little better.
    for chunks in (1, 2, 4) + ((count, 2 * count, 4 * count) if name == "all_reduce" else ()):
        assert found_s <= best_s(name, network, size, chunks=chunks) * (1 + 1e-9)


def test_both_directions_of_a_ring_are_dealt_evenly():
    """A bidirectional ring over a mesh: 2 (N - 1) / 2N of the bytes each way, in few chunks."""
    network = parse_topology("mesh:3x2,bandwidth=25GB/s,latency=1us")
    found = synthesize("all_gather", network, size_bytes=1e6, method="library")
    assert found.time_s <= 3e-6 + 5 / 6 * 1e6 / 2 / 25e9 + 1e-9


@pytest.mark.nightly
@settings(deadline=None)
@given(network=networks(8), size=SIZES, name=st.sampled_from(COLLECTIVES))
def test_auto_is_never_slower_than_what_it_is_made_of(network, size, name):
    found = synthesize(name, network, size_bytes=size, time_limit_s=3)
    assert found.time_s <= best_s(name, network, size) * (1 + 1e-9)


@given(count=st.integers(2, 40))
def test_the_bound_by_rounds_is_what_a_binomial_tree_takes(count):
    """Without bytes, one port a rank: ceil(log2 N) rounds, and nothing is faster."""
    network = switch(count, bandwidth=1e9, latency=1e-6)
    schedule = build_algorithm("binomial_tree", broadcast(count), network)
    bound = rounds_bound(broadcast(count), network)
    assert bound.seconds == pytest.approx(2e-6 * math.ceil(math.log2(count)))
    assert evaluate(schedule, size_bytes=0).total_s == pytest.approx(bound.seconds)


def test_the_bound_of_the_ends_adds_the_way_to_the_bytes():
    """On a line, the last rank's whole buffer comes from the first: 4 latencies and its bytes."""
    network = line(5, bandwidth=1e9, latency=1e-6)
    for name in ("all_reduce", "broadcast", "reduce"):
        bound = ends_bound(named_collective(name, 5), network, 1e6)
        assert bound.seconds == pytest.approx(4e-6 + 1e-3)
    assert lower_bound(all_reduce(5), network, 1e6).seconds >= 4e-6 + 1e-3


@pytest.mark.parametrize("name", [*COLLECTIVES, "all_to_allv"])
def test_paths_do_every_collective(name):
    network = ring(6, bandwidth=1e9, latency=1e-6)
    asked = named_collective(name.removesuffix("v"), 6)
    if name == "all_to_allv":
        asked = asked.replaced(name=name, chunk_weights=np.arange(36.0))
    found = synthesize(asked, network, size_bytes=6e3, method="paths")
    verify_schedule(found.schedule, topology=network, check_times=True)


def test_paths_refuse_a_collective_of_ones_own():
    asked = broadcast(3).replaced(name="custom", root=None)
    with pytest.raises(ConfigurationError, match="shortest paths"):
        synthesize(asked, ring(3), size_bytes=1e3, method="paths")
