"""A fabric of tiers (GPU, node, pod, and so on) and the groups of ranks that lie on it.

A tier joins units of the tier below and gives every GPU a share of what leaves its unit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fivefold.collectives.pricing.phases import ranks_by_host
from fivefold.errors import ConfigurationError, optional_module, require_number, require_whole
from fivefold.network.topology import Topology

Ints = npt.NDArray[np.int64]
Quote = Callable[[str, float], float]
"""Seconds of a collective of a job, from its kind and bytes: the price that layer 3 quotes."""


_FULL = 0.6  # of a unit that a job takes at least, or units are filled one after the other
_TIMES = ("base_s", "hop_s", "fill_s")
_FACTORS = (
    "bandwidth_bytes_per_s",
    "efficiency",
    "exchange_efficiency",
    "all_reduce_gain",
    "peer_share",
)


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One level of the fabric.

    Args:
        name: Such as ``"node"`` or ``"cluster"``.
        gpus: GPUs that one unit of this tier joins; the last tier's may exceed the cluster.
        tray: GPUs of a tray, of which a job may leave some out so that it takes as many of each
            unit (a rack of 72 gives 64 to a job of 256); 0: units are filled one after the other.
        bandwidth_bytes_per_s: What each GPU can send through this tier at once.
        efficiency: Share of it that collectives reach.
        exchange_efficiency: Share that all-to-all and point-to-point reach; None: the same.
        base_s: Fixed time of a collective.
        hop_s: Time of one step across this tier.
        fill_s: Time scale in which a pipelined collective fills: adds 2 sqrt(fill x size / rate).
        all_reduce_gain: Rate of an all-reduce against a ring's, where switches reduce (NVLS).
        peer_share: Share of the bandwidth that leads to one peer. Below 1 where links join pairs
            and no switch is there: a group uses those between its own members only.

    Raises:
        ConfigurationError: A count, bandwidth, efficiency or gain is not above 0, a time is not
            from 0, or ``peer_share`` is no share.
    """

    name: str
    gpus: int
    tray: int = 0
    bandwidth_bytes_per_s: float
    efficiency: float = 0.8
    exchange_efficiency: float | None = None
    base_s: float = 8.4e-6
    hop_s: float = 3.4e-6
    fill_s: float = 0.0
    all_reduce_gain: float = 1.0
    peer_share: float = 1.0

    def __post_init__(self) -> None:
        require_whole(f"gpus of tier {self.name!r}", self.gpus)
        require_whole(f"tray of tier {self.name!r}", self.tray, least=0, most=self.gpus)
        for name in _TIMES:
            require_number(f"{name} of tier {self.name!r}", getattr(self, name))
        for name in _FACTORS:
            value = getattr(self, name)
            if value is not None or name != "exchange_efficiency":
                require_number(f"{name} of tier {self.name!r}", value, positive=True)
        if self.peer_share > 1:
            message = f"tier {self.name!r} has peer_share={self.peer_share!r}"
            raise ConfigurationError(message, hint="above 0, and 1 where a switch joins all")

    @property
    def rate_bytes_per_s(self) -> float:
        """Return what a GPU reaches in a collective."""
        return self.bandwidth_bytes_per_s * self.efficiency

    @property
    def exchange_share(self) -> float:
        """Share of the bandwidth that all-to-all and point to point reach."""
        return self.efficiency if self.exchange_efficiency is None else self.exchange_efficiency

    @property
    def exchange_rate_bytes_per_s(self) -> float:
        """Return what a GPU reaches in an all-to-all or point to point."""
        return self.bandwidth_bytes_per_s * self.exchange_share


@dataclass(frozen=True, kw_only=True)
class FabricSpec:
    """Tiers from the innermost outward.

    Args:
        name: For people.
        tiers: Each joins more GPUs than the one before.

    Raises:
        ConfigurationError: There is no tier, or the counts do not grow by whole factors.

    Examples:
        >>> node = Tier(name="node", gpus=8, bandwidth_bytes_per_s=300e9)
        >>> net = Tier(name="cluster", gpus=1024, bandwidth_bytes_per_s=25e9)
        >>> FabricSpec(name="dgx", tiers=(node, net)).gpus_per_node
        8
    """

    name: str
    tiers: tuple[Tier, ...]

    def __post_init__(self) -> None:
        if not self.tiers:
            raise ConfigurationError(f"fabric {self.name!r} has no tier", hint="give at least one")
        for inner, outer in zip(self.tiers, self.tiers[1:], strict=False):
            # The last one is as large as the cluster, which has no unit that is not whole.
            astride = outer is not self.tiers[-1] and outer.gpus % inner.gpus
            if outer.gpus <= inner.gpus or astride:
                raise ConfigurationError(
                    f"tier {outer.name!r} joins {outer.gpus} GPUs, {inner.name!r} {inner.gpus}",
                    hint="each tier joins a multiple of the one below",
                )

    def packed(self, num_gpus: int) -> FabricSpec:
        """Return the fabric as a job of so many GPUs meets it: with the same share of each unit.

        Examples:
            >>> rack = Tier(name="rack", gpus=72, tray=4, bandwidth_bytes_per_s=900e9)
            >>> net = Tier(name="cluster", gpus=7200, bandwidth_bytes_per_s=50e9)
            >>> racks = FabricSpec(name="racks", tiers=(rack, net))
            >>> racks.packed(256).gpus_per_node, racks.packed(144).gpus_per_node
            (64, 72)
        """
        unit = self.tiers[0]
        if not unit.tray or num_gpus <= unit.gpus:
            return self
        shares = (
            num_gpus // units
            for units in range(-(-num_gpus // unit.gpus), int(num_gpus / (_FULL * unit.gpus)) + 1)
            if num_gpus % units == 0 and num_gpus // units % unit.tray == 0
        )
        share = next(shares, unit.gpus)
        return replace(self, tiers=(replace(unit, gpus=share), *self.tiers[1:]))

    @functools.cached_property
    def merged(self) -> tuple[Tier, ...]:
        """Return the tiers, neighbours of the same constants made one: nothing tells them apart."""
        kept: list[Tier] = []
        for tier in self.tiers:
            if kept and replace(kept[-1], name=tier.name, gpus=tier.gpus) == tier:
                kept.pop()
            kept.append(tier)
        return tuple(kept)

    @property
    def gpus_per_node(self) -> int:
        """GPUs that the innermost tier joins."""
        return self.merged[0].gpus

    @property
    def gpus_per_host(self) -> int:
        """GPUs whose processes one host starts: those of a tray, where racks have trays."""
        return self.tiers[0].tray or self.gpus_per_node

    @property
    def num_gpus(self) -> int:
        """GPUs that the outermost tier can join."""
        return self.tiers[-1].gpus

    def holds_in_node(self, size: int, num_gpus: int) -> bool:
        """Return whether groups of ``size`` neighbours among so many GPUs all lie inside nodes."""
        return num_gpus <= self.gpus_per_node or self.gpus_per_node % size == 0


@dataclass(frozen=True, kw_only=True)
class Group:
    """A group of ranks that lie ``stride`` apart, as every axis of a mesh does.

    Args:
        size: Members.
        stride: Ranks between neighbours: the product of the axes inside it.
        ranks: Ranks of the whole mesh, whose groups of this axis all work at once; None: of one
            run of groups from rank 0. Groups that do not divide a node lie across nodes in some
            places, and the slowest counts.

    Raises:
        ConfigurationError: A number is below 1.

    Examples:
        >>> Group(size=6, ranks=24)
        Group(size=6, stride=1, ranks=24)
    """

    size: int
    stride: int = 1
    ranks: int | None = None

    def __post_init__(self) -> None:
        require_whole("size of a group", self.size)
        require_whole("stride of a group", self.stride)
        if self.ranks is not None:
            require_whole("ranks of a group", self.ranks)


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Many groups: the numbers of ``Group`` as arrays, with one entry per group."""

    size: Ints
    stride: Ints
    ranks: Ints


_MOST_UNITS = 64  # flows are computed for so many units, spread over all
_LARGEST_CAPACITY = 1 << 24  # SciPy's flows are 32-bit integers
_LARGEST_EXACT = 2.0**53  # of whole bytes in a float; faster links are none of this world
_Unit = tuple[int, ...]


def fabric_from_topology(
    topology: Topology, *, efficiency: float = 0.8, base_s: float = 8.4e-6, hop_s: float = 2e-6
) -> FabricSpec:
    """Describe a topology by tiers.

    Args:
        topology: Connected; every host must have the same number of GPUs.
        efficiency: Share of the links that collectives reach.
        base_s: Fixed time of a collective.
        hop_s: Time of a step in software, added to the latency of the links.

    Raises:
        ConfigurationError: Hosts differ in their number of GPUs, or a number is out of range.
        InfeasibleError: A rank cannot be reached.

    Examples:
        >>> from fivefold.network.topology import named_topology
        >>> fabric = fabric_from_topology(named_topology("dgx_a100", boxes=2))
        >>> [(tier.name, tier.gpus, tier.bandwidth_bytes_per_s) for tier in fabric.tiers]
        [('node', 8, 300000000000.0), ('cluster', 16, 25000000000.0)]
    """
    require_number("hop_s", hop_s)
    topology.require_connected()
    hosts = ranks_by_host(topology, range(topology.num_ranks))
    sizes = sorted({len(ranks) for ranks in hosts})
    if len(sizes) > 1:
        message = f"hosts of {topology.name!r} have {sizes} GPUs"
        raise ConfigurationError(message, hint="take a subset with as many GPUs on every host")
    flows = _Flows(topology)
    racks = _racks(topology, hosts)
    levels: list[tuple[str, list[_Unit]]] = [("rack" if racks else "cluster", hosts)]
    if len(hosts) < flows.count:
        levels.insert(0, ("node", [(rank,) for rank in range(flows.count)]))
    if racks:
        levels.append(("cluster", racks))
    tiers = []
    for (name, units), (_, joined) in pairwise([*levels, ("", [tuple(range(flows.count))])]):
        if len(joined) == len(units):
            continue
        some = units[:: max(1, len(units) // _MOST_UNITS)]
        rate = min(flows.leaving(unit, joined) / len(unit) for unit in some)
        latency_s = max(_latency_s(topology, joined[0]), _latency_s(topology, joined[-1]))
        tiers.append(
            Tier(
                name=name, gpus=len(joined[0]), bandwidth_bytes_per_s=rate, efficiency=efficiency,
                base_s=base_s, hop_s=hop_s + latency_s,
            )
        )  # fmt: skip
    if not tiers:
        tiers.append(Tier(name="node", gpus=1, bandwidth_bytes_per_s=1.0))
    return FabricSpec(name=topology.name, tiers=tuple(tiers))


def _racks(topology: Topology, hosts: list[_Unit]) -> list[_Unit]:
    """Return hosts on the same switches, where there are several such groups of one size."""
    owner = {topology.nodes[topology.node_of_rank(r)].host: unit for unit in hosts for r in unit}
    names = [node.host for node in topology.nodes]
    above: dict[_Unit, set[int]] = {unit: set() for unit in hosts}
    for source, target in zip(topology.link_sources, topology.link_targets, strict=True):
        if names[source] is not None and names[target] is None and names[source] in owner:
            above[owner[names[source]]].add(int(target))
    groups: dict[frozenset[int], list[int]] = {}
    for unit, switches in above.items():
        groups.setdefault(frozenset(switches), []).extend(unit)
    sizes = {len(group) for group in groups.values()}
    uniform = len(sizes) == 1 and 1 < len(groups) < len(hosts)
    return [tuple(group) for group in groups.values()] if uniform else []


def _latency_s(topology: Topology, unit: Sequence[int]) -> float:
    if len(unit) < 2:
        return 0.0
    links = topology.shortest_route(unit[0], unit[-1])
    return float(np.asarray(topology.latencies_s)[np.asarray(links, dtype=np.int64)].sum())


class _Flows:
    """Maximum flows between groups of ranks."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.count = len(topology.ranks)
        capacities = np.asarray(topology.capacities_bytes_per_s, dtype=np.float64)
        # Whole bytes have a common divisor, with which most flows are exact.
        whole = np.round(np.minimum(capacities, _LARGEST_EXACT)).astype(np.int64)
        shared = float(np.gcd.reduce(whole, initial=0))
        coarse = float(capacities.max(initial=1.0)) / _LARGEST_CAPACITY
        self.unit_bytes_per_s = max(shared, 1.0) if shared >= coarse else coarse
        # A link far slower than the widest is one unit, not none.
        rounded = np.maximum(np.round(capacities / self.unit_bytes_per_s), 1)
        self.capacities = rounded.astype(np.int64)
        hosts = [node.host for node in topology.nodes]
        ends = zip(topology.link_sources, topology.link_targets, strict=True)
        self.is_inside = np.array([hosts[a] is not None and hosts[a] == hosts[b] for a, b in ends])

    def leaving(self, unit: _Unit, joined: list[_Unit]) -> float:
        """Return what a unit can send at once to the rest of the larger unit that joins it."""
        sparse = optional_module("scipy.sparse", extra="network", use="fabric of tiers")
        csgraph = optional_module("scipy.sparse.csgraph", extra="network", use="fabric of tiers")
        whole = next(group for group in joined if unit[0] in group)
        others = [rank for rank in whole if rank not in unit]
        topology, source = self.topology, len(self.topology.nodes)
        # Between GPUs of one host nothing leaves the host.
        host = topology.host_of(unit[0]) if len(unit) == 1 else None
        within = host is not None and all(topology.host_of(rank) == host for rank in others)
        most = np.iinfo(np.int32).max // 4
        rows = [*topology.link_sources, *([source] * len(unit))]
        columns = [*topology.link_targets, *(topology.node_of_rank(rank) for rank in unit)]
        rows += [topology.node_of_rank(rank) for rank in others]
        columns += [source + 1] * len(others)
        links = np.where(self.is_inside, self.capacities, 0) if within else self.capacities
        values = np.concatenate([links, np.full(len(unit) + len(others), most)])
        # Parallel links add up when the matrix is built.
        matrix = sparse.csr_matrix((values, (rows, columns)), shape=(source + 2, source + 2))
        matrix.data = np.minimum(matrix.data, most).astype(np.int32)
        flow = csgraph.maximum_flow(matrix.astype(np.int32), source, source + 1)
        return float(flow.flow_value) * self.unit_bytes_per_s
