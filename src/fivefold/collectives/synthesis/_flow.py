"""All-to-all at its throughput optimum: a linear program of flows, and a schedule of its paths.

What one rank sends to all others is one commodity; ranks that can take each other's place need one
for all of them. Prices of links prove the value: no routing is faster than the demand times its
cheapest paths. References: Leighton and Rao, 1999; TE-CCL, arXiv 2305.13479.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array, hstack
from scipy.sparse.csgraph import dijkstra

from fivefold.collectives.schedules import Collective, Schedule
from fivefold.collectives.schedules.arrays import Floats, Ints, Longs, rows_of
from fivefold.collectives.schedules.bounds import mixed, recoloured
from fivefold.collectives.schedules.schedule import require_match
from fivefold.collectives.synthesis._dispatch import dispatch
from fivefold.collectives.synthesis._solver import OutOfTime, check_time, time_left_s, time_limit
from fivefold.errors import ConfigurationError, InfeasibleError, UnsupportedError, require_number
from fivefold.network.topology import Topology

# Entries of the program's matrix, and flows in it, that are solved in a minute or so.
_MOST_ENTRIES, _MOST_FLOWS = 1_200_000, 20_000
_MOST_BRANCHES = 64
_MOST_REFINEMENTS = 10_000  # then ranks that may be alike are taken as unlike
_NEGLIGIBLE = 1e-9  # share of a demand below which what a solver leaves is no flow
_MORE_PATHS, _MOST_WALKS = 6, 200_000
_SWEEPS, _MOST_MOVES = 6, 200_000
_STEEPNESS = 6  # the sixth power of loads is nearly their maximum

Colours = NDArray[np.uint64]
Path = tuple[int, ...]
PathTable = dict[tuple[int, int], list[Path]]


@dataclass(frozen=True, kw_only=True, eq=False)
class FlowOptimum:
    """The fastest routing of a demand between ranks."""

    topology: Topology
    demands: Floats = field(repr=False)
    seconds: float
    bound_s: float
    flows: Floats = field(repr=False)
    prices: Floats = field(repr=False)


def all_to_all_optimum(
    topology: Topology, demands: NDArray[np.float64] | None = None
) -> FlowOptimum:
    """Solve the flow program.

    Args:
        topology: The network; every rank must reach every other that it sends to.
        demands: Bytes from each rank (row) to each (column), the diagonal is ignored; None for
            one byte between every two ranks.

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
            flows=np.zeros((topology.num_ranks, links)), prices=np.zeros(links),
        )  # fmt: skip
    _require_paths(topology, wanted)
    symmetry = symmetry_of(topology, wanted)
    count, links = len(symmetry.representatives), topology.num_links
    entries = 2 * count * links + topology.num_ranks * links
    if count * links > _MOST_FLOWS or entries > _MOST_ENTRIES:
        raise UnsupportedError(
            f"the flow program of {count} unlike ranks and {links} links is too large",
            hint="all_to_all_flow takes shortest paths where it has no program",
        )
    unit, rates = float(wanted.max()), topology.capacities_bytes_per_s
    # In the middle of the rates: the solver takes what is below 1e-9 of its unit for nothing.
    rate = float(np.sqrt(rates.min() * rates.max()))
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
    """Return the links as a matrix that keeps the lightest of parallel ones."""
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
    """Return the prices whose bound is best, from those that the smaller program gives.

    Averaged over the mappings again and again they become as symmetric as the network.
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


@dataclass(frozen=True)
class Symmetry:
    """Representatives of the ranks, and a mapping from its representative for each rank."""

    representatives: tuple[int, ...]
    of_rank: Longs
    link_maps: Longs


def symmetry_of(topology: Topology, demands: NDArray[np.float64]) -> Symmetry:
    """Find symmetries that keep links, capacities and demands."""
    ranks = topology.num_ranks
    search = _Search(topology)
    marked = [search.refined(search.plain, int(node)) for node in topology.rank_nodes]
    found: list[int] = []
    of_rank = np.arange(ranks)
    link_maps = np.tile(np.arange(topology.num_links), (ranks, 1))
    for rank in range(ranks):
        for other in found:
            mapping = search.mapping(marked[other], marked[rank])
            if mapping is None or not _keeps(demands, topology, mapping):
                continue
            moved = search.link_map(mapping)
            if moved is not None:
                of_rank[rank], link_maps[rank] = other, moved
                break
        else:
            found.append(rank)
    return Symmetry(tuple(found), of_rank, link_maps)


def _keeps(demands: NDArray[np.float64], topology: Topology, mapping: Longs) -> bool:
    images = topology.rank_of_node[mapping[topology.rank_nodes]]
    return bool((demands[np.ix_(images, images)] == demands).all())


class _Search:
    """Searches mappings of nodes by colours that are refined until they tell them apart."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.classes = np.unique(topology.capacities_bytes_per_s, return_inverse=True)[1]
        self.branches = self.refinements = 0
        self.plain = self._settle(mixed(topology.is_rank.astype(np.uint64)))
        self.order, self.keys = self._ordered(np.arange(topology.num_nodes))

    def _settle(self, colours: Colours) -> Colours:
        """Refine until the number of colours stays."""
        count = 0
        while (now := np.unique(colours).size) > count:
            count = now
            colours = recoloured(self.topology, colours, self.classes.astype(np.uint64))
        return colours

    def refined(self, colours: Colours, node: int) -> Colours:
        """Return the colours after one node has been marked."""
        check_time()
        self.refinements += 1
        marked = colours.copy()
        marked[node] = mixed(marked[node : node + 1] + np.uint64(7))[0]
        return self._settle(marked)

    def mapping(self, first: Colours, second: Colours) -> Longs | None:
        """Find an image of each node that turns the first colours into the second, or None."""
        self.branches = 0
        return self._mapping(first, second)

    def _mapping(self, first: Colours, second: Colours) -> Longs | None:
        self.branches += 1
        orders = np.argsort(first, kind="stable"), np.argsort(second, kind="stable")
        ordered = first[orders[0]]
        if self.branches > _MOST_BRANCHES or (ordered != second[orders[1]]).any():
            return None
        # Nodes that look alike are matched in order first: with regular names that is often right.
        mapping = np.empty(len(first), np.int64)
        mapping[orders[0]] = orders[1]
        values, starts, counts = np.unique(ordered, return_index=True, return_counts=True)
        if values.size == len(first) or self.link_map(mapping) is not None:
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
        """Sort the links by their mapped ends and capacity; return an order and sorted rows."""
        heads, tails = mapping[self.topology.link_targets], mapping[self.topology.link_sources]
        rows = np.stack([self.classes, heads, tails])
        order = np.lexsort(rows)
        return order, rows[:, order]

    def link_map(self, mapping: Longs) -> Longs | None:
        """Return the image of each link; None where a link has none, so that it is no symmetry."""
        order, keys = self._ordered(mapping)
        if (keys != self.keys).any():
            return None
        moved = np.empty(len(order), np.int64)
        moved[order] = self.order
        return moved


def all_to_all_flow(
    collective: Collective,
    topology: Topology,
    *,
    size_bytes: float | None = None,
    optimum: FlowOptimum | None = None,
    time_limit_s: float | None = None,
) -> Schedule:
    """Route the chunks of an all-to-all along an optimal flow.

    Args:
        collective: Any copying collective whose chunks go from one rank to one other: all-to-all,
            also uneven, scatter, gather. More chunks per pair follow the flow more closely.
        topology: The network.
        size_bytes: Size for which transfers get times in the serial model; None for none.
        optimum: The flow, where it is at hand; None to compute it. Where that would take too
            long, the shortest routes are taken, and the schedule's attributes say so.
        time_limit_s: When to give the flow up for the shortest routes; None for never.

    Returns:
        The schedule. Its attributes hold ``routing``, ``"flow"`` or ``"shortest"``.

    Raises:
        ConfigurationError: A chunk is summed, or has several holders or receivers.
        InfeasibleError: A rank cannot be reached.

    Examples:
        >>> from fivefold.collectives.schedules import all_to_all, verify_schedule
        >>> from fivefold.network.topology import ring
        >>> network = ring(4, bandwidth=1.0)
        >>> schedule = all_to_all_flow(all_to_all(4, 2), network, size_bytes=4.0)
        >>> verify_schedule(schedule, check_times=True).num_transfers, float(schedule.ends_s.max())
        (32, 2.0)
    """
    if time_limit_s is not None:
        require_number("time_limit_s", time_limit_s)
    moved, sources, targets = _pairs(collective, topology)
    ranks = topology.num_ranks
    demands = np.zeros((ranks, ranks))
    np.add.at(demands, (sources, targets), collective.chunk_weights[moved])
    routing = "flow"
    try:
        with time_limit(time_limit_s):
            flow = all_to_all_optimum(topology, demands) if optimum is None else optimum
            weights = collective.chunk_weights[moved]
            chosen = _spread_chunks(topology, (sources, targets), weights, _paths(flow))
        links = np.array([link for path in chosen for link in path], np.int32)
        paths = np.cumsum([0, *map(len, chosen)]).astype(np.int64), links
    except (OutOfTime, UnsupportedError):
        routing, routes = "shortest", topology.routes(sources, targets)
        paths = np.asarray(routes.offsets, np.int64), np.asarray(routes.links)
    schedule = _hops(collective, topology, moved, paths, by_need=size_bytes is not None)
    schedule = schedule.replaced(attributes={"routing": routing})
    if size_bytes is None:
        return schedule
    # Two rules for who goes first; the better one counts.
    found = (dispatch(schedule, size_bytes=size_bytes, by_load=rule) for rule in (True, False))
    return min(found, key=lambda one: one.total_s)


def _pairs(collective: Collective, topology: Topology) -> tuple[Longs, Longs, Longs]:
    """Return the chunks that move, where from and where to."""
    require_match(collective, topology)
    if collective.reducing or not (collective.single_source and collective.single_target):
        raise ConfigurationError(
            f"{collective.name} is no exchange of single chunks",
            hint="flows route what goes from one rank to one other, without sums or copies",
        )
    wanted = collective.post_chunks.astype(np.int64)
    sources = collective.pre_ranks[collective.pre_offsets[wanted]].astype(np.int64)
    targets = collective.post_ranks.astype(np.int64)
    away = sources != targets
    return wanted[away], sources[away], targets[away]


def _hops(
    collective: Collective,
    topology: Topology,
    moved: Longs,
    paths: tuple[Longs, Ints],
    *,
    by_need: bool,
) -> Schedule:
    """Return the transfers between ranks, the longest way to go first, or hop by hop."""
    offsets, links = paths
    owner = np.repeat(np.arange(len(moved)), np.diff(offsets))
    last = np.flatnonzero(topology.is_rank[topology.link_targets[links]])  # a hop ends at a rank
    first = np.concatenate([[0], last[:-1] + 1])[: len(last)].astype(np.int64)
    path = owner[last]
    counts = np.bincount(path, minlength=len(moved))
    number = np.arange(len(last)) - (np.cumsum(counts) - counts)[path]
    ranks = topology.rank_of_node
    sources = ranks[topology.link_sources[links[first]]]
    targets = ranks[topology.link_targets[links[last]]]
    # Each rank serves the next ranks first, so that not all of them meet at one.
    ahead = (targets - sources) % topology.num_ranks
    order = np.lexsort((ahead, number - counts[path] if by_need else number))
    starts, places = rows_of(np.append(first, len(links)), order)
    return Schedule(
        collective=collective,
        chunks=moved[path[order]].astype(np.int32),
        sources=sources[order],
        targets=targets[order],
        route_offsets=starts,
        route_links=links[places],
        topology=topology,
        name="flow",
        solver="HiGHS",
    )


def _paths(flow: FlowOptimum) -> PathTable:
    """Return the paths of every pair that has a demand, those of the flow first."""
    table = {
        (source, target): paths
        for source in range(flow.topology.num_ranks)
        for target, paths in _strip(flow, source).items()
    }
    _add_cheapest(flow, table, min(_MORE_PATHS, _MOST_WALKS // max(1, len(table))))
    return table


def _strip(flow: FlowOptimum, source: int) -> dict[int, list[Path]]:
    """Cut one source's flow into paths."""
    topology = flow.topology
    left = flow.flows[source].copy()
    negligible = _NEGLIGIBLE * float(flow.demands[source].max(initial=0.0))
    left[left <= negligible] = 0.0
    tails = topology.link_sources.tolist()
    entering = [topology.in_links(node).tolist() for node in range(topology.num_nodes)]
    start = topology.node_of_rank(source)
    found: dict[int, list[Path]] = {}
    for target in np.flatnonzero(flow.demands[source] > 0).tolist():
        wanted = float(flow.demands[source, target])
        paths: list[Path] = []
        while wanted > negligible:
            check_time()
            end = topology.node_of_rank(target)
            path = _trace(left, entering, tails, (start, end))
            if path is None:  # the rest is the solver's rounding
                break
            amount = min(wanted, float(left[list(path)].min()))
            left[list(path)] -= amount
            left[left <= negligible] = 0.0
            wanted -= amount
            paths.append(path)
        found[target] = paths or [tuple(topology.shortest_route(source, target))]
    return found


def _trace(
    left: Floats, entering: list[list[int]], tails: list[int], ends: tuple[int, int]
) -> Path | None:
    """Return a path of the flow between two nodes, found backwards; None where there is none."""
    start, node = ends
    path: list[int] = []
    seen = {node: 0}
    while node != start:
        link = max(entering[node], key=left.__getitem__, default=-1)
        if link < 0 or left[link] <= 0:
            return None
        path.append(link)
        node = tails[link]
        if node in seen:  # a circle carries nothing anywhere
            circle = path[seen[node] :]
            left[circle] -= left[circle].min()
            path = path[: seen[node]]
            for later in [other for other, place in seen.items() if place > seen[node]]:
                del seen[later]
        else:
            seen[node] = len(path)
    return tuple(reversed(path))


def _add_cheapest(flow: FlowOptimum, table: PathTable, more: int) -> None:
    """Walk a few more of the cheapest paths of each pair, at random."""
    topology, random = flow.topology, np.random.default_rng(0)
    # Free links would let paths wander: among equal prices fewer links win.
    scale = float(flow.prices.max(initial=0.0)) or 1.0
    weights = np.maximum(flow.prices / scale, 0.0) + 1e-7
    graph = graph_of_links(topology, weights).tocsr().T
    to_rank = dijkstra(graph, indices=topology.rank_nodes)
    heads = topology.link_targets
    leaving = [topology.out_links(node) for node in range(topology.num_nodes)]
    for (source, target), paths in table.items():
        known = set(paths)
        away = to_rank[target]
        check_time()
        for _ in range(more):
            node, path = topology.node_of_rank(source), []
            while node != topology.node_of_rank(target):
                links = leaving[node]
                longer = weights[links] + away[heads[links]] - away[node]
                link = int(random.choice(links[longer <= 1e-9]))
                path.append(link)
                node = int(heads[link])
            if tuple(path) not in known:
                known.add(tuple(path))
                paths.append(tuple(path))


def _spread_chunks(
    topology: Topology, moves: tuple[Longs, Longs], weights: Floats, table: PathTable
) -> list[Path]:
    """Choose each chunk's path so that the fullest link is as empty as local changes make it."""
    per_byte = 1.0 / topology.capacities_bytes_per_s
    loads = np.zeros(topology.num_links)
    options = []
    for source, target in zip(*(column.tolist() for column in moves), strict=True):
        if (source, target) not in table:
            table[source, target] = [tuple(topology.shortest_route(source, target))]
        options.append([np.array(path) for path in table[source, target]])
    chosen = [-1] * len(options)
    for sweep in range(min(_SWEEPS, max(1, _MOST_MOVES // max(1, len(options))))):
        changed = False
        for chunk, paths in enumerate(options):
            check_time()
            if len(paths) == 1 and sweep:
                continue
            before, weight = chosen[chunk], float(weights[chunk])
            if before >= 0:
                loads[paths[before]] -= weight * per_byte[paths[before]]
            chosen[chunk] = best = _emptiest(paths, loads, weight, per_byte)
            changed |= best != before
            loads[paths[best]] += weight * per_byte[paths[best]]
        if not changed:
            break
    return [tuple(paths[place].tolist()) for paths, place in zip(options, chosen, strict=True)]


def _emptiest(paths: list[Longs], loads: Floats, weight: float, per_byte: Floats) -> int:
    """Return the path that adds least to the sum of steep powers of the loads."""
    if len(paths) == 1:
        return 0
    scale = float(loads.max()) or 1.0
    costs = []
    for path in paths:
        now = loads[path] / scale
        then = now + weight * per_byte[path] / scale
        costs.append((then**_STEEPNESS - now**_STEEPNESS).sum())
    return int(np.argmin(costs))
