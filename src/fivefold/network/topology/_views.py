"""The arrays of a topology: what solvers and simulators read. Made once, read-only."""

from __future__ import annotations

from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fivefold.errors import ConfigurationError
from fivefold.network.topology._checks import nearest_node
from fivefold.network.topology._elements import COMPUTE_KINDS, Link, Node
from fivefold.network.topology._graph import Adjacency, IntArray, group_by

FloatArray = npt.NDArray[np.float64]
_Array = TypeVar("_Array", bound=npt.NDArray[Any])


def frozen(array: _Array) -> _Array:
    """The array itself, from now on read-only."""
    array.flags.writeable = False
    return array


class TopologyViews:
    """Nodes and links by number; node n is ``nodes[n]`` and link i is ``links[i]``."""

    name: str
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]

    @property
    def num_nodes(self) -> int:
        """Number of nodes of any kind."""
        return len(self.nodes)

    @property
    def num_links(self) -> int:
        """Number of links, parallel ones of one entry counted once."""
        return len(self.links)

    @property
    def num_ranks(self) -> int:
        """Number of compute nodes."""
        return len(self.ranks)

    @cached_property
    def ranks(self) -> tuple[str, ...]:
        """Names of the compute nodes; the position is the rank."""
        return tuple(node.name for node in self.nodes if node.is_rank)

    @cached_property
    def _index(self) -> dict[str, int]:
        return {node.name: index for index, node in enumerate(self.nodes)}

    def index(self, name: str) -> int:
        """Node index of a name.

        Raises:
            ConfigurationError: There is no such node.
        """
        if name not in self._index:
            raise ConfigurationError(
                f"{name!r} is no node of topology {self.name!r}",
                hint=nearest_node(name, self._index),
            )
        return self._index[name]

    def node_of_rank(self, rank: int) -> int:
        """Node index of a rank.

        Raises:
            ConfigurationError: There is no such rank.
        """
        return int(self.rank_nodes[self._checked_rank(rank)])

    def _checked_rank(self, rank: int) -> int:
        if not 0 <= rank < self.num_ranks:
            raise ConfigurationError(
                f"topology {self.name!r} has no rank {rank}",
                hint=f"its ranks are 0 to {self.num_ranks - 1}",
            )
        return int(rank)

    @cached_property
    def rank_nodes(self) -> IntArray:
        """Node index of each rank, int32 [num_ranks]."""
        return frozen(np.flatnonzero(self.is_rank).astype(np.int32))

    @cached_property
    def is_rank(self) -> npt.NDArray[np.bool_]:
        """Whether each node computes, bool [num_nodes]."""
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
        """Number of physical links of each link, int32 [num_links]."""
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
    def outgoing(self) -> Adjacency:
        """Links that leave each node, as arrays."""
        return group_by(self.link_sources, num_groups=self.num_nodes)

    @cached_property
    def incoming(self) -> Adjacency:
        """Links that enter each node, as arrays."""
        return group_by(self.link_targets, num_groups=self.num_nodes)

    def out_links(self, node: int | str) -> IntArray:
        """Indices of the links that leave a node (index or name), ascending."""
        return self.outgoing.of(self.index(node) if isinstance(node, str) else node)

    def in_links(self, node: int | str) -> IntArray:
        """Indices of the links that enter a node (index or name), ascending."""
        return self.incoming.of(self.index(node) if isinstance(node, str) else node)

    def direct_links(self, rank_a: int, rank_b: int) -> IntArray:
        """Indices of the links that lead from one rank to another without a stop between."""
        target = self.node_of_rank(rank_b)
        leaving = self.out_links(self.node_of_rank(rank_a))
        found: IntArray = leaving[self.link_targets[leaving] == target]
        return found
