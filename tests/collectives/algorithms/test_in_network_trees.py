"""Trees of aggregating switches: their shape, their closed form, and the simulator's answer."""

import numpy as np
import pytest

from fivefold.collectives.algorithms import in_network_tree
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.simulation import simulate
from fivefold.network.topology import Aggregation, Link, Node, SwitchAbility, Topology, switch

POOL = Aggregation(slots=512, slot_bytes=1024)


def two_tiers(*, able=("tor0", "tor1", "core"), pool=POOL, core_rate=2e9, hosts=4):
    nodes = [Node(f"gpu{i}", "gpu") for i in range(hosts)]
    nodes += [Node("tor0", "tor"), Node("tor1", "tor"), Node("core", "core")]
    ends = [(f"gpu{i}", f"tor{2 * i // hosts}", 1e9) for i in range(hosts)]
    ends += [("tor0", "core", core_rate), ("tor1", "core", core_rate)]
    links = [
        Link(*pair, bandwidth_bytes_per_s=rate, latency_s=1e-6)
        for a, b, rate in ends
        for pair in ((a, b), (b, a))
    ]
    switches = [SwitchAbility(name, aggregation=pool) for name in able]
    return Topology("tiers", nodes, links, switches=switches)


def names(network, nodes):
    return sorted(network.nodes[node].name for node in nodes)


def test_the_closed_form_is_the_round_trip_and_the_bytes():
    network = two_tiers()
    tree = in_network_tree(network)
    assert tree.depth == 2
    assert names(network, tree.switches) == ["core", "tor0", "tor1"]
    assert network.nodes[tree.root].name == "core"
    assert tree.round_trip_s == pytest.approx(4e-6)
    assert tree.time_s(1e6) == pytest.approx(4e-6 + 1e-3)  # 2 h a + S / B
    assert tree.time_s(0) == pytest.approx(4e-6)
    loads = tree.link_bytes(10.0)
    assert loads.tolist() == [10.0] * network.num_links


def test_the_simulator_takes_as_long():
    network = two_tiers()
    tree = in_network_tree(network)
    result = simulate(network, [tree.request("sum", 1e6)])
    assert result.finish_of("sum") == pytest.approx(tree.time_s(1e6), rel=1e-6)


def test_slots_over_the_round_trip_limit_the_rate():
    small = Aggregation(slots=2, slot_bytes=1000)
    tree = in_network_tree(two_tiers(pool=small))
    assert tree.rate_bytes_per_s == pytest.approx(2 * 1000 / 4e-6)
    assert in_network_tree(two_tiers(pool=small), slots=1).rate_bytes_per_s == pytest.approx(2.5e8)
    slow = Aggregation(slots=4096, slot_bytes=1024, rate_bytes_per_s=1e8)
    assert in_network_tree(two_tiers(pool=slow)).rate_bytes_per_s == pytest.approx(1e8)


def test_a_switch_that_only_passes_on_need_not_add():
    network = two_tiers(able=("core",), hosts=2)  # each rack switch has one child
    tree = in_network_tree(network)
    assert names(network, tree.switches) == ["core"]
    some = in_network_tree(two_tiers(able=("tor0",)), ranks=[0, 1])
    assert some.depth == 1
    assert len(some.leaves) == 2


def test_the_best_root_wins():
    network = two_tiers(able=("tor0", "tor1", "core"), core_rate=5e8)
    assert in_network_tree(network, ranks=[0, 1]).rate_bytes_per_s == pytest.approx(1e9)
    assert np.isclose(in_network_tree(network).rate_bytes_per_s, 5e8)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: in_network_tree(switch(4)), InfeasibleError, "no switch of topology"),
        (lambda: in_network_tree(two_tiers(able=("tor0",))), InfeasibleError, "no tree of the 1"),
        (lambda: in_network_tree(two_tiers(), slots=513), InfeasibleError, "no tree"),
        (lambda: in_network_tree(two_tiers(), ranks=[0, 0]), ConfigurationError, "each rank once"),
        (lambda: in_network_tree(two_tiers(), ranks=[]), ConfigurationError, "each rank once"),
        (lambda: in_network_tree(two_tiers(), ranks=[9]), ConfigurationError, "9"),
        (lambda: in_network_tree(two_tiers(), slots=0), ConfigurationError, "slots"),
        (lambda: in_network_tree(two_tiers()).time_s(-1), ConfigurationError, "size_bytes is -1"),
    ],
)
def test_what_cannot_be_summed_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()
