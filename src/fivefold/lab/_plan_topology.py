"""The plan of a cluster that is a topology: every node a namespace, every link a pair of cables.

Hosts keep their addresses, on an interface ``eth0`` of their own that leads nowhere; every link has
a small network of its own, shaped in each direction where it leaves a node, and every node has a
route to every host. Nodes pass on what is not for them, hosts too: in a ring a message to the host
opposite uses the links between. Routes are the topology's own shortest ones, so that what is
predicted is what is run. Pure data, as the plan of one switch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

from fivefold.lab._plan import (
    ETHERNET_MTU,
    Step,
    address_of,
    aggregator_address,
    host_name,
    shape_link,
)
from fivefold.lab._spec import LabSpec

if TYPE_CHECKING:
    from fivefold.network.topology import Topology

_FIRST_TABLE = 1000  # of routes; the kernel's own have numbers up to 255
_SETTINGS = {"ip_forward": 1, "conf/all/rp_filter": 0, "conf/default/rp_filter": 0}


def plan_topology(spec: LabSpec) -> tuple[int, list[Step]]:
    """Plan the nodes and links of a topology."""
    from fivefold.network.topology import Topology  # noqa: PLC0415 - only here it needs numpy

    topology = Topology.from_toml(str(spec.topology))
    names = _namespaces(topology)
    pairs = _pairs(topology)
    steps = [
        step for node in range(topology.num_nodes) for step in _plan_node(spec, topology, node)
    ]
    for number, (pair, rates) in enumerate(sorted(pairs.items())):
        steps += _plan_link(spec, pair, rates, number=number, names=names)
    numbers = {pair: at for at, pair in enumerate(sorted(pairs))}
    next_hops = _next_hops(topology)
    for name in spec.aggregators:
        address = aggregator_address(spec, name)
        steps.append(Step.of(names[topology.index(name)], f"ip addr add {address}/32 dev lo"))
        _add_tree(topology, topology.index(name), address, next_hops)
    steps += _plan_routes(topology, next_hops, numbers, names)
    steps += _plan_own_routes(spec, topology, next_hops, numbers)
    return topology.num_nodes - topology.num_ranks, steps


def namespace_of(spec: LabSpec, node: str) -> str:
    """Return the namespace of a node of the topology."""
    from fivefold.network.topology import Topology  # noqa: PLC0415 - only here it needs numpy

    topology = Topology.from_toml(str(spec.topology))
    return _namespaces(topology)[topology.index(node)]


def _namespaces(topology: Topology) -> list[str]:
    """Return the name of each node's namespace: hosts by rank, the others in their order."""
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
    """Return the joined nodes, the lower one first, with the rate there and the rate back."""
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
    steps.append(Step.of(name, "ip link set lo up"))
    rank = int(topology.rank_of_node[node])
    if rank >= 0:
        # gloo wants an interface that is running: both ends of a cable that stays inside.
        mtu = spec.mtu or ETHERNET_MTU
        steps += [
            Step.of(name, "ip link add eth0 type veth peer name inside"),
            Step.of(name, f"ip link set inside mtu {mtu} up"),
            Step.of(name, f"ip addr add {address_of(rank)}/32 dev eth0"),
            Step.of(name, f"ip link set eth0 mtu {mtu} up"),
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
    mtu = spec.mtu or ETHERNET_MTU
    low, high = names[pair[0]], names[pair[1]]
    steps = [
        Step.of(low, f"ip link add link{number} type veth peer name link{number} netns @{high}")
    ]
    for side, name in enumerate((low, high)):
        steps += [
            Step.of(name, f"ip addr add {_end_address(number, side)}/30 dev link{number}"),
            Step.of(name, f"ip link set link{number} mtu {mtu} up"),
            shape_link(spec, rates[side], namespace=name, device=f"link{number}"),
        ]
    return steps


def _end_address(number: int, side: int) -> str:
    """Return the address of an end of a link: four addresses a link from 10.78.0.0 on."""
    place = 4 * number + 1 + side
    return f"10.{78 + (place >> 16)}.{place >> 8 & 255}.{place & 255}"


def _next_hops(topology: Topology) -> dict[tuple[int, str], int]:
    """Return the next node on the way to each host's address, at every node of a route."""
    next_hops: dict[tuple[int, str], int] = {}
    for target in range(topology.num_ranks):
        for source in range(topology.num_ranks):
            if source != target:
                for link in topology.shortest_route(source, target):
                    node = int(topology.link_sources[link])
                    next_hops.setdefault(
                        (node, address_of(target)), int(topology.link_targets[link])
                    )
    return next_hops


def _add_tree(
    topology: Topology, root: int, address: str, next_hops: dict[tuple[int, str], int]
) -> None:
    """Add the ways between all hosts and an aggregator: fewest links, and the same ones back."""
    frontier = deque([root])
    seen = {root}
    while frontier:
        node = frontier.popleft()
        for link in topology.in_links(node):
            child = int(topology.link_sources[link])
            if child in seen:
                continue
            seen.add(child)
            next_hops[child, address] = node
            if topology.is_rank[child]:
                own = address_of(int(topology.rank_of_node[child]))
                below = child
                while below != root:
                    above = next_hops[below, address]
                    next_hops.setdefault((above, own), below)
                    below = above
            else:
                frontier.append(child)


def _plan_routes(
    topology: Topology,
    next_hops: dict[tuple[int, str], int],
    numbers: dict[tuple[int, int], int],
    names: list[str],
) -> list[Step]:
    return [
        Step.of(names[node], f"ip route add {_hop(topology, (node, neighbour), address, numbers)}")
        for (node, address), neighbour in sorted(next_hops.items())
    ]


def _plan_own_routes(
    spec: LabSpec,
    topology: Topology,
    next_hops: dict[tuple[int, str], int],
    numbers: dict[tuple[int, int], int],
) -> list[Step]:
    """Plan a table for each pair of hosts with its own route, at each node that it changes."""
    names, steps = _namespaces(topology), []
    for number, ((source, target), links) in enumerate(sorted(spec.routes.items())):
        address, table = address_of(target), _FIRST_TABLE + number
        for link in links:
            ends = int(topology.link_sources[link]), int(topology.link_targets[link])
            if next_hops.get((ends[0], address)) == ends[1]:
                continue
            hop = _hop(topology, ends, address, numbers)
            rule = f"from {address_of(source)}/32 to {address}/32 lookup {table}"
            steps += [
                Step.of(names[ends[0]], f"ip route add {hop} table {table}"),
                Step.of(names[ends[0]], f"ip rule add {rule}"),
            ]
    return steps


def _hop(
    topology: Topology, ends: tuple[int, int], address: str, numbers: dict[tuple[int, int], int]
) -> str:
    """Return the words of a route to an address from one node over its neighbour."""
    node, neighbour = ends
    number = numbers[min(ends), max(ends)]
    via = _end_address(number, int(neighbour > node))
    rank = int(topology.rank_of_node[node])
    own = f" src {address_of(rank)}" if rank >= 0 else ""
    return f"{address}/32 via {via} dev link{number}{own}"
