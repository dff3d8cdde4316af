"""Shortest routes between ranks: least latency, fewest links, wide ones first, spread over equals.

Latencies are compared as whole numbers of a fine tick, so that two routes over the same links in
another order are exactly equal. The tree of distances is found per source (Dijkstra); a route is
then walked back from its destination. Where several links are equally good the widest are taken,
and of those the destination's rank decides, digit by digit, as in static routing of fat-trees
(destination modulo k): flows to different destinations meet on as few links as can be without
knowing the traffic.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.topology._graph import IntArray, LinkGraph, LinksAtNodes, group_by

_TICKS_PER_S = 1e15
_MAX_TICKS = 2**60  # sums over a route stay well inside int64
_KEPT_SOURCES = 64
# Odd constants of splitmix64.
_MIX = tuple(map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)))
_NODES_PER_SEARCH = 512  # a search from both ends costs about as much as this part of a tree


@dataclass(frozen=True)
class Routes:
    """Routes of many pairs; route i is ``links[offsets[i]:offsets[i + 1]]``."""

    sources: IntArray
    targets: IntArray
    offsets: npt.NDArray[np.int64]
    links: IntArray

    def __len__(self) -> int:
        return len(self.sources)

    def of(self, route: int) -> IntArray:
        """Return the link indices of one route."""
        return self.links[self.offsets[route] : self.offsets[route + 1]]


class Router:
    """Finds the shortest routes of one network; distances from recent sources are kept.

    Args:
        graph: The network.
    """

    def __init__(self, graph: LinkGraph) -> None:
        self._graph = graph
        rate = _tick_rate(graph.latencies_s, graph.num_nodes)
        self._ticks = np.rint(graph.latencies_s * rate).astype(np.int64)
        self._kept: OrderedDict[tuple[int, bool], tuple[npt.NDArray[np.int64], IntArray]]
        self._kept = OrderedDict()
        # Classes of equal capacity, and each node's entering links with the widest first.
        capacities = graph.capacities_bytes_per_s
        self._widths = np.unique(capacities, return_inverse=True)[1].astype(np.int64)
        enter = graph.incoming
        node_of = np.repeat(np.arange(graph.num_nodes), np.diff(enter.offsets))
        order = np.lexsort((enter.links, -self._widths[enter.links], node_of))
        self._entering: IntArray = enter.links[order]

    def routes(
        self,
        sources: npt.ArrayLike | None = None,
        targets: npt.ArrayLike | None = None,
        *,
        through_ranks: bool = True,
    ) -> Routes:
        """Return the routes of many pairs, see :meth:`Topology.routes`."""
        first, last = self._pairs(sources, targets)
        lengths = np.zeros(len(first), np.int64)
        pieces: list[tuple[npt.NDArray[np.int64], IntArray]] = []
        order = np.argsort(first, kind="stable")
        bounds = np.flatnonzero(np.diff(first[order], prepend=-1, append=-1))
        few: list[npt.NDArray[np.int64]] = []
        for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            wanted = order[start:end]
            rank = int(first[wanted[0]])
            if end - start <= self._few and (rank, through_ranks) not in self._kept:
                few.append(wanted)
                continue
            lengths[wanted], links = self._from_one(rank, last[wanted], through_ranks)
            pieces.append((wanted, links))
        if few:
            wanted = np.concatenate(few)
            lengths[wanted], links = self._from_both(first[wanted], last[wanted], through_ranks)
            pieces.append((wanted, links))
        return _gathered(first, last, lengths, pieces)

    def distances(
        self, rank: int, *, through_ranks: bool = True
    ) -> tuple[npt.NDArray[np.int64], IntArray]:
        """Return the ticks of latency and number of links from a rank to each node, or -1."""
        from fivefold.network.topology._searches import (  # noqa: PLC0415 - brings numba
            shortest_distances,
        )

        key = (rank, through_ranks)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        graph = self._graph
        found: tuple[npt.NDArray[np.int64], IntArray] = shortest_distances(
            graph.outgoing.offsets,
            graph.outgoing.links,
            graph.link_targets,
            self._ticks,
            self._blocked(through_ranks),
            int(graph.rank_nodes[rank]),
        )
        self._kept[key] = found
        if len(self._kept) > _KEPT_SOURCES:
            self._kept.popitem(last=False)
        return found

    def eccentricities_s(self) -> npt.NDArray[np.float64]:
        """Return the largest latency from each rank to any; infinite where one is cut off."""
        graph = self._graph
        found = np.zeros(graph.num_ranks)
        if not self._ticks.any() and graph.is_connected():
            return found
        for rank in range(graph.num_ranks):
            ticks, hops = self.distances(rank)
            ranks = graph.rank_nodes
            lost = bool((hops[ranks] < 0).any())
            found[rank] = math.inf if lost else self.seconds(int(ticks[ranks].max()))
        return found

    def nearest_tour(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return ranks from the first one on, each followed by the nearest one left."""
        from fivefold.network.topology._searches import (  # noqa: PLC0415 - brings numba
            nearest_neighbour_tour,
        )

        graph = self._graph
        out = (graph.outgoing.offsets, graph.outgoing.links, graph.link_targets, self._ticks)
        order, reached = nearest_neighbour_tour(out, graph.rank_nodes[np.asarray(ranks)])
        if reached < len(ranks):
            left = set(ranks) - {ranks[place] for place in order[:reached].tolist()}
            lost = min(left)
            raise self._no_route(ranks[order[reached - 1]], lost, through_ranks=True)
        return tuple(ranks[place] for place in order.tolist())

    def seconds(self, ticks: int) -> float:
        """Return a sum of ticks in seconds."""
        return ticks / self._ticks_per_s

    @property
    def _ticks_per_s(self) -> float:
        return _tick_rate(self._graph.latencies_s, self._graph.num_nodes)

    def _pairs(
        self, sources: npt.ArrayLike | None, targets: npt.ArrayLike | None
    ) -> tuple[IntArray, IntArray]:
        num_ranks = self._graph.num_ranks
        if (sources is None) != (targets is None):
            message = "routes needs both sources and targets, or neither"
            raise ConfigurationError(message)
        if sources is None or targets is None:
            first, last = np.divmod(np.arange(num_ranks * num_ranks), num_ranks)
            different = first != last
            return first[different].astype(np.int32), last[different].astype(np.int32)
        first, last = np.atleast_1d(np.asarray(sources)), np.atleast_1d(np.asarray(targets))
        if first.shape != last.shape or first.ndim != 1:
            raise ConfigurationError(
                f"routes got {first.shape} sources and {last.shape} targets",
                hint="give one source and one target per route",
            )
        for ranks in (first, last):
            if len(ranks) and not (ranks.min() >= 0 and ranks.max() < num_ranks):
                raise ConfigurationError(
                    f"routes got ranks {ranks.min()} to {ranks.max()}",
                    hint=f"the ranks are 0 to {num_ranks - 1}",
                )
        return first.astype(np.int32), last.astype(np.int32)

    def _from_one(
        self,
        rank: int,
        targets: IntArray,
        through_ranks: bool,  # noqa: FBT001 - passed on
    ) -> tuple[IntArray, IntArray]:
        from fivefold.network.topology._searches import walk_back  # noqa: PLC0415 - brings numba

        graph = self._graph
        ticks, hops = self.distances(rank, through_ranks=through_ranks)
        nodes = graph.rank_nodes[targets]
        counts = hops[nodes]
        if (counts < 0).any():
            raise self._no_route(rank, int(targets[int(np.argmin(counts))]), through_ranks)
        links: IntArray = walk_back(
            (graph.incoming.offsets, self._entering, graph.link_sources, self._widths),
            (self._ticks, ticks, hops, self._blocked(through_ranks)),
            int(graph.rank_nodes[rank]),
            nodes,
            self._selectors(np.full(len(targets), rank, np.int32), targets),
        )
        return counts, links

    def _from_both(
        self,
        first: IntArray,
        last: IntArray,
        through_ranks: bool,  # noqa: FBT001 - passed on
    ) -> tuple[npt.NDArray[np.int64], IntArray]:
        from fivefold.network.topology._searches import (  # noqa: PLC0415 - brings numba
            meeting_routes,
        )

        graph = self._graph
        leave, enter, nodes = graph.outgoing, graph.incoming, graph.rank_nodes
        offsets, links, lost = meeting_routes(
            (leave.offsets, leave.links, graph.link_targets, self._ticks),
            (enter.offsets, self._entering, graph.link_sources, self._ticks, self._widths),
            self._blocked(through_ranks),
            (nodes[first], nodes[last]),
            self._selectors(first, last),
        )
        if lost >= 0:
            raise self._no_route(int(first[lost]), int(last[lost]), through_ranks)
        return np.diff(offsets), links

    def _selectors(self, sources: IntArray, targets: IntArray) -> IntArray:
        """Return what decides among equals: the target where switches are, else a hash of the pair.

        In a grid of ranks the target alone would send all its traffic through the same neighbour.
        """
        if not self._graph.is_rank.all():
            return targets
        mixed = (sources.astype(np.uint64) + 1) * _MIX[0] ^ (targets.astype(np.uint64) + 1) * _MIX[
            1
        ]
        mixed = (mixed ^ mixed >> np.uint64(29)) * _MIX[2]
        selectors: IntArray = (mixed >> np.uint64(33)).astype(np.int32)
        return selectors

    @property
    def _few(self) -> int:
        """Up to so many routes from a source are found one by one, not by its whole tree."""
        return self._graph.num_nodes // _NODES_PER_SEARCH

    def _blocked(self, through_ranks: bool) -> npt.NDArray[np.bool_]:  # noqa: FBT001 - passed on
        graph = self._graph
        return np.zeros(graph.num_nodes, np.bool_) if through_ranks else graph.is_rank

    def _no_route(
        self,
        rank: int,
        lost: int,
        through_ranks: bool,  # noqa: FBT001 - passed on
    ) -> InfeasibleError:
        ranks = self._graph.ranks
        through = "" if through_ranks else " through switches only"
        return InfeasibleError(
            f"topology {self._graph.name!r} has no route from {ranks[rank]!r} to "
            f"{ranks[lost]!r}{through}",
            hint="add the links that are missing",
        )


def _gathered(
    first: IntArray,
    last: IntArray,
    lengths: npt.NDArray[np.int64],
    pieces: list[tuple[npt.NDArray[np.int64], IntArray]],
) -> Routes:
    """Put routes found in pieces into the order that they were asked for."""
    offsets = np.zeros(len(first) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    links_of_all = np.empty(offsets[-1], np.int32)
    for wanted, links in pieces:
        each = lengths[wanted]
        within = np.arange(len(links)) - np.repeat(np.cumsum(each) - each, each)
        links_of_all[np.repeat(offsets[wanted], each) + within] = links
    return Routes(first, last, offsets, links_of_all)


def _tick_rate(latencies_s: npt.NDArray[np.float64], num_nodes: int) -> float:
    longest_s = float(latencies_s.max(initial=0.0)) * num_nodes
    return min(_TICKS_PER_S, _MAX_TICKS / longest_s) if longest_s > 0 else _TICKS_PER_S


@dataclass(frozen=True)
class RankGraph:
    """Logical links between ranks, ordered by source, then target, direct ones first."""

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
    def outgoing(self) -> LinksAtNodes:
        """Logical links that leave each rank."""
        return group_by(self.sources, num_groups=self._num_ranks)

    @cached_property
    def incoming(self) -> LinksAtNodes:
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


def build_rank_graph(graph: LinkGraph) -> RankGraph:
    """Find all logical links of a topology; routes through switches are the shortest ones."""
    ranks_at_ends = graph.is_rank[graph.link_sources] & graph.is_rank[graph.link_targets]
    direct = np.flatnonzero(ranks_at_ends).astype(np.int32)
    switched = np.flatnonzero(~ranks_at_ends).astype(np.int32)
    # Direct links are left out of the search: a pair may have both kinds.
    router = Router(
        LinkGraph(graph.name, graph.nodes, tuple(graph.links[i] for i in switched.tolist()))
    )
    first, last = _reachable_pairs(graph, router)
    routes = router.routes(first, last, through_ranks=False)
    sources = np.concatenate([graph.rank_of_node[graph.link_sources[direct]], first])
    targets = np.concatenate([graph.rank_of_node[graph.link_targets[direct]], last])
    lengths = np.concatenate([np.ones(len(direct), np.int64), np.diff(routes.offsets)])
    links = np.concatenate([direct, switched[routes.links]])
    return _ordered(graph, (sources, targets), lengths, links)


def _reachable_pairs(graph: LinkGraph, router: Router) -> tuple[IntArray, IntArray]:
    found: list[IntArray] = []
    for rank in range(graph.num_ranks):
        _, hops = router.distances(rank, through_ranks=False)
        found.append(np.flatnonzero(hops[graph.rank_nodes] > 0).astype(np.int32))
    counts = [len(targets) for targets in found]
    first = np.repeat(np.arange(graph.num_ranks, dtype=np.int32), counts)
    return first, np.concatenate(found)


def _ordered(
    graph: LinkGraph,
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
        np.minimum.reduceat(graph.capacities_bytes_per_s[links], offsets[:-1]),
        np.add.reduceat(graph.latencies_s[links], offsets[:-1]),
        np.minimum.reduceat(graph.link_counts[links], offsets[:-1]),
    )
