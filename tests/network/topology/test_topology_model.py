"""The graph itself: what is refused, its arrays, and the topologies made from it."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.topology import (
    Aggregation,
    HostSpec,
    Link,
    Node,
    SwitchAbility,
    Topology,
    clos,
    draw_topology,
    fat_tree,
    line,
    mesh,
    parse_topology,
    ring,
    switch,
)


def link(source, target, **values):
    return Link(source, target, **{"bandwidth_bytes_per_s": 1e9, **values})


def two(*links, **values):
    return Topology("two", [Node("a", "gpu"), Node("b", "cpu")], links, **values)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Node("", "gpu"), "name"),
        (lambda: Node("a", "tpu"), "unknown kind 'tpu'"),
        (lambda: Node("a", "gpu", host=""), "host"),
        (lambda: link("a", "a"), "to itself"),
        (lambda: link("a", "b", bandwidth_bytes_per_s=0), "bandwidth of .* got 0"),
        (lambda: link("a", "b", bandwidth_bytes_per_s=float("inf")), "finite"),
        (lambda: link("a", "b", bandwidth_bytes_per_s="1 GB/s"), "bandwidth of .* got '1 GB/s'"),
        (lambda: link("a", "b", bandwidth_bytes_per_s=True), "bandwidth of .* got True"),
        (lambda: link("a", "b", latency_s=-1e-6), "latency of .* got -1e-06"),
        (lambda: link("a", "b", latency_s=float("nan")), "latency of .* got nan"),
        (lambda: link("a", "b", count=0), "count of .* got 0"),
        (lambda: link("a", "b", count=1.5), "count of .* got 1.5"),
        (lambda: Aggregation(slots=0, slot_bytes=256), "slots of an .* got 0"),
        (lambda: Aggregation(slots=1, slot_bytes=256, rate_bytes_per_s=0), "rate of .* got 0"),
        (lambda: Aggregation(slots=1, slot_bytes=256, dtypes=("",)), "dtypes"),
        (lambda: two(link("a", "c")), "ends at 'c'.*'two'"),
        (lambda: two("a->b"), "Link objects; got 'a->b'"),
        (lambda: Topology("", [Node("a", "gpu")], []), "needs a name"),
        (lambda: Topology("x", [], []), "no compute node"),
        (lambda: Topology("x", [Node("s", "tor")], []), "no compute node"),
        (lambda: Topology("x", [Node("a", "gpu")] * 2, []), "several nodes named 'a'"),
        (lambda: two(switches=[SwitchAbility("c")]), "no node"),
        (lambda: two(switches=[SwitchAbility("a")]), "a compute node"),
        (lambda: switch(2).index("switch1"), "did you mean 'switch0'"),
        (lambda: ring(3).node_of_rank(3), "no rank 3.*0 to 2"),
        (lambda: ring(3).node_of_rank(-1), "no rank -1"),
        (lambda: ring(3).node_of_rank("0"), "no rank '0'"),
        (lambda: ring(3).routes(["a"], ["b"]), r"routes got ranks \['a'\]"),
        (lambda: ring(3).routes([0.5], [1]), r"routes got ranks \[0.5\]"),
        (lambda: Topology("x", 5, []), "Node objects; got 5"),
        (lambda: mesh(4), "a mesh needs a shape; got 4"),
        (lambda: clos((2, 2), aggs=1, cores=1), "clos needs pods x racks x hosts"),
        (lambda: parse_topology(5), "5 is no topology"),
        (lambda: draw_topology(ring(3), link_loads="a"), "link_loads must be 6 numbers.* got 'a'"),
        (lambda: fat_tree(4, oversubscription="2"), "oversubscription must be a number"),
        (lambda: ring(3).without_links([99]), "no link 99.*0 to 5"),
        (lambda: ring(3).without_links(["a"]), "no link 'a'"),
        (lambda: ring(3).subset([0, 0]), "twice"),
        (lambda: ring(3).subset([]), "no compute node"),
        (lambda: ring(3).renamed(nodes={"gpu7": "x"}), "'gpu7' is no node"),
        (lambda: switch(3).renamed(nodes={"gpu0": "gpu2"}), "several nodes"),
        (lambda: ring(3).scaled(bandwidth=0), "bandwidth"),
        (lambda: ring(3).scaled(bandwidth="a"), "bandwidth of scaled.* got 'a'"),
        (lambda: ring(3).scaled(latency=None), "latency of scaled.* got None"),
    ],
)
def test_what_is_wrong_is_named(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_a_switch_may_be_described_once():
    with pytest.raises(ConfigurationError, match="several times 'switch0'"):
        Topology("s", switch(2).nodes, switch(2).links, switches=[SwitchAbility("switch0")] * 2)


def test_ranks_are_the_compute_nodes_in_order():
    nodes = [Node("s", "switch"), Node("b", "cpu", "h"), Node("a", "gpu", "h"), Node("n", "nic")]
    found = Topology("mixed", nodes, [link("b", "s"), link("s", "a", count=3)])
    assert found.ranks == ("b", "a")
    assert found.rank_nodes.tolist() == [1, 2]
    assert found.rank_of_node.tolist() == [-1, 0, 1, -1]
    assert found.is_rank.tolist() == [False, True, True, False]
    assert found.hosts == {"h": (0, 1)}
    assert found.host_of(1) == "h"
    assert found.link_counts.tolist() == [1, 3]
    assert found.capacities_bytes_per_s.tolist() == [1e9, 3e9]


def test_a_single_rank_without_links_is_a_topology():
    alone = Topology("alone", [Node("a", "gpu")], [])
    assert (alone.num_links, alone.capacities_bytes_per_s.shape) == (0, (0,))
    assert alone.is_connected()
    assert alone.shortest_route(0, 0) == ()
    assert alone.eccentricity_s.tolist() == [0.0]
    assert len(alone.rank_graph) == len(alone.routes()) == 0


def test_parallel_links_stay_apart():
    found = two(link("a", "b"), link("a", "b", latency_s=1e-6), link("b", "a"))
    assert found.direct_links(0, 1).tolist() == [0, 1]
    assert found.direct_links(1, 0).tolist() == [2]
    graph = found.rank_graph
    assert list(zip(graph.sources, graph.targets, strict=True)) == [(0, 1), (0, 1), (1, 0)]
    assert graph.latencies_s.tolist() == [0.0, 1e-6, 0.0]


@given(st.integers(1, 12), st.integers(0, 40), st.integers(0, 10**6))
def test_neighbours_are_those_of_the_link_list(num_nodes, num_links, seed):
    random = np.random.default_rng(seed)
    nodes = [
        Node(f"n{i}", "gpu" if i == 0 or random.random() < 0.6 else "tor") for i in range(num_nodes)
    ]
    links = []
    for _ in range(num_links if num_nodes > 1 else 0):
        a, b = random.choice(num_nodes, 2, replace=False).tolist()
        links.append(link(f"n{a}", f"n{b}", count=int(random.integers(1, 4))))
    found = Topology("random", nodes, links)
    for node in range(num_nodes):
        name = f"n{node}"
        assert found.out_links(node).tolist() == [
            i for i, x in enumerate(links) if x.source == name
        ]
        assert found.in_links(name).tolist() == [i for i, x in enumerate(links) if x.target == name]
    assert found.reversed().reversed() == found
    assert pickle.loads(pickle.dumps(found)) == found  # noqa: S301 - our own bytes


def test_nothing_can_be_changed():
    found = fat_tree(4)
    for array in (found.link_sources, found.capacities_bytes_per_s, found.outgoing.links):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    with pytest.raises(AttributeError):
        found.name = "other"
    copy = pickle.loads(pickle.dumps(found))  # noqa: S301 - our own bytes
    assert not copy.link_sources.flags.writeable


def test_equality_is_of_structure_not_of_labels():
    assert ring(4) == ring(4).renamed("other")
    assert hash(ring(4)) == hash(ring(4))
    assert len({ring(4), ring(4), ring(5)}) == 2
    assert ring(4) != ring(4, latency="1 us")
    assert ring(4) != ring(4).renamed(nodes={"gpu0": "x"})
    able = Topology("s", switch(4).nodes, switch(4).links, switches=[SwitchAbility("switch0")])
    assert able != switch(4)
    assert ring(4) != "ring:4"


def test_a_fingerprint_is_the_same_everywhere():
    # A stored schedule is found by it: a change here throws every cache away.
    assert ring(4).fingerprint.startswith("1fb41443b8e9f463")


def test_reversing_turns_links_and_keeps_their_numbers():
    found = Topology("one way", line(3).nodes, [link("gpu0", "gpu1"), link("gpu1", "gpu2")])
    back = found.reversed()
    assert back.link_sources.tolist() == found.link_targets.tolist()
    assert back.link_targets.tolist() == found.link_sources.tolist()
    assert found.shortest_route(0, 2) == (0, 1)
    assert back.shortest_route(2, 0) == (1, 0)


def test_scaling_and_failures():
    found = ring(4, bandwidth=8.0, latency=2.0).scaled(bandwidth=0.5, latency=3)
    assert set(found.capacities_bytes_per_s.tolist()) == {4.0}
    assert set(found.latencies_s.tolist()) == {6.0}
    broken = ring(4).without_links([0, 1])  # between ranks 0 and 1, both ways
    assert broken.num_links == 6
    assert len(broken.shortest_route(0, 1)) == 3


def test_a_subset_renumbers_and_keeps_what_joins():
    some = fat_tree(4).subset([5, 0])
    assert some.ranks == ("host5", "host0")
    assert some.is_connected()
    assert len(some.shortest_route(0, 1)) == 6
    assert not ring(4).subset([0, 2]).is_connected()
    hosts = fat_tree(4, host=HostSpec(gpus=2)).subset([0, 1])
    assert "host0/nvswitch" in [node.name for node in hosts.nodes]
    assert len(hosts.shortest_route(0, 1)) == 2


def test_a_slow_edge():
    found = ring(4).with_changed_link("gpu1", "gpu2", bandwidth="1 GB/s", latency="5 us")
    slow = sorted(index for index, rate in enumerate(found.capacities_bytes_per_s) if rate == 1e9)
    assert slow == sorted([*found.direct_links(1, 2), *found.direct_links(2, 1)])
    one_way = ring(4).with_changed_link("gpu1", "gpu2", count=3, both_ways=False)
    assert sorted(one_way.link_counts.tolist()) == [1] * 7 + [3]
    with pytest.raises(ConfigurationError, match="no link 'gpu0' -> 'gpu2'"):
        ring(4).with_changed_link("gpu0", "gpu2", count=2)
    with pytest.raises(ConfigurationError, match="'gpu7' is no node"):
        ring(4).with_changed_link("gpu0", "gpu7", count=2)


def test_switches_can_be_made_to_sum():
    unit = Aggregation(slots=4, slot_bytes=256)
    tree = fat_tree(4).with_aggregation(unit, kinds=["tor", "core"])
    able = {ability.node for ability in tree.switches}
    assert able == {node.name for node in tree.nodes if node.kind in ("tor", "core")}
    assert tree.ability_of("core0") == SwitchAbility("core0", multicast=True, aggregation=unit)
    assert tree.with_switches([]) == fat_tree(4)
    again = tree.with_aggregation(Aggregation(slots=9, slot_bytes=1), kinds=["core"])
    assert again.ability_of("core1").aggregation.slots == 9
    assert again.ability_of("pod0/tor0").aggregation == unit
    with pytest.raises(ConfigurationError, match="no switch of kind agg; it has gpu, switch"):
        switch(3).with_aggregation(unit, kinds=["agg"])


def test_switch_abilities_follow_their_switch():
    unit = Aggregation(slots=4, slot_bytes=256, dtypes=["int32"])
    abilities = [SwitchAbility("switch0", multicast=True, aggregation=unit)]
    found = Topology("s", switch(3).nodes, switch(3).links, switches=abilities)
    assert found.ability_of("switch0").aggregation == unit
    assert found.ability_of(3).multicast
    assert found.renamed(nodes={"switch0": "s"}).ability_of("s").multicast
    assert found.subset([0, 1]).ability_of("switch0").multicast
    assert not switch(3).ability_of("switch0").multicast


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ([], r"2 of 3 ranks cannot be reached from 'gpu0': 'gpu1', 'gpu2'"),
        ([("gpu0", "gpu1"), ("gpu1", "gpu2")], r"2 of 3 ranks cannot reach 'gpu0'"),
        ([("gpu1", "gpu0"), ("gpu2", "gpu0")], r"2 of 3 ranks cannot be reached"),
        ([("gpu0", "gpu1"), ("gpu1", "gpu0")], r"1 of 3 ranks cannot be reached .*'gpu2'"),
    ],
)
def test_a_disconnected_topology_says_who_is_cut_off(links, words):
    found = Topology("cut", line(3).nodes, [link(*ends) for ends in links])
    assert not found.is_connected()
    with pytest.raises(InfeasibleError, match=words):
        found.require_connected()
    assert np.isinf(found.eccentricity_s).any()


def test_connected_topologies_pass():
    one_way = Topology(
        "circle", line(3).nodes, [link(f"gpu{i}", f"gpu{(i + 1) % 3}") for i in range(3)]
    )
    one_way.require_connected()
    assert one_way.is_connected()


def test_numbers_of_numpy_become_plain_ones():
    found = link(
        "a", "b", bandwidth_bytes_per_s=np.float32(2), latency_s=np.int64(1), count=np.int8(3)
    )
    assert found == link("a", "b", bandwidth_bytes_per_s=2.0, latency_s=1.0, count=3)
    assert [type(x) for x in (found.bandwidth_bytes_per_s, found.latency_s, found.count)] == [
        float,
        float,
        int,
    ]


def test_other_links_on_the_same_nodes():
    found = ring(3).with_links([link("gpu2", "gpu0")])
    assert (found.num_nodes, found.num_links) == (3, 1)
    with pytest.raises(ConfigurationError, match="gpu9"):
        ring(3).with_links([link("gpu9", "gpu0")])
