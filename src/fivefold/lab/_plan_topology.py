"""The plan of a cluster that is a topology: every node a namespace, every link a pair of cables.

Hosts keep their addresses, on an interface ``eth0`` of their own that leads nowhere; every link has
a small network of its own, shaped in each direction where it leaves a node, and every node has a
route to every host. Nodes pass on what is not for them, hosts too: in a ring a message to the host
opposite uses the links between. Routes are the topology's own shortest ones, so that what is
predicted is what is run. Pure data, as the plan of one switch.
"""

from __future__ import annotations

from collections import defaultdict, deque

from fivefold.lab._plan import (
    ETHERNET_MTU,
    Step,
    address_of,
    aggregator_address,
    host_name,
    shape_link,
)
from fivefold.lab._spec import LabSpec

_FIRST_TABLE = 1000  # of routes; the kernel's own have numbers up to 255
_SETTINGS = {"ip_forward": 1, "conf/all/rp_filter": 0, "conf/default/rp_filter": 0}


def plan_topology(spec: LabSpec) -> tuple[int, list[Step]]:
    """Return the number of namespaces besides the hosts' (node0, node1, ...), and the steps."""
    plan = _TopologyPlan(spec)
    topology = plan.topology
    steps = [step for node in range(topology.num_nodes) for step in plan.node_steps(node)]
    for number, (pair, rates) in enumerate(plan.pairs.items()):
        steps += plan.link_steps(number, pair, rates)
    plan.find_next_hops()
    for name in spec.aggregators:
        root, address = topology.index(name), aggregator_address(spec, name)
        steps.append(Step.of(plan.names[root], f"ip addr add {address}/32 dev lo"))
        plan.add_tree(root, address)
    return topology.num_nodes - topology.num_ranks, steps + plan.route_steps()


def namespace_of(spec: LabSpec, node: str) -> str:
    """Return the namespace of a node of the topology."""
    plan = _TopologyPlan(spec)
    return plan.names[plan.topology.index(node)]


class _TopologyPlan:
    """Names of the namespaces, joined pairs of nodes, and the way to each address."""

    def __init__(self, spec: LabSpec) -> None:
        from fivefold.network.topology import read_topology  # noqa: PLC0415 - it needs numpy

        self.spec = spec
        self.topology = topology = read_topology(str(spec.topology))
        self.mtu = spec.mtu or ETHERNET_MTU
        # Hosts are named by rank, the others in their order.
        others = (f"node{number}" for number in range(topology.num_nodes))
        self.names = [
            host_name(rank) if rank >= 0 else next(others)
            for rank in topology.rank_of_node.tolist()
        ]
        # The lower node first, with the rate there and the rate back.
        pairs: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for link in range(topology.num_links):
            source, target = int(topology.link_sources[link]), int(topology.link_targets[link])
            rates = pairs[min(source, target), max(source, target)]
            rates[int(source > target)] += float(topology.capacities_bytes_per_s[link])
        self.pairs = dict(sorted(pairs.items()))
        self.numbers = {pair: number for number, pair in enumerate(self.pairs)}
        self.next_hops: dict[tuple[int, str], int] = {}

    def node_steps(self, node: int) -> list[Step]:
        name, rank = self.names[node], int(self.topology.rank_of_node[node])
        steps = [
            Step(name, ("sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{setting}"))
            for setting, value in _SETTINGS.items()
        ]
        steps.append(Step.of(name, "ip link set lo up"))
        if rank >= 0:
            # gloo wants an interface that is running: both ends of a cable that stays inside.
            steps += [
                Step.of(name, "ip link add eth0 type veth peer name inside"),
                Step.of(name, f"ip link set inside mtu {self.mtu} up"),
                Step.of(name, f"ip addr add {address_of(rank)}/32 dev eth0"),
                Step.of(name, f"ip link set eth0 mtu {self.mtu} up"),
            ]
        return steps

    def link_steps(self, number: int, pair: tuple[int, int], rates: list[float]) -> list[Step]:
        low, high = self.names[pair[0]], self.names[pair[1]]
        device = f"link{number}"
        steps = [Step.of(low, f"ip link add {device} type veth peer name {device} netns @{high}")]
        for side, name in enumerate((low, high)):
            steps += [
                Step.of(name, f"ip addr add {_end_address(number, side)}/30 dev {device}"),
                Step.of(name, f"ip link set {device} mtu {self.mtu} up"),
                shape_link(self.spec, rates[side], namespace=name, device=device),
            ]
        return steps

    def find_next_hops(self) -> None:
        """Find the way to each host's address, at every node of a route to it."""
        topology = self.topology
        for target in range(topology.num_ranks):
            for source in range(topology.num_ranks):
                for link in topology.shortest_route(source, target):
                    place = int(topology.link_sources[link]), address_of(target)
                    self.next_hops.setdefault(place, int(topology.link_targets[link]))

    def add_tree(self, root: int, address: str) -> None:
        """Add the ways between all hosts and an aggregator: fewest links, the same ones back."""
        topology, next_hops = self.topology, self.next_hops
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

    def route_steps(self) -> list[Step]:
        """Return every node's routes, and a table for each pair of hosts with its own route."""
        topology = self.topology
        steps = [
            Step.of(self.names[node], f"ip route add {self._hop((node, neighbour), address)}")
            for (node, address), neighbour in sorted(self.next_hops.items())
        ]
        for number, ((source, target), links) in enumerate(sorted(self.spec.routes.items())):
            address, table = address_of(target), _FIRST_TABLE + number
            for link in links:
                ends = int(topology.link_sources[link]), int(topology.link_targets[link])
                if self.next_hops.get((ends[0], address)) == ends[1]:
                    continue
                name = self.names[ends[0]]
                rule = f"from {address_of(source)}/32 to {address}/32 lookup {table}"
                steps += [
                    Step.of(name, f"ip route add {self._hop(ends, address)} table {table}"),
                    Step.of(name, f"ip rule add {rule}"),
                ]
        return steps

    def _hop(self, ends: tuple[int, int], address: str) -> str:
        """Return the words of a route to an address from one node over its neighbour."""
        node, neighbour = ends
        number = self.numbers[min(ends), max(ends)]
        via = _end_address(number, int(neighbour > node))
        rank = int(self.topology.rank_of_node[node])
        own = f" src {address_of(rank)}" if rank >= 0 else ""
        return f"{address}/32 via {via} dev link{number}{own}"


def _end_address(number: int, side: int) -> str:
    """Return the address of an end of a link: four addresses a link from 10.78.0.0 on."""
    place = 4 * number + 1 + side
    return f"10.{78 + (place >> 16)}.{place >> 8 & 255}.{place & 255}"
