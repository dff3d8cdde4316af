"""The plan of a cluster: which ``ip`` and ``tc`` command runs in which namespace. Pure data.

A plan is a list of steps; whoever carries it out replaces an argument ``@host0`` by a path of
that host's network namespace. The switch is a bridge in a namespace of its own. This module runs
nothing and knows nothing of processes.

Queues: ``tbf`` lets a burst of ``BURST_S`` seconds of the rate (at least two frames) pass at once
and holds at most ``queue_s`` seconds more. Where one of the kernel's large packets takes less than
``LARGE_PACKET_S``, the burst lets it pass whole: cut into frames it would wake the receiver for
each, and take processor time from what trains beside it (120 ms per 11 MB all-reduce were seen)
that a network card would not take. Both directions of a link are shaped: the uplink where
it leaves the host, the downlink where it leaves the switch.
"""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.lab._classes import htb_commands
from fivefold.lab._spec import LabSpec

SWITCH = "switch"
AGGREGATOR_PORT = 5900
AGGREGATOR_NETWORK = "10.79.0.0/16"
BURST_S = 0.001
LARGE_PACKET_S = 0.02
_LARGE_PACKET_BYTES = 66_000  # Linux joins up to 64 KiB of a stream, and headers, into one packet
FRAME_OVERHEAD_BYTES = 14  # the Ethernet header, which tbf counts
_BRIDGE_ADDRESS = "10.77.0.254"  # behind those of the hosts
_ETHERNET_MTU = 1500
_MAX_RELAY_MTU = 65000
_RELAY_PACKET_S = 0.0004  # serialising one packet may take this long: bounds packets per second
_MIN_QUEUED_FRAMES = 10
_NETEM_HEADROOM = 2.0
_MIN_NETEM_PACKETS = 1000
_UNLIMITED_BYTES_PER_S = 12.5e9  # 100 Gbit/s, to size queues where no rate was asked for


@dataclass(frozen=True)
class Step:
    """One command in one namespace.

    Examples:
        >>> Step(SWITCH, ("ip", "link", "set", "lo", "up")).namespace
        'switch'
    """

    namespace: str
    argv: tuple[str, ...]
    lines: tuple[str, ...] = ()  # what the command reads


def host_name(host: int) -> str:
    """Name of a host and of its namespace.

    Examples:
        >>> host_name(0)
        'host0'
    """
    return f"host{host}"


def address_of(host: int) -> str:
    """IPv4 address of a host.

    Examples:
        >>> address_of(0)
        '10.77.0.1'
    """
    return f"10.77.0.{host + 1}"


def aggregator_address(spec: LabSpec, node: str) -> str:
    """IPv4 address of a switch that sums.

    Examples:
        >>> aggregator_address(LabSpec(aggregators={"switch": {}}), "switch")
        '10.79.0.1'
    """
    return f"10.79.0.{sorted(spec.aggregators).index(node) + 1}"


def relay_mtu(spec: LabSpec) -> int:
    """Largest packet where the relay carries the traffic.

    The relay's cost is per packet, so packets grow with the rate, up to the size that takes
    0.4 ms on the slowest link.

    Examples:
        >>> relay_mtu(LabSpec(rate="10Mbit/s")), relay_mtu(LabSpec(rate="200Mbit/s"))
        (1500, 10000)
    """
    if spec.mtu is not None:
        return spec.mtu
    rates = [rate for host in range(spec.hosts) if (rate := spec.rate_of(host)) is not None]
    if not rates:
        return _MAX_RELAY_MTU
    return round(min(max(min(rates) * _RELAY_PACKET_S, _ETHERNET_MTU), _MAX_RELAY_MTU))


def queue_bytes(spec: LabSpec, rate_bytes_per_s: float, *, mtu: int) -> int:
    """Bytes that a link's queue holds before it drops.

    Examples:
        >>> queue_bytes(LabSpec(queue="50ms"), 25e6, mtu=1500)
        1250000
    """
    frames = _MIN_QUEUED_FRAMES * (mtu + FRAME_OVERHEAD_BYTES)
    return round(max(rate_bytes_per_s * spec.queue_s, frames))


def plan_bridge(spec: LabSpec, *, netem: bool = False) -> list[Step]:
    """Hosts on a bridge over veth pairs, shaped by ``tbf`` and, where asked, ``netem``.

    Args:
        spec: The cluster.
        netem: Whether delay, jitter and loss are made by ``netem`` on the uplinks.

    Returns:
        The steps in order.

    Examples:
        >>> plan_bridge(LabSpec(hosts=1))[0].argv
        ('ip', 'link', 'add', 'br0', 'type', 'bridge')
    """
    steps = [
        _step(SWITCH, "ip link add br0 type bridge"),
        _step(SWITCH, "ip link set br0 up"),
    ]
    for host in range(spec.hosts):
        steps += _plan_cable(spec, host)
        steps += _plan_uplink(spec, host, netem=netem)
        rate = spec.rate_of(host)
        if rate is not None:
            steps.append(shape_link(spec, rate, namespace=SWITCH, device=f"port{host}"))
    if spec.aggregators:
        steps.append(_step(SWITCH, f"ip addr add {_BRIDGE_ADDRESS}/24 dev br0"))
        steps.append(_step(SWITCH, f"ip addr add {aggregator_address(spec, SWITCH)}/32 dev br0"))
        steps += [
            _step(host_name(host), f"ip route add {AGGREGATOR_NETWORK} via {_BRIDGE_ADDRESS}")
            for host in range(spec.hosts)
        ]
    return steps


def plan_relay(spec: LabSpec) -> list[Step]:
    """Addresses and sizes of the TUN devices ``eth0``, which the relay's starter has made.

    Examples:
        >>> len(plan_relay(LabSpec(hosts=2, delay="5ms")))
        6
    """
    steps = []
    for host in range(spec.hosts):
        name = host_name(host)
        steps += [
            _step(name, "ip link set lo up"),
            _step(name, f"ip addr add {address_of(host)}/24 dev eth0"),
            _step(name, f"ip link set eth0 mtu {relay_mtu(spec)} txqueuelen 1000 up"),
        ]
    return steps


def _plan_cable(spec: LabSpec, host: int) -> list[Step]:
    name, mtu = host_name(host), spec.mtu or _ETHERNET_MTU
    return [
        _step(SWITCH, f"ip link add port{host} type veth peer name eth0 netns @{name}"),
        _step(SWITCH, f"ip link set port{host} mtu {mtu} master br0 up"),
        _step(name, "ip link set lo up"),
        _step(name, f"ip addr add {address_of(host)}/24 dev eth0"),
        _step(name, f"ip link set eth0 mtu {mtu} up"),
    ]


def _plan_uplink(spec: LabSpec, host: int, *, netem: bool) -> list[Step]:
    name, parent, steps = host_name(host), "root", []
    if netem and spec.delays_or_loses:
        if spec.loss > 0:
            # netem would drop a whole offloaded super-packet as if it were one packet.
            steps.append(_step(name, "ip link set eth0 gso_max_segs 1"))
        steps.append(_step(name, f"tc qdisc add dev eth0 root handle 1: {_netem(spec, host)}"))
        parent = "parent 1:1"
    rate = spec.rate_of(host)
    if rate is not None:
        steps.append(shape_link(spec, rate, namespace=name, device="eth0", parent=parent))
    return steps


def shape_link(
    spec: LabSpec, rate: float, *, namespace: str, device: str, parent: str = "root"
) -> Step:
    """What gives one direction of a link its rate: ``tbf``, or ``htb`` where it has classes.

    Args:
        spec: The cluster: its packet size, queue and classes.
        rate: Rate in bytes per second.
        namespace: Where the link is left.
        device: The interface there.
        parent: What the queue hangs below.

    Returns:
        The step.

    Examples:
        >>> " ".join(shape_link(LabSpec(), 1e6, namespace="host0", device="eth0").argv)
        'tc qdisc add dev eth0 root tbf rate 8000000bit burst 3028b latency 50000us'
    """
    mtu = spec.mtu or _ETHERNET_MTU
    burst = max(rate * BURST_S, 2 * (mtu + FRAME_OVERHEAD_BYTES))
    if rate * LARGE_PACKET_S >= _LARGE_PACKET_BYTES:
        burst = max(burst, _LARGE_PACKET_BYTES)
    held = queue_bytes(spec, rate, mtu=mtu)
    if spec.classes > 1:
        sizes = (round(burst), round(held + burst))  # tbf's limit is latency and burst as well
        lines = htb_commands(spec, rate, device=device, parent=parent, sizes=sizes)
        return Step(namespace, ("tc", "-batch", "-"), lines)
    latency_us = round(held / rate * 1e6)
    tbf = f"tbf rate {round(rate * 8)}bit burst {round(burst)}b latency {latency_us}us"
    return _step(namespace, f"tc qdisc add dev {device} {parent} {tbf}")


def _netem(spec: LabSpec, host: int) -> str:
    rate = spec.rate_of(host) or _UNLIMITED_BYTES_PER_S
    in_flight_bytes = rate * (spec.delay_s + spec.jitter_s)
    packets = in_flight_bytes / (spec.mtu or _ETHERNET_MTU) * _NETEM_HEADROOM
    words = [f"netem limit {round(max(packets, _MIN_NETEM_PACKETS))}"]
    if spec.delay_s > 0:
        words.append(f"delay {round(spec.delay_s * 1e6)}us")
        if spec.jitter_s > 0:
            words.append(f"{round(spec.jitter_s * 1e6)}us")
    if spec.loss > 0:
        words.append(f"loss {spec.loss * 100:g}%")
    return " ".join(words)


def _step(namespace: str, command: str) -> Step:
    return Step(namespace, tuple(command.split()))
