"""Neighbours as they were at the time of a seed: nothing that came later is ever sampled."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from fivefold.errors import ConfigurationError, require_one_of
from fivefold.gnn.sampling._topology import Adjacency
from fivefold.gnn.sampling.batches import SampledBatch, as_ids, checked_fanouts, stream_key
from fivefold.gnn.sampling.kernels import draw_in_time, most_edges
from fivefold.gnn.storage.pages import Array, Ids

TemporalStrategy = Literal["uniform", "last"]
_BEYOND = 2.0**62


class TemporalSampler:
    """Samples in-neighbours hop by hop, for each seed only what is not later than its time.

    Two seeds see the same node at different times, so each seed has a tree of its own, in which a
    node stands once; the same node may be in several trees, and the same seed may be given at
    several times. As PyG's ``NeighborLoader`` with ``time_attr`` and ``disjoint=True``.

    Args:
        topology: The graph, without weights.
        fanouts: Neighbours to sample in each hop, first hop first; -1 means all, 0 none.
        node_time: ``[nodes]``, when each node came into being; an edge may be taken where its
            source is not later than the seed. Whole or real numbers.
        edge_time: ``[edges]``, when each edge came into being, by its id (``Adjacency.edge_ids``,
            or its position); in place of ``node_time``.
        strategy: "uniform" draws among what is early enough, "last" takes the latest of it.
        seed: Other seeds give other samples.
        edge_ids: Also return the id of every edge.

    Raises:
        ConfigurationError: Not exactly one of the two times is given, or they do not fit.

    References:
        Rossi et al., arXiv 2006.10637, section 3 (sampling of temporal neighbourhoods).

    Examples:
        >>> topology = Adjacency([0, 3, 3, 3, 3], [1, 2, 3])  # 1, 2 and 3 into 0
        >>> sampler = TemporalSampler(topology, [2], edge_time=[10, 20, 30], strategy="last")
        >>> batch = sampler.sample([0, 0], [20, 9], epoch=0, batch=0)
        >>> batch.node_ids.tolist(), batch.trees.tolist()
        ([0, 0, 1, 2], [0, 1, 0, 0])
    """

    def __init__(
        self,
        topology: Adjacency,
        fanouts: Sequence[int],
        *,
        node_time: ArrayLike | None = None,
        edge_time: ArrayLike | None = None,
        strategy: TemporalStrategy = "uniform",
        seed: int = 0,
        edge_ids: bool = False,
    ) -> None:
        if (node_time is None) == (edge_time is None):
            message = "times of nodes or of edges are needed, and only one of them"
            raise ConfigurationError(message, hint="give node_time or edge_time")
        require_one_of(strategy, ("uniform", "last"), f"temporal_strategy is {strategy!r}")
        if topology.weights is not None:
            message = "the topology has edge weights, which temporal sampling does not use"
            raise ConfigurationError(message, hint="open it without weights")
        self.topology, self.fanouts = topology, checked_fanouts(fanouts)
        self.strategy, self.seed = strategy, operator.index(seed)
        self.edge_ids, self._of_nodes = edge_ids, edge_time is None
        if edge_time is None:
            self.times = checked_times(node_time, topology.num_nodes, "node_time")
        else:
            by_id = checked_times(edge_time, topology.num_edges, "edge_time")
            self.times = by_id if topology.edge_ids is None else by_id[topology.edge_ids]

    def times_of(self, seeds: Ids, given: ArrayLike | None, name: str = "input_time") -> Array:
        """Return the time of each seed: as given, or when its node came into being."""
        if given is not None:
            limits = checked_times(given, len(seeds), name)
            if self.times.dtype.kind == "i" and limits.dtype.kind == "f":
                # What is at most 1.5 is at most 1; what int64 does not hold is before or after all.
                limits = np.clip(np.floor(limits), -_BEYOND, _BEYOND)
            return limits.astype(self.times.dtype)
        if not self._of_nodes:
            raise ConfigurationError(
                f"edges have times, but {name} is None", hint="give one time for each seed"
            )
        return self.times[seeds]

    def sample(
        self, seeds: ArrayLike, seed_time: ArrayLike, *, epoch: int, batch: int
    ) -> SampledBatch:
        """Return the batch of the trees around ``seeds``, each a node up to its ``seed_time``.

        A node may stand several times; ``epoch`` and ``batch`` are as of ``NeighborSampler``.

        Raises:
            ConfigurationError: A seed is out of range, or times are missing.
        """
        ids, topology = as_ids(seeds, "seeds"), self.topology
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < topology.num_nodes:
            raise ConfigurationError(
                f"seeds go from {ids.min()} to {ids.max()}, the graph has {topology.num_nodes} "
                "nodes",
                hint="ids of nodes count from 0",
            )
        limits = self.times_of(ids, seed_time, "seed_time")
        found = _Trees(ids, topology.num_nodes)
        degrees, sources, edge_ids, first = [], [], [], 0
        for hop, fanout in enumerate(self.fanouts):
            nodes, trees = found.nodes[first:], found.trees[first:]
            positions = np.empty(most_edges(topology.indptr, nodes, fanout), np.int64)
            taken = np.empty(nodes.size, np.int32)
            key = np.uint64(stream_key(self.seed, epoch, batch, hop))
            count = draw_in_time(
                *(topology.indptr, topology.indices, self.times, self._of_nodes, nodes, trees),
                *(limits, fanout, self.strategy == "last", key, positions, taken),
            )
            positions, first = positions[:count], len(found.nodes)
            topology.check_unchanged()
            degrees.append(taken)
            sources.append(found.enter(topology.indices[positions], np.repeat(trees, taken)))
            edge_ids.append(
                positions if topology.edge_ids is None else topology.edge_ids[positions]
            )
        return SampledBatch(
            number=batch,
            node_ids=found.nodes,
            batch_size=ids.size,
            nodes_per_hop=np.array(found.per_hop, np.int64),
            edges_per_hop=np.array([part.size for part in sources], np.int64),
            degrees=np.concatenate(degrees),
            sources=np.concatenate(sources),
            edge_ids=np.concatenate(edge_ids) if self.edge_ids else None,
            trees=found.trees,
        )


class _Trees:
    """The nodes found so far, each once in its tree, in order of discovery."""

    def __init__(self, seeds: Ids, num_nodes: int) -> None:
        self.nodes, self.trees = seeds.copy(), np.arange(seeds.size)
        self.per_hop = [seeds.size]
        self._num_nodes = num_nodes

    def enter(self, nodes: Array, trees: Ids) -> Any:
        """Add what is new of one hop; return the local number of every node given, int32."""
        known = self.nodes.size
        nodes, trees = np.append(self.nodes, nodes), np.append(self.trees, trees)
        _, first, inverse = np.unique(
            trees * self._num_nodes + nodes, return_index=True, return_inverse=True
        )
        new = np.sort(first[first >= known])
        local = np.where(first < known, first, known + np.searchsorted(new, first))
        self.nodes = np.append(self.nodes, nodes[new])
        self.trees = np.append(self.trees, trees[new])
        self.per_hop.append(new.size)
        return local[inverse[known:]].astype(np.int32)


def checked_times(times: Any, count: int, name: str) -> Array:
    """Return times as int64 or float64, one for each of ``count``, all finite."""
    array = np.asarray(times)
    if array.shape != (count,) or array.dtype.kind not in "iuf":
        raise ConfigurationError(
            f"{name} has shape {list(array.shape)} and dtype {array.dtype}",
            hint=f"give {count} numbers, one for each",
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ConfigurationError(f"{name} has values that are not finite", hint="remove them")
    if array.dtype == np.uint64 and array.max(initial=0) > np.iinfo(np.int64).max:
        raise ConfigurationError(
            f"{name} has {array.max()}, which int64 does not hold", hint="count from a later time"
        )
    return np.ascontiguousarray(array, np.float64 if array.dtype.kind == "f" else np.int64)
