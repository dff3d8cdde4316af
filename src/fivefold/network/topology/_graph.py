"""Nodes and directed links, checked; a network of them in arrays and by name, and what it reaches.

A link's bandwidth is that of one physical link, so that eight lanes of 25 GB/s and one of 200 GB/s
stay different things: schedules that send whole chunks on whole links care. Compute nodes in their
order are the ranks. Arrays and names number the same things: link i is ``links[i]`` and row i of
every link array.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from fivefold.errors import (
    ConfigurationError,
    InfeasibleError,
    require_number,
    require_one_of,
    require_whole,
)
from fivefold.network.topology.arrays import (
    FloatArray,
    IntArray,
    LinksAtNodes,
    frozen,
    group_by,
    reachable,
)

NodeKind = Literal["gpu", "cpu", "pcie", "nvswitch", "nic", "tor", "agg", "core", "switch"]
NODE_KINDS: tuple[str, ...] = get_args(NodeKind)
COMPUTE_KINDS = ("gpu", "cpu")
_MOST_PHYSICAL_LINKS = 1_000_000


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
        require_one_of(
            self.kind, NODE_KINDS, f"node {self.name!r} has the unknown kind {self.kind!r}"
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
        # Numbers of numpy become plain ones: they are written to files and compared.
        plain = {
            "bandwidth_bytes_per_s": require_number(
                f"bandwidth of {place}",
                self.bandwidth_bytes_per_s,
                positive=True,
                hint="give bytes per second, and leave out a dead link",
            ),
            "latency_s": require_number(f"latency of {place}", self.latency_s),
            "count": require_whole(f"count of {place}", self.count, most=_MOST_PHYSICAL_LINKS),
        }
        for key, value in plain.items():
            object.__setattr__(self, key, value)

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
        require_whole("slots of an aggregation unit", self.slots)
        require_whole("slot_bytes of an aggregation unit", self.slot_bytes)
        if self.rate_bytes_per_s is not None:
            require_number("rate of an aggregation unit", self.rate_bytes_per_s, positive=True)
        if not isinstance(self.dtypes, list | tuple) or not all(
            isinstance(dtype, str) and dtype for dtype in self.dtypes
        ):
            raise ConfigurationError(
                f"aggregation has dtypes {self.dtypes!r}", hint='list names such as "float32"'
            )
        object.__setattr__(self, "dtypes", tuple(self.dtypes))


@dataclass(frozen=True, slots=True)
class SwitchAbility:
    """Abilities of a forwarding node besides forwarding.

    Args:
        node: Its name.
        multicast: Whether it copies one incoming chunk to several outgoing links.
        aggregation: Its aggregation unit; None where it has none.
    """

    node: str
    multicast: bool = field(default=False, kw_only=True)
    aggregation: Aggregation | None = field(default=None, kw_only=True)


_NAMED_IN_ERRORS = 5


def nearest_node(name: object, known: Collection[str]) -> str:
    """Return a hint for a name that is no node."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else f"its nodes are {listed(list(known))}"


def listed(names: Sequence[str]) -> str:
    """Return the first few of many names."""
    shown = ", ".join(repr(name) for name in names[:_NAMED_IN_ERRORS])
    return f"{shown}, ..." if len(names) > _NAMED_IN_ERRORS else shown


@dataclass(frozen=True, eq=False)
class LinkGraph:
    """Nodes and directed links, in arrays and by name: what routes are found on.

    Node n is ``nodes[n]``; link i is ``links[i]`` and row i of every link array.
    """

    name: str
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes of any kind."""
        return len(self.nodes)

    @property
    def num_links(self) -> int:
        """Return the number of links, parallel ones of one entry counted once."""
        return len(self.links)

    @property
    def num_ranks(self) -> int:
        """Return the number of compute nodes."""
        return len(self.ranks)

    @cached_property
    def ranks(self) -> tuple[str, ...]:
        """Names of the compute nodes; the position is the rank."""
        return tuple(node.name for node in self.nodes if node.is_rank)

    @cached_property
    def _index(self) -> dict[str, int]:
        return {node.name: index for index, node in enumerate(self.nodes)}

    def index(self, name: str) -> int:
        """Return the node index of a name."""
        if name not in self._index:
            raise ConfigurationError(
                f"{name!r} is no node of topology {self.name!r}",
                hint=nearest_node(name, self._index),
            )
        return self._index[name]

    def node_of_rank(self, rank: int) -> int:
        """Return the node index of a rank."""
        return int(self.rank_nodes[self._checked_rank(rank)])

    def _checked_rank(self, rank: int) -> int:
        if not isinstance(rank, int | np.integer) or not 0 <= rank < self.num_ranks:
            raise ConfigurationError(
                f"topology {self.name!r} has no rank {rank!r}",
                hint=f"its ranks are 0 to {self.num_ranks - 1}",
            )
        return int(rank)

    @cached_property
    def rank_nodes(self) -> IntArray:
        """Node index of each rank, int32 [num_ranks]."""
        return frozen(np.flatnonzero(self.is_rank).astype(np.int32))

    @cached_property
    def is_rank(self) -> npt.NDArray[np.bool_]:
        """Return whether each node computes, bool [num_nodes]."""
        return frozen(np.array([node.kind in COMPUTE_KINDS for node in self.nodes], np.bool_))

    @cached_property
    def rank_of_node(self) -> IntArray:
        """Rank of each node, -1 where it only forwards, int32 [num_nodes]."""
        ranks = np.full(self.num_nodes, -1, np.int32)
        ranks[self.rank_nodes] = np.arange(self.num_ranks, dtype=np.int32)
        return frozen(ranks)

    @cached_property
    def link_sources(self) -> IntArray:
        """Node index of each link's source, int32 [num_links]."""
        index = self._index
        return frozen(np.array([index[link.source] for link in self.links], np.int32))

    @cached_property
    def link_targets(self) -> IntArray:
        """Node index of each link's target, int32 [num_links]."""
        index = self._index
        return frozen(np.array([index[link.target] for link in self.links], np.int32))

    @cached_property
    def link_counts(self) -> IntArray:
        """Return the number of physical links of each link, int32 [num_links]."""
        return frozen(np.array([link.count for link in self.links], np.int32))

    @cached_property
    def _bandwidths_bytes_per_s(self) -> FloatArray:
        rates = [link.bandwidth_bytes_per_s for link in self.links]
        return frozen(np.array(rates, np.float64))

    @cached_property
    def capacities_bytes_per_s(self) -> FloatArray:
        """Rate of each link, its physical links together, float64 [num_links]."""
        return frozen(self.link_counts * self._bandwidths_bytes_per_s)

    @cached_property
    def latencies_s(self) -> FloatArray:
        """Latency of each link, float64 [num_links]."""
        return frozen(np.array([link.latency_s for link in self.links], np.float64))

    @cached_property
    def outgoing(self) -> LinksAtNodes:
        """Links that leave each node, as arrays."""
        return group_by(self.link_sources, num_groups=self.num_nodes)

    @cached_property
    def incoming(self) -> LinksAtNodes:
        """Links that enter each node, as arrays."""
        return group_by(self.link_targets, num_groups=self.num_nodes)

    def out_links(self, node: int | str) -> IntArray:
        """Return the indices of the links that leave a node (index or name), ascending."""
        return self.outgoing.of(self.index(node) if isinstance(node, str) else node)

    def in_links(self, node: int | str) -> IntArray:
        """Return the indices of the links that enter a node (index or name), ascending."""
        return self.incoming.of(self.index(node) if isinstance(node, str) else node)

    def direct_links(self, rank_a: int, rank_b: int) -> IntArray:
        """Return the indices of the links from one rank to another without a stop between."""
        target = self.node_of_rank(rank_b)
        leaving = self.out_links(self.node_of_rank(rank_a))
        found: IntArray = leaving[self.link_targets[leaving] == target]
        return found

    def is_connected(self) -> bool:
        """Return whether every rank can reach every other."""
        forward, backward = self._reach_of_first_rank()
        return bool(forward.all() and backward.all())

    def require_connected(self) -> None:
        """Do nothing where every rank can reach every other."""
        for seen, verb in zip(
            self._reach_of_first_rank(), ("cannot be reached from", "cannot reach"), strict=True
        ):
            lost = [self.ranks[rank] for rank in np.flatnonzero(~seen).tolist()]
            if lost:
                raise InfeasibleError(
                    f"topology {self.name!r} is disconnected: {len(lost)} of {self.num_ranks} "
                    f"ranks {verb} {self.ranks[0]!r}: {listed(lost)}",
                    hint="add the links that are missing, or plan for a subset of the ranks",
                )

    def _reach_of_first_rank(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        first = self.rank_nodes[:1].tolist()
        forward = reachable(self.outgoing, self.link_targets, start=first)
        backward = reachable(self.incoming, self.link_sources, start=first)
        return forward[self.rank_nodes], backward[self.rank_nodes]
