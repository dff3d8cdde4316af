"""Rail fabrics: port i of every host is on switch i, so that equal GPUs are one switch apart.

They differ in what joins the rails: spines (rail-optimized), nothing but the hosts' own NVLink
(rail-only), or two separate planes with a pair of switches per rail (HPN).
"""

from __future__ import annotations

from fivefold.network.topology._build import Builder, Wire, check_count
from fivefold.network.topology._clusters import Port, check_oversubscription
from fivefold.network.topology._hosts import HostSpec, add_host
from fivefold.network.topology._regular import DEFAULT_BANDWIDTH
from fivefold.network.topology._topology import Topology
from fivefold.units import parse_bytes_per_s

EIGHT_GPUS = HostSpec(gpus=8)


def rail_only(
    hosts: int,
    *,
    host: HostSpec = EIGHT_GPUS,
    bandwidth: str | float = DEFAULT_BANDWIDTH,
    latency: str | float = 0.0,
) -> Topology:
    """One switch per rail and no spine: GPUs of different rails meet inside hosts only.

    Args:
        hosts: Number of hosts.
        host: What a host is like; its ports are the rails.
        bandwidth: Of each port.
        latency: Of each link outside the hosts.

    Returns:
        The topology.

    References:
        Wang et al.: Rail-only, arXiv 2307.12169.

    Examples:
        >>> fabric = rail_only(4)
        >>> fabric.num_ranks, len(fabric.shortest_route(0, 8)), len(fabric.shortest_route(0, 9))
        (32, 2, 4)
    """
    check_count("hosts", hosts)
    builder, wire = Builder(), Wire(bandwidth, latency)
    ports = [add_host(builder, f"host{index}", host) for index in range(hosts)]
    rails = builder.row("rail", host.ports, kind="tor")
    for ends in ports:
        for rail, end in zip(rails, ends, strict=True):
            builder.join(end, rail, wire)
    return builder.done(f"rail_only:{hosts}")


def rail_optimized(
    hosts: int,
    *,
    spines: int,
    hosts_per_pod: int | None = None,
    host: HostSpec = EIGHT_GPUS,
    bandwidth: str | float = DEFAULT_BANDWIDTH,
    latency: str | float = 0.0,
    oversubscription: float = 1.0,
) -> Topology:
    """One leaf switch per rail and pod, and every leaf on every spine.

    Args:
        hosts: Number of hosts.
        spines: Spine switches.
        hosts_per_pod: Hosts that share leaf switches; None for all.
        host: What a host is like; its ports are the rails.
        bandwidth: Of each port.
        latency: Of each link outside the hosts.
        oversubscription: A leaf's capacity downwards over that upwards.

    Returns:
        The topology.

    Examples:
        >>> fabric = rail_optimized(4, spines=4, hosts_per_pod=2)
        >>> fabric.num_ranks, fabric.num_nodes, len(fabric.shortest_route(0, 8))
        (32, 56, 2)
    """
    check_count("hosts", hosts)
    check_count("spines", spines)
    per_pod = hosts if hosts_per_pod is None else hosts_per_pod
    check_count("hosts_per_pod", per_pod)
    check_oversubscription(oversubscription)
    builder, port = Builder(), Port(bandwidth, latency, oversubscription)
    ports = [add_host(builder, f"host{index}", host) for index in range(hosts)]
    leaves: list[str] = []
    for pod, first in enumerate(range(0, hosts, per_pod)):
        rails = builder.row(f"pod{pod}/rail", host.ports, kind="tor")
        leaves += rails
        for ends in ports[first : first + per_pod]:
            for rail, end in zip(rails, ends, strict=True):
                builder.join(end, rail, port.wire)
    uplink = port.uplink(min(per_pod, hosts), uplinks=spines)
    for spine in builder.row("spine", spines, kind="core"):
        for leaf in leaves:
            builder.join(leaf, spine, uplink)
    return builder.done(f"rail_optimized:{hosts}")


def dual_plane(
    hosts: int,
    *,
    hosts_per_segment: int,
    aggs_per_plane: int,
    host: HostSpec = EIGHT_GPUS,
    bandwidth: str | float = DEFAULT_BANDWIDTH,
    latency: str | float = 0.0,
    oversubscription: float = 1.0,
) -> Topology:
    """Two planes: each port is split over a pair of rail switches, one in each plane.

    The planes meet in the hosts only. This is the pod of Alibaba HPN 7.0 (there: 128 hosts of 8
    NICs with two 200 Gbit/s ports per segment, 60 aggregation switches per plane).

    Args:
        hosts: Number of hosts.
        hosts_per_segment: Hosts that share rail switches.
        aggs_per_plane: Aggregation switches in each plane.
        host: What a host is like; its ports are the rails.
        bandwidth: Of each port, half of it in each plane.
        latency: Of each link outside the hosts.
        oversubscription: A rail switch's capacity downwards over that upwards.

    Returns:
        The topology.

    References:
        Qian et al.: Alibaba HPN, SIGCOMM 2024.

    Examples:
        >>> fabric = dual_plane(4, hosts_per_segment=2, aggs_per_plane=2)
        >>> fabric.num_ranks, len(fabric.shortest_route(0, 8)), len(fabric.shortest_route(0, 24))
        (32, 2, 4)
    """
    for what, value in (
        ("hosts", hosts),
        ("hosts_per_segment", hosts_per_segment),
        ("aggs_per_plane", aggs_per_plane),
    ):
        check_count(what, value)
    check_oversubscription(oversubscription)
    builder, half = Builder(), Port(parse_bytes_per_s(bandwidth) / 2, latency, oversubscription)
    ports = [add_host(builder, f"host{index}", host) for index in range(hosts)]
    switches: tuple[list[str], list[str]] = ([], [])
    for segment, first in enumerate(range(0, hosts, hosts_per_segment)):
        for plane in range(len(switches)):
            prefix = f"segment{segment}/plane{plane}/rail"
            rails = builder.row(prefix, host.ports, kind="tor")
            switches[plane].extend(rails)
            for ends in ports[first : first + hosts_per_segment]:
                for rail, end in zip(rails, ends, strict=True):
                    builder.join(end, rail, half.wire)
    uplink = half.uplink(min(hosts_per_segment, hosts), uplinks=aggs_per_plane)
    for plane, in_plane in enumerate(switches):
        for agg in builder.row(f"plane{plane}/agg", aggs_per_plane, kind="agg"):
            for rail in in_plane:
                builder.join(rail, agg, uplink)
    return builder.done(f"dual_plane:{hosts}")
