"""Mini-batches of sampled neighbours, of one type of nodes and edges and of several."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import ConfigurationError

EdgeType = tuple[str, str, str]


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledBatch:
    """The nodes and edges of one mini-batch, with local numbers.

    Nodes stand in order of discovery: the seeds, then the nodes first met in hop 1, and so on.
    Each node is expanded once, in the hop after its discovery, so that edges are grouped by
    target, and the targets are 0, 1, 2, ...

    Attributes:
        number: Which batch this is.
        node_ids: ``[nodes]``, the ids in the graph; int64, distinct.
        batch_size: How many of them, at the front, are seeds.
        nodes_per_hop: ``[hops + 1]``, newly met nodes: seeds, hop 1, ...; int64.
        edges_per_hop: ``[hops]``, int64.
        degrees: ``[nodes of all hops but the last]``, sampled in-edges of each target; int32.
        sources: ``[edges]``, local number of each edge's source; int32.
        edge_ids: ``[edges]``, position of each edge in ``Topology.indices``; int64, or None where
            it was not asked for.

    Examples:
        >>> from fivefold.gnn.sampling import NeighborSampler, Topology
        >>> sampler = NeighborSampler(Topology([0, 2, 2, 3], [1, 2, 0]), [-1])
        >>> batch = sampler.sample([0], epoch=0, batch=0)
        >>> batch.node_ids.tolist(), batch.edge_index().tolist()
        ([0, 1, 2], [[1, 2], [0, 0]])
    """

    number: int
    node_ids: NDArray[np.int64]
    batch_size: int
    nodes_per_hop: NDArray[np.int64]
    edges_per_hop: NDArray[np.int64]
    degrees: NDArray[np.int32]
    sources: NDArray[np.int32]
    edge_ids: NDArray[np.int64] | None = None

    @property
    def seeds(self) -> NDArray[np.int64]:
        """Return the ids of the seeds."""
        return self.node_ids[: self.batch_size]

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return self.node_ids.size

    @property
    def num_edges(self) -> int:
        """Return the number of edges."""
        return self.sources.size

    @property
    def nbytes(self) -> int:
        """Return the bytes of the arrays."""
        edge_ids = 0 if self.edge_ids is None else self.edge_ids.nbytes
        return self.node_ids.nbytes + self.degrees.nbytes + self.sources.nbytes + edge_ids

    def targets(self) -> NDArray[np.int32]:
        """Return the local number of each edge's target."""
        return np.repeat(np.arange(self.degrees.size, dtype=np.int32), self.degrees)

    def edge_index(self) -> NDArray[np.int64]:
        """Return ``[2, edges]``: row 0 sources, row 1 targets, local numbers."""
        return np.stack([self.sources, self.targets()]).astype(np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class HeteroSampledBatch:
    """A mini-batch with the fields of :class:`SampledBatch` for each node or edge type.

    Local numbers count within a type. A type without nodes or edges in the batch has empty arrays.

    Attributes:
        number: Which batch this is.
        node_ids: By node type: ids, seeds first, then in order of discovery; int64.
        batch_sizes: By node type: how many of them are seeds.
        nodes_per_hop: By node type: ``[hops + 1]``, newly met nodes.
        edges_per_hop: By edge type: ``[hops]``.
        degrees: By edge type: sampled in-edges of target nodes 0, 1, ...; int32.
        sources: By edge type: local number, in the source type, of each edge's source; int32.
        edge_ids: By edge type: positions in ``indices``; empty where it was not asked for.
    """

    number: int
    node_ids: dict[str, NDArray[np.int64]]
    batch_sizes: dict[str, int]
    nodes_per_hop: dict[str, NDArray[np.int64]]
    edges_per_hop: dict[EdgeType, NDArray[np.int64]]
    degrees: dict[EdgeType, NDArray[np.int32]]
    sources: dict[EdgeType, NDArray[np.int32]]
    edge_ids: dict[EdgeType, NDArray[np.int64]] = field(default_factory=dict)

    def seeds(self, node_type: str) -> NDArray[np.int64]:
        """Return the ids of the seeds of one type."""
        return self.node_ids[node_type][: self.batch_sizes[node_type]]

    def edge_index(self, edge_type: EdgeType) -> NDArray[np.int64]:
        """Return ``[2, edges]`` of one type: row 0 sources, row 1 targets, local numbers.

        Raises:
            ConfigurationError: There is no such edge type.
        """
        if edge_type not in self.sources:
            raise ConfigurationError(f"no edge type {edge_type}", hint=f"{list(self.sources)}")
        degrees = self.degrees[edge_type]
        targets = np.repeat(np.arange(degrees.size), degrees)
        return np.stack([self.sources[edge_type].astype(np.int64), targets])
