"""Paths of a flow, and which of them each chunk takes.

The flow of one source is stripped of paths, target by target. Whole chunks rarely fit these
amounts, so every chunk may also take another cheapest path under the prices that prove the
optimum (an optimal flow uses no others), and chunks change paths until the links are even.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.csgraph import dijkstra

from fivefold.collectives.synthesis._deadline import check_time
from fivefold.collectives.synthesis._flow import Floats, FlowOptimum, graph_of_links
from fivefold.network.topology import Topology

Path = tuple[int, ...]
Longs = NDArray[np.int64]
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
    """A path for each chunk, so that the fullest link is as empty as local changes make it.

    Args:
        topology: The network.
        moves: Source and target rank of each chunk.
        weights: Bytes of each chunk.
        table: Paths of each pair; pairs without take the shortest route.

    Returns:
        The paths.
    """
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
    """The path that adds least to the sum of steep powers of the loads."""
    if len(paths) == 1:
        return 0
    scale = float(loads.max()) or 1.0
    costs = []
    for path in paths:
        now = loads[path] / scale
        then = now + weight * per_byte[path] / scale
        costs.append(float((then**_STEEPNESS - now**_STEEPNESS).sum()))
    return int(np.argmin(costs))
