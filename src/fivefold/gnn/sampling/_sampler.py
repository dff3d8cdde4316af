"""The neighbour samplers: compiled hops over a topology, the same result for any thread count."""

from __future__ import annotations

import itertools
import operator
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.sampling._batch import EdgeType, HeteroSampledBatch, SampledBatch
from fivefold.gnn.sampling._epoch import as_ids, stream_key
from fivefold.gnn.sampling._hetero import HeteroTopology
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


def check_fanouts(fanouts: Sequence[int]) -> tuple[int, ...]:
    """Return the fan-outs."""
    try:
        checked = tuple(operator.index(fanout) for fanout in fanouts)
    except TypeError:
        checked = ()
    if not checked or min(checked) < -1 or max(checked) >= 1 << 63:
        raise ConfigurationError(
            f"fanouts is {fanouts!r}",
            hint="one number per hop: neighbours to sample, or -1 for all",
        )
    return checked


class NeighborSampler:
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
        edge_ids: Also return the position of every edge in ``topology.indices``.

    Raises:
        ConfigurationError: A fan-out is below -1, or ``threads`` is below 1.

    References:
        Hamilton et al., arXiv 1706.02216, algorithm 2; Bentley and Floyd, CACM 30(9), 1987;
        Efraimidis and Spirakis, Information Processing Letters 97(5), 2006, algorithm A-ES.

    Examples:
        >>> ring = [[(node - 1) % 10, (node + 1) % 10] for node in range(10)]
        >>> topology = Topology(range(0, 21, 2), sum(ring, []))
        >>> batch = NeighborSampler(topology, [1, 1]).sample([3, 7], epoch=0, batch=0)
        >>> batch.seeds.tolist(), batch.edges_per_hop.tolist()
        ([3, 7], [2, 2])
    """

    def __init__(
        self,
        topology: Topology,
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
        self.fanouts = check_fanouts(fanouts)
        self.seed = operator.index(seed)
        self.threads = len(os.sched_getaffinity(0)) if threads is None else threads
        self.edge_ids = edge_ids
        if self.threads < 1:
            raise ConfigurationError(f"threads is {threads}", hint="use 1 or more, or None")
        self._local = threading.local()

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
        ids = as_ids(seeds, "seeds")
        table, scratch = self._buffers()
        table.start(ids, self.topology.num_nodes)
        bounds = [0, ids.size]
        hops: list[Hop] = []
        for hop, fanout in enumerate(self.fanouts):
            first, last = bounds[-2:]
            key = stream_key(self.seed, epoch, batch, hop)
            positions, degrees = draw_edges(
                self.topology, table.nodes[first:last], fanout, key=key, scratch=scratch
            )
            sources = number_edges(self.topology, positions, table)
            edge_ids = positions.copy() if self.edge_ids else None
            hops.append(Hop(degrees, sources, edge_ids))
            bounds.append(table.count)
        return _assemble(batch, table.nodes[: table.count].copy(), bounds, hops)

    def sample_many(
        self, batches: Iterable[ArrayLike], *, epoch: int, first: int = 0
    ) -> Iterator[SampledBatch]:
        """Yield the samples of ``batches`` in order, ``threads`` of them in the making.

        Args:
            batches: Seeds of each batch.
            epoch: As in :meth:`sample`.
            first: Number of the first batch.

        Raises:
            ConfigurationError: As :meth:`sample`.
            DataError: As :meth:`sample`.
        """
        numbered = zip(itertools.count(first), batches, strict=False)
        if self.threads == 1:
            for number, seeds in numbered:
                yield self.sample(seeds, epoch=epoch, batch=number)
            return
        with ThreadPoolExecutor(self.threads, "fivefold-sampler") as pool:
            waiting: deque[Future[SampledBatch]] = deque()
            try:
                for number, seeds in numbered:
                    waiting.append(pool.submit(self.sample, seeds, epoch=epoch, batch=number))
                    if len(waiting) > self.threads:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._local = threading.local()

    def _buffers(self) -> tuple[NodeTable, Scratch]:
        local = self._local
        if not hasattr(local, "buffers"):
            local.buffers = (NodeTable(), Scratch())
        buffers: tuple[NodeTable, Scratch] = local.buffers
        return buffers


def _assemble(
    number: int, node_ids: NDArray[np.int64], bounds: list[int], hops: list[Hop]
) -> SampledBatch:
    edge_ids = [hop.edge_ids for hop in hops if hop.edge_ids is not None]
    return SampledBatch(
        number=number,
        node_ids=node_ids,
        batch_size=bounds[1],
        nodes_per_hop=np.diff(bounds).astype(np.int64),
        edges_per_hop=np.array([hop.sources.size for hop in hops], np.int64),
        degrees=np.concatenate([hop.degrees for hop in hops]),
        sources=np.concatenate([hop.sources for hop in hops]),
        edge_ids=np.concatenate(edge_ids) if edge_ids else None,
    )


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
        return _assemble_hetero(batch, tables, bounds, hops)

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


def _assemble_hetero(
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
