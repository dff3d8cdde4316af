"""Shortest routes between ranks: least latency, fewest links, wide ones first, spread over equals.

Latencies are compared as whole ticks, so that two routes over the same links in another order are
equal. Of equally good links the destination's rank chooses, digit by digit, as in static routing of
fat-trees: flows to different destinations meet on as few links as can be.
"""

from __future__ import annotations

import importlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.topology._graph import LinkGraph
from fivefold.network.topology.arrays import FloatArray, IntArray, LongArray, offsets_of, places_of

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
    """Finds the shortest routes of one network; distances from recent sources are kept."""

    def __init__(self, graph: LinkGraph) -> None:
        self._graph = graph
        longest_s = float(graph.latencies_s.max(initial=0.0)) * graph.num_nodes
        self._ticks_per_s = min(_TICKS_PER_S, _MAX_TICKS / longest_s) if longest_s else _TICKS_PER_S
        self._ticks = np.rint(graph.latencies_s * self._ticks_per_s).astype(np.int64)
        self._kept: OrderedDict[tuple[int, bool], tuple[LongArray, IntArray]] = OrderedDict()
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
        pieces: list[tuple[LongArray, IntArray]] = []
        order = np.argsort(first, kind="stable")
        few: list[LongArray] = []
        for wanted in np.split(order, np.flatnonzero(np.diff(first[order])) + 1):
            if not wanted.size:
                continue
            rank = int(first[wanted[0]])
            if wanted.size <= self._few and (rank, through_ranks) not in self._kept:
                few.append(wanted)
                continue
            ends = first[wanted], last[wanted]
            lengths[wanted], links = self._from_one(*ends, through_ranks=through_ranks)
            pieces.append((wanted, links))
        if few:
            wanted = np.concatenate(few)
            ends = first[wanted], last[wanted]
            lengths[wanted], links = self._from_both(*ends, through_ranks=through_ranks)
            pieces.append((wanted, links))
        offsets = offsets_of(lengths)
        found = np.empty(offsets[-1], np.int32)
        for wanted, links in pieces:
            found[places_of(offsets[wanted], lengths[wanted])] = links
        return Routes(first, last, offsets, found)

    def distances(self, rank: int, *, through_ranks: bool = True) -> tuple[LongArray, IntArray]:
        """Return the ticks of latency and number of links from a rank to each node, or -1."""
        key = (rank, through_ranks)
        if key not in self._kept:
            self._kept[key] = _searches().shortest_distances(
                *self._outgoing,
                self._blocked(through_ranks=through_ranks),
                int(self._graph.rank_nodes[rank]),
            )
            if len(self._kept) > _KEPT_SOURCES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    @property
    def _outgoing(self) -> tuple[IntArray, IntArray, IntArray, LongArray]:
        """Return the network as searches read it: by node its links, their ends, their ticks."""
        graph = self._graph
        return graph.outgoing.offsets, graph.outgoing.links, graph.link_targets, self._ticks

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
        nodes = self._graph.rank_nodes[np.asarray(ranks)]
        order, reached = _searches().nearest_neighbour_tour(self._outgoing, nodes)
        if reached < len(ranks):
            lost = min(set(ranks) - {ranks[place] for place in order[:reached].tolist()})
            raise self._no_route(ranks[order[reached - 1]], lost, through_ranks=True)
        return tuple(ranks[place] for place in order.tolist())

    def seconds(self, ticks: int) -> float:
        """Return a sum of ticks in seconds."""
        return ticks / self._ticks_per_s

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
            whole = ranks.dtype.kind in "iu" or not ranks.size
            if not whole or ranks.min(initial=0) < 0 or ranks.max(initial=0) >= num_ranks:
                raise ConfigurationError(
                    f"routes got ranks {ranks.tolist()!r:.60}",
                    hint=f"the ranks are 0 to {num_ranks - 1}",
                )
        return first.astype(np.int32), last.astype(np.int32)

    def _from_one(
        self, sources: IntArray, targets: IntArray, *, through_ranks: bool
    ) -> tuple[IntArray, IntArray]:
        """Walk routes from one source, by the distances from it."""
        graph, rank = self._graph, int(sources[0])
        ticks, hops = self.distances(rank, through_ranks=through_ranks)
        nodes = graph.rank_nodes[targets]
        counts = hops[nodes]
        if (counts < 0).any():
            lost = int(targets[int(np.argmin(counts))])
            raise self._no_route(rank, lost, through_ranks=through_ranks)
        links: IntArray = _searches().walk_back(
            (graph.incoming.offsets, self._entering, graph.link_sources, self._widths),
            (self._ticks, ticks, hops, self._blocked(through_ranks=through_ranks)),
            int(graph.rank_nodes[rank]),
            nodes,
            self._selectors(sources, targets),
        )
        return counts, links

    def _from_both(
        self, sources: IntArray, targets: IntArray, *, through_ranks: bool
    ) -> tuple[LongArray, IntArray]:
        """Find routes one by one, by searches from both ends."""
        graph = self._graph
        offsets, links, lost = _searches().meeting_routes(
            self._outgoing,
            (graph.incoming.offsets, self._entering, graph.link_sources, self._ticks, self._widths),
            self._blocked(through_ranks=through_ranks),
            (graph.rank_nodes[sources], graph.rank_nodes[targets]),
            self._selectors(sources, targets),
        )
        if lost >= 0:
            pair = int(sources[lost]), int(targets[lost])
            raise self._no_route(*pair, through_ranks=through_ranks)
        return np.diff(offsets), links

    def _selectors(self, sources: IntArray, targets: IntArray) -> IntArray:
        """Return what decides among equals: the target where switches are, else a hash of both.

        In a grid of ranks the target alone would lead all through the same neighbour.
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

    def _blocked(self, *, through_ranks: bool) -> npt.NDArray[np.bool_]:
        return np.zeros_like(self._graph.is_rank) if through_ranks else self._graph.is_rank

    def _no_route(self, rank: int, lost: int, *, through_ranks: bool) -> InfeasibleError:
        ranks = self._graph.ranks
        through = "" if through_ranks else " through switches only"
        return InfeasibleError(
            f"topology {self._graph.name!r} has no route from {ranks[rank]!r} to "
            f"{ranks[lost]!r}{through}",
            hint="add the links that are missing",
        )


def _searches() -> Any:
    """Return the compiled searches, loaded when one is needed: they bring numba."""
    return importlib.import_module("fivefold.network.topology._searches")


@dataclass(frozen=True)
class RankGraph(Routes):
    """Logical links between ranks, ordered by source, then target, direct ones first.

    Each is the route of physical links that it stands for.
    """

    capacities_bytes_per_s: FloatArray
    latencies_s: FloatArray


def build_rank_graph(graph: LinkGraph) -> RankGraph:
    """Find all logical links of a topology; routes through switches are the shortest ones."""
    ranks_at_ends = graph.is_rank[graph.link_sources] & graph.is_rank[graph.link_targets]
    direct = np.flatnonzero(ranks_at_ends).astype(np.int32)
    switched = np.flatnonzero(~ranks_at_ends).astype(np.int32)
    # Direct links are left out of the search: a pair may have both kinds.
    router = Router(
        LinkGraph(graph.name, graph.nodes, tuple(graph.links[i] for i in switched.tolist()))
    )
    reached = [
        router.distances(rank, through_ranks=False)[1][graph.rank_nodes] > 0
        for rank in range(graph.num_ranks)
    ]
    first, last = np.nonzero(reached)
    routes = router.routes(first, last, through_ranks=False)
    sources = np.concatenate([graph.rank_of_node[graph.link_sources[direct]], routes.sources])
    targets = np.concatenate([graph.rank_of_node[graph.link_targets[direct]], routes.targets])
    lengths = np.concatenate([np.ones(len(direct), np.int64), np.diff(routes.offsets)])
    links = np.concatenate([direct, switched[routes.links]])
    order = np.lexsort((lengths > 1, targets, sources))
    links = links[places_of(offsets_of(lengths)[:-1][order], lengths[order])]
    offsets = offsets_of(lengths[order])
    return RankGraph(
        sources[order],
        targets[order],
        offsets,
        links,
        np.minimum.reduceat(graph.capacities_bytes_per_s[links], offsets[:-1]),
        np.add.reduceat(graph.latencies_s[links], offsets[:-1]),
    )
