"""What one mini-batch of sampled neighbours is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
        """The ids of the seeds."""
        return self.node_ids[: self.batch_size]

    @property
    def num_nodes(self) -> int:
        """Nodes in the batch."""
        return self.node_ids.size

    @property
    def num_edges(self) -> int:
        """Edges in the batch."""
        return self.sources.size

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        edge_ids = 0 if self.edge_ids is None else self.edge_ids.nbytes
        return self.node_ids.nbytes + self.degrees.nbytes + self.sources.nbytes + edge_ids

    def targets(self) -> NDArray[np.int32]:
        """Return the local number of each edge's target."""
        return np.repeat(np.arange(self.degrees.size, dtype=np.int32), self.degrees)

    def edge_index(self) -> NDArray[np.int64]:
        """Return ``[2, edges]``: row 0 sources, row 1 targets, local numbers."""
        return np.stack([self.sources, self.targets()]).astype(np.int64)
