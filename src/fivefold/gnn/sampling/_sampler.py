"""The neighbour samplers: compiled hops over a topology, the same result for any thread count."""

from __future__ import annotations

import abc
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fivefold.errors import (
    ConfigurationError,
    DataError,
    require_flag,
    require_one_of,
    require_whole,
)
from fivefold.gnn.sampling._topology import Adjacency, HeteroAdjacency
from fivefold.gnn.sampling.batches import (
    ONE_TYPE,
    EdgeType,
    GraphTypes,
    HeteroSampledBatch,
    SampledBatch,
    as_ids,
    checked_fanouts,
    fanouts_by_type,
    one_type,
    stream_key,
)
from fivefold.gnn.sampling.kernels import (
    LOCAL_BITS,
    draw,
    draw_weighted,
    most_edges,
    number_sources,
    refill_table,
)
from fivefold.gnn.storage.pages import Array, Ids
from fivefold.gnn.storage.parallel import in_threads

_FIRST_ROOM = 1 << 10

Seeds = TypeVar("Seeds")
Sampled = TypeVar("Sampled")


class _Hop(NamedTuple):
    """Edges that one hop adds to a batch along one edge type."""

    degrees: NDArray[np.int32]
    sources: NDArray[np.int32]
    edge_ids: Ids | None


class _NodeTable:
    """The nodes of a batch in order of discovery, and a half-empty hash table of their numbers."""

    def __init__(self) -> None:
        self.slots: Ids = np.zeros(2 * _FIRST_ROOM, np.int64)
        self.nodes: Ids = np.empty(_FIRST_ROOM, np.int64)
        self.count = 0

    def start(self, seeds: Ids, num_nodes: int) -> None:
        """Forget everything and enter the seeds."""
        self.count = 0
        self.slots[:] = 0
        seeds = seeds.view()
        seeds.flags.writeable = False  # as a topology's ids: one compiled version
        numbers, wrong = self.enter(seeds, np.arange(seeds.size), num_nodes)
        if wrong < 0 and self.count == seeds.size:
            return
        reason = "is out of range"
        if wrong < 0:
            wrong, reason = int(np.argmax(numbers != np.arange(seeds.size))), "stands twice"
        raise ConfigurationError(
            f"seed {seeds[wrong]} {reason}", hint=f"give each of 0 to {num_nodes - 1} once"
        )

    def enter(self, ids: Array, positions: Ids, bound: int) -> tuple[NDArray[np.int32], int]:
        """Return the numbers of the ids at positions, new ones too, and the place of a wrong id."""
        numbers, done, count = np.empty(positions.size, np.int32), 0, self.count
        while True:
            done, count = number_sources(
                ids, positions, done, positions.size, self.slots, self.nodes, count, bound, numbers
            )
            if count < 0:
                return numbers, done
            self.count = count
            if done == positions.size:
                return numbers, -1
            self.enlarge()

    def enlarge(self) -> None:
        """Double the number of slots."""
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


def _draw_edges(
    topology: Adjacency, nodes: Ids, fanout: int, *, key: int, buffers: _Buffers
) -> tuple[Ids, NDArray[np.int32]]:
    """Return (positions of the sampled edges, in memory that is used again; degrees)."""
    most = most_edges(topology.indptr, nodes, fanout)
    if buffers.positions.size < most:
        buffers.positions = np.empty(max(most, 2 * buffers.positions.size), np.int64)
    positions = buffers.positions
    degrees = np.empty(nodes.size, np.int32)
    frontier = (nodes, fanout, np.uint64(key), positions, degrees)
    if topology.weights is None:
        count = draw(topology.indptr, *frontier)
    else:
        count = draw_weighted(topology.indptr, topology.weights, *frontier)
    return positions[:count], degrees


class _Buffers(threading.local):
    """Memory of one thread, by node type, which stays from batch to batch."""

    def __init__(self, node_types: Sequence[str]) -> None:
        self.tables = {name: _NodeTable() for name in node_types}
        self.positions: Ids = np.empty(0, np.int64)  # of one hop's edges; grows to the widest


class _Sampler(abc.ABC, Generic[Seeds, Sampled]):
    """Common part of the samplers of one and of several types."""

    def __init__(
        self,
        types: GraphTypes,
        edges: Mapping[EdgeType, Adjacency],
        fanouts: dict[EdgeType, tuple[int, ...]],
        *,
        seed: int,
        threads: int | None,
        edge_ids: bool,
    ) -> None:
        self.types, self.edges, self.fanouts_by_type = types, edges, fanouts
        self.seed = require_whole("seed", seed, least=-(2**63))
        self.threads = (
            len(os.sched_getaffinity(0)) if threads is None else require_whole("threads", threads)
        )
        self.edge_ids = require_flag("edge_ids", edge_ids)
        if self.edge_ids:  # read now, in one thread
            [topology.edge_ids for topology in edges.values()]
        self._buffers = _Buffers(list(types.num_nodes))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_buffers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._buffers = _Buffers(list(self.types.num_nodes))

    @abc.abstractmethod
    def sample(self, seeds: Seeds, *, epoch: int, batch: int) -> Sampled:
        """Return the batch around ``seeds``."""

    def sample_many(
        self, batches: Iterable[Seeds], *, epoch: int, first: int = 0
    ) -> Iterator[Sampled]:
        """Yield the samples of ``batches`` in order, ``threads`` of them in the making."""
        calls = (
            partial(self.sample, seeds, epoch=epoch, batch=number)
            for number, seeds in enumerate(batches, start=first)
        )
        if self.threads == 1:
            yield from (call() for call in calls)
        else:
            yield from in_threads(calls, threads=self.threads)

    def _walk(
        self, key_of: Callable[[int, int], int]
    ) -> tuple[dict[str, list[int]], dict[EdgeType, list[_Hop]]]:
        """Sample hop by hop from seeded tables; returns where hops end among nodes, and hops."""
        tables, edges = self._buffers.tables, self.edges
        bounds = {name: [0, table.count] for name, table in tables.items()}
        hops: dict[EdgeType, list[_Hop]] = {kind: [] for kind in self.fanouts_by_type}
        for hop in range(len(next(iter(self.fanouts_by_type.values()), ()))):
            for number, (kind, fanouts) in enumerate(self.fanouts_by_type.items()):
                source, _, target = kind
                first, last = bounds[target][-2:]
                positions, degrees = _draw_edges(
                    edges[kind],
                    tables[target].nodes[first:last],
                    fanouts[hop],
                    key=key_of(hop, number),
                    buffers=self._buffers,
                )
                sources = self._number(edges[kind], positions, tables[source])
                edge_ids = edges[kind].numbers_of(positions) if self.edge_ids else None
                hops[kind].append(_Hop(degrees, sources, edge_ids))
            for name, table in tables.items():
                bounds[name].append(table.count)
        return bounds, hops

    @staticmethod
    def _number(topology: Adjacency, positions: Ids, table: _NodeTable) -> NDArray[np.int32]:
        sources, wrong = table.enter(topology.indices, positions, topology.num_sources)
        if wrong >= 0:
            raise DataError(
                f"edge {positions[wrong]} comes from node {topology.indices[positions[wrong]]}",
                hint=f"sources are 0 to {topology.num_sources - 1}; ingest the graph again",
            )
        topology.check_unchanged()
        return sources


def _edges_of(hops: list[_Hop]) -> dict[str, Any]:
    """Return the fields of a batch that its hops along one edge type give."""
    edge_ids = [hop.edge_ids for hop in hops if hop.edge_ids is not None]
    return {
        "edges_per_hop": np.array([hop.sources.size for hop in hops], np.int64),
        "degrees": np.concatenate([hop.degrees for hop in hops]),
        "sources": np.concatenate([hop.sources for hop in hops]),
        "edge_ids": np.concatenate(edge_ids) if edge_ids else None,
    }


class NeighborSampler(_Sampler[ArrayLike, SampledBatch]):
    """Samples in-neighbours hop by hop, without replacement, each node expanded once.

    The random numbers of a node are keyed by (seed, epoch, batch, hop, node). So a batch is the
    same whatever the number of threads, the order in which batches are asked for, and whether the
    topology is in memory or mapped. Uniform neighbours are chosen by Floyd's algorithm. Where the
    topology has weights, the neighbours with the least exponential keys ``-log(u) / weight`` are
    taken, which is drawing them one after another in proportion to the weights.

    Threads share out batches, not the nodes of one: giving nodes their local numbers is one chain
    of steps and most of a batch's time, so threads within a batch would gain little.

    Memory beside the result: 8 to 16 bytes for each edge of the widest hop and 24 to 48 for each
    node of the batch (a list and a hash table), for each thread; nothing grows with the graph.

    Args:
        topology: The graph.
        fanouts: Neighbours to sample in each hop, first hop first; -1 means all, 0 none.
        seed: Other seeds give other samples.
        threads: Batches sampled at the same time by :meth:`sample_many`; None means one for each
            processor that this process may use.
        edge_ids: Also return the id of every edge: ``topology.edge_ids``, or its position.

    Raises:
        ConfigurationError: A fan-out is below -1, or ``threads`` is below 1.

    References:
        Hamilton et al., arXiv 1706.02216, algorithm 2; Bentley and Floyd, CACM 30(9), 1987;
        Efraimidis and Spirakis, Information Processing Letters 97(5), 2006, algorithm A-ES.

    Examples:
        >>> ring = [[(node - 1) % 10, (node + 1) % 10] for node in range(10)]
        >>> topology = Adjacency(range(0, 21, 2), sum(ring, []))
        >>> batch = NeighborSampler(topology, [1, 1]).sample([3, 7], epoch=0, batch=0)
        >>> batch.seeds.tolist(), batch.edges_per_hop.tolist()
        ([3, 7], [2, 2])
    """

    def __init__(
        self,
        topology: Adjacency,
        fanouts: Sequence[int],
        *,
        seed: int = 0,
        threads: int | None = None,
        edge_ids: bool = False,
    ) -> None:
        if topology.num_sources != topology.num_nodes:
            message = "sources and targets are different nodes"
            raise ConfigurationError(message, hint="use HeteroNeighborSampler")
        self.topology = topology
        self.fanouts = checked_fanouts(fanouts)
        types, by_type = one_type(topology.num_nodes), {ONE_TYPE: self.fanouts}
        super().__init__(
            types, {ONE_TYPE: topology}, by_type, seed=seed, threads=threads, edge_ids=edge_ids
        )

    def sample(self, seeds: ArrayLike, *, epoch: int, batch: int) -> SampledBatch:
        """Return the batch around ``seeds``.

        Args:
            seeds: Node ids, each once.
            epoch: Part of the key of the random numbers.
            batch: So is this; it is the batch's number, too.

        Raises:
            ConfigurationError: A seed stands twice or is out of range.
            DataError: The topology names a node that there is not (one made with ``check=False``),
                or its mapped file was changed.
        """
        table = self._buffers.tables["node"]
        table.start(as_ids(seeds, "seeds"), self.topology.num_nodes)
        bounds, hops = self._walk(lambda hop, _: stream_key(self.seed, epoch, batch, hop))
        return SampledBatch(
            number=batch,
            node_ids=table.nodes[: table.count].copy(),
            batch_size=bounds["node"][1],
            nodes_per_hop=np.diff(bounds["node"]).astype(np.int64),
            **_edges_of(hops[ONE_TYPE]),
        )


class HeteroNeighborSampler(_Sampler[Mapping[str, ArrayLike], HeteroSampledBatch]):
    """As :class:`NeighborSampler`, for a :class:`HeteroAdjacency`.

    In each hop the edge types are visited in their order. Every node first met in the hop before
    gets neighbours along every edge type that ends in its type. Random numbers are keyed by
    (seed, epoch, batch, hop, number of the edge type, node).

    Args:
        topology: The graph.
        fanouts: Per hop, for all edge types alike or by edge type; -1 means all, 0 none.
        seed: Other seeds give other samples.
        threads: As for :class:`NeighborSampler`.
        edge_ids: Also return the ids of the edges, or their positions.

    Raises:
        ConfigurationError: Fan-outs do not fit the edge types.

    Examples:
        >>> from fivefold.gnn.sampling import Adjacency
        >>> cites = ("paper", "cites", "paper")
        >>> graph = HeteroAdjacency({"paper": 3}, {cites: Adjacency([0, 2, 2, 3], [1, 2, 0])})
        >>> batch = HeteroNeighborSampler(graph, [-1]).sample({"paper": [0]}, epoch=0, batch=0)
        >>> batch.node_ids["paper"].tolist()
        [0, 1, 2]
    """

    def __init__(
        self,
        topology: HeteroAdjacency,
        fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]],
        *,
        seed: int = 0,
        threads: int | None = None,
        edge_ids: bool = False,
    ) -> None:
        self.topology = topology
        self.fanouts = fanouts_by_type(topology.edge_types, fanouts)
        types = GraphTypes(num_nodes=topology.num_nodes, edge_types=tuple(topology.edge_types))
        super().__init__(
            types, topology.edges, self.fanouts, seed=seed, threads=threads, edge_ids=edge_ids
        )

    def sample(
        self, seeds: Mapping[str, ArrayLike], *, epoch: int, batch: int
    ) -> HeteroSampledBatch:
        """Return the batch around ``seeds``, node ids by type, as :class:`NeighborSampler` does.

        Raises:
            ConfigurationError: A type is unknown, or a seed stands twice or is out of range.
            DataError: The topology names a node that there is not.
        """
        tables = self._buffers.tables
        for name in seeds:
            require_one_of(name, tables, f"seeds of unknown type {name!r}")
        for name, table in tables.items():
            table.start(as_ids(seeds.get(name, ()), "seeds"), self.topology.num_nodes[name])
        bounds, hops = self._walk(
            lambda hop, number: stream_key(self.seed, epoch, batch, hop, number)
        )
        fields = {kind: _edges_of(parts) for kind, parts in hops.items()}
        names = ["edges_per_hop", "degrees", "sources", *(["edge_ids"] if self.edge_ids else [])]
        return HeteroSampledBatch(
            number=batch,
            node_ids={name: table.nodes[: table.count].copy() for name, table in tables.items()},
            batch_sizes={name: bound[1] for name, bound in bounds.items()},
            nodes_per_hop={name: np.diff(bound).astype(np.int64) for name, bound in bounds.items()},
            **{name: {kind: field[name] for kind, field in fields.items()} for name in names},
        )
