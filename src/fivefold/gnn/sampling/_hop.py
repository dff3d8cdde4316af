"""One hop of sampling: the compiled passes, and the buffers they need, kept from batch to batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.sampling._kernels import (
    LOCAL_BITS,
    draw,
    draw_weighted,
    insert_seeds,
    most_edges,
    number_sources,
    refill_table,
)
from fivefold.gnn.sampling._topology import Topology

_FIRST_ROOM = 1 << 10


class Hop(NamedTuple):
    """What one hop adds to a batch."""

    degrees: NDArray[np.int32]
    sources: NDArray[np.int32]
    edge_ids: NDArray[np.int64] | None


class NodeTable:
    """The nodes of a batch in order of discovery, and a hash table from id to local number.

    At most half of the table's slots are taken, so a look-up probes about 1.5 of them. It is
    enlarged when it must be and keeps its size for the next batch.
    """

    def __init__(self) -> None:
        self.slots: NDArray[np.int64] = np.zeros(2 * _FIRST_ROOM, np.int64)
        self.nodes: NDArray[np.int64] = np.empty(_FIRST_ROOM, np.int64)
        self.count = 0

    def start(self, seeds: NDArray[np.int64], num_nodes: int, name: str = "seed") -> None:
        """Forget everything and enter the seeds."""
        self.count = 0
        while self.nodes.size < seeds.size:
            self.enlarge()
        self.slots[:] = 0
        place = insert_seeds(self.slots, seeds, num_nodes)
        if place >= 0:
            reason = "stands twice" if 0 <= seeds[place] < num_nodes else "is out of range"
            raise ConfigurationError(
                f"{name} {seeds[place]} {reason}", hint=f"give each of 0 to {num_nodes - 1} once"
            )
        self.nodes[: seeds.size] = seeds
        self.count = seeds.size

    def enlarge(self) -> None:
        """Double the room."""
        if 2 * self.nodes.size > 1 << LOCAL_BITS:
            raise ConfigurationError(
                f"a batch of more than {1 << LOCAL_BITS} nodes",
                hint="use smaller batches or fan-outs",
            )
        nodes = np.empty(2 * self.nodes.size, np.int64)
        nodes[: self.count] = self.nodes[: self.count]
        self.nodes = nodes
        self.slots = np.empty(2 * nodes.size, np.int64)
        refill_table(self.slots, nodes, self.count)


class Scratch:
    """Chosen edge positions of one hop; grows to the widest hop and stays."""

    def __init__(self) -> None:
        self._positions: NDArray[np.int64] = np.empty(0, np.int64)

    def positions(self, count: int) -> NDArray[np.int64]:
        """Return room for ``count`` positions; what was there before is lost."""
        if self._positions.size < count:
            self._positions = np.empty(max(count, 2 * self._positions.size), np.int64)
        return self._positions


def draw_edges(
    topology: Topology,
    nodes: NDArray[np.int64],
    fanout: int,
    *,
    key: int,
    scratch: Scratch,
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return (positions of the sampled edges, in scratch memory; how many each node got)."""
    positions = scratch.positions(most_edges(topology.indptr, nodes, fanout))
    degrees = np.empty(nodes.size, np.int32)
    frontier = (nodes, fanout, np.uint64(key), positions, degrees)
    if topology.weights is None:
        count = draw(topology.indptr, *frontier)
    else:
        count = draw_weighted(topology.indptr, topology.weights, *frontier)
    return positions[:count], degrees


def number_edges(
    topology: Topology, positions: NDArray[np.int64], table: NodeTable
) -> NDArray[np.int32]:
    """Return the local number of each edge's source, entering new nodes in ``table``."""
    sources = np.empty(positions.size, np.int32)
    done = 0
    while True:
        done, count = number_sources(
            topology.indices,
            positions,
            done,
            positions.size,
            table.slots,
            table.nodes,
            table.count,
            topology.num_sources,
            sources,
        )
        if count < 0:
            raise DataError(
                f"edge {positions[done]} comes from node {topology.indices[positions[done]]}",
                hint=f"sources are 0 to {topology.num_sources - 1}; ingest the graph again",
            )
        table.count = count
        if done == positions.size:
            topology.check_unchanged()
            return sources
        table.enlarge()
