"""From paths to a schedule: hops from rank to rank, and who goes first.

Hops end at ranks; what lies between two ranks, switches included, is one transfer. Whoever has the
longest way to go is sent first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.csgraph import dijkstra

from fivefold.collectives.schedules import Collective, Schedule
from fivefold.collectives.synthesis._deadline import OutOfTime, check_time, time_limit
from fivefold.collectives.synthesis._dispatch import dispatch
from fivefold.collectives.synthesis._flow import (
    Floats,
    FlowOptimum,
    all_to_all_optimum,
    graph_of_links,
)
from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.network.topology import Topology

Longs = NDArray[np.int64]
Rows = tuple[Longs, NDArray[np.int32]]


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
        >>> from fivefold.collectives.schedules import all_to_all, verify
        >>> from fivefold.network.topology import ring
        >>> network = ring(4, bandwidth=1.0)
        >>> schedule = all_to_all_flow(all_to_all(4, 2), network, size_bytes=4.0)
        >>> verify(schedule, check_times=True).num_transfers, float(schedule.ends_s.max())
        (32, 2.0)
    """
    moved, sources, targets = _pairs(collective, topology)
    ranks = topology.num_ranks
    demands = np.zeros((ranks, ranks))
    np.add.at(demands, (sources, targets), collective.chunk_weights[moved])
    routing = "flow"
    try:
        with time_limit(time_limit_s):
            flow = all_to_all_optimum(topology, demands) if optimum is None else optimum
            weights = collective.chunk_weights[moved]
            table = flow_paths(flow)
            paths = _as_rows(spread_chunks(topology, (sources, targets), weights, table))
    except (OutOfTime, UnsupportedError):
        routing, routes = "shortest", topology.routes(sources, targets)
        paths = (np.asarray(routes.offsets, np.int64), np.asarray(routes.links))
    schedule = _hops(collective, topology, moved, paths, by_need=size_bytes is not None)
    schedule = schedule.replaced(attributes={"routing": routing})
    return schedule if size_bytes is None else _dispatched(schedule, size_bytes)


def _dispatched(schedule: Schedule, size_bytes: float) -> Schedule:
    """Return the better of two rules for who goes first."""
    found = [
        dispatch(schedule, size_bytes=size_bytes, by_load=by_load) for by_load in (True, False)
    ]
    return min(found, key=lambda one: 0.0 if one.ends_s is None else one.ends_s.max(initial=0.0))


def _pairs(collective: Collective, topology: Topology) -> tuple[Longs, Longs, Longs]:
    """Chunks that move, where from and where to."""
    if collective.num_ranks != topology.num_ranks:
        raise ConfigurationError(
            f"the collective has {collective.num_ranks} ranks, the topology {topology.num_ranks}",
            hint="make the collective for topology.num_ranks ranks",
        )
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


def _as_rows(paths: list[Path]) -> Rows:
    """Paths as offsets and links."""
    offsets = np.cumsum([0, *map(len, paths)]).astype(np.int64)
    return offsets, np.array([link for path in paths for link in path], np.int32)


def _hops(
    collective: Collective, topology: Topology, moved: Longs, paths: Rows, *, by_need: bool
) -> Schedule:
    """Transfers between ranks, the longest way to go first, or hop by hop."""
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
    lengths = (last - first + 1)[order]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    within = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    return Schedule(
        collective=collective,
        chunks=moved[path[order]].astype(np.int32),
        sources=sources[order],
        targets=targets[order],
        route_offsets=starts,
        route_links=links[np.repeat(first[order], lengths) + within],
        topology=topology,
        name="flow",
        solver="HiGHS",
    )


Path = tuple[int, ...]
PathTable = dict[tuple[int, int], list[Path]]

_DUST = 1e-9
"""Share of a demand below which what a solver leaves is no flow."""

_MORE_PATHS = 6
_MOST_WALKS = 200_000
_SWEEPS = 6
_MOST_MOVES = 200_000
_STEEPNESS = 6  # the sixth power of loads is nearly their maximum


def flow_paths(flow: FlowOptimum, *, seed: int = 0) -> PathTable:
    """Paths of every pair that has a demand, those of the flow first."""
    table = {
        (source, target): paths
        for source in range(flow.topology.num_ranks)
        for target, paths in _strip(flow, source).items()
    }
    more = min(_MORE_PATHS, _MOST_WALKS // max(1, len(table)))
    _add_cheapest(flow, table, np.random.default_rng(seed), more)
    return table


def _strip(flow: FlowOptimum, source: int) -> dict[int, list[Path]]:
    """Cut one source's flow into paths."""
    topology = flow.topology
    left = flow.flows[source].copy()
    dust = _DUST * float(flow.demands[source].max(initial=0.0))
    left[left <= dust] = 0.0
    tails = topology.link_sources.tolist()
    entering = [topology.in_links(node).tolist() for node in range(topology.num_nodes)]
    start = topology.node_of_rank(source)
    found: dict[int, list[Path]] = {}
    for target in np.flatnonzero(flow.demands[source] > 0).tolist():
        wanted = float(flow.demands[source, target])
        paths: list[Path] = []
        while wanted > dust:
            check_time()
            end = topology.node_of_rank(target)
            path = _trace(left, entering, tails, (start, end))
            if path is None:  # the rest is the solver's rounding
                break
            amount = min(wanted, float(left[list(path)].min()))
            left[list(path)] -= amount
            left[left <= dust] = 0.0
            wanted -= amount
            paths.append(path)
        found[target] = paths or [tuple(topology.shortest_route(source, target))]
    return found


def _trace(
    left: Floats, entering: list[list[int]], tails: list[int], ends: tuple[int, int]
) -> Path | None:
    """A path of the flow from one node to another, found backwards; None where there is none."""
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


def _add_cheapest(
    flow: FlowOptimum, table: PathTable, random: np.random.Generator, more: int
) -> None:
    """Walk a few more of the cheapest paths of each pair, at random."""
    topology = flow.topology
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


def spread_chunks(
    topology: Topology, moves: tuple[Longs, Longs], weights: Floats, table: PathTable
) -> list[Path]:
    """A path for each chunk, so that the fullest link is as empty as local changes make it."""
    per_byte = 1.0 / topology.capacities_bytes_per_s
    loads = np.zeros(topology.num_links)
    options = []
    for source, target in zip(*(column.tolist() for column in moves), strict=True):
        if (source, target) not in table:
            table[source, target] = [tuple(topology.shortest_route(source, target))]
        options.append([np.array(path) for path in table[source, target]])
    chosen = [-1] * len(options)
    sweeps = min(_SWEEPS, max(1, _MOST_MOVES // max(1, len(options))))
    for sweep in range(sweeps):
        changed = False
        for chunk, paths in enumerate(options):
            check_time()
            if len(paths) == 1 and sweep:
                continue
            if chosen[chunk] >= 0:
                _load(loads, paths[chosen[chunk]], -float(weights[chunk]), per_byte)
            best = _emptiest(paths, loads, float(weights[chunk]), per_byte)
            changed |= best != chosen[chunk]
            chosen[chunk] = best
            _load(loads, paths[best], float(weights[chunk]), per_byte)
        if not changed:
            break
    return [tuple(paths[place].tolist()) for paths, place in zip(options, chosen, strict=True)]


def _load(loads: Floats, path: Longs, weight: float, per_byte: Floats) -> None:
    loads[path] += weight * per_byte[path]


def _emptiest(paths: list[Longs], loads: Floats, weight: float, per_byte: Floats) -> int:
    """Return the path that adds least to the sum of steep powers of the loads."""
    if len(paths) == 1:
        return 0
    scale = float(loads.max()) or 1.0
    costs = []
    for path in paths:
        now = loads[path] / scale
        then = now + weight * per_byte[path] / scale
        costs.append(float((then**_STEEPNESS - now**_STEEPNESS).sum()))
    return int(np.argmin(costs))
