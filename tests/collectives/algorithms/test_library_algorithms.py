"""Every algorithm of the library, for every collective it does, any number of ranks."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.collectives import schedules
from fivefold.collectives.algorithms import available_algorithms, build_algorithm
from fivefold.collectives.algorithms._library import ring_order
from fivefold.collectives.schedules.constructors import COLLECTIVES
from fivefold.errors import ConfigurationError
from fivefold.network.topology import (
    fully_connected,
    hypercube,
    mesh,
    named_topology,
    switch,
    torus,
)
from fivefold.network.topology import ring as ring_network
from oracles.schedule_data import verify_with_data

bidirectional_ring = partial(build_algorithm, "bidirectional_ring")
binary_tree = partial(build_algorithm, "binary_tree")
binomial_tree = partial(build_algorithm, "binomial_tree")
bruck = partial(build_algorithm, "bruck")
direct = partial(build_algorithm, "direct")
direct_all_to_all = partial(build_algorithm, "direct")
double_binary_tree = partial(build_algorithm, "double_binary_tree")
hierarchical = partial(build_algorithm, "hierarchical")
one_shot = partial(build_algorithm, "one_shot")
pairwise_all_to_all = partial(build_algorithm, "pairwise")
pat = partial(build_algorithm, "pat")
recursive_doubling = partial(build_algorithm, "recursive_doubling")
recursive_halving_doubling = partial(build_algorithm, "recursive_halving_doubling")
ring = partial(build_algorithm, "ring")


@st.composite
def groups_of(draw, n):
    order = draw(st.permutations(range(n)))
    cuts = sorted(draw(st.sets(st.integers(1, n - 1), max_size=3))) if n > 1 else []
    return [order[a:b] for a, b in zip([0, *cuts], [*cuts, n], strict=True)]


@given(
    n=st.integers(1, 11),
    name=st.sampled_from(COLLECTIVES),
    chunks=st.integers(1, 5),
    data=st.data(),
)
def test_every_algorithm_does_its_collective(n, name, chunks, data):
    root = data.draw(st.integers(0, n - 1))
    collective = schedules.named_collective(name, n, chunks=chunks, root=root)
    algorithm = data.draw(st.sampled_from(available_algorithms(collective)))
    options = {}
    if algorithm == "hierarchical":
        levels = st.sampled_from(["ring", "direct", "bruck", "pat", "recursive_doubling"])
        options = {"groups": data.draw(groups_of(n))}
        if name != "all_to_all":
            options |= {"intra": data.draw(levels), "inter": data.draw(levels)}
    if algorithm == "pat":
        options = {"most_chunks": data.draw(st.sampled_from([None, 1, 2, 3, 8]))}
    if algorithm in ("ring", "bidirectional_ring"):
        options = {"order": data.draw(st.permutations(range(n)))}
    if algorithm == "bruck" and name == "all_to_all":
        options = {"radix": data.draw(st.integers(2, 5))}
    schedule = build_algorithm(algorithm, collective, **options)
    assert schedules.verify_schedule(schedule).num_redundant == 0
    verify_with_data(schedule, seed=n)
    assert schedule.has_steps or schedule.num_transfers == 0


@given(n=st.integers(1, 6), data=st.data())
def test_uneven_all_to_alls(n, data):
    sizes = data.draw(st.lists(st.integers(0, 3), min_size=n * n, max_size=n * n))
    collective = schedules.all_to_allv(np.array(sizes).reshape(n, n))
    for algorithm in available_algorithms(collective):
        options = {"groups": [range(n)]} if algorithm == "hierarchical" else {}
        schedule = build_algorithm(algorithm, collective, **options)
        schedules.verify_schedule(schedule)
        verify_with_data(schedule)
        sent = collective.chunk_weights[schedule.chunks]
        assert (sent > 0).all()


def log2(n):
    return (n - 1).bit_length()


@pytest.mark.parametrize("n", [2, 3, 5, 8, 12, 16])
def test_steps_are_those_of_the_literature(n):
    assert ring(schedules.all_gather(n)).num_steps == n - 1
    assert ring(schedules.reduce_scatter(n)).num_steps == n - 1
    assert ring(schedules.all_reduce(n)).num_steps == 2 * (n - 1)
    assert bidirectional_ring(schedules.all_gather(n)).num_steps == n // 2
    assert bruck(schedules.all_gather(n)).num_steps == log2(n)
    assert bruck(schedules.all_to_all(n)).num_steps == log2(n)
    assert pat(schedules.all_gather(n)).num_steps == log2(n)
    assert binomial_tree(schedules.broadcast(n)).num_steps == log2(n)
    assert binomial_tree(schedules.scatter(n)).num_steps == log2(n)
    assert binomial_tree(schedules.gather(n)).num_steps == log2(n)
    assert direct(schedules.all_gather(n)).num_steps == 1
    assert direct(schedules.all_reduce(n)).num_steps == 2
    assert one_shot(schedules.all_reduce(n)).num_steps == 1
    assert pairwise_all_to_all(schedules.all_to_all(n)).num_steps == n - 1
    assert direct_all_to_all(schedules.all_to_all(n)).num_steps == 1
    power = n & (n - 1) == 0
    folded = 0 if power else 2
    bits = n.bit_length() - 1
    assert recursive_doubling(schedules.all_reduce(n, 1)).num_steps == bits + folded
    assert recursive_halving_doubling(schedules.all_reduce(n)).num_steps == 2 * bits + folded
    depth = n.bit_length() - 1
    assert binary_tree(schedules.broadcast(n, 5)).num_steps == depth + 4


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_nobody_sends_more_than_it_must(n):
    chunks = 2 * n
    for algorithm in (ring, bidirectional_ring, recursive_halving_doubling, bruck, pat, direct):
        schedule = algorithm(schedules.all_reduce(n, chunks))
        sent = np.bincount(schedule.sources, minlength=n)
        assert sent.tolist() == [2 * (n - 1) * chunks // n] * n
        gathering = algorithm(schedules.all_gather(n, 2))
        assert np.bincount(gathering.sources, minlength=n).tolist() == [2 * (n - 1)] * n


@pytest.mark.parametrize("n", [3, 4, 6, 7, 9, 16])
def test_a_leaf_of_one_tree_forwards_in_the_other(n):
    schedule = double_binary_tree(schedules.broadcast(n, 2))
    forwards = [set(schedule.sources[schedule.chunks == chunk].tolist()) - {0} for chunk in (0, 1)]
    assert len(forwards[0] & forwards[1]) <= 1  # the odd one out, where others are odd
    sent = np.bincount(schedule.sources, minlength=n)
    assert sent.max() <= 4  # two children in one tree, at most two more for the odd one


def test_far_ranks_get_one_block_by_pat_and_half_of_them_by_bruck():
    n = 16
    for algorithm, most in ((pat, 1), (bruck, n // 2)):
        schedule = algorithm(schedules.all_gather(n))
        hops = (schedule.targets - schedule.sources) % n
        far = np.minimum(hops, n - hops) == n // 2
        messages = np.bincount(schedule.sources[far], minlength=n)
        assert messages.tolist() == [most] * n


@pytest.mark.parametrize(("n", "limit"), [(16, 1), (16, 2), (16, 4), (13, 2), (32, 8)])
def test_a_message_of_pat_carries_no_more_than_it_may(n, limit):
    schedule = pat(schedules.all_gather(n), most_chunks=limit)
    keys = schedule.steps.astype(np.int64) * n * n + schedule.sources * n + schedule.targets
    assert np.unique(keys, return_counts=True)[1].max() <= limit
    bits, top = log2(n), limit.bit_length() - 1
    assert schedule.num_steps <= top + 2 ** (bits - top) - 1


def test_pairwise_steps_are_permutations():
    for n in (5, 8):
        schedule = pairwise_all_to_all(schedules.all_to_all(n))
        for step in range(n - 1):
            chosen = schedule.steps == step
            assert sorted(schedule.sources[chosen]) == sorted(schedule.targets[chosen])
            assert sorted(schedule.targets[chosen]) == list(range(n))
    swaps = pairwise_all_to_all(schedules.all_to_all(8))
    pairs = set(zip(swaps.steps, swaps.sources, swaps.targets, strict=True))
    assert all((step, target, source) in pairs for step, source, target in pairs)


def test_hierarchies_keep_traffic_inside():
    network = named_topology("dgx_a100", boxes=2).scaled(latency=0.0)
    size = 1e9
    flat = schedules.evaluate(
        ring(schedules.all_reduce(16), order=range(16)), network, size_bytes=size
    ).total_s
    levels = hierarchical(schedules.all_reduce(16), network)
    group = levels.sources // 8 != levels.targets // 8
    crossing = levels.collective.chunk_bytes(size)[levels.chunks[group]].sum()
    assert crossing == pytest.approx(2 * size)  # the sums, once each way
    assert schedules.evaluate(levels, size_bytes=size).total_s < flat / 2
    exchange = hierarchical(schedules.all_to_all(16), network)
    partners = {
        (s, t) for s, t in zip(exchange.sources, exchange.targets, strict=True) if s // 8 != t // 8
    }
    assert len(partners) == 16  # each rank has one partner outside


def test_a_closed_form_of_the_hierarchy():
    g, m, size, a, b = 4, 2, 8e6, 1e-6, 1e9
    network = fully_connected(g * m, bandwidth=b, latency=a)
    schedule = hierarchical(schedules.all_reduce(g * m), groups=[range(g), range(g, g * m)])
    timing = schedules.evaluate(schedule, network, size_bytes=size, model="synchronous")
    inside = 2 * (g - 1) * a + 2 * size * (g - 1) / g / b
    across = 2 * (m - 1) * a + 2 * (size / g) * (m - 1) / m / b
    assert timing.total_s == pytest.approx(inside + across)


@pytest.mark.parametrize(
    "network",
    [
        ring_network(6),
        named_topology("dgx1").scaled(latency=0.0),
        named_topology("mi250").scaled(latency=0.0),
        torus((4, 4)),
        torus((3, 5)),
        hypercube(4),
        mesh((4, 3)),
        torus((16, 16)),
    ],
    ids=lambda network: network.name,
)
def test_ring_neighbours_are_neighbours_where_there_is_such_a_ring(network):
    order = ring_order(network)
    assert sorted(order) == list(range(network.num_ranks))
    for a, b in zip(order, [*order[1:], order[0]], strict=True):
        assert network.direct_links(a, b).size


def test_the_ring_of_dgx1_uses_the_widest_links():
    network = named_topology("dgx1").scaled(latency=0.0)
    schedule = ring(schedules.all_gather(8), network)
    timing = schedules.evaluate(schedule, size_bytes=8e9)
    assert timing.total_s == pytest.approx(7 * 1e9 / 50e9)


def test_rings_fall_back_to_hosts_and_to_paths():
    boxes = named_topology("dgx_a100", boxes=2).scaled(latency=0.0)
    order = ring_order(boxes)
    hosts = [boxes.host_of(rank) for rank in order]
    assert sum(a != b for a, b in zip(hosts, [*hosts[1:], hosts[0]], strict=True)) == 2
    odd = mesh((3, 3))  # an odd grid has no ring: a path that ends somewhere
    assert all(odd.direct_links(a, b).size for a, b in pairwise(ring_order(odd)))
    assert ring_order(switch(3)) == [0, 1, 2]
    assert ring_order(switch(1)) == [0]


def test_sums_go_round_the_same_way_as_copies():
    schedule = ring(schedules.all_reduce(5))
    assert ((schedule.targets - schedule.sources) % 5 == 1).all()


def test_optimal_where_theory_says_so():
    for network, algorithm in (
        (ring_network(7, latency=0.0), bidirectional_ring),
        (switch(6, latency=0.0), ring),
    ):
        n, size = network.num_ranks, 1e7
        for collective in (
            schedules.all_gather(n),
            schedules.reduce_scatter(n),
            schedules.all_reduce(n),
        ):
            schedule = algorithm(collective, order=range(n))
            timing = schedules.evaluate(schedule, network, size_bytes=size)
            assert timing.total_s == pytest.approx(
                schedules.lower_bound(collective, network, size).seconds
            )


def test_large_rings_are_arrays():
    schedule = ring(schedules.all_reduce(512))
    assert schedule.num_transfers == 2 * 511 * 512
    assert schedules.verify_schedule(schedule).num_redundant == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ring(schedules.all_to_all(4)), "ring does not do all_to_all"),
        (lambda: binary_tree(schedules.all_gather(4)), "binary_tree does not do all_gather"),
        (lambda: double_binary_tree(schedules.reduce_scatter(4)), "does not do reduce_scatter"),
        (lambda: pairwise_all_to_all(schedules.all_gather(4)), "does not do all_gather"),
        (lambda: one_shot(schedules.all_gather(4)), "one_shot does not do all_gather"),
        (lambda: recursive_doubling(schedules.scatter(4)), "does not do scatter"),
        (lambda: bruck(schedules.all_to_all(4), radix=1), "radix is 1"),
        (lambda: pat(schedules.all_gather(4), most_chunks=0), "most_chunks is 0"),
        (lambda: ring(schedules.all_gather(3), order=[0, 1, 1]), "name each rank once"),
        (lambda: ring(schedules.all_gather(3), order=[0, 1]), "name each rank once"),
        (lambda: hierarchical(schedules.all_reduce(4)), "needs groups"),
        (
            lambda: hierarchical(schedules.all_reduce(4), groups=[[0, 1], [2]]),
            "hold each of 4 ranks",
        ),
        (lambda: hierarchical(schedules.all_reduce(2), groups=[[0, 1], []]), "none may|no group"),
        (
            lambda: hierarchical(schedules.all_reduce(2), groups=[[0], [1]], intra="tree"),
            "'tree' cannot",
        ),
        (
            lambda: hierarchical(schedules.all_reduce(2), groups=[[0], [1]], inter="binary_tree"),
            "cannot be",
        ),
        (lambda: build_algorithm("magic", schedules.all_reduce(2)), "no algorithm 'magic'"),
        (lambda: build_algorithm("ring", schedules.all_reduce(2), radix=3), "no such option"),
        (lambda: build_algorithm("ring", schedules.all_reduce(4), ring_network(3)), "topology 3"),
        (
            lambda: direct(
                schedules.custom_collective(2, [(0, 0), (0, 1)], post=[(0, 1)], reducing=True)
            ),
            "direct does",
        ),
    ],
)
def test_what_no_algorithm_can_do_is_refused(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_names_as_people_write_them():
    assert build_algorithm(" Direct", schedules.all_to_all(3)).name == "direct"
    assert build_algorithm("Binary-Tree", schedules.broadcast(3)).name == "binary_tree"
    assert available_algorithms(schedules.custom_collective(2, [(0, 0)], post=[(0, 1)])) == (
        "direct",
    )
    either = schedules.custom_collective(3, [(0, 0), (0, 2)], post=[(0, 1), (0, 2)])
    assert direct(either).num_transfers == 1
    schedules.verify_schedule(direct(either))
    assert available_algorithms(schedules.reduce(3))[:2] == ("ring", "bidirectional_ring")
