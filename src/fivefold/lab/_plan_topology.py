"""The plan of a cluster that is a topology: every node a namespace, every link a pair of cables.

Hosts keep their addresses, on an interface ``eth0`` of their own that leads nowhere; every link has
a small network of its own, shaped in each direction where it leaves a node, and every node has a
route to every host. Nodes pass on what is not for them, hosts too: in a ring a message to the host
opposite uses the links between. Routes are the topology's own shortest ones, so that what is
predicted is what is run. Pure data, as the plan of one switch.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from fivefold.lab._plan import Step, address_of, host_name, shaper
from fivefold.lab._spec import LabSpec

if TYPE_CHECKING:
    from fivefold.network.topology import Topology

__all__ = ["plan_topology"]

_ETHERNET_MTU = 1500
_SETTINGS = {"ip_forward": 1, "conf/all/rp_filter": 0, "conf/default/rp_filter": 0}


def plan_topology(spec: LabSpec) -> tuple[int, list[Step]]:
    """How the nodes and links of a topology are made.

    Args:
        spec: A cluster with a topology.

    Returns:
        Number of namespaces besides the hosts' (``node0``, ``node1``, ...), and the steps.

    Example:
        >>> from fivefold.network.topology import ring, switch
        >>> plan_topology(LabSpec.of_topology(switch(3, bandwidth="1 MB/s")))[0]
        1
        >>> plan_topology(LabSpec.of_topology(ring(3, bandwidth="1 MB/s")))[0]
        0
    """
    from fivefold.network.topology import Topology  # noqa: PLC0415 - only here it needs numpy

    topology = Topology.from_toml(str(spec.topology))
    names = _namespaces(topology)
    pairs = _pairs(topology)
    steps = [
        step for node in range(topology.num_nodes) for step in _plan_node(spec, topology, node)
    ]
    for number, (pair, rates) in enumerate(sorted(pairs.items())):
        steps += _plan_link(spec, pair, rates, number=number, names=names)
    steps += _plan_routes(topology, {pair: at for at, pair in enumerate(sorted(pairs))}, names)
    return topology.num_nodes - topology.num_ranks, steps


def _namespaces(topology: Topology) -> list[str]:
    """Name of each node's namespace: hosts by rank, the others in their order."""
    names, others = [], 0
    for node in range(topology.num_nodes):
        rank = int(topology.rank_of_node[node])
        if rank >= 0:
            names.append(host_name(rank))
        else:
            names.append(f"node{others}")
            others += 1
    return names


def _pairs(topology: Topology) -> dict[tuple[int, int], list[float]]:
    """Joined nodes, the lower one first, with the rate there and the rate back."""
    pairs: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for link in range(topology.num_links):
        source, target = int(topology.link_sources[link]), int(topology.link_targets[link])
        pair = (min(source, target), max(source, target))
        pairs[pair][int(source > target)] += float(topology.capacities_bytes_per_s[link])
    return pairs


def _plan_node(spec: LabSpec, topology: Topology, node: int) -> list[Step]:
    name = _namespaces(topology)[node]
    steps = [
        Step(name, ("sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{setting}"))
        for setting, value in _SETTINGS.items()
    ]
    steps.append(_step(name, "ip link set lo up"))
    rank = int(topology.rank_of_node[node])
    if rank >= 0:
        # gloo wants an interface that is running: both ends of a cable that stays inside.
        mtu = spec.mtu or _ETHERNET_MTU
        steps += [
            _step(name, "ip link add eth0 type veth peer name inside"),
            _step(name, f"ip link set inside mtu {mtu} up"),
            _step(name, f"ip addr add {address_of(rank)}/32 dev eth0"),
            _step(name, f"ip link set eth0 mtu {mtu} up"),
        ]
    return steps


def _plan_link(
    spec: LabSpec,
    pair: tuple[int, int],
    rates: list[float],
    *,
    number: int,
    names: list[str],
) -> list[Step]:
    mtu = spec.mtu or _ETHERNET_MTU
    low, high = names[pair[0]], names[pair[1]]
    steps = [_step(low, f"ip link add link{number} type veth peer name link{number} netns @{high}")]
    for side, name in enumerate((low, high)):
        steps += [
            _step(name, f"ip addr add {_end_address(number, side)}/30 dev link{number}"),
            _step(name, f"ip link set link{number} mtu {mtu} up"),
            _step(name, f"tc qdisc add dev link{number} root {shaper(spec, rates[side])}"),
        ]
    return steps


def _end_address(number: int, side: int) -> str:
    """Address of an end of a link: four addresses a link from 10.78.0.0 on."""
    place = 4 * number + 1 + side
    return f"10.{78 + (place >> 16)}.{place >> 8 & 255}.{place & 255}"


def _plan_routes(
    topology: Topology, numbers: dict[tuple[int, int], int], names: list[str]
) -> list[Step]:
    """At every node that lies on a route to a host, the way to that host."""
    next_hops: dict[tuple[int, int], int] = {}
    for target in range(topology.num_ranks):
        for source in range(topology.num_ranks):
            if source != target:
                for link in topology.shortest_route(source, target):
                    node = int(topology.link_sources[link])
                    next_hops.setdefault((node, target), int(topology.link_targets[link]))
    steps = []
    for (node, target), neighbour in sorted(next_hops.items()):
        pair = (min(node, neighbour), max(node, neighbour))
        via = _end_address(numbers[pair], int(neighbour > node))
        rank = int(topology.rank_of_node[node])
        own = f" src {address_of(rank)}" if rank >= 0 else ""
        command = f"ip route add {address_of(target)}/32 via {via} dev link{numbers[pair]}{own}"
        steps.append(_step(names[node], command))
    return steps


def _step(namespace: str, command: str) -> Step:
    return Step(namespace, tuple(command.split()))
