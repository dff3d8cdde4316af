"""The plan of a run: commands that make its network, and each rank's environment. Pure data.

A plan is a list of steps; whoever carries it out replaces an argument ``@host0`` by a path of
that host's network namespace. The switch is a bridge in a namespace of its own.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fivefold.lab._spec import LabSpec, class_tos

if TYPE_CHECKING:
    from collections.abc import Iterator


_OWN_SHARE = 0.01
_SELECTOR_MASK = 0xE0
_QUANTUM_BYTES = 66_000  # one large packet; only classes of one priority would take turns
_FIRST_LEAF = 16
SWITCH = "switch"
AGGREGATOR_PORT = 5900
AGGREGATOR_NETWORK = "10.79.0.0/16"
BURST_S = 0.001
_LARGE_PACKET_S = 0.02
_LARGE_PACKET_BYTES = 66_000  # Linux joins up to 64 KiB of a stream, and headers, into one packet
FRAME_OVERHEAD_BYTES = 14  # the Ethernet header, which tbf counts
_BRIDGE_ADDRESS = "10.77.0.254"  # behind those of the hosts
ETHERNET_MTU = 1500
_MAX_RELAY_MTU = 65000
_RELAY_PACKET_S = 0.0004  # serialising one packet may take this long: bounds packets per second
_MIN_QUEUED_FRAMES = 10
_NETEM_HEADROOM = 2.0
_MIN_NETEM_PACKETS = 1000
UNLIMITED_BYTES_PER_S = 12.5e9  # 100 Gbit/s, to size queues where no rate was asked for


def htb_commands(
    spec: LabSpec, rate: float, *, device: str, parent: str = "root", sizes: tuple[int, int]
) -> tuple[str, ...]:
    """Return what ``tc -batch`` reads to give one direction of a link its rate and classes.

    A tree of token buckets: the whole link's rate above, one leaf per class below. A leaf borrows
    what the link has left in strict order of its class, and has a hundredth of the rate for itself,
    so that no job waits for ever. Class 0 goes first.
    """
    classes, (burst, held) = spec.classes, sizes
    bits, own = round(rate * 8), round(rate * 8 * _OWN_SHARE)
    bursts = f"burst {burst}b cburst {burst}b quantum {_QUANTUM_BYTES}"
    lines = [
        f"qdisc add dev {device} {parent} handle 8: htb default {_leaf(classes - 1)}",
        f"class add dev {device} parent 8: classid 8:1 htb rate {bits}bit {bursts}",
    ]
    for priority in range(classes):
        share = bits - own * (classes - 1) if priority == 0 else own
        lines.append(
            f"class add dev {device} parent 8:1 classid 8:{_leaf(priority)} htb rate {share}bit "
            f"ceil {bits}bit prio {priority} {bursts}"
        )
    lines += [
        f"qdisc add dev {device} parent 8:{_leaf(priority)} bfifo limit {held}"
        for priority in range(classes)
    ]
    lines += [
        f"filter add dev {device} parent 8: protocol ip prio {order} u32 {match} "
        f"flowid 8:{_leaf(priority)}"
        for order, match, priority in _matches(spec)
    ]
    return tuple(lines)


def _matches(spec: LabSpec) -> Iterator[tuple[int, str, int]]:
    """Yield order, condition and class of each filter; the rest is of the last class.

    The class selector (RFC 2474, the socket option ``IP_TOS``) counts before the host that sent
    it; for what an aggregating switch sends, the host that it goes to counts.
    """
    for priority in range(spec.classes - 1):
        tos = class_tos(priority, spec.classes)
        yield 1, f"match ip dsfield {tos:#x} {_SELECTOR_MASK:#x}", priority
    for host, priority in sorted(spec.host_classes.items()):
        yield 2, f"match ip src {address_of(host)}/32", priority
        if spec.aggregators:
            answers = f"match ip src {AGGREGATOR_NETWORK} match ip dst {address_of(host)}/32"
            yield 3, answers, priority


def _leaf(priority: int) -> str:
    # tc reads and shows numbers of classes in base 16.
    return f"{_FIRST_LEAF + priority:x}"


@dataclass(frozen=True)
class Step:
    """One command in one namespace."""

    namespace: str
    argv: tuple[str, ...]
    lines: tuple[str, ...] = ()  # what the command reads

    @classmethod
    def of(cls, namespace: str, command: str) -> Step:
        return cls(namespace, tuple(command.split()))


def host_name(host: int) -> str:
    return f"host{host}"


def address_of(host: int) -> str:
    return f"10.77.0.{host + 1}"


def aggregator_address(spec: LabSpec, node: str) -> str:
    return f"10.79.0.{sorted(spec.aggregators).index(node) + 1}"


def relay_mtu(spec: LabSpec) -> int:
    """Return the largest packet where the relay carries the traffic.

    The relay's cost is per packet, so packets grow with the rate, up to the size that takes
    0.4 ms on the slowest link.
    """
    if spec.mtu is not None:
        return spec.mtu
    rates = [rate for host in range(spec.hosts) if (rate := spec.rate_of(host)) is not None]
    if not rates:
        return _MAX_RELAY_MTU
    return round(min(max(min(rates) * _RELAY_PACKET_S, ETHERNET_MTU), _MAX_RELAY_MTU))


def queue_bytes(spec: LabSpec, rate_bytes_per_s: float, *, mtu: int) -> int:
    """Return the bytes that a link's queue holds before it drops."""
    frames = _MIN_QUEUED_FRAMES * (mtu + FRAME_OVERHEAD_BYTES)
    return round(max(rate_bytes_per_s * spec.queue_s, frames))


def plan_bridge(spec: LabSpec, *, netem: bool = False) -> list[Step]:
    """Plan hosts on a bridge over veth pairs, shaped by ``tbf`` and, where asked, ``netem``."""
    steps = [Step.of(SWITCH, "ip link add br0 type bridge"), Step.of(SWITCH, "ip link set br0 up")]
    for host in range(spec.hosts):
        steps += _plan_host(spec, host, netem=netem)
    if spec.aggregators:
        steps.append(Step.of(SWITCH, f"ip addr add {_BRIDGE_ADDRESS}/24 dev br0"))
        steps.append(Step.of(SWITCH, f"ip addr add {aggregator_address(spec, SWITCH)}/32 dev br0"))
        steps += [
            Step.of(host_name(host), f"ip route add {AGGREGATOR_NETWORK} via {_BRIDGE_ADDRESS}")
            for host in range(spec.hosts)
        ]
    return steps


def plan_relay(spec: LabSpec) -> list[Step]:
    """Plan addresses and sizes of the TUN devices ``eth0``, which the relay's starter has made."""
    steps = []
    for host in range(spec.hosts):
        name = host_name(host)
        steps += [
            Step.of(name, "ip link set lo up"),
            Step.of(name, f"ip addr add {address_of(host)}/24 dev eth0"),
            Step.of(name, f"ip link set eth0 mtu {relay_mtu(spec)} txqueuelen 1000 up"),
        ]
    return steps


def _plan_host(spec: LabSpec, host: int, *, netem: bool) -> list[Step]:
    """Return the steps that make a host's cable and shape both its directions."""
    name, mtu, parent = host_name(host), spec.mtu or ETHERNET_MTU, "root"
    steps = [
        Step.of(SWITCH, f"ip link add port{host} type veth peer name eth0 netns @{name}"),
        Step.of(SWITCH, f"ip link set port{host} mtu {mtu} master br0 up"),
        Step.of(name, "ip link set lo up"),
        Step.of(name, f"ip addr add {address_of(host)}/24 dev eth0"),
        Step.of(name, f"ip link set eth0 mtu {mtu} up"),
    ]
    if netem and spec.delays_or_loses:
        if spec.loss > 0:
            # netem would drop a whole offloaded super-packet as if it were one packet.
            steps.append(Step.of(name, "ip link set eth0 gso_max_segs 1"))
        steps.append(Step.of(name, f"tc qdisc add dev eth0 root handle 1: {_netem(spec, host)}"))
        parent = "parent 1:1"
    rate = spec.rate_of(host)
    if rate is not None:
        steps += [
            shape_link(spec, rate, namespace=name, device="eth0", parent=parent),
            shape_link(spec, rate, namespace=SWITCH, device=f"port{host}"),
        ]
    return steps


def shape_link(
    spec: LabSpec, rate: float, *, namespace: str, device: str, parent: str = "root"
) -> Step:
    """Give one direction of a link its rate: by ``tbf``, or ``htb`` where it has classes.

    A burst passes at once, and ``queue_s`` seconds more are held.
    """
    mtu = spec.mtu or ETHERNET_MTU
    burst = max(rate * BURST_S, 2 * (mtu + FRAME_OVERHEAD_BYTES))
    # Cut into frames, one of the kernel's large packets would wake the receiver for each, and take
    # processor time from what trains beside it that a network card would not take.
    if rate * _LARGE_PACKET_S >= _LARGE_PACKET_BYTES:
        burst = max(burst, _LARGE_PACKET_BYTES)
    held = queue_bytes(spec, rate, mtu=mtu)
    if spec.classes > 1:
        sizes = (round(burst), round(held + burst))  # tbf's limit is latency and burst as well
        lines = htb_commands(spec, rate, device=device, parent=parent, sizes=sizes)
        return Step(namespace, ("tc", "-batch", "-"), lines)
    latency_us = round(held / rate * 1e6)
    tbf = f"tbf rate {round(rate * 8)}bit burst {round(burst)}b latency {latency_us}us"
    return Step.of(namespace, f"tc qdisc add dev {device} {parent} {tbf}")


def _netem(spec: LabSpec, host: int) -> str:
    rate = spec.rate_of(host) or UNLIMITED_BYTES_PER_S
    in_flight_bytes = rate * (spec.delay_s + spec.jitter_s)
    packets = in_flight_bytes / (spec.mtu or ETHERNET_MTU) * _NETEM_HEADROOM
    words = [f"netem limit {round(max(packets, _MIN_NETEM_PACKETS))}"]
    if spec.delay_s > 0:
        words.append(f"delay {round(spec.delay_s * 1e6)}us")
        if spec.jitter_s > 0:
            words.append(f"{round(spec.jitter_s * 1e6)}us")
    if spec.loss > 0:
        words.append(f"loss {spec.loss * 100:g}%")
    return " ".join(words)


_FIRST_TABLE = 1000  # of routes; the kernel's own have numbers up to 255
_SETTINGS = {"ip_forward": 1, "conf/all/rp_filter": 0, "conf/default/rp_filter": 0}


def plan_topology(spec: LabSpec) -> tuple[int, list[Step]]:
    """Return the number of namespaces besides the hosts' (node0, node1, ...), and the steps.

    Every node is a namespace and every link a pair of cables with a small network of its own.
    Hosts keep their addresses, on an interface ``eth0`` that leads nowhere. Nodes pass on what is
    not for them, hosts too, on the topology's own shortest routes: what is predicted is run.
    """
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
    plan = _TopologyPlan(spec)
    return plan.names[plan.topology.index(node)]


class _TopologyPlan:
    """Names of the namespaces, joined pairs of nodes, and the way to each address."""

    def __init__(self, spec: LabSpec) -> None:
        from fivefold.network.topology import read_topology  # noqa: PLC0415 - only here it needs numpy

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


_PORT = 29500
_DEFAULTS = {
    "OMP_NUM_THREADS": "1",  # ranks share the cores; more threads than cores only wait
    "PYTHONUNBUFFERED": "1",  # so that logs are complete also when a rank is killed
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Request of the caller to the supervisor."""

    spec: LabSpec
    facts: dict[str, Any]  # what the ranks may know of their links
    command: list[str]  # what each rank runs
    port: int | None  # of the rendezvous over loopback; None where hosts are namespaces
    timeout_s: float | None
    grace_s: float
    log_folder: str  # gets the ranks' output
    run_folder: str  # private files of this run
    stream: bool  # whether output is also shown


def lab_facts(spec: LabSpec, means: str | None, reason: str | None = None) -> dict[str, Any]:
    """Return what the ranks may know of their links; becomes the variable ``FIVEFOLD_LAB``.

    ``means`` is ``tbf``, ``htb``, either with ``+netem``, or ``relay``; None where the links are
    unshaped, and ``reason`` says why.
    """
    names = ("hosts", "nproc_per_host", "rate_bytes_per_s", "delay_s", "jitter_s", "loss", "mtu")
    return {
        **{name: getattr(spec, name) for name in (*names, "topology", "classes")},
        "host_rates_bytes_per_s": {str(host): spec.rate_of(host) for host in spec.host_rates},
        "host_classes": {str(host): own for host, own in spec.host_classes.items()},
        "shaped": means is not None,
        "means": means,
        "reason": reason,
        "aggregation": {
            node: f"{aggregator_address(spec, node)}:{AGGREGATOR_PORT}"
            for node in sorted(spec.aggregators)
        },
    }


def rank_environment(
    rank: int,
    spec: LabSpec,
    facts: Mapping[str, Any],
    *,
    base: Mapping[str, str],
    port: int | None = None,
) -> dict[str, str]:
    """Return the environment of one rank; with a port the ranks meet over loopback."""
    host, local_rank = divmod(rank, spec.nproc_per_host)
    interface = "eth0" if port is None else "lo"
    # A torchrun around the lab must not make its ranks wait for that torchrun's store.
    kept = {key: value for key, value in base.items() if not key.startswith("TORCHELASTIC_")}
    own = {
        "RANK": rank,
        "WORLD_SIZE": spec.world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": spec.nproc_per_host,
        "GROUP_RANK": host,
        "GROUP_WORLD_SIZE": spec.hosts,
        "NODE_RANK": host,
        "MASTER_ADDR": address_of(0) if port is None else "127.0.0.1",
        "MASTER_PORT": _PORT if port is None else port,
        "GLOO_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
        "FIVEFOLD_LAB": json.dumps(facts),
    }
    if len(facts["aggregation"]) == 1:  # the backend "fivefold" then sums there without being told
        kept = {"FIVEFOLD_AGGREGATION": next(iter(facts["aggregation"].values())), **kept}
    return {**_DEFAULTS, **kept, **{key: str(value) for key, value in own.items()}}
