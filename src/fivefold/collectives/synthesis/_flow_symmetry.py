"""Symmetries of a network: which ranks can take each other's place, and how links move then.

An automorphism is found by colours: one node is marked, every node's colour is refined by those of
its neighbours until nothing changes, and where nodes still look alike another one is marked. Two
markings of one network whose colours agree give the mapping. Every mapping is checked link by
link, so a collision of colours cannot do harm. This module knows no flows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fivefold.collectives.synthesis._deadline import check_time
from fivefold.network.topology import Topology

Longs = NDArray[np.int64]
Colours = NDArray[np.uint64]

_MOST_BRANCHES = 64
_MOST_REFINEMENTS = 10_000  # then ranks that may be alike are taken as unlike
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@dataclass(frozen=True)
class Symmetry:
    """Representatives of the ranks, and a mapping from its representative for each rank.

    Args:
        representatives: Ranks of which every other is an image.
        of_rank: Representative of each rank.
        link_maps: Image of each link under each rank's mapping, [ranks, links].
        node_maps: Image of each node under each rank's mapping, [ranks, nodes].
    """

    representatives: tuple[int, ...]
    of_rank: Longs
    link_maps: Longs
    node_maps: Longs


def symmetry_of(topology: Topology, demands: NDArray[np.float64]) -> Symmetry:
    """Symmetries that keep links, capacities and demands.

    Args:
        topology: The network.
        demands: What each rank sends to each, [ranks, ranks].

    Returns:
        The symmetry; every rank is its own representative where none is found.
    """
    ranks, links, nodes = topology.num_ranks, topology.num_links, topology.num_nodes
    search = _Search(topology)
    marked = [search.refined(search.plain, int(node)) for node in topology.rank_nodes]
    found: list[int] = []
    of_rank = np.empty(ranks, np.int64)
    link_maps = np.empty((ranks, links), np.int64)
    node_maps = np.empty((ranks, nodes), np.int64)
    for rank in range(ranks):
        for other in found:
            mapping = search.mapping(marked[other], marked[rank])
            if mapping is None or not _keeps(demands, topology, mapping):
                continue
            moved = search.link_map(mapping)
            if moved is not None:
                of_rank[rank], link_maps[rank], node_maps[rank] = other, moved, mapping
                break
        else:
            found.append(rank)
            of_rank[rank] = rank
            link_maps[rank], node_maps[rank] = np.arange(links), np.arange(nodes)
    return Symmetry(tuple(found), of_rank, link_maps, node_maps)


def _keeps(demands: NDArray[np.float64], topology: Topology, mapping: Longs) -> bool:
    images = topology.rank_of_node[mapping[topology.rank_nodes]]
    return bool((demands[np.ix_(images, images)] == demands).all())


def _mixed(values: Colours) -> Colours:
    values = (values ^ (values >> _SHIFT)) * _MIX
    return values ^ (values >> _SHIFT)


class _Search:
    def __init__(self, topology: Topology) -> None:
        self.tails = topology.link_sources.astype(np.int64)
        self.heads = topology.link_targets.astype(np.int64)
        classes = np.unique(topology.capacities_bytes_per_s, return_inverse=True)[1]
        self.classes = classes.astype(np.int64)
        self.weights = _mixed(classes.astype(np.uint64) + np.uint64(3))
        self.nodes = topology.num_nodes
        self.branches = self.refinements = 0
        self.plain = self._settle(_mixed(topology.is_rank.astype(np.uint64) + np.uint64(1)))
        self.order, self.keys = self._ordered(np.arange(self.nodes))

    def _settle(self, colours: Colours) -> Colours:
        """Refine until the number of colours stays."""
        count = 0
        while (now := np.unique(colours).size) > count:
            count = now
            out, into = np.zeros_like(colours), np.zeros_like(colours)
            np.add.at(out, self.tails, _mixed(colours[self.heads] ^ self.weights))
            np.add.at(into, self.heads, _mixed(colours[self.tails] + self.weights))
            colours = _mixed(_mixed(colours) + _mixed(out) * np.uint64(3) + into)
        return colours

    def refined(self, colours: Colours, node: int) -> Colours:
        """Colours after one node has been marked."""
        check_time()
        self.refinements += 1
        marked = colours.copy()
        marked[node] = _mixed(marked[node : node + 1] + np.uint64(7))[0]
        return self._settle(marked)

    def mapping(self, first: Colours, second: Colours) -> Longs | None:
        """An image of each node that turns the first colours into the second; None for none."""
        self.branches = 0
        return self._mapping(first, second)

    def _mapping(self, first: Colours, second: Colours) -> Longs | None:
        self.branches += 1
        orders = np.argsort(first, kind="stable"), np.argsort(second, kind="stable")
        ordered = first[orders[0]]
        if self.branches > _MOST_BRANCHES or (ordered != second[orders[1]]).any():
            return None
        # Nodes that look alike are matched in order first: with regular names that is often right.
        mapping = np.empty(self.nodes, np.int64)
        mapping[orders[0]] = orders[1]
        values, starts, counts = np.unique(ordered, return_index=True, return_counts=True)
        if values.size == self.nodes or self.link_map(mapping) is not None:
            return mapping
        if self.refinements > _MOST_REFINEMENTS:
            return None
        open_classes = np.flatnonzero(counts > 1)
        chosen = open_classes[np.argmin(counts[open_classes])]
        members = slice(starts[chosen], starts[chosen] + counts[chosen])
        node = int(orders[0][members][0])
        marked = self.refined(first, node)
        for other in orders[1][members].tolist():
            found = self._mapping(marked, self.refined(second, other))
            if found is not None:
                return found
        return None

    def _ordered(self, mapping: Longs) -> tuple[Longs, Longs]:
        """Links by their mapped ends and capacity, as an order and sorted rows."""
        rows = np.stack([self.classes, mapping[self.heads], mapping[self.tails]])
        order = np.lexsort(rows)
        return order, rows[:, order]

    def link_map(self, mapping: Longs) -> Longs | None:
        """Image of each link; None where a link has none, so that it is no symmetry."""
        order, keys = self._ordered(mapping)
        if (keys != self.keys).any():
            return None
        moved = np.empty(len(order), np.int64)
        moved[order] = self.order
        return moved
