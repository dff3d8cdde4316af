"""The neighbour sampler: compiled hops over a topology, the same result for any thread count."""

from __future__ import annotations

import itertools
import operator
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fivefold.errors import ConfigurationError
from fivefold.gnn.sampling._batch import SampledBatch
from fivefold.gnn.sampling._epoch import as_ids
from fivefold.gnn.sampling._hop import Hop, NodeTable, Scratch, draw_edges, number_edges
from fivefold.gnn.sampling._random import stream_key
from fivefold.gnn.sampling._topology import Topology


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
