"""The order of a ring: a way round all ranks whose hops are fast links of the network.

A search for a Hamiltonian cycle along the widest links that allow one: depth first, inside a host
before leaving it, first where fewest ways lead on (Warnsdorff), with a limit on the work. Where
the ranks' own order is as good, it is kept.
"""

from __future__ import annotations

import numpy as np

from fivefold.network.topology import Topology

_MOST_RANKS_SWITCHED = 512  # every pair is joined through switches: too many to search
_MOST_WIDTHS = 8
_WORK = 60  # steps of the search for each rank

Neighbours = list[dict[int, float]]


def ring_order(topology: Topology) -> list[int]:
    """Order the ranks so that neighbours, the last and the first among them, are near.

    Args:
        topology: The network.

    Returns:
        Each rank once, beginning with 0. Where no cycle along links was found, ranks of one host
        stand together and ring neighbours may be several links apart.

    Raises:
        InfeasibleError: The topology is not connected.

    Examples:
        >>> from fivefold.network.topology import mesh
        >>> ring_order(mesh((2, 3)))
        [0, 3, 4, 5, 2, 1]
    """
    topology.require_connected()
    count = topology.num_ranks
    by_host = _by_host(topology)
    if count < 4 or (topology.num_nodes > count > _MOST_RANKS_SWITCHED):
        return by_host
    near, hosts = _neighbours(topology), [topology.host_of(rank) for rank in range(count)]
    widths = sorted({width for ways in near for width in ways.values()}, reverse=True)
    widest = min(max(ways.values(), default=0.0) for ways in near)
    for width in [value for value in widths if value <= widest][:_MOST_WIDTHS]:
        plain = [order for order in (list(range(count)), by_host) if _is_ring(order, near, width)]
        found = _search(near, width, hosts, closed=True)
        candidates = plain if found is None else [*plain, found]
        if candidates:
            return min(candidates, key=lambda order: _slowness(order, near))
    # No cycle: a path, whose ends the network joins as it can.
    return _search(near, 0.0, hosts, closed=False) or by_host


def _by_host(topology: Topology) -> list[int]:
    placed = [rank for ranks in topology.hosts.values() for rank in ranks]
    return [*placed, *sorted(set(range(topology.num_ranks)) - set(placed))]


def _neighbours(topology: Topology) -> Neighbours:
    graph = topology.rank_graph
    near: Neighbours = [{} for _ in range(topology.num_ranks)]
    triples = zip(graph.sources, graph.targets, graph.capacities_bytes_per_s, strict=True)
    for source, target, width in triples:
        known = near[int(source)].get(int(target), 0.0)
        near[int(source)][int(target)] = max(known, float(width))
    return near


def _is_ring(order: list[int], near: Neighbours, width: float) -> bool:
    following = [*order[1:], order[0]]
    return all(near[a].get(b, 0.0) >= width for a, b in zip(order, following, strict=True))


def _slowness(order: list[int], near: Neighbours) -> float:
    """Sum of the hops' times for one byte."""
    following = [*order[1:], order[0]]
    return sum(1.0 / near[a][b] for a, b in zip(order, following, strict=True))


def _search(
    near: Neighbours, width: float, hosts: list[str | None], *, closed: bool
) -> list[int] | None:
    """Find a cycle (or path) along links of at least this width; None if none in time."""
    count = len(near)
    ways = [[to for to, wide in near[rank].items() if wide >= width] for rank in range(count)]
    entering = [0] * count
    for targets in ways:
        for to in targets:
            entering[to] += 1
    if min(entering) == 0 or not all(ways) or _reached(ways) < count:
        return None
    path, used = [0], np.zeros(count, dtype=np.bool_)
    used[0] = True
    options = [_ranked(0, ways, near, used, hosts)]
    for _ in range(_WORK * count):
        if len(path) == count and (not closed or path[0] in ways[path[-1]]):
            return path
        if options[-1] and len(path) < count:
            step = options[-1].pop()
            path.append(step)
            used[step] = True
            options.append(_ranked(step, ways, near, used, hosts))
            continue
        options.pop()
        used[path.pop()] = False
        if not path:
            return None
    return None


def _reached(ways: list[list[int]]) -> int:
    seen, waiting = {0}, [0]
    while waiting:
        for to in ways[waiting.pop()]:
            if to not in seen:
                seen.add(to)
                waiting.append(to)
    return len(seen)


def _ranked(
    rank: int,
    ways: list[list[int]],
    near: Neighbours,
    used: np.ndarray[tuple[int], np.dtype[np.bool_]],
    hosts: list[str | None],
) -> list[int]:
    """Return the next ranks, the best last: same host, widest, fewest ways on, lowest number."""

    def worth(to: int) -> tuple[bool, float, int, int]:
        onward = sum(not used[further] for further in ways[to])
        return (hosts[to] == hosts[rank], near[rank][to], -onward, -to)

    return sorted((to for to in ways[rank] if not used[to]), key=worth)
