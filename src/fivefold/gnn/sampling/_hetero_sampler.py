"""The neighbour sampler for graphs with several types of nodes and edges."""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fivefold.errors import ConfigurationError
from fivefold.gnn.sampling._epoch import as_ids
from fivefold.gnn.sampling._hetero import EdgeType, HeteroSampledBatch, HeteroTopology
from fivefold.gnn.sampling._hop import Hop, NodeTable, Scratch, draw_edges, number_edges
from fivefold.gnn.sampling._random import stream_key
from fivefold.gnn.sampling._sampler import check_fanouts


def fanouts_by_type(
    edge_types: Sequence[EdgeType], fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]]
) -> dict[EdgeType, tuple[int, ...]]:
    """Return the fan-outs of every edge type; one list serves all."""
    if not isinstance(fanouts, Mapping):
        return dict.fromkeys(edge_types, check_fanouts(fanouts))
    if set(fanouts) != set(edge_types):
        odd = sorted(set(fanouts) ^ set(edge_types))
        raise ConfigurationError(
            f"fanouts and edge types differ in {odd}", hint="use [0, ...] to leave a type out"
        )
    checked = {edge_type: check_fanouts(fanouts[edge_type]) for edge_type in edge_types}
    if len({len(numbers) for numbers in checked.values()}) > 1:
        raise ConfigurationError(
            f"fanouts have different numbers of hops: {checked}", hint="fill up with 0"
        )
    return checked


class HeteroNeighborSampler:
    """As :class:`NeighborSampler`, for a :class:`HeteroTopology`.

    In each hop the edge types are visited in their order. Every node first met in the hop before
    gets neighbours along every edge type that ends in its type. Random numbers are keyed by
    (seed, epoch, batch, hop, number of the edge type, node).

    Args:
        topology: The graph.
        fanouts: Per hop, for all edge types alike or by edge type; -1 means all, 0 none.
        seed: Other seeds give other samples.
        edge_ids: Also return the positions of the edges.

    Raises:
        ConfigurationError: Fan-outs do not fit the edge types.

    Examples:
        >>> from fivefold.gnn.sampling import Topology
        >>> cites = ("paper", "cites", "paper")
        >>> graph = HeteroTopology({"paper": 3}, {cites: Topology([0, 2, 2, 3], [1, 2, 0])})
        >>> batch = HeteroNeighborSampler(graph, [-1]).sample({"paper": [0]}, epoch=0, batch=0)
        >>> batch.node_ids["paper"].tolist()
        [0, 1, 2]
    """

    def __init__(
        self,
        topology: HeteroTopology,
        fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]],
        *,
        seed: int = 0,
        edge_ids: bool = False,
    ) -> None:
        self.topology = topology
        self.fanouts = fanouts_by_type(topology.edge_types, fanouts)
        self.seed = operator.index(seed)
        self.edge_ids = edge_ids
        self._local = threading.local()

    def sample(
        self, seeds: Mapping[str, ArrayLike], *, epoch: int, batch: int
    ) -> HeteroSampledBatch:
        """Return the batch around ``seeds``.

        Args:
            seeds: Node ids by node type, each once; types may be left out.
            epoch: Part of the key of the random numbers.
            batch: So is this; it is the batch's number, too.

        Raises:
            ConfigurationError: A type is unknown, or a seed stands twice or is out of range.
            DataError: The topology names a node that there is not.
        """
        tables, scratch = self._buffers()
        self._start(tables, seeds)
        num_hops = len(next(iter(self.fanouts.values()), ()))
        bounds = {name: [0, table.count] for name, table in tables.items()}
        hops: dict[EdgeType, list[Hop]] = {edge_type: [] for edge_type in self.fanouts}
        for hop in range(num_hops):
            for number, (edge_type, fanouts) in enumerate(self.fanouts.items()):
                topology = self.topology.edges[edge_type]
                first, last = bounds[edge_type[2]][-2:]
                key = stream_key(self.seed, epoch, batch, hop, number)
                positions, degrees = draw_edges(
                    topology,
                    tables[edge_type[2]].nodes[first:last],
                    fanouts[hop],
                    key=key,
                    scratch=scratch,
                )
                sources = number_edges(topology, positions, tables[edge_type[0]])
                edge_ids = positions.copy() if self.edge_ids else None
                hops[edge_type].append(Hop(degrees, sources, edge_ids))
            for name, table in tables.items():
                bounds[name].append(table.count)
        return _assemble(batch, tables, bounds, hops)

    def _start(self, tables: dict[str, NodeTable], seeds: Mapping[str, ArrayLike]) -> None:
        unknown = set(seeds) - set(tables)
        if unknown:
            raise ConfigurationError(
                f"seeds of unknown type {min(unknown)!r}", hint=f"types are {list(tables)}"
            )
        for name, table in tables.items():
            table.start(as_ids(seeds.get(name, ()), "seeds"), self.topology.num_nodes[name])

    def _buffers(self) -> tuple[dict[str, NodeTable], Scratch]:
        local = self._local
        if not hasattr(local, "buffers"):
            local.buffers = ({name: NodeTable() for name in self.topology.num_nodes}, Scratch())
        buffers: tuple[dict[str, NodeTable], Scratch] = local.buffers
        return buffers


def _assemble(
    number: int,
    tables: dict[str, NodeTable],
    bounds: dict[str, list[int]],
    hops: dict[EdgeType, list[Hop]],
) -> HeteroSampledBatch:
    def joined(edge_type: EdgeType, name: str) -> NDArray[np.int32]:
        parts: NDArray[np.int32] = np.concatenate([getattr(hop, name) for hop in hops[edge_type]])
        return parts

    with_ids = any(hop.edge_ids is not None for parts in hops.values() for hop in parts)
    edge_ids = {kind: joined(kind, "edge_ids").astype(np.int64) for kind in hops if with_ids}
    return HeteroSampledBatch(
        number=number,
        node_ids={name: table.nodes[: table.count].copy() for name, table in tables.items()},
        batch_sizes={name: bound[1] for name, bound in bounds.items()},
        nodes_per_hop={name: np.diff(bound).astype(np.int64) for name, bound in bounds.items()},
        edges_per_hop={
            kind: np.array([hop.sources.size for hop in parts], np.int64)
            for kind, parts in hops.items()
        },
        degrees={kind: joined(kind, "degrees") for kind in hops},
        sources={kind: joined(kind, "sources") for kind in hops},
        edge_ids=edge_ids,
    )
