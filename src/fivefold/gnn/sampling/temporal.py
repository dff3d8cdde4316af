"""Neighbours as they were at the time of a seed: nothing that came later is ever sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from fivefold.errors import ConfigurationError, require_flag, require_one_of, require_whole
from fivefold.gnn.sampling._topology import Adjacency
from fivefold.gnn.sampling.batches import SampledBatch, as_ids, checked_fanouts, stream_key
from fivefold.gnn.sampling.kernels import draw_in_time, most_edges
from fivefold.gnn.storage.pages import Array, Ids, first_outside

TemporalStrategy = Literal["uniform", "last"]
_BEYOND = 2.0**62


class TemporalSampler:
    """Samples in-neighbours hop by hop, for each seed only what is not later than its time.

    Two seeds see the same node at different times, so each seed has a tree of its own, in which a
    node stands once; seeds may repeat, at several times. As PyG's ``NeighborLoader`` with
    ``time_attr`` and ``disjoint=True`` (Rossi et al., arXiv 2006.10637, section 3).
    """

    def __init__(
        self,
        topology: Adjacency,  # with weights neighbours are drawn in proportion to them
        fanouts: Sequence[int],
        *,
        node_time: ArrayLike | None = None,  # [nodes]; an edge is as old as its source
        edge_time: ArrayLike | None = None,  # [edges of the source], in place of node_time
        strategy: TemporalStrategy = "uniform",  # among what is early enough; "last": the latest
        seed: int = 0,
        edge_ids: bool = False,
    ) -> None:
        if (node_time is None) == (edge_time is None):
            message = "times of nodes or of edges are needed, and only one of them"
            raise ConfigurationError(message, hint="give node_time or edge_time")
        require_one_of(strategy, ("uniform", "last"), f"temporal_strategy is {strategy!r}")
        self.topology, self.fanouts = topology, checked_fanouts(fanouts)
        self.strategy, self.seed = strategy, require_whole("seed", seed, least=-(2**63))
        self.edge_ids, self._of_nodes = require_flag("edge_ids", edge_ids), edge_time is None
        if edge_time is None:
            self.times = checked_times(node_time, topology.num_nodes, "node_time")
        else:
            by_id = checked_times(edge_time, topology.num_source_edges, "edge_time")
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

    def born(self) -> Array:
        """Return since when each node exists: its time, or that of its first edge."""
        if self._of_nodes:
            return self.times
        most: Any = np.inf if self.times.dtype.kind == "f" else np.iinfo(self.times.dtype).max
        born, topology = np.full(self.topology.num_nodes, most, self.times.dtype), self.topology
        targets = np.repeat(np.arange(topology.num_nodes), np.diff(topology.indptr))
        for ends in (topology.indices, targets):
            np.minimum.at(born, ends, self.times)
        return born

    def sample(
        self, seeds: ArrayLike, seed_time: ArrayLike, *, epoch: int, batch: int
    ) -> SampledBatch:
        """Return the batch of the trees around ``seeds``, each a node up to its ``seed_time``."""
        ids, topology = as_ids(seeds, "seeds"), self.topology
        if first_outside(ids, topology.num_nodes) >= 0:
            raise ConfigurationError(
                f"seeds go from {ids.min()} to {ids.max()}, the graph has {topology.num_nodes} "
                "nodes",
                hint="ids of nodes count from 0",
            )
        limits = self.times_of(ids, seed_time, "seed_time")
        found = _Trees(ids, topology.num_nodes)
        weights = np.empty(0, np.float32) if topology.weights is None else topology.weights
        degrees, sources, edge_ids, first = [], [], [], 0
        for hop, fanout in enumerate(self.fanouts):
            nodes, trees = found.nodes[first:], found.trees[first:]
            positions = np.empty(most_edges(topology.indptr, nodes, fanout), np.int64)
            taken = np.empty(nodes.size, np.int32)
            key = np.uint64(stream_key(self.seed, epoch, batch, hop))
            count = draw_in_time(
                *(topology.indptr, topology.indices, self.times, self._of_nodes, nodes, trees),
                *(limits, weights, fanout, self.strategy == "last", key, positions, taken),
            )
            positions, first = positions[:count], len(found.nodes)
            topology.check_unchanged()
            degrees.append(taken)
            sources.append(found.enter(topology.indices[positions], np.repeat(trees, taken)))
            if self.edge_ids:
                edge_ids.append(topology.numbers_of(positions))
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
