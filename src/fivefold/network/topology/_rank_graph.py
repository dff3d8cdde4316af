"""The logical links between ranks: every direct link, and every route through switches only.

This is what point-to-point solvers see of a switched network. Parallel links stay several logical
links, one each; a link with a count of two is one logical link with twice the capacity. Two logical
links whose routes meet on a physical link share its capacity; whoever uses them together must look
at the routes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fivefold.network.topology._graph import Adjacency, IntArray, group_by
from fivefold.network.topology._routes import Router

if TYPE_CHECKING:
    from fivefold.network.topology._topology import Topology


@dataclass(frozen=True)
class RankGraph:
    """Logical links between ranks, ordered by source, then target, direct ones first.

    Args:
        sources: Rank where each begins, int32.
        targets: Rank where each ends, int32.
        route_offsets: Where each one's route begins in ``route_links``, int64 [edges + 1].
        route_links: Physical link indices of the routes, int32.
        capacities_bytes_per_s: Least capacity on each route.
        latencies_s: Sum of the latencies on each route.
        counts: Physical links side by side at the narrowest place of each route, int32.

    Examples:
        >>> from fivefold.network.topology import switch
        >>> graph = switch(3).rank_graph()
        >>> len(graph), graph.route(0).tolist(), graph.is_direct(0)
        (6, [0, 3], False)
    """

    sources: IntArray
    targets: IntArray
    route_offsets: npt.NDArray[np.int64]
    route_links: IntArray
    capacities_bytes_per_s: npt.NDArray[np.float64]
    latencies_s: npt.NDArray[np.float64]
    counts: IntArray

    def __len__(self) -> int:
        return len(self.sources)

    def route(self, edge: int) -> IntArray:
        """Return the physical links of one logical link, in order."""
        return self.route_links[self.route_offsets[edge] : self.route_offsets[edge + 1]]

    def is_direct(self, edge: int) -> bool:
        """Return whether it is one physical link."""
        return int(self.route_offsets[edge + 1] - self.route_offsets[edge]) == 1

    @cached_property
    def outgoing(self) -> Adjacency:
        """Logical links that leave each rank."""
        return group_by(self.sources, num_groups=self._num_ranks)

    @cached_property
    def incoming(self) -> Adjacency:
        """Logical links that enter each rank."""
        return group_by(self.targets, num_groups=self._num_ranks)

    def between(self, rank_a: int, rank_b: int) -> IntArray:
        """Return the logical links from one rank to another."""
        leaving = self.outgoing.of(rank_a)
        found: IntArray = leaving[self.targets[leaving] == rank_b]
        return found

    @property
    def _num_ranks(self) -> int:
        return 1 + int(max(self.sources.max(initial=0), self.targets.max(initial=0)))


def build_rank_graph(topology: Topology) -> RankGraph:
    """Find all logical links of a topology; routes through switches are the shortest ones."""
    ranks_at_ends = (
        topology.is_rank[topology.link_sources] & topology.is_rank[topology.link_targets]
    )
    direct = np.flatnonzero(ranks_at_ends).astype(np.int32)
    switched = np.flatnonzero(~ranks_at_ends).astype(np.int32)
    # Direct links are left out of the search: a pair may have both kinds.
    router = Router(topology.without_links(direct.tolist()))
    first, last = _reachable_pairs(topology, router)
    routes = router.routes(first, last, through_ranks=False)
    sources = np.concatenate([topology.rank_of_node[topology.link_sources[direct]], first])
    targets = np.concatenate([topology.rank_of_node[topology.link_targets[direct]], last])
    lengths = np.concatenate([np.ones(len(direct), np.int64), np.diff(routes.offsets)])
    links = np.concatenate([direct, switched[routes.links]])
    return _ordered(topology, (sources, targets), lengths, links)


def _reachable_pairs(topology: Topology, router: Router) -> tuple[IntArray, IntArray]:
    found: list[IntArray] = []
    for rank in range(topology.num_ranks):
        _, hops = router.distances(rank, through_ranks=False)
        found.append(np.flatnonzero(hops[topology.rank_nodes] > 0).astype(np.int32))
    counts = [len(targets) for targets in found]
    first = np.repeat(np.arange(topology.num_ranks, dtype=np.int32), counts)
    return first, np.concatenate(found)


def _ordered(
    topology: Topology,
    ends: tuple[IntArray, IntArray],
    lengths: npt.NDArray[np.int64],
    links: IntArray,
) -> RankGraph:
    sources, targets = ends
    order = np.lexsort((lengths > 1, targets, sources))
    starts = np.cumsum(lengths) - lengths
    lengths, starts = lengths[order], starts[order]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    links = links[np.repeat(starts, lengths) + within].astype(np.int32)
    if len(order) == 0:
        nothing = np.zeros(0)
        none = np.zeros(0, np.int32)
        return RankGraph(none, none, offsets, links, nothing, nothing, none)
    return RankGraph(
        sources[order].astype(np.int32),
        targets[order].astype(np.int32),
        offsets,
        links,
        np.minimum.reduceat(topology.capacities_bytes_per_s[links], offsets[:-1]),
        np.add.reduceat(topology.latencies_s[links], offsets[:-1]),
        np.minimum.reduceat(topology.link_counts[links], offsets[:-1]),
    )
