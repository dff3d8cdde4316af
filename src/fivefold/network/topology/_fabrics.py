"""Switched clusters: leaf-spine, fat-tree, Clos, and rail fabrics (equal GPUs one switch apart).

Rates of the fabric follow from the hosts' ports: at an oversubscription of 1 a switch has as much
capacity upwards as downwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fivefold.errors import ConfigurationError, require_number, require_one_of
from fivefold.network.topology._build import Builder, HostSpec, Wire, add_host, check_count
from fivefold.network.topology._direct import DEFAULT_BANDWIDTH
from fivefold.network.topology._graph import NodeKind
from fivefold.network.topology._topology import Topology
from fivefold.units import parse_bytes_per_s

EIGHT_GPUS = HostSpec(gpus=8)


@dataclass(frozen=True)
class Port:
    """A host's link to its switch and how the fabric scales with it.

    Args:
        bandwidth: Rate of the link in each direction.
        latency: Of this link and of all links of the fabric.
        oversubscription: A rack switch's capacity downwards over that upwards.

    Raises:
        ConfigurationError: The oversubscription is no number above zero.
    """

    bandwidth: str | float = DEFAULT_BANDWIDTH
    latency: str | float = 0.0
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        require_number(
            "oversubscription",
            self.oversubscription,
            positive=True,
            hint="1 is non-blocking, 4 gives a quarter of the capacity upwards",
        )

    @cached_property
    def wire(self) -> Wire:
        """Return the link itself."""
        return Wire(self.bandwidth, self.latency)

    def uplink(self, ports_below: float, *, uplinks: int) -> Wire:
        """Return each of a switch's uplinks, where so many host ports lie below it."""
        below = ports_below * parse_bytes_per_s(self.bandwidth)
        return Wire(below / uplinks / self.oversubscription, self.latency)


PORT = Port()


def leaf_spine(
    hosts: int,
    *,
    leaves: int,
    spines: int,
    host: HostSpec | None = None,
    bandwidth: str | float = DEFAULT_BANDWIDTH,
    latency: str | float = 0.0,
    oversubscription: float = 1.0,
) -> Topology:
    """Build hosts on leaf switches, every leaf on every spine.

    Args:
        hosts: Number of hosts, dealt to the leaves in order, as evenly as can be.
        leaves: Leaf switches (kind ``tor``).
        spines: Spine switches (kind ``core``).
        host: What a host is like; None for one GPU.
        bandwidth: Of each host port.
        latency: Of each link outside the hosts.
        oversubscription: A leaf's capacity downwards over that upwards.

    Examples:
        >>> cluster = leaf_spine(8, leaves=2, spines=2)
        >>> cluster.num_ranks, cluster.num_links, len(cluster.shortest_route(0, 7))
        (8, 24, 4)
    """
    for what, value in (("hosts", hosts), ("leaves", leaves), ("spines", spines)):
        check_count(what, value)
    port, spec, builder = Port(bandwidth, latency, oversubscription), host or HostSpec(), Builder()
    names = [f"host{number}" for number in range(hosts)]
    share, more = divmod(hosts, leaves)
    tops: list[str] = []
    for leaf in range(leaves):
        first = leaf * share + min(leaf, more)
        rack = names[first : first + share + (leaf < more)]
        tops.append(_add_rack(builder, f"leaf{leaf}", rack, spec, port))
    # All uplinks are those of a full rack, so that racks differ in hosts only.
    uplink = port.uplink(-(-hosts // leaves) * spec.ports, uplinks=spines)
    _add_tier(builder, "spine", spines, kind="core", below=tops, wire=uplink)
    return builder.done(f"leaf_spine:{hosts}x{leaves}x{spines}")


def fat_tree(
    k: int,
    *,
    host: HostSpec | None = None,
    bandwidth: str | float = DEFAULT_BANDWIDTH,
    latency: str | float = 0.0,
    oversubscription: float = 1.0,
) -> Topology:
    """Build the k-ary fat-tree: k pods of k/2 racks with k/2 hosts, (k/2)^2 core switches.

    Aggregation switch j of each pod is on cores j k/2 to (j+1) k/2 - 1. A switch has ``k`` ports;
    the other arguments are as of ``leaf_spine``.

    Raises:
        ConfigurationError: ``k`` is odd or below 2.

    References:
        Al-Fares, Loukissas, Vahdat: A scalable, commodity data center network architecture,
        SIGCOMM 2008.

    Examples:
        >>> tree = fat_tree(4)
        >>> tree.num_ranks, tree.num_nodes, tree.num_links
        (16, 36, 96)
    """
    check_count("k of a fat-tree", k, low=2)
    if k % 2:
        raise ConfigurationError(
            f"k of a fat-tree must be even; got {k}", hint=f"use {k - 1} or {k + 1}"
        )
    half = k // 2
    return clos(
        (k, half, half),
        aggs=half,
        cores=half * half,
        host=host,
        port=Port(bandwidth, latency, oversubscription),
        name=f"fat_tree:{k}",
    )


def clos(
    shape: tuple[int, int, int],
    *,
    aggs: int,
    cores: int,
    host: HostSpec | None = None,
    port: Port = PORT,
    planes: Literal["split", "full"] = "split",
    name: str = "",
) -> Topology:
    """Build a three-tier Clos: pods of racks of hosts, aggregation switches per pod, core switches.

    Args:
        shape: Pods, racks per pod, hosts per rack.
        aggs: Aggregation switches per pod; every rack switch of the pod is on each.
        cores: Core switches of the cluster.
        host: What a host is like; None for one GPU.
        port: Rate and latency of a host's port, and the oversubscription of the rack switches.
        planes: ``split`` gives aggregation switch j its own share of the cores, as in a fat-tree;
            ``full`` puts every aggregation switch on every core.
        name: Name of the topology.

    Raises:
        ConfigurationError: ``planes`` is unknown, or the cores cannot be split evenly.

    Examples:
        >>> clos((2, 2, 4), aggs=2, cores=2).num_ranks
        16
    """
    if not isinstance(shape, Collection) or len(shape) != 3:
        raise ConfigurationError(
            f"clos needs pods x racks x hosts; got {shape!r}",
            hint="such as (4, 8, 16), or clos:4x8x16,... in one line",
        )
    pods, racks, hosts = shape
    for what, value in zip(("pods", "racks", "hosts"), shape, strict=True):
        check_count(f"{what} of a clos", value)
    names = iter(f"host{number}" for number in range(pods * racks * hosts))
    places = {
        f"pod{pod}": {
            f"pod{pod}/tor{rack}": list(itertools.islice(names, hosts)) for rack in range(racks)
        }
        for pod in range(pods)
    }
    builder = Builder()
    add_clos(builder, places, host or HostSpec(), fabric=(aggs, cores, planes), port=port)
    label = name or f"clos:{pods}x{racks}x{hosts},aggs={aggs},cores={cores}"
    return builder.done(label)


def add_clos(
    builder: Builder,
    pods: Mapping[str, Mapping[str, Sequence[str]]],
    host: HostSpec,
    *,
    fabric: tuple[int, int, str],
    port: Port,
) -> None:
    """Add pods of racks of named hosts and the switches above them."""
    aggs, cores, planes = fabric
    check_count("aggs", aggs)
    check_count("cores", cores)
    require_one_of(planes, ("split", "full"), f"planes is {planes!r}")
    if planes == "split" and cores % aggs:
        raise ConfigurationError(
            f"{cores} cores cannot be split evenly among {aggs} aggregation switches",
            hint=f"use a multiple of {aggs} cores, or planes = full",
        )
    # Every rack switch has the uplinks of the fullest rack, and every pod those of the fullest pod.
    fullest = max(len(rack) for pod in pods.values() for rack in pod.values())
    to_agg = port.uplink(fullest * host.ports, uplinks=aggs)
    per_agg = cores // aggs if planes == "split" else cores
    most_racks = max(len(pod) for pod in pods.values())
    to_core = Port(to_agg.bandwidth, port.latency).uplink(most_racks, uplinks=per_agg)
    switches: list[list[str]] = []
    for pod, rack_hosts in pods.items():
        tors = [_add_rack(builder, rack, names, host, port) for rack, names in rack_hosts.items()]
        switches.append(_add_tier(builder, f"{pod}/agg", aggs, kind="agg", below=tors, wire=to_agg))
    for core, name in enumerate(builder.row("core", cores, kind="core")):
        for row in switches:
            for agg in [row[core // per_agg]] if planes == "split" else row:
                builder.join(agg, name, to_core)


def _add_rack(builder: Builder, name: str, hosts: Sequence[str], spec: HostSpec, port: Port) -> str:
    ends = [end for host in hosts for end in add_host(builder, host, spec)]
    switch = builder.node(name, "tor")
    for end in ends:
        builder.join(end, switch, port.wire)
    return switch


def _add_rails(
    builder: Builder, prefix: str, ports: Sequence[Sequence[str]], wire: Wire
) -> list[str]:
    """Add a switch for each port number, with that port of every host on it."""
    rails = builder.row(prefix, len(ports[0]), kind="tor")
    for ends in ports:
        for rail, end in zip(rails, ends, strict=True):
            builder.join(end, rail, wire)
    return rails


def _add_tier(
    builder: Builder, prefix: str, number: int, *, kind: NodeKind, below: Sequence[str], wire: Wire
) -> list[str]:
    """Add switches, each joined to all of those below."""
    tops = builder.row(prefix, number, kind=kind)
    for top in tops:
        for name in below:
            builder.join(name, top, wire)
    return tops


def rail_only(
    hosts: int,
    *,
    host: HostSpec = EIGHT_GPUS,
    bandwidth: str | float = DEFAULT_BANDWIDTH,
    latency: str | float = 0.0,
) -> Topology:
    """Build one switch per rail and no spine: GPUs of different rails meet inside hosts only.

    The ports of a host are the rails; arguments as of ``leaf_spine``.

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
    _add_rails(builder, "rail", ports, wire)
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
    """Build one leaf switch per rail and pod, and every leaf on every spine.

    Args:
        hosts: Number of hosts.
        spines: Spine switches.
        hosts_per_pod: Hosts that share leaf switches; None for all.
        host: What a host is like; its ports are the rails.
        bandwidth: Of each port.
        latency: Of each link outside the hosts.
        oversubscription: A leaf's capacity downwards over that upwards.

    Examples:
        >>> fabric = rail_optimized(4, spines=4, hosts_per_pod=2)
        >>> fabric.num_ranks, fabric.num_nodes, len(fabric.shortest_route(0, 8))
        (32, 56, 2)
    """
    check_count("hosts", hosts)
    check_count("spines", spines)
    per_pod = hosts if hosts_per_pod is None else hosts_per_pod
    check_count("hosts_per_pod", per_pod)
    builder, port = Builder(), Port(bandwidth, latency, oversubscription)
    ports = [add_host(builder, f"host{index}", host) for index in range(hosts)]
    leaves: list[str] = []
    for pod, first in enumerate(range(0, hosts, per_pod)):
        leaves += _add_rails(builder, f"pod{pod}/rail", ports[first : first + per_pod], port.wire)
    uplink = port.uplink(min(per_pod, hosts), uplinks=spines)
    _add_tier(builder, "spine", spines, kind="core", below=leaves, wire=uplink)
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
    """Build two planes: each port is split over a pair of rail switches, one in each plane.

    The planes meet in the hosts only. This is the pod of Alibaba HPN 7.0 (there: 128 hosts of 8
    NICs with two 200 Gbit/s ports per segment, 60 aggregation switches per plane). Hosts of a
    segment share rail switches; half of a port's ``bandwidth`` lies in each plane. The other
    arguments are as of ``rail_optimized``.

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
    builder, half = Builder(), Port(parse_bytes_per_s(bandwidth) / 2, latency, oversubscription)
    ports = [add_host(builder, f"host{index}", host) for index in range(hosts)]
    switches: tuple[list[str], list[str]] = ([], [])
    for segment, first in enumerate(range(0, hosts, hosts_per_segment)):
        for plane in range(len(switches)):
            prefix = f"segment{segment}/plane{plane}/rail"
            own = ports[first : first + hosts_per_segment]
            switches[plane].extend(_add_rails(builder, prefix, own, half.wire))
    uplink = half.uplink(min(hosts_per_segment, hosts), uplinks=aggs_per_plane)
    for plane, in_plane in enumerate(switches):
        prefix = f"plane{plane}/agg"
        _add_tier(builder, prefix, aggs_per_plane, kind="agg", below=in_plane, wire=uplink)
    return builder.done(f"dual_plane:{hosts}")
