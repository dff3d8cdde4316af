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

Each link with priority classes has a tree of token buckets (``htb``): the whole link's rate above,
one leaf per class below. A leaf borrows what the link has left in strict order of its class, and
has a hundredth of the rate for itself, so that no job waits for ever. Class 0 goes first, the last
class last. A packet's class is, in this order: that of its class selector (RFC 2474), which any
program may set with the socket option ``IP_TOS``; that of the host that sent it; for what an
aggregating switch sends, that of the host it goes to; else the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fivefold.lab._spec import LabSpec, class_tos

if TYPE_CHECKING:
    from collections.abc import Iterator


OWN_SHARE = 0.01
_SELECTOR_MASK = 0xE0
_QUANTUM_BYTES = 66_000  # one large packet; only classes of one priority would take turns
_FIRST_LEAF = 16
SWITCH = "switch"
AGGREGATOR_PORT = 5900
AGGREGATOR_NETWORK = "10.79.0.0/16"
BURST_S = 0.001
LARGE_PACKET_S = 0.02
_LARGE_PACKET_BYTES = 66_000  # Linux joins up to 64 KiB of a stream, and headers, into one packet
FRAME_OVERHEAD_BYTES = 14  # the Ethernet header, which tbf counts
_BRIDGE_ADDRESS = "10.77.0.254"  # behind those of the hosts
ETHERNET_MTU = 1500
_MAX_RELAY_MTU = 65000
_RELAY_PACKET_S = 0.0004  # serialising one packet may take this long: bounds packets per second
_MIN_QUEUED_FRAMES = 10
_NETEM_HEADROOM = 2.0
_MIN_NETEM_PACKETS = 1000
_UNLIMITED_BYTES_PER_S = 12.5e9  # 100 Gbit/s, to size queues where no rate was asked for


def htb_commands(
    spec: LabSpec, rate: float, *, device: str, parent: str = "root", sizes: tuple[int, int]
) -> tuple[str, ...]:
    """Return what ``tc -batch`` reads to give one direction of a link its rate and classes."""
    classes, (burst, held) = spec.classes, sizes
    bits, own = round(rate * 8), round(rate * 8 * OWN_SHARE)
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
    """Yield order, condition and class of each filter; the rest is of the last class."""
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
        """Return a step from the words of its command."""
        return cls(namespace, tuple(command.split()))


def host_name(host: int) -> str:
    """Return the name of a host and of its namespace."""
    return f"host{host}"


def address_of(host: int) -> str:
    """Return IPv4 address of a host."""
    return f"10.77.0.{host + 1}"


def aggregator_address(spec: LabSpec, node: str) -> str:
    """Return IPv4 address of an aggregating switch."""
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
    steps = [
        Step.of(SWITCH, "ip link add br0 type bridge"),
        Step.of(SWITCH, "ip link set br0 up"),
    ]
    for host in range(spec.hosts):
        steps += _plan_cable(spec, host)
        steps += _plan_uplink(spec, host, netem=netem)
        rate = spec.rate_of(host)
        if rate is not None:
            steps.append(shape_link(spec, rate, namespace=SWITCH, device=f"port{host}"))
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


def _plan_cable(spec: LabSpec, host: int) -> list[Step]:
    name, mtu = host_name(host), spec.mtu or ETHERNET_MTU
    return [
        Step.of(SWITCH, f"ip link add port{host} type veth peer name eth0 netns @{name}"),
        Step.of(SWITCH, f"ip link set port{host} mtu {mtu} master br0 up"),
        Step.of(name, "ip link set lo up"),
        Step.of(name, f"ip addr add {address_of(host)}/24 dev eth0"),
        Step.of(name, f"ip link set eth0 mtu {mtu} up"),
    ]


def _plan_uplink(spec: LabSpec, host: int, *, netem: bool) -> list[Step]:
    name, parent, steps = host_name(host), "root", []
    if netem and spec.delays_or_loses:
        if spec.loss > 0:
            # netem would drop a whole offloaded super-packet as if it were one packet.
            steps.append(Step.of(name, "ip link set eth0 gso_max_segs 1"))
        steps.append(Step.of(name, f"tc qdisc add dev eth0 root handle 1: {_netem(spec, host)}"))
        parent = "parent 1:1"
    rate = spec.rate_of(host)
    if rate is not None:
        steps.append(shape_link(spec, rate, namespace=name, device="eth0", parent=parent))
    return steps


def shape_link(
    spec: LabSpec, rate: float, *, namespace: str, device: str, parent: str = "root"
) -> Step:
    """Give one direction of a link its rate: by ``tbf``, or ``htb`` where it has classes."""
    mtu = spec.mtu or ETHERNET_MTU
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
    return Step.of(namespace, f"tc qdisc add dev {device} {parent} {tbf}")


def _netem(spec: LabSpec, host: int) -> str:
    rate = spec.rate_of(host) or _UNLIMITED_BYTES_PER_S
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
