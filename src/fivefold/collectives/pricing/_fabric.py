"""A fabric of tiers (GPU, node, pod, and so on) and the groups of ranks that lie on it.

A tier joins units of the tier below and gives every GPU a share of what leaves its unit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from fivefold.errors import ConfigurationError

Ints = npt.NDArray[np.int64]
Quote = Callable[[str, float], float]
"""Seconds of a collective of a job, from its kind and bytes: the price that layer 3 quotes."""


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
            if outer.gpus <= inner.gpus or outer.gpus % inner.gpus:
                message = (
                    f"tier {outer.name!r} joins {outer.gpus} GPUs, {inner.name!r} {inner.gpus}"
                )
                raise ConfigurationError(
                    message, hint="each tier joins a multiple of the one below"
                )

    @functools.cached_property
    def merged(self) -> tuple[Tier, ...]:
        """Return the tiers, neighbours of the same constants made one: nothing tells them apart."""
        kept: list[Tier] = []
        for tier in self.tiers:
            if kept and _constants(kept[-1]) == _constants(tier):
                kept.pop()
            kept.append(tier)
        return tuple(kept)

    @property
    def gpus_per_node(self) -> int:
        """GPUs that the innermost tier joins."""
        return self.merged[0].gpus

    @property
    def num_gpus(self) -> int:
        """GPUs that the outermost tier can join."""
        return self.tiers[-1].gpus

    def holds_in_node(self, size: int, num_gpus: int) -> bool:
        """Whether groups of ``size`` neighbouring ranks, of so many GPUs, all lie inside nodes."""
        return num_gpus <= self.gpus_per_node or self.gpus_per_node % size == 0


def _constants(tier: Tier) -> dict[str, object]:
    return {key: value for key, value in asdict(tier).items() if key not in {"name", "gpus"}}


@dataclass(frozen=True, kw_only=True)
class Group:
    """A group of ranks that lie ``stride`` apart, as every axis of a mesh does.

    Args:
        size: Members.
        stride: Ranks between neighbours: the product of the axes inside it.
        ranks: Ranks of the whole mesh, whose groups of this axis all work at once; None: of one
            run of groups from rank 0. Groups that do not divide a node lie across nodes in some
            places, and the slowest counts.

    Examples:
        >>> Group(size=6, ranks=24)
        Group(size=6, stride=1, ranks=24)
    """

    size: int
    stride: int = 1
    ranks: int | None = None


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Many groups: the numbers of ``Group`` as arrays, with one entry per group.

    Args:
        size: Members of each.
        stride: Ranks between its neighbours.
        ranks: Ranks of the whole mesh.
    """

    size: Ints
    stride: Ints
    ranks: Ints
