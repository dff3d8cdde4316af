"""Graphs with several types of nodes and edges."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import DataError
from fivefold.gnn.sampling._batch import EdgeType
from fivefold.gnn.sampling._topology import Topology


class HeteroTopology:
    """One :class:`Topology` for each edge type ``(source type, relation, target type)``.

    Args:
        num_nodes: Nodes of each type. Sampling goes by the order of ``edges``, not of this.
        edges: In-neighbours of the target type's nodes; ``indices`` are nodes of the source type.

    Raises:
        DataError: An edge type names an unknown node type, or its sizes do not fit.

    Examples:
        >>> cites = Topology([0, 1, 1], [1])
        >>> writes = Topology([0, 2, 3], [0, 1, 2], num_sources=3)
        >>> graph = HeteroTopology(
        ...     {"paper": 2, "author": 3},
        ...     {("paper", "cites", "paper"): cites, ("author", "writes", "paper"): writes},
        ... )
        >>> graph.num_edges
        4
    """

    def __init__(self, num_nodes: Mapping[str, int], edges: Mapping[EdgeType, Topology]) -> None:
        self.num_nodes: dict[str, int] = dict(num_nodes)
        self.edges: dict[EdgeType, Topology] = dict(edges)
        for edge_type, topology in self.edges.items():
            source, _, target = edge_type
            unknown = {source, target} - set(self.num_nodes)
            if unknown:
                raise DataError(
                    f"edge type {edge_type} joins {min(unknown)!r}",
                    hint=f"node types are {', '.join(sorted(self.num_nodes))}",
                )
            sizes = (topology.num_sources, topology.num_nodes)
            expected = (self.num_nodes[source], self.num_nodes[target])
            if sizes != expected:
                raise DataError(
                    f"edge type {edge_type} has {sizes} sources and targets",
                    hint=f"its node types have {expected}; give Topology its num_sources",
                )

    @property
    def node_types(self) -> list[str]:
        """Return the node types, in the order given."""
        return list(self.num_nodes)

    @property
    def edge_types(self) -> list[EdgeType]:
        """Return the edge types, in the order in which a hop visits them."""
        return list(self.edges)

    @property
    def num_edges(self) -> int:
        """Return the number of edges of all types."""
        return sum(topology.num_edges for topology in self.edges.values())

    @property
    def nbytes(self) -> int:
        """Return the bytes of all arrays."""
        return sum(topology.nbytes for topology in self.edges.values())

    def merged(self) -> MergedTopology:
        """Return the same graph with one numbering of all nodes, and one type of edges.

        So a heterogeneous graph goes through everything that knows one type only, such as offline
        sampling and packing; a model that tells edge types apart looks them up by edge id. What is
        lost are fan-outs by edge type. The features of the node types must have one row size.
        """
        sizes = np.array(list(self.num_nodes.values()), np.int64)
        offsets = dict(zip(self.num_nodes, (np.cumsum(sizes) - sizes).tolist(), strict=True))
        total = int(sizes.sum())
        degrees = np.zeros(total + 1, np.int64)
        for (_, _, target), topology in self.edges.items():
            first = offsets[target]
            degrees[first + 1 : first + topology.num_nodes + 1] += np.diff(topology.indptr)
        indptr = np.cumsum(degrees)
        indices = np.empty(self.num_edges, np.int32 if total <= 1 << 31 else np.int64)
        kinds = np.empty(self.num_edges, np.min_scalar_type(max(len(self.edges) - 1, 0)))
        weighted = any(topology.weights is not None for topology in self.edges.values())
        weights = np.ones(self.num_edges if weighted else 0, np.float32)
        begins = indptr[:-1].copy()
        for number, ((source, _, target), topology) in enumerate(self.edges.items()):
            rows = slice(offsets[target], offsets[target] + topology.num_nodes)
            shift = np.repeat(begins[rows] - topology.indptr[:-1], np.diff(topology.indptr))
            places = np.arange(topology.num_edges) + shift
            indices[places] = topology.indices + offsets[source]
            kinds[places] = number
            if topology.weights is not None:
                weights[places] = topology.weights
            begins[rows] += np.diff(topology.indptr)
        merged = Topology(indptr, indices, weights if weighted else None, check=False)
        return MergedTopology(topology=merged, offsets=offsets, edge_kinds=kinds)

    @property
    def fingerprint(self) -> str:
        """Return a digest of the types and of the fingerprint of each topology."""
        digest = hashlib.blake2b(repr(sorted(self.num_nodes.items())).encode(), digest_size=16)
        for edge_type, topology in self.edges.items():
            digest.update(f"{edge_type} {topology.fingerprint}".encode())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True, eq=False)
class MergedTopology:
    """A heterogeneous graph with one numbering; made by :meth:`HeteroTopology.merged`.

    Attributes:
        topology: Its edges, for each target by edge type.
        offsets: By node type: the number that its node 0 has got.
        edge_kinds: ``[num_edges]``, which edge type each edge is of, counted in the order of
            ``HeteroTopology.edge_types``; the narrowest unsigned type.
    """

    topology: Topology
    offsets: dict[str, int]
    edge_kinds: NDArray[np.unsignedinteger[Any]]
