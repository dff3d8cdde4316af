"""Paths between ranks: the one that a flow takes by itself, and all that ECMP chooses among."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import numpy.typing as npt

from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.topology import Topology
from fivefold.network.topology.routes import Routes


def default_paths(topology: Topology, sources: npt.ArrayLike, targets: npt.ArrayLike) -> Routes:
    """Return the path that each flow takes where nothing chooses one, of many flows at once.

    Neighbours use the widest link that joins them, others the route of least latency; ranks on the
    way forward.

    Args:
        topology: The graph.
        sources: Rank where each flow begins.
        targets: Rank where each ends.

    Returns:
        The paths, in the order asked for.

    Raises:
        InfeasibleError: Two ranks have no route.

    Examples:
        >>> from fivefold.network.topology import ring
        >>> default_paths(ring(4), [0, 0], [1, 2]).offsets.tolist()
        [0, 1, 3]
    """
    first, last = np.asarray(sources, np.int64), np.asarray(targets, np.int64)
    joined, widest = _direct_links(topology)
    keys = first * topology.num_ranks + last
    place = np.minimum(np.searchsorted(joined, keys), max(joined.size - 1, 0))
    adjacent = joined[place] == keys if joined.size else np.zeros(keys.size, dtype=np.bool_)
    lengths = np.ones(keys.size, dtype=np.int64)
    far = topology.routes(first[~adjacent], last[~adjacent])
    lengths[~adjacent] = np.diff(far.offsets)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    links = np.empty(offsets[-1], dtype=np.int32)
    of_far = np.repeat(~adjacent, lengths)
    links[of_far] = far.links
    links[~of_far] = widest[place[adjacent]] if joined.size else 0
    return Routes(first.astype(np.int32), last.astype(np.int32), offsets, links)


def _direct_links(topology: Topology) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Return the pairs of neighbouring ranks, sorted, and the widest link that joins each."""
    ranks = topology.rank_of_node
    first, last = ranks[topology.link_sources], ranks[topology.link_targets]
    between = np.flatnonzero((first >= 0) & (last >= 0))
    keys = first[between].astype(np.int64) * topology.num_ranks + last[between]
    order = np.lexsort((-topology.capacities_bytes_per_s[between], keys))
    unique, where = np.unique(keys[order], return_index=True)
    return unique, between[order][where].astype(np.int32)


def equal_cost_paths(
    topology: Topology, source: int, target: int, *, limit: int = 64, relay: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Find the paths of fewest links from one rank to another that no third rank forwards.

    Between ranks of one host paths that stay inside it go before others of the same length, as
    libraries use NVLink where it is there.

    Args:
        topology: The graph.
        source: Rank where they begin.
        target: Rank where they end.
        limit: Most paths to return; they are found in the order of their link numbers.
        relay: Whether other ranks may forward where there is no path without them; then the
            shortest route is the only path (in a torus, or between rails that meet in hosts).

    Returns:
        Link indices of each path, at least one path.

    Raises:
        ConfigurationError: A rank does not exist, they are equal, or the limit is not positive.
        InfeasibleError: There is no path.

    Examples:
        >>> from fivefold.network.topology import switch
        >>> equal_cost_paths(switch(3), 0, 1)
        ((0, 3),)
    """
    if source == target or limit < 1:
        raise ConfigurationError(
            f"paths lead from one rank to another, and at least one is asked for; got {source} to "
            f"{target}, limit {limit}"
        )
    return _paths(topology, (source, target), limit=limit, relay=relay)


@functools.lru_cache(maxsize=1 << 16)  # planners ask for the same pairs again and again
def _paths(
    topology: Topology, ranks: tuple[int, int], *, limit: int, relay: bool
) -> tuple[tuple[int, ...], ...]:
    source, target = ranks
    begin, end = topology.node_of_rank(source), topology.node_of_rank(target)
    onward = _onward(topology, begin, end)
    if not onward and relay:
        return (topology.shortest_route(source, target),)
    if not onward:
        raise InfeasibleError(
            f"there is no path from rank {source} to rank {target} in {topology.name!r}",
            hint="ranks do not forward here; add a link or a switch between them",
        )
    found: list[tuple[int, ...]] = []
    stack: list[tuple[int, tuple[int, ...]]] = [(begin, ())]
    while stack and len(found) < limit:
        node, path = stack.pop()
        if node == end:
            found.append(path)
            continue
        stack.extend((further, (*path, link)) for link, further in reversed(onward[node]))
    return _inside(topology, (begin, end), tuple(found))


def _inside(
    topology: Topology, ends: tuple[int, int], paths: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    """Only the paths that stay in the host of both ends, where there are such."""
    host = topology.nodes[ends[0]].host
    if host is None or topology.nodes[ends[1]].host != host:
        return paths
    kept = [
        path
        for path in paths
        if all(topology.nodes[int(topology.link_targets[link])].host == host for link in path)
    ]
    return tuple(kept) or paths


_Reached = dict[int, list[tuple[int, int]]]


def _onward(topology: Topology, begin: int, end: int) -> _Reached:
    """Return the links of all shortest paths, with where they lead, by where they start.

    Both ends search, always the one with less to look at: the widest switches lie in the middle,
    and are met rather than searched.
    """
    sides: list[_Reached] = [{begin: []}, {end: []}]
    fronts = [[begin], [end]]
    met: list[int] = []
    while not met and all(fronts):
        widths = [sum(len(_steps(topology, n, s)[0]) for n in fronts[s]) for s in (0, 1)]
        side = int(widths[1] < widths[0])
        reached, goal, new = sides[side], (end, begin)[side], dict[int, list[tuple[int, int]]]()
        for node in fronts[side]:
            on, to_ranks = _steps(topology, node, side)
            for link, other in itertools.chain(on, to_ranks.get(goal, ())):
                if other not in reached:
                    new.setdefault(other, []).append((link, node))
        reached.update(new)
        fronts[side] = list(new)
        met = [node for node in new if node in sides[1 - side]]
    onward: _Reached = {}
    for side in (0, 1):
        waiting, known = list(met), set(met)
        while waiting:
            node = waiting.pop()
            for link, other in sides[side][node]:
                first, further = (other, node) if side == 0 else (node, other)
                onward.setdefault(first, []).append((link, further))
                if other not in known:
                    known.add(other)
                    waiting.append(other)
    for links in onward.values():
        links.sort()
    return onward


@functools.lru_cache(maxsize=1 << 18)
def _steps(
    topology: Topology, node: int, side: int
) -> tuple[list[tuple[int, int]], dict[int, list[tuple[int, int]]]]:
    """Return links out of a node (side 1: into it) with their other ends; ranks do not forward."""
    links = topology.in_links(node) if side else topology.out_links(node)
    others = (topology.link_sources if side else topology.link_targets)[links]
    on: list[tuple[int, int]] = []
    to_ranks: dict[int, list[tuple[int, int]]] = {}
    for link, other in zip(links.tolist(), others.tolist(), strict=True):
        is_rank = topology.is_rank[other]
        (to_ranks.setdefault(other, []) if is_rank else on).append((link, other))
    return on, to_ranks
