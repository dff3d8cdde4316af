"""Shortest routes against an oracle that tries everything, and the two ways to find them."""

from __future__ import annotations

import itertools
import math

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.topology import (
    HostSpec,
    Link,
    Node,
    Topology,
    fat_tree,
    named_topology,
    parse_topology,
    rail_only,
    ring,
    switch,
    torus,
)
from fivefold.network.topology.routes import Router
from helpers.night import number_of


def random_topology(seed, *, num_nodes=9):
    """A few nodes and links of few different latencies, so that there are ties."""
    random = np.random.default_rng(seed)
    kinds = [
        "gpu" if index == 0 or random.random() < 0.5 else "switch" for index in range(num_nodes)
    ]
    links = []
    for _ in range(int(random.integers(1, 4 * num_nodes))):
        a, b = random.choice(num_nodes, 2, replace=False).tolist()
        latency = float(random.choice([0.0, 0.7e-6, 1e-6, 1.4e-6]))
        links.append(Link(f"n{a}", f"n{b}", bandwidth_bytes_per_s=1.0, latency_s=latency))
    return Topology("random", [Node(f"n{i}", kind) for i, kind in enumerate(kinds)], links)


def oracle(topology, a, b, *, through_ranks):
    """Least (latency, links) from rank to rank, by networkx on the nodes that may forward."""
    source, target = topology.node_of_rank(a), topology.node_of_rank(b)
    graph = nx.MultiDiGraph()
    graph.add_nodes_from(range(topology.num_nodes))
    for x, y, latency in zip(
        topology.link_sources.tolist(),
        topology.link_targets.tolist(),
        topology.latencies_s.tolist(),
        strict=True,
    ):
        if through_ranks or x == source or not topology.is_rank[x]:
            # Whole numbers of 0.1 us, and one tick of a far smaller unit for each link.
            graph.add_edge(x, y, cost=round(latency * 1e7) * 1000 + 1)
    try:
        cost = nx.dijkstra_path_length(graph, source, target, weight="cost")
    except nx.NetworkXNoPath:
        return None
    return divmod(cost, 1000)


def check_route(topology, a, b, route, *, through_ranks):
    node = topology.node_of_rank(a)
    for place, link in enumerate(route):
        assert topology.link_sources[link] == node
        node = int(topology.link_targets[link])
        assert through_ranks or place == len(route) - 1 or not topology.is_rank[node]
    assert node == topology.node_of_rank(b)


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=40, deadline=None)
def test_routes_are_shortest(seed, through_ranks):
    topology = random_topology(seed)
    for a, b in itertools.product(range(topology.num_ranks), repeat=2):
        best = oracle(topology, a, b, through_ranks=through_ranks)
        if best is None:
            with pytest.raises(InfeasibleError, match="no route from"):
                topology.shortest_route(a, b, through_ranks=through_ranks)
            continue
        route = topology.shortest_route(a, b, through_ranks=through_ranks)
        check_route(topology, a, b, route, through_ranks=through_ranks)
        latency_s = sum(topology.latencies_s[list(route)])
        assert (round(latency_s * 1e7), len(route)) == best


@pytest.mark.slow
@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=number_of(5, 1000), deadline=None)
def test_a_search_from_both_ends_finds_the_same_routes(seed, through_ranks):
    topology = random_topology(seed, num_nodes=12)
    check_both_ways(topology, through_ranks=through_ranks)


@pytest.mark.parametrize(
    "text",
    ["fat_tree:4,gpus=2,nics=2", "dragonfly:3", "torus:4x5", "rail_only:3", "ndv2:3", "switch:6"],
)
def test_a_search_from_both_ends_finds_the_same_routes_in(text):
    topology = parse_topology(text)
    check_both_ways(topology, through_ranks=True)
    check_both_ways(topology, through_ranks=False)


def check_both_ways(topology, *, through_ranks):
    """Every pair by the source's whole tree, and by two searches that meet."""
    answers = []
    for nodes_per_search in (10**9, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fivefold.network.topology.routes._NODES_PER_SEARCH", nodes_per_search)
            answers.append(answers_of(topology, through_ranks=through_ranks))
    assert answers[0] == answers[1]


def answers_of(topology, *, through_ranks):
    router, found = Router(topology), []
    every = np.array(list(itertools.product(range(topology.num_ranks), repeat=2)))
    try:
        routes = router.routes(*every.T, through_ranks=through_ranks)
        return [routes.of(place).tolist() for place in range(len(routes))]
    except InfeasibleError:  # one by one, for the message of each pair that has none
        pass
    for a, b in every.tolist():
        try:
            found.append(router.routes([a], [b], through_ranks=through_ranks).links.tolist())
        except InfeasibleError as error:
            found.append(str(error))
    return found


def test_routes_come_in_the_order_asked_for():
    topology = torus((4, 4))
    sources, targets = [9, 0, 9, 3, 0], [0, 5, 9, 3, 15]
    routes = topology.routes(sources, targets)
    assert len(routes) == 5
    for index, (a, b) in enumerate(zip(sources, targets, strict=True)):
        assert tuple(routes.of(index).tolist()) == topology.shortest_route(a, b)


def test_all_pairs_without_being_asked_for_any():
    routes = ring(5).routes()
    assert len(routes) == 20
    lengths = np.diff(routes.offsets)
    assert sorted(lengths.tolist()) == [1] * 10 + [2] * 10


@pytest.mark.parametrize(
    ("sources", "targets", "words"),
    [
        ([0, 1], [1], "2.*1"),
        ([0], [4], "0 to 3"),
        ([-1], [2], "0 to 3"),
        ([-1, 0], [2, 1], "0 to 3"),  # some are right
        ([0, 1], [3, 4], "0 to 3"),
        ([0], None, "both"),
        ([[0]], [[1]], "one source"),
    ],
)
def test_wrong_questions(sources, targets, words):
    with pytest.raises(ConfigurationError, match=words):
        ring(4).routes(sources, targets)


def test_latency_comes_before_hops():
    nodes = [Node(name, "gpu") for name in "abc"]
    slow = Link("a", "c", bandwidth_bytes_per_s=1.0, latency_s=3e-6)
    fast = [
        Link(first, second, bandwidth_bytes_per_s=1.0, latency_s=1e-6)
        for first, second in ("ab", "bc")
    ]
    topology = Topology("detour", nodes, [slow, *fast])
    assert topology.shortest_route(0, 2) == (1, 2)
    assert topology.shortest_route(0, 2, through_ranks=False) == (0,)


@pytest.mark.parametrize("latency_s", [1e-15, 1.0, 3600.0, 1e9])
def test_any_latency_is_told_apart(latency_s):
    assert math.isclose(ring(8, latency=latency_s).eccentricity_s[0], 4 * latency_s, rel_tol=1e-9)


def test_a_mixture_of_small_and_huge_latencies():
    nodes = [Node(name, "gpu") for name in "ab"]
    links = [
        Link("a", "b", bandwidth_bytes_per_s=1.0, latency_s=latency) for latency in (1e6, 1e-6)
    ]
    assert Topology("far", nodes, links).shortest_route(0, 1) == (1,)


def test_eccentricities_against_the_oracle():
    for text in ("dgx2:2", "mesh:3x4", "dragonfly:3"):
        latency = None if text == "dgx2:2" else "1 us"
        topology = parse_topology(text, latency=latency)
        graph = nx.DiGraph()
        for x, y, latency_s in zip(
            topology.link_sources, topology.link_targets, topology.latencies_s, strict=True
        ):
            graph.add_edge(int(x), int(y), cost=float(latency_s))
        for rank, node in enumerate(topology.rank_nodes.tolist()):
            lengths = nx.single_source_dijkstra_path_length(graph, node, weight="cost")
            farthest = max(lengths[other] for other in topology.rank_nodes.tolist())
            assert math.isclose(topology.eccentricity_s[rank], farthest, rel_tol=1e-9)


def test_a_shift_of_a_fat_tree_meets_on_no_link():
    """Routes that follow the destination give every rotation of the hosts full bandwidth."""
    tree = fat_tree(8)
    number = tree.num_ranks
    for shift in (1, 4, 16, 37, number // 2):
        routes = tree.routes(range(number), [(rank + shift) % number for rank in range(number)])
        assert np.bincount(routes.links, minlength=tree.num_links).max() == 1


def test_rank_graph_of_a_switch_has_every_pair():
    graph = switch(4, bandwidth=8.0, latency=1.0).rank_graph
    pairs = set(zip(graph.sources.tolist(), graph.targets.tolist(), strict=True))
    assert pairs == set(itertools.permutations(range(4), 2))
    assert set(graph.latencies_s.tolist()) == {2.0}
    assert set(graph.capacities_bytes_per_s.tolist()) == {8.0}
    assert np.diff(graph.offsets).min() == 2


def test_rank_graph_has_direct_and_switched_links_side_by_side():
    nodes = [Node("a", "gpu"), Node("b", "gpu"), Node("s", "nvswitch"), Node("t", "tor")]
    links = [
        Link("a", "s", bandwidth_bytes_per_s=4.0, latency_s=1.0, count=2),
        Link("s", "t", bandwidth_bytes_per_s=6.0, latency_s=1.0),
        Link("t", "b", bandwidth_bytes_per_s=8.0, latency_s=1.0, count=3),
        Link("a", "b", bandwidth_bytes_per_s=1.0),
    ]
    graph = Topology("both", nodes, links).rank_graph
    assert list(zip(graph.sources, graph.targets, strict=True)) == [(0, 1), (0, 1)]
    assert [graph.of(edge).tolist() for edge in (0, 1)] == [[3], [0, 1, 2]]
    assert graph.capacities_bytes_per_s.tolist() == [1.0, 6.0]
    assert graph.latencies_s.tolist() == [0.0, 3.0]


def test_rank_graph_of_boxes_and_rails():
    # 16 GPUs see each other in each box, and one NIC link leads from each odd GPU to the other box.
    assert len(named_topology("dgx2", boxes=2).rank_graph) == 2 * 16 * 15 + 2 * 8
    # 7 GPUs of the own host, and those of the own rail on the other hosts.
    fabric = rail_only(4, host=HostSpec(gpus=8)).rank_graph
    assert np.bincount(fabric.sources).tolist() == [7 + 3] * 32


@pytest.mark.parametrize("search", ["tree", "both ends"])
def test_of_equal_routes_the_widest_is_taken(search, monkeypatch):
    """GPUs of one host: NVLink and the rack's switch are both two links away."""
    topology = parse_topology("fat_tree:4,gpus=8")
    if search == "both ends":
        monkeypatch.setattr(type(topology.router), "_few", 10**9)
    for pair in ((0, 1), (1, 0), (7, 3)):
        links = [topology.links[link] for link in topology.shortest_route(*pair)]
        assert {link.bandwidth_bytes_per_s for link in links} == {300e9}


@pytest.mark.parametrize("name", ["fat_tree:4,gpus=2", "torus:4x4", "dgx1", "rail_only:4,gpus=4"])
def test_a_tour_goes_on_to_the_nearest_rank_left(name):
    topology = parse_topology(name)
    graph = nx.MultiDiGraph((link.source, link.target) for link in topology.links)
    ranks = np.random.default_rng(0).permutation(topology.num_ranks)[: topology.num_ranks - 3]
    links = {
        source: nx.single_source_shortest_path_length(graph, source) for source in topology.ranks
    }
    left, here = list(ranks[1:].tolist()), int(ranks[0])
    for found in topology.router.nearest_tour(ranks.tolist())[1:]:
        far = {rank: links[topology.ranks[here]][topology.ranks[rank]] for rank in left}
        equals = [rank for rank in left if far[rank] == min(far.values())]
        delays = [
            topology.latencies_s[list(topology.shortest_route(here, r))].sum() for r in equals
        ]
        assert found == equals[int(np.argmin(np.round(delays, 12)))]
        left.remove(found)
        here = found
    assert not left
