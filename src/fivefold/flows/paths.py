"""Paths between ranks: the one that a flow takes by itself, and all that ECMP chooses among."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fivefold.errors import ConfigurationError, InfeasibleError, require_whole
from fivefold.network.topology import Topology
from fivefold.network.topology.arrays import IntArray
from fivefold.network.topology.routes import Routes


def default_paths(topology: Topology, sources: npt.ArrayLike, targets: npt.ArrayLike) -> Routes:
    """Return the path that each flow takes where nothing chooses one, of many flows at once.

    Neighbours use the widest link that joins them, others the route of least latency; ranks on the
    way forward.
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
    """Return pairs of neighbouring ranks, sorted, and their widest link, the nearest of equals."""
    ranks = topology.rank_of_node
    first, last = ranks[topology.link_sources], ranks[topology.link_targets]
    between = np.flatnonzero((first >= 0) & (last >= 0))
    keys = first[between].astype(np.int64) * topology.num_ranks + last[between]
    width, delay_s = topology.capacities_bytes_per_s[between], topology.latencies_s[between]
    order = np.lexsort((delay_s, -width, keys))
    unique, where = np.unique(keys[order], return_index=True)
    return unique, between[order][where].astype(np.int32)


@dataclass(frozen=True, eq=False)
class PathChoices(Sequence[tuple[int, ...]]):
    """Paths of fewest links between two ranks: how all begin, where they differ, how all end."""

    first: tuple[int, ...]
    middle: IntArray  # [paths, links]; shared by all ranks behind the same gateways
    last: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.middle)

    def __getitem__(self, place: Any) -> Any:
        return (*self.first, *self.middle[place].tolist(), *self.last)

    def links(self) -> IntArray:
        """Return the links of all paths, int32 [paths, links]."""
        first, last = (
            np.tile(np.array(x, np.int32), (len(self), 1)) for x in (self.first, self.last)
        )
        return np.concatenate([first, self.middle, last], axis=1)


def equal_cost_paths(
    topology: Topology, source: int, target: int, *, limit: int = 64, relay: bool = False
) -> PathChoices:
    """Find the paths of fewest links from one rank to another that no third rank forwards.

    Between ranks of one host paths that stay inside it go before others of the same length, as
    libraries use NVLink where it is there. They are not written out: a rank's only way out, say
    over its NIC to the leaf switch, is the same for all its targets, and what lies between two leaf
    switches is the same for all ranks below them.

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
        >>> list(equal_cost_paths(switch(3), 0, 1))
        [(0, 3)]
    """
    require_whole("limit", limit, hint="at least one path is asked for")
    if source == target:
        message = f"paths lead from one rank to another; got {source} to {target}"
        raise ConfigurationError(message)
    begin, end = topology.node_of_rank(source), topology.node_of_rank(target)
    host = topology.nodes[begin].host
    if host is not None and topology.nodes[end].host == host:
        found = PathChoices((), _inside(topology, begin, end, limit), ())
    else:
        out, into = _gateway(topology, begin, 0), _gateway(topology, end, 1)
        if end in out.behind or begin in into.behind or into.node in out.behind:
            out, into = _Gateway(begin), _Gateway(end)
        found = PathChoices(
            out.links, _between(topology, out.node, into.node, limit), into.links[::-1]
        )
    if found:
        return found
    if relay:
        route = np.array([topology.shortest_route(source, target)], np.int32)
        return PathChoices((), route, ())
    raise InfeasibleError(
        f"there is no path from rank {source} to rank {target} in {topology.name!r}",
        hint="ranks do not forward here; add a link or a switch between them",
    )


class _Gateway(NamedTuple):
    """A node that every path from (or to) a rank passes, but for those to nodes behind it."""

    node: int
    links: tuple[int, ...] = ()  # from the rank to the gateway; side 1: from it, last one first
    behind: frozenset[int] = frozenset()


@functools.lru_cache(maxsize=1 << 17)
def _gateway(topology: Topology, node: int, side: int) -> _Gateway:
    """Follow a rank's links as long as there is only one way on."""
    links: list[int] = []
    behind: set[int] = set()
    while True:
        on, to_ranks = _steps(topology, node, side)
        near, further = {node, *to_ranks}, []
        for link, other in on:
            beyond, its_ranks = _steps(topology, other, side)
            if all(after == node for _, after in beyond):  # from here only back, or to its ranks
                near |= {other, *its_ranks}
            elif other not in behind:
                further.append((link, other))
        if len(further) != 1:
            return _Gateway(node, tuple(links), frozenset(behind))
        behind |= near
        ((link, node),) = further
        links.append(link)


@functools.lru_cache(maxsize=1 << 17)  # planners ask for the same gateways again and again
def _between(topology: Topology, begin: int, end: int, limit: int) -> IntArray:
    """Return shortest paths from one node to another, in the order of their link numbers."""
    onward = _onward(topology, begin, end) if begin != end else {}
    found: list[tuple[int, ...]] = []
    stack: list[tuple[int, tuple[int, ...]]] = [(begin, ())] if onward or begin == end else []
    while stack and len(found) < limit:
        node, path = stack.pop()
        if node == end:
            found.append(path)
            continue
        stack.extend((further, (*path, link)) for link, further in reversed(onward[node]))
    return np.array(found, np.int32) if found else np.empty((0, 0), np.int32)


def _inside(topology: Topology, begin: int, end: int, limit: int) -> IntArray:
    """Return only the paths that stay in the host of both ends, where there are such."""
    paths, host = _between(topology, begin, end, limit), topology.nodes[begin].host
    inside = [
        all(topology.nodes[node].host == host for node in nodes)
        for nodes in topology.link_targets[paths].tolist()
    ]
    return paths[inside] if any(inside) else paths


_Reached = dict[int, list[tuple[int, int]]]


def _onward(topology: Topology, begin: int, end: int) -> _Reached:
    """Return the links of all shortest paths, with where they lead, by where they start."""
    # Both ends search, always the one with less to look at: the widest switches lie in the middle,
    # and are met rather than searched.
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
