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
from fivefold.collectives.synthesis._flow_symmetry import Symmetry, symmetry_of
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
    """The demand times the price of its cheapest paths: a lower bound for any prices."""
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
    """The program in units near 1: all flows, and the prices of its capacities."""
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
