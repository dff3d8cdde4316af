"""What a collective of one plan costs on a fabric of tiers: GPU, node, pod, and so on.

A tier joins units of the tier below and gives every GPU a share of what leaves its unit. A ring
over a group crosses a tier with as many members as the group has inside one unit, so it may use
the shares of all of them: eight data-parallel rings of a node each get one share, one tensor ring
over two nodes gets all eight. Latencies follow NCCL's own model. The module knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fivefold.errors import ConfigurationError

__all__ = ["FabricSpec", "Group", "Tier", "collective_time_s"]

_TREE_SHARE = 0.92  # of the bandwidth, as NCCL's tuner has it


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One level of the fabric.

    Args:
        name: Such as ``"node"`` or ``"cluster"``.
        gpus: GPUs that one unit of this tier joins; the last tier's may exceed the cluster.
        bandwidth_bytes_per_s: What each GPU can send through this tier at once.
        efficiency: Share of it that collectives reach.
        exchange_efficiency: Share that all-to-all and point-to-point reach; None: the same.
        base_s: Fixed time of a collective.
        hop_s: Time of one step across this tier.
        fill_s: Time scale in which a pipelined collective fills: adds 2 sqrt(fill x size / rate).
        all_reduce_gain: Rate of an all-reduce against a ring's, where switches reduce (NVLS).

    Raises:
        ConfigurationError: A bandwidth or count is not positive, or a time negative.

    Example:
        >>> Tier(name="node", gpus=8, bandwidth_bytes_per_s=300e9, hop_s=3e-6).gpus
        8
    """

    name: str
    gpus: int
    bandwidth_bytes_per_s: float
    efficiency: float = 0.8
    exchange_efficiency: float | None = None
    base_s: float = 8.4e-6
    hop_s: float = 3.4e-6
    fill_s: float = 0.0
    all_reduce_gain: float = 1.0

    def __post_init__(self) -> None:
        if self.gpus < 1 or not self.bandwidth_bytes_per_s > 0 or not self.efficiency > 0:
            message = f"tier {self.name!r} has gpus={self.gpus}, {self.bandwidth_bytes_per_s:g} B/s"
            raise ConfigurationError(message, hint="both must be positive, and the efficiency too")
        if min(self.base_s, self.hop_s, self.fill_s) < 0:
            message = f"tier {self.name!r} has a negative time"
            raise ConfigurationError(message, hint="latencies are at least 0")

    @property
    def rate_bytes_per_s(self) -> float:
        """What a GPU reaches in a collective."""
        return self.bandwidth_bytes_per_s * self.efficiency

    @property
    def exchange_rate_bytes_per_s(self) -> float:
        """What a GPU reaches in an all-to-all or point to point."""
        share = self.efficiency if self.exchange_efficiency is None else self.exchange_efficiency
        return self.bandwidth_bytes_per_s * share


@dataclass(frozen=True, kw_only=True)
class FabricSpec:
    """Tiers from the innermost outward.

    Args:
        name: For people.
        tiers: Each joins more GPUs than the one before.

    Raises:
        ConfigurationError: There is no tier, or the counts do not grow by whole factors.

    Example:
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
            if outer.gpus <= inner.gpus or outer.gpus % inner.gpus:
                message = (
                    f"tier {outer.name!r} joins {outer.gpus} GPUs, {inner.name!r} {inner.gpus}"
                )
                raise ConfigurationError(
                    message, hint="each tier joins a multiple of the one below"
                )

    @property
    def gpus_per_node(self) -> int:
        """GPUs that the innermost tier joins."""
        return self.tiers[0].gpus

    @property
    def num_gpus(self) -> int:
        """GPUs that the outermost tier can join."""
        return self.tiers[-1].gpus


@dataclass(frozen=True, kw_only=True)
class Group:
    """A group of ranks that lie ``stride`` apart, as every axis of a mesh does.

    Args:
        size: Members.
        stride: Ranks between neighbours: the product of the axes inside it.

    Example:
        >>> Group(size=16, stride=4).inside(8)
        2
    """

    size: int
    stride: int = 1

    def inside(self, gpus: int) -> int:
        """Members within one unit of ``gpus`` GPUs."""
        return max(1, min(self.size, gpus // self.stride))


def collective_time_s(
    fabric: FabricSpec, kind: str, *, size_bytes: float, group: Group, concurrent: float = 1.0
) -> float:
    """Time of one collective of a group, with all its sister groups at work at the same time.

    Args:
        fabric: The tiers.
        kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"`` or
            ``"point_to_point"``.
        size_bytes: As the collective counts it: the buffer, the gathered output, what one GPU
            holds before an exchange, the message.
        group: Who takes part; of ``point_to_point`` the two are neighbours of the group.
        concurrent: Other traffic: 2 where this group gets half of its share.

    Returns:
        Seconds; 0 for a group of one.

    Raises:
        ConfigurationError: The kind is unknown.

    Example:
        >>> net = FabricSpec(name="x", tiers=(Tier(name="node", gpus=8, bandwidth_bytes_per_s=1e11,
        ...                                        efficiency=1.0, base_s=0.0, hop_s=0.0),))
        >>> collective_time_s(net, "all_gather", size_bytes=8e9, group=Group(size=8))
        0.07
    """
    if group.size <= 1 or size_bytes <= 0:
        return 0.0
    try:
        cost = _KINDS[kind]
    except KeyError:
        message = f"collective {kind!r} is unknown"
        raise ConfigurationError(message, hint=f"use one of {sorted(_KINDS)}") from None
    return cost(fabric, size_bytes * concurrent, group)


def _crossed(fabric: FabricSpec, group: Group) -> list[tuple[Tier, int]]:
    """Tiers that a ring of the group crosses, each with the members inside one unit below it."""
    below, crossed = 1, []
    for tier in fabric.tiers:
        if group.inside(tier.gpus) > group.inside(below):
            crossed.append((tier, group.inside(below)))
        below = tier.gpus
    if group.inside(below) < group.size:  # a group beyond the last tier: at the last tier's cost
        crossed.append((fabric.tiers[-1], group.inside(below)))
    return crossed or [(fabric.tiers[-1], 1)]


def _ring_rate(crossed: list[tuple[Tier, int]]) -> float:
    return min(tier.rate_bytes_per_s * members for tier, members in crossed)


def _fill_s(crossed: list[tuple[Tier, int]], size_bytes: float) -> float:
    scale = max(tier.fill_s for tier, _ in crossed)
    return 2.0 * math.sqrt(scale * size_bytes / _ring_rate(crossed)) if scale else 0.0


def _latency_s(crossed: list[tuple[Tier, int]], group: Group, *, tree: bool) -> float:
    """NCCL's: a ring meets every member, a tree of nodes their logarithm."""
    base = max(tier.base_s for tier, _ in crossed)
    outside = group.size
    total = 0.0
    for tier, members in reversed(crossed):
        units = max(outside // members, 1)
        inside_only = members == 1 and len(crossed) > 1 and tier is crossed[0][0]
        steps = math.ceil(math.log2(units)) if tree and not inside_only else units - 1
        rings = 1 if tree else group.size // outside
        total += rings * steps * tier.hop_s
        outside = members
    return base + total


def _gather_s(fabric: FabricSpec, size_bytes: float, group: Group) -> float:
    crossed = _crossed(fabric, group)
    moved = size_bytes * (group.size - 1) / group.size
    return (
        _latency_s(crossed, group, tree=False)
        + moved / _ring_rate(crossed)
        + _fill_s(crossed, size_bytes)
    )


def _all_reduce_s(fabric: FabricSpec, size_bytes: float, group: Group) -> float:
    crossed = _crossed(fabric, group)
    gain = crossed[0][0].all_reduce_gain if len(crossed) == 1 else 1.0
    moved = 2.0 * size_bytes * (group.size - 1) / group.size
    ring_s = 2.0 * _latency_s(crossed, group, tree=False) + moved / (gain * _ring_rate(crossed))
    tree_s = (
        2.0 * _latency_s(crossed, group, tree=True) + _tree_s(crossed, size_bytes, group) / gain
    )
    base_s = max(tier.base_s for tier, _ in crossed)
    return min(ring_s, tree_s) - base_s + _fill_s(crossed, size_bytes)


def _tree_s(crossed: list[tuple[Tier, int]], size_bytes: float, group: Group) -> float:
    """Two trees, each with half the data up and down: a unit sends 2 (units - 1) / units of it.

    Over two nodes that is half of what the ring carries, for the ring passes by every member.
    """
    outside, slowest = group.size, 0.0
    for tier, members in reversed(crossed):
        units = outside / members
        share = 2.0 * (units - 1.0) / units
        slowest = max(slowest, share * size_bytes / (tier.rate_bytes_per_s * members))
        outside = members
    return slowest / _TREE_SHARE


def _all_to_all_s(fabric: FabricSpec, size_bytes: float, group: Group) -> float:
    """Each tier carries what goes beyond the unit below it; the slowest rules."""
    slowest = 0.0
    crossed = _crossed(fabric, group)
    for tier, members in crossed:
        beyond = size_bytes * (group.size - members) / group.size
        slowest = max(slowest, beyond / tier.exchange_rate_bytes_per_s)
    outermost = crossed[-1][0]
    peers = group.size - crossed[-1][1]
    return outermost.base_s + outermost.hop_s * math.ceil(math.log2(peers + 1)) + slowest


def _point_to_point_s(fabric: FabricSpec, size_bytes: float, group: Group) -> float:
    """Between neighbours of the group; they share the tier with all other pairs of their kind."""
    tier = next((t for t in fabric.tiers if group.stride < t.gpus), fabric.tiers[-1])
    return tier.base_s + tier.hop_s + size_bytes / tier.exchange_rate_bytes_per_s


_KINDS: Mapping[str, Callable[[FabricSpec, float, Group], float]] = {
    "all_reduce": _all_reduce_s,
    "all_gather": _gather_s,
    "reduce_scatter": _gather_s,
    "all_to_all": _all_to_all_s,
    "point_to_point": _point_to_point_s,
}
