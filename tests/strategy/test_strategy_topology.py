"""Tiers from topologies."""

import pytest

from fivefold.collectives.pricing import fabric_from_topology
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.topology import Link, Node, Topology, named_topology, ring


def racked(*, uplink):
    """Two racks of two hosts of two GPUs; adapters of 10, uplinks as given."""
    nodes, links = [], []
    for rack in range(2):
        nodes.append(Node(f"tor{rack}", "tor"))
        for host in range(2):
            name = f"h{rack}{host}"
            nodes.append(Node(f"{name}/sw", "nvswitch", name))
            nodes.append(Node(f"{name}/nic", "nic", name))
            for gpu in range(2):
                nodes.append(Node(f"{name}/g{gpu}", "gpu", name))
                links += both(f"{name}/g{gpu}", f"{name}/sw", 100.0)
            links += both(f"{name}/sw", f"{name}/nic", 100.0)
            links += both(f"{name}/nic", f"tor{rack}", 10.0)
    nodes.append(Node("core", "core"))
    for rack in range(2):
        links += both(f"tor{rack}", "core", uplink)
    return Topology("racked", nodes, links)


def both(a, b, rate):
    return [
        Link(x, y, bandwidth_bytes_per_s=rate * 1e9, latency_s=1e-6) for x, y in ((a, b), (b, a))
    ]


@pytest.mark.parametrize("uplink", [20.0, 4.0])
def test_racks_share_their_uplink(uplink):
    fabric = fabric_from_topology(racked(uplink=uplink))
    found = [(tier.name, tier.gpus) for tier in fabric.tiers]
    assert found == [("node", 2), ("rack", 4), ("cluster", 8)]
    rates = [tier.bandwidth_bytes_per_s / 1e9 for tier in fabric.tiers]
    assert rates == pytest.approx([100.0, 5.0, min(uplink / 4, 5.0)], rel=1e-5)
    assert fabric.tiers[0].hop_s < fabric.tiers[1].hop_s < fabric.tiers[2].hop_s


def test_hosts_without_switches_of_their_own():
    fabric = fabric_from_topology(ring(4, bandwidth=1e9, latency=1e-6))
    assert fabric.num_gpus == 4
    assert fabric.tiers[-1].bandwidth_bytes_per_s == pytest.approx(2e9, rel=1e-5)


def test_one_box_has_one_tier():
    fabric = fabric_from_topology(named_topology("dgx_a100", boxes=1))
    assert [tier.gpus for tier in fabric.tiers] == [8]


def test_uneven_and_disconnected_topologies_are_refused():
    nodes = [Node("a", "gpu", "x"), Node("b", "gpu", "x"), Node("c", "gpu", "y")]
    links = both("a", "b", 1.0) + both("b", "c", 1.0)
    with pytest.raises(ConfigurationError, match="GPUs"):
        fabric_from_topology(Topology("uneven", nodes, links))
    with pytest.raises(InfeasibleError):
        fabric_from_topology(Topology("apart", nodes, both("a", "b", 1.0)))
