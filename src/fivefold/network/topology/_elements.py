"""What a network is made of: nodes, directed links, and what a switch can do besides forwarding.

Plain checked values; how they form a graph is said in ``_topology``. A link's bandwidth is that
of one physical link, so that eight lanes of 25 GB/s and one of 200 GB/s stay different things:
schedules that send whole chunks on whole links care.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Literal, get_args

from fivefold.errors import ConfigurationError, require_whole

NodeKind = Literal["gpu", "cpu", "pcie", "nvswitch", "nic", "tor", "agg", "core", "switch"]
NODE_KINDS: tuple[str, ...] = get_args(NodeKind)
COMPUTE_KINDS = ("gpu", "cpu")
_MOST_PHYSICAL_LINKS = 1_000_000
_PLAIN = (("count", int), ("latency_s", float), ("bandwidth_bytes_per_s", float))


@dataclass(frozen=True, slots=True)
class Node:
    """A device: compute nodes (``gpu``, ``cpu``) are ranks, all others only forward.

    Args:
        name: Unique in its topology.
        kind: One of ``gpu``, ``cpu``, ``pcie``, ``nvswitch``, ``nic``, ``tor``, ``agg``, ``core``
            and ``switch`` (any other switch).
        host: The machine it sits in; None for devices of the fabric.

    Raises:
        ConfigurationError: The name is empty or the kind unknown.
    """

    name: str
    kind: NodeKind
    host: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ConfigurationError(
                f"a node's name must be text that is not empty; got {self.name!r}",
                hint='name it, such as "gpu0"',
            )
        if self.kind not in NODE_KINDS:
            raise ConfigurationError(
                f"node {self.name!r} has the unknown kind {self.kind!r}",
                hint=f"use one of {', '.join(NODE_KINDS)}",
            )
        if self.host is not None and (not isinstance(self.host, str) or not self.host):
            raise ConfigurationError(
                f"the host of node {self.name!r} must be a name; got {self.host!r}",
                hint='name the machine, such as "box0", or leave it out',
            )

    @property
    def is_rank(self) -> bool:
        """Return whether the node computes, and so is a rank."""
        return self.kind in COMPUTE_KINDS


@dataclass(frozen=True, slots=True)
class Link:
    """``count`` equal physical links side by side, in one direction.

    A message of n bytes takes ``latency_s + n / bandwidth_bytes_per_s`` on one of them.

    Args:
        source: Name of the node it leaves.
        target: Name of the node it enters.
        bandwidth_bytes_per_s: Rate of one physical link.
        latency_s: Time from the last byte sent to the last byte received.
        count: Number of physical links.

    Raises:
        ConfigurationError: A value is out of range, or both ends are the same.

    Examples:
        >>> Link("gpu0", "gpu1", bandwidth_bytes_per_s=25e9, count=2).capacity_bytes_per_s
        50000000000.0
    """

    source: str
    target: str
    bandwidth_bytes_per_s: float = field(kw_only=True)
    latency_s: float = field(default=0.0, kw_only=True)
    count: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        place = f"link {self.source!r} -> {self.target!r}"
        if self.source == self.target:
            raise ConfigurationError(
                f"{place} joins a node to itself", hint="name two different nodes"
            )
        if not _is_number(self.bandwidth_bytes_per_s) or self.bandwidth_bytes_per_s <= 0:
            raise ConfigurationError(
                f"{place} has bandwidth {self.bandwidth_bytes_per_s!r}",
                hint="bytes per second must be finite and more than zero; leave out a dead link",
            )
        if not _is_number(self.latency_s) or self.latency_s < 0:
            raise ConfigurationError(
                f"{place} has latency {self.latency_s!r}",
                hint="seconds must be finite and at least zero",
            )
        if (
            isinstance(self.count, bool)
            or not isinstance(self.count, Integral)
            or not 1 <= self.count <= _MOST_PHYSICAL_LINKS
        ):
            raise ConfigurationError(
                f"{place} has count {self.count!r}",
                hint=f"a whole number of physical links, from 1 to {_MOST_PHYSICAL_LINKS:,}",
            )
        # Numbers of numpy become plain ones: they are written to files and compared.
        for key, kind in _PLAIN:
            value = getattr(self, key)
            if type(value) is not kind:
                object.__setattr__(self, key, kind(value))

    @property
    def capacity_bytes_per_s(self) -> float:
        """Rate of all the physical links together."""
        return self.count * self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """In-network aggregation: a pool of slots in which a switch sums what its leaves send.

    Args:
        slots: Number of chunks that can be summed at a time.
        slot_bytes: Size of one slot.
        rate_bytes_per_s: Rate of the adders, counted in summed bytes; None is line rate.
        dtypes: Element types that it can add, such as ``("int32", "float16")``; empty is any.

    Raises:
        ConfigurationError: A value is out of range.
    """

    slots: int
    slot_bytes: int
    rate_bytes_per_s: float | None = None
    dtypes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key, value in (("slots", self.slots), ("slot_bytes", self.slot_bytes)):
            require_whole(f"{key} of an aggregation unit", value)
        rate = self.rate_bytes_per_s
        if rate is not None and (not _is_number(rate) or rate <= 0):
            raise ConfigurationError(
                f"aggregation has rate {rate!r}",
                hint="bytes per second must be finite and more than zero, or left out: line rate",
            )
        if not isinstance(self.dtypes, list | tuple) or not all(
            isinstance(dtype, str) and dtype for dtype in self.dtypes
        ):
            raise ConfigurationError(
                f"aggregation has dtypes {self.dtypes!r}", hint='list names such as "float32"'
            )
        object.__setattr__(self, "dtypes", tuple(self.dtypes))


@dataclass(frozen=True, slots=True)
class SwitchAbility:
    """What a forwarding node can do besides forwarding.

    Args:
        node: Its name.
        multicast: Whether it copies one incoming chunk to several outgoing links.
        aggregation: Its aggregation unit; None where it has none.
    """

    node: str
    multicast: bool = field(default=False, kw_only=True)
    aggregation: Aggregation | None = field(default=None, kw_only=True)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return bool(abs(value) < math.inf)  # type: ignore[operator]  # also of whole numbers that no float holds
