"""Paths and priorities against networkx, hand-solved cases and brute force."""

import dataclasses
import itertools
from typing import get_args

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.flows import (
    FlowDemand,
    JobTraffic,
    equal_cost_paths,
    priority_classes,
    route_flows,
    time_shifts,
)
from fivefold.flows.routing import RoutePolicy
from fivefold.network.topology import Link, Node, Topology, line, parse_topology, switch
from helpers.night import number_of


def two_spines(hosts_per_leaf=2, bandwidth_bytes_per_s=1e9):
    """Two leaves of hosts, two spines between them, all links alike."""
    nodes = [Node(f"h{leaf}{host}", "gpu") for leaf in range(2) for host in range(hosts_per_leaf)]
    nodes += [Node(f"{kind}{n}", "tor" if kind == "leaf" else "core")
              for kind in ("leaf", "spine") for n in range(2)]  # fmt: skip
    pairs = [
        (f"h{leaf}{host}", f"leaf{leaf}") for leaf in range(2) for host in range(hosts_per_leaf)
    ]
    pairs += [(f"leaf{leaf}", f"spine{spine}") for leaf in range(2) for spine in range(2)]
    links = [
        Link(*ends, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
        for a, b in pairs
        for ends in ((a, b), (b, a))
    ]
    return Topology("two spines", nodes, links)


def job(name, *flows, compute_s=1.0, **more):
    return JobTraffic(
        job_id=name, compute_s=compute_s, flows=tuple(FlowDemand(*flow) for flow in flows), **more
    )


@st.composite
def topologies(draw):
    """Random graphs of ranks and switches; some pairs have no path."""
    kinds = draw(st.lists(st.sampled_from(["gpu", "tor"]), min_size=2, max_size=8))
    kinds[:2] = ["gpu", "gpu"]
    nodes = [Node(f"n{i}", kind) for i, kind in enumerate(kinds)]
    pairs = draw(st.sets(st.tuples(*[st.integers(0, len(nodes) - 1)] * 2), max_size=20))
    links = [Link(f"n{a}", f"n{b}", bandwidth_bytes_per_s=1e9) for a, b in sorted(pairs) if a != b]
    return Topology("random", nodes, links)


@given(topologies())
def test_equal_cost_paths_are_all_shortest_paths(topology):
    graph = nx.DiGraph()
    graph.add_nodes_from(range(topology.num_nodes))
    for a, b in zip(topology.link_sources.tolist(), topology.link_targets.tolist(), strict=True):
        graph.add_edge(a, b)
    # Other ranks forward nothing.
    graph.remove_nodes_from(topology.rank_nodes[2:].tolist())
    begin, end = topology.rank_nodes[:2].tolist()
    if not nx.has_path(graph, begin, end):
        with pytest.raises(InfeasibleError, match="no path from rank 0 to rank 1"):
            equal_cost_paths(topology, 0, 1)
        return
    wanted = {tuple(path) for path in nx.all_shortest_paths(graph, begin, end)}
    found = tuple(equal_cost_paths(topology, 0, 1))
    nodes = {(begin, *(int(topology.link_targets[link]) for link in path)) for path in found}
    assert len(found) == len(wanted)
    assert nodes == wanted


def test_parallel_links_are_paths_of_their_own():
    link = Link("a", "b", bandwidth_bytes_per_s=1e9)
    topology = Topology("pair", [Node("a", "gpu"), Node("b", "gpu")], [link, link])
    assert list(equal_cost_paths(topology, 0, 1)) == [(0,), (1,)]
    assert list(equal_cost_paths(topology, 0, 1, limit=1)) == [(0,)]


@pytest.mark.parametrize(("host", "paths"), [("box", [(0, 2)]), ("other", [(0, 2), (1, 3)])])
def test_only_ranks_of_one_host_keep_their_paths_in_it(host, paths):
    """Rank 1 is in a box with the first switch; the second switch belongs to no host."""
    ends = [("a", "inner"), ("a", "outer"), ("inner", "b"), ("outer", "b")]
    topology = Topology(
        "box",
        [Node("a", "gpu", host=host), Node("b", "gpu", host="box"),
         Node("inner", "tor", host="box"), Node("outer", "tor")],
        [Link(*pair, bandwidth_bytes_per_s=1e9) for pair in ends],
    )  # fmt: skip
    assert sorted(equal_cost_paths(topology, 0, 1)) == paths


def test_ranks_do_not_forward():
    with pytest.raises(InfeasibleError):
        equal_cost_paths(line(3), 0, 2)
    relayed = tuple(equal_cost_paths(line(3), 0, 2, relay=True))
    assert relayed == (line(3).shortest_route(0, 2),)
    assert route_flows(line(3), [job("a", (0, 2, 1.0))]).paths["a"] == relayed


def test_least_loaded_keeps_two_flows_apart():
    topology = two_spines()
    jobs = [job("a", (0, 2, 4e9)), job("b", (1, 3, 4e9))]
    routing = route_flows(topology, jobs, policy="least_loaded")
    assert len(routing.shared_links("a", "b")) == 0
    # Some seed hashes both onto one spine, some other does not.
    shared = {
        len(route_flows(topology, jobs, seed=seed).shared_links("a", "b")) for seed in range(9)
    }
    assert shared == {0, 2}


def test_by_intensity_the_busiest_gpus_choose_first():
    """Three jobs cross two spines: by size the large idle one would get a spine for itself."""
    topology = two_spines(hosts_per_leaf=3)
    jobs = [
        job("large", (0, 3, 8e9), compute_s=0.1),
        job("keen", (1, 4, 4e9), compute_s=8.0),
        job("middle", (2, 5, 4e9), compute_s=4.0),
    ]
    by_size = route_flows(topology, jobs, policy="least_loaded")
    assert len(by_size.shared_links("keen", "middle")) == 2
    by_intensity = route_flows(topology, jobs, policy="intensity")
    assert len(by_intensity.shared_links("keen", "middle")) == 0
    assert by_intensity.intensity("keen") > by_intensity.intensity("middle")


def test_figures_of_a_routing_by_hand():
    topology = two_spines()
    routing = route_flows(topology, [job("a", (0, 1, 3e9), (0, 1, 1e9), compute_s=2.0)])
    assert routing.communication_s("a") == 4.0
    assert routing.link_bytes("a").sum() == 8e9
    assert routing.intensity("a") == 2.0 * 2 / 4.0
    assert route_flows(topology, [job("a")]).intensity("a") == float("inf")


def test_paths_depend_on_the_seed_and_not_on_the_order_of_jobs():
    topology = two_spines(hosts_per_leaf=6)
    jobs = [job(str(n), (n, 6 + n, 1e9)) for n in range(6)]
    once = route_flows(topology, jobs, seed=3)
    again = route_flows(topology, jobs[::-1], seed=3)
    assert dict(once.paths) == dict(again.paths)
    assert once.paths != route_flows(topology, jobs, seed=4).paths


def test_equal_flows_between_two_ranks_may_take_several_paths():
    """As connections with ports of their own do, whether they belong to one job or to several."""
    topology = two_spines()
    one = route_flows(topology, [job("a", *[(0, 2, 1e9)] * 16)]).paths["a"]
    many = route_flows(topology, [job(str(n), (0, 2, 1e9)) for n in range(16)]).paths
    assert len(set(one)) == len(set(many.values())) == 2


@st.composite
def clusters_and_jobs(draw):
    """A fabric, and jobs on any of its ranks: some alike, some between the same ranks."""
    topology = draw(st.sampled_from([
        two_spines(4), parse_topology("fat_tree:4,gpus=2,bandwidth=1GB/s"),
        parse_topology("torus:3x3,bandwidth=1GB/s"), switch(9, bandwidth="1 GB/s"),
    ]))  # fmt: skip
    ranks = st.integers(0, 7)
    flows = st.lists(
        st.tuples(ranks, ranks, st.sampled_from([1e9, 3e9])).filter(lambda f: f[0] != f[1]),
        max_size=4,
    )
    kinds = draw(st.lists(st.tuples(flows, st.sampled_from([0.5, 1.0])), min_size=1, max_size=5))
    kinds += draw(st.lists(st.sampled_from(kinds), max_size=2))
    return topology, kinds


@pytest.mark.slow
@settings(max_examples=number_of(5, 1000), deadline=None)
@given(clusters_and_jobs(), st.permutations("abcdefg"), st.sampled_from(get_args(RoutePolicy)))
def test_nothing_depends_on_what_jobs_are_called(cluster, names, policy):
    topology, kinds = cluster

    def decided(names):
        jobs = [
            job(name, *flows, compute_s=seconds)
            for name, (flows, seconds) in zip(names, kinds, strict=False)
        ]
        routing = route_flows(topology, jobs, policy=policy, seed=1)
        classes = priority_classes(routing, classes=2).classes
        shifts = time_shifts(routing, slots_per_period=4).shift_s
        return [(routing.paths[n], classes[n], shifts[n]) for n in names[: len(kinds)]]

    assert decided(names) == decided([f"job {n}" for n in range(7)])


def ends_of(flows):
    return tuple(flow[:2] for flow in flows)


@settings(max_examples=60, deadline=None)
@given(clusters_and_jobs(), st.data())
def test_a_hashed_path_depends_on_its_own_job_alone(cluster, data):
    topology, kinds = cluster
    given_ = [(f"job {n}", flows) for n, (flows, _) in enumerate(kinds)]

    def paths(jobs):
        return dict(route_flows(topology, [job(name, *flows) for name, flows in jobs]).paths)

    wanted = paths(given_)
    renamed = paths([(f"{name}, renamed", flows) for name, flows in given_])
    assert {f"{name}, renamed": found for name, found in wanted.items()} == renamed
    scaled = [(name, [(a, b, 7 * size) for a, b, size in flows]) for name, flows in given_]
    assert paths(scaled) == wanted
    # Only jobs that are alike keep their order: they are told apart by it.
    contents = data.draw(st.permutations(sorted({ends_of(flows) for _, flows in given_})))
    assert paths(sorted(given_, key=lambda one: contents.index(ends_of(one[1])))) == wanted
    further = [(1, 0, 1e9)] * 5  # more flows than any other job has
    at = data.draw(st.integers(0, len(given_)))
    more = paths([*given_[:at], ("further", further), *given_[at:]])
    assert more.pop("further")
    assert more == wanted


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: route_flows(t, [job("a", (0, 9, 1.0))]), "no rank 9"),
        (lambda t: route_flows(t, [job("a"), job("a")]), "two jobs are called 'a'"),
        (lambda t: route_flows(t, [], policy="best"), "no policy 'best'"),
        (lambda t: route_flows(t, [], seed="1"), "seed must be a whole number"),
        (lambda t: route_flows(t, [job("a")]).link_bytes("b"), "no job 'b'"),
        (lambda t: equal_cost_paths(t, 0, 0), "one rank to another"),
        (lambda t: equal_cost_paths(t, 0, 1, limit=0), "limit must be a whole number"),
        (lambda t: equal_cost_paths(t, 0, 1, limit="a"), "limit must be a whole number"),
        (lambda t: equal_cost_paths(t, "0", 1), "no rank '0'"),
        (lambda t: priority_classes(route_flows(t, []), classes="2"), "classes must be a whole"),
        (lambda _: FlowDemand(0, 0, 1.0), "from one rank to another"),
        (lambda _: FlowDemand(0, 1, float("nan")), "size_bytes"),
        (lambda _: FlowDemand(0, 1, "1"), "size_bytes of a flow must be a number"),
        (lambda _: FlowDemand("0", 1, 1.0), "source of a flow must be a whole number"),
        (lambda _: FlowDemand(0, -1, 1.0), "target of a flow must be a whole number"),
        (lambda _: job(""), "needs a name"),
        (lambda _: job(5), "needs a name; got 5"),
        (lambda _: JobTraffic(job_id="a", compute_s=1.0, flows=(5,)), "flows of job 'a' hold 5"),
        (lambda _: job("a", compute_s=-1.0), "compute_s of job 'a'"),
        (lambda _: job("a", compute_s="1"), "compute_s of job 'a' must be a number"),
        (lambda _: job("a", weight=None), "weight of job 'a'"),
        (lambda _: job("a", weight=0.0), "weight"),
        (lambda _: job("a", work=-1.0), "work of job"),
        (
            lambda t: priority_classes(route_flows(t, []), classes=0),
            "classes must be a whole number",
        ),
    ],
)
def test_bad_traffic_is_refused(call, message):
    with pytest.raises(ConfigurationError, match=message):
        call(two_spines())


def lost_by(classes, routing):
    """What pairs in one class, or in the wrong order, lose."""
    lost = 0.0
    names = list(classes)
    for a, b in itertools.combinations(names, 2):
        if len(routing.shared_links(a, b)):
            high, low = sorted((a, b), key=lambda n: -routing.intensity(n))
            if classes[high] > classes[low]:
                return np.inf
            lost += routing.intensity(high) * (classes[high] == classes[low])
    return lost


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), min_size=1, max_size=5),
       st.integers(1, 3))  # fmt: skip
def test_classes_lose_as_little_as_brute_force(kinds, number):
    """Jobs between neighbours of a switch of five: those of adjoining places contend."""
    topology = switch(5, bandwidth="1 GB/s")
    jobs = [
        job(f"j{i}", (place, place + 1, 1e9), (place + 1, place, 1e9), compute_s=s + i / 100)
        for i, (place, s) in enumerate(kinds)
    ]
    routing = route_flows(topology, jobs)
    found = priority_classes(routing, classes=number)
    assert set(found.classes.values()) <= set(range(number))
    best = min(
        lost_by(dict(zip(found.classes, choice, strict=True)), routing)
        for choice in itertools.product(range(number), repeat=len(jobs))
    )
    assert lost_by(found.classes, routing) == pytest.approx(best)


def test_jobs_that_share_nothing_need_one_class():
    routing = route_flows(switch(6), [job(str(n), (2 * n, 2 * n + 1, 1e9)) for n in range(3)])
    found = priority_classes(routing, classes=8)
    assert set(found.classes.values()) == {0}
    assert found.lost == 0


def test_a_job_that_sends_nothing_has_a_class():
    found = priority_classes(route_flows(switch(3), [job("a"), job("b", (0, 1, 1e9))]))
    assert set(found.classes) == {"a", "b"}


def test_a_weight_makes_a_job_more_urgent():
    """Of two jobs alike, the heavier goes first; three times the intensity outweighs two."""

    def classes(**weights):
        jobs = [
            dataclasses.replace(job(name, (0, 1, 1e9), compute_s=seconds), weight=weights[name])
            for name, seconds in (("a", 1.0), ("b", 1.0), ("c", 3.0))
        ]
        found = priority_classes(route_flows(switch(2, bandwidth="1 GB/s"), jobs), classes=3)
        assert found.lost == 0
        return sorted(found.classes, key=found.classes.__getitem__)

    assert classes(a=2.0, b=1.0, c=1.0) == ["c", "a", "b"]
    assert classes(a=1.0, b=2.0, c=1.0) == ["c", "b", "a"]
    assert classes(a=4.0, b=1.0, c=1.0) == ["a", "c", "b"]
