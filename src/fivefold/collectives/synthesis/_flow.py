"""All-to-all at its throughput optimum: a linear program of flows, and a schedule of its paths.

What one rank sends to all others is one commodity, which splits over links as it likes; the time
is that of the fullest link. The least time is a linear program. Ranks that can take each other's
place need one commodity for all of them, which makes regular networks of hundreds of ranks small
problems. Prices of links prove the value: no routing is faster than the demand times its cheapest
paths. The flows are then cut into paths, and every chunk travels one of them.

References: Leighton and Rao, "Multicommodity max-flow min-cut theorems", 1999; TE-CCL, arXiv
2305.13479 (all-to-all as a linear program); the prices are linear-programming duality.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array, hstack
from scipy.sparse.csgraph import dijkstra

from fivefold.collectives.synthesis._deadline import check_time, time_left_s
from fivefold.errors import ConfigurationError, InfeasibleError, UnsupportedError
from fivefold.network.topology import Topology

Floats = NDArray[np.float64]

_MOST_ENTRIES = 1_200_000
_MOST_FLOWS = 20_000
"""Entries of the program's matrix, and flows in it, that are solved in a minute or so."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FlowOptimum:
    """The fastest routing of a demand between ranks.

    Args:
        topology: The network.
        demands: Bytes from each rank to each, float64 [ranks, ranks].
        seconds: Least time, with the flows below.
        bound_s: Time that the prices prove to be necessary.
        flows: Bytes of each rank's data on each link, float64 [ranks, links].
        prices: Price of each link; with the capacities they sum to 1.
        num_commodities: Sources in the program after symmetry.

    Examples:
        >>> from fivefold.network.topology import ring
        >>> optimum = all_to_all_optimum(ring(8, bandwidth=1.0))
        >>> round(optimum.seconds, 6), round(optimum.bound_s, 6), optimum.num_commodities
        (8.0, 8.0, 1)
    """

    topology: Topology
    demands: Floats = field(repr=False)
    seconds: float
    bound_s: float
    flows: Floats = field(repr=False)
    prices: Floats = field(repr=False)
    num_commodities: int

    @property
    def link_loads_s(self) -> Floats:
        """Time that each link is busy."""
        loads: Floats = self.flows.sum(axis=0) / self.topology.capacities_bytes_per_s
        return loads


def all_to_all_optimum(
    topology: Topology, demands: NDArray[np.float64] | None = None
) -> FlowOptimum:
    """Solve the flow program.

    Args:
        topology: The network; every rank must reach every other that it sends to.
        demands: Bytes from each rank (row) to each (column), the diagonal is ignored; None for
            one byte between every two ranks.

    Returns:
        The optimum with its proof.

    Raises:
        ConfigurationError: The demands have the wrong shape or are negative.
        InfeasibleError: A demand has no path.
        UnsupportedError: The program is too large: many ranks of which no two are alike.
    """
    wanted = _checked(topology, demands)
    if not wanted.any():
        links = topology.num_links
        return FlowOptimum(
            topology=topology, demands=wanted, seconds=0.0, bound_s=0.0,
            flows=np.zeros((topology.num_ranks, links)), prices=np.zeros(links), num_commodities=0,
        )  # fmt: skip
    _require_paths(topology, wanted)
    symmetry = symmetry_of(topology, wanted)
    _require_size(topology, symmetry)
    unit, rate = float(wanted.max()), float(topology.capacities_bytes_per_s.max())
    flows, prices = _solve(topology, wanted / unit, symmetry, rate)
    loads_s = unit * flows.sum(axis=0) / topology.capacities_bytes_per_s
    prices, bound_s = _proof(topology, wanted, symmetry, prices)
    return FlowOptimum(
        topology=topology,
        demands=wanted,
        seconds=float(loads_s.max()),
        bound_s=bound_s,
        flows=flows * unit,
        prices=prices,
        num_commodities=len(symmetry.representatives),
    )


def _checked(topology: Topology, demands: NDArray[np.float64] | None) -> Floats:
    ranks = topology.num_ranks
    wanted = np.ones((ranks, ranks)) if demands is None else np.array(demands, np.float64)
    if wanted.shape != (ranks, ranks):
        raise ConfigurationError(
            f"demands have the shape {wanted.shape}", hint=f"give {ranks} rows of {ranks} numbers"
        )
    if not np.isfinite(wanted).all() or (wanted < 0).any():
        message = "demands hold a number that is negative or not finite"
        raise ConfigurationError(message, hint="a rank sends 0 bytes or more to each other")
    np.fill_diagonal(wanted, 0.0)
    return wanted


def graph_of_links(topology: Topology, weights: Floats) -> coo_array:
    """Links as a matrix that keeps the lightest of parallel ones."""
    ends = np.stack([topology.link_sources, topology.link_targets])
    order = np.lexsort((weights, ends[1], ends[0]))
    sorted_ends = ends[:, order]
    first = np.ones(len(order), np.bool_)
    first[1:] = (sorted_ends[:, 1:] != sorted_ends[:, :-1]).any(axis=0)
    kept = order[first]
    shape = (topology.num_nodes, topology.num_nodes)
    return coo_array((weights[kept], (ends[0][kept], ends[1][kept])), shape=shape)


def _distances(topology: Topology, weights: Floats) -> Floats:
    found: Floats = dijkstra(graph_of_links(topology, weights).tocsr(), indices=topology.rank_nodes)
    return found[:, topology.rank_nodes]


def _priced(topology: Topology, demands: Floats, prices: Floats) -> float:
    """Return the demand times the price of its cheapest paths: a lower bound for any prices."""
    distances = _distances(topology, np.maximum(prices, 0.0))
    return float((demands * np.where(demands > 0, distances, 0.0)).sum())


def _proof(
    topology: Topology, demands: Floats, symmetry: Symmetry, prices: Floats
) -> tuple[Floats, float]:
    """Prices whose bound is best, from those that the smaller program gives.

    Averaging them over the mappings again and again makes them as symmetric as the network, which
    the program itself has no reason to do; every step is a bound of its own.
    """
    best, best_s = prices, -1.0
    for repeats in (0, 4, 16, 64):
        for _ in range(repeats):
            prices = prices[symmetry.link_maps].mean(axis=0)
        prices = prices / float((prices * topology.capacities_bytes_per_s).sum())
        bound_s = _priced(topology, demands, prices)
        if bound_s > best_s:
            best, best_s = prices, bound_s
        if len(symmetry.representatives) == topology.num_ranks:
            break
    return best, best_s


def _require_paths(topology: Topology, demands: Floats) -> None:
    hops = _distances(topology, np.ones(topology.num_links))
    lost = np.argwhere((demands > 0) & ~np.isfinite(hops))
    if lost.size:
        source, target = (topology.ranks[rank] for rank in lost[0].tolist())
        raise InfeasibleError(
            f"{source!r} sends to {target!r}, but cannot reach it",
            hint="add the links that are missing",
        )


def _require_size(topology: Topology, symmetry: Symmetry) -> None:
    count, links = len(symmetry.representatives), topology.num_links
    entries = 2 * count * links + topology.num_ranks * links
    if count * links > _MOST_FLOWS or entries > _MOST_ENTRIES:
        raise UnsupportedError(
            f"the flow program of {count} unlike ranks and {links} links is too large",
            hint="all_to_all_flow takes shortest paths where it has no program",
        )


def _solve(
    topology: Topology, demands: Floats, symmetry: Symmetry, rate: float
) -> tuple[Floats, Floats]:
    """Return the program in units near 1: all flows, and the prices of its capacities."""
    links, nodes = topology.num_links, topology.num_nodes
    count = len(symmetry.representatives)
    place = {rank: number for number, rank in enumerate(symmetry.representatives)}
    arcs = np.arange(count * links)
    of_link, commodity = arcs % links, arcs // links
    rows = np.concatenate([commodity * nodes + topology.link_targets[of_link],
                           commodity * nodes + topology.link_sources[of_link]])  # fmt: skip
    signs = np.repeat([1.0, -1.0], len(arcs))
    balance = coo_array((signs, (rows, np.tile(arcs, 2))), shape=(count * nodes, len(arcs)))
    needs = np.zeros((count, nodes))
    for rank, number in place.items():
        needs[number, topology.rank_nodes] = demands[rank]
        needs[number, topology.rank_nodes[rank]] -= demands[rank].sum()
    # Link e carries, for each rank, what its representative sends over the link that maps to e.
    moved = symmetry.link_maps.reshape(-1)
    own = np.array([place[int(rank)] for rank in symmetry.of_rank])
    columns = np.repeat(own, links) * links + np.tile(np.arange(links), topology.num_ranks)
    loads = coo_array((np.ones(len(moved)), (moved, columns)), shape=(links, len(arcs)))
    capacity = coo_array(-(topology.capacities_bytes_per_s / rate)[:, None])
    result = linprog(
        np.concatenate([np.zeros(len(arcs)), [1.0]]),
        A_ub=hstack([loads, capacity]).tocsr(),
        b_ub=np.zeros(links),
        A_eq=hstack([balance, coo_array((count * nodes, 1))]).tocsr(),
        b_eq=needs.reshape(-1),
        method="highs",
        options={"time_limit": max(time_left_s(), 0.0)} if np.isfinite(time_left_s()) else {},
    )
    check_time()
    if result.status != 0:
        raise InfeasibleError(f"the flow program has no solution: {result.message}")
    base = result.x[:-1].reshape(count, links)
    flows = np.zeros((topology.num_ranks, links))
    np.put_along_axis(flows, symmetry.link_maps, np.maximum(base[own], 0.0), axis=1)
    prices = np.maximum(-result.ineqlin.marginals, 0.0)
    return flows, prices


Longs = NDArray[np.int64]
Colours = NDArray[np.uint64]

_MOST_BRANCHES = 64
_MOST_REFINEMENTS = 10_000  # then ranks that may be alike are taken as unlike
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@dataclass(frozen=True)
class Symmetry:
    """Representatives of the ranks, and a mapping from its representative for each rank."""

    representatives: tuple[int, ...]
    of_rank: Longs
    link_maps: Longs
    node_maps: Longs


def symmetry_of(topology: Topology, demands: NDArray[np.float64]) -> Symmetry:
    """Symmetries that keep links, capacities and demands."""
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
