"""Dijkstra on arrays, compiled. Costs are whole numbers: (ticks of latency, number of links)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold._compiler import njit
from fivefold.network.topology._graph import IntArray

LongArray = npt.NDArray[np.int64]


@njit
def before(ticks: Any, hops: Any, a: int, b: int) -> bool:
    """Whether node a is nearer than node b; equals are ordered by index."""
    if ticks[a] != ticks[b]:
        return bool(ticks[a] < ticks[b])
    if hops[a] != hops[b]:
        return bool(hops[a] < hops[b])
    return a < b


@njit
def rise(heap: Any, places: Any, ticks: Any, hops: Any, place: int) -> None:
    """Move a node of a heap up to where it belongs."""
    node = heap[place]
    while place > 0:
        above = (place - 1) // 2
        if not before(ticks, hops, node, heap[above]):
            break
        heap[place] = heap[above]
        places[heap[place]] = place
        place = above
    heap[place] = node
    places[node] = place


@njit
def sink(heap: Any, places: Any, ticks: Any, hops: Any, size: int) -> None:
    """Move the first node of a heap down to where it belongs."""
    node = heap[0]
    place = 0
    while 2 * place + 1 < size:
        below = 2 * place + 1
        if below + 1 < size and before(ticks, hops, heap[below + 1], heap[below]):
            below += 1
        if not before(ticks, hops, heap[below], node):
            break
        heap[place] = heap[below]
        places[heap[place]] = place
        place = below
    heap[place] = node
    places[node] = place


@njit
def shortest_distances(
    offsets: IntArray,
    links: IntArray,
    link_targets: IntArray,
    link_ticks: LongArray,
    blocked: npt.NDArray[np.bool_],
    source: int,
) -> tuple[LongArray, IntArray]:
    """Distance of each node from a source; nodes in ``blocked`` are entered but never left.

    Returns:
        Ticks and hops per node, -1 where it cannot be reached.
    """
    num_nodes = len(offsets) - 1
    ticks = np.full(num_nodes, -1, np.int64)
    hops = np.full(num_nodes, -1, np.int32)
    heap = np.empty(num_nodes, np.int32)
    places = np.full(num_nodes, -1, np.int32)  # -1 unseen, -2 done, else its place in the heap
    heap[0], places[source], ticks[source], hops[source] = source, 0, 0, 0
    size = 1
    while size > 0:
        node = heap[0]
        places[node] = -2
        size -= 1
        if size > 0:
            heap[0] = heap[size]
            sink(heap, places, ticks, hops, size)
        if blocked[node] and node != source:
            continue
        for position in range(offsets[node], offsets[node + 1]):
            link = links[position]
            target = link_targets[link]
            if places[target] == -2:
                continue
            through, length = ticks[node] + link_ticks[link], hops[node] + 1
            if places[target] == -1:
                places[target] = size
                heap[size] = target
                size += 1
            elif through > ticks[target] or (through == ticks[target] and length >= hops[target]):
                continue
            ticks[target], hops[target] = through, length
            rise(heap, places, ticks, hops, places[target])
    return ticks, hops


@njit
def _choose(
    graph: tuple[IntArray, IntArray, IntArray, LongArray],
    costs: tuple[LongArray, LongArray, IntArray, npt.NDArray[np.bool_]],
    ends: tuple[int, int],
    wanted: int,
) -> tuple[int, int]:
    """The wanted one of the links by which a node is reached best, and the number of such links.

    A node's links are sorted, the widest first; narrower ones than the first that serves are not
    considered.
    """
    offsets, in_links, link_sources, widths = graph
    link_ticks, ticks, hops, blocked = costs
    source, node = ends
    equals, found, width = 0, -1, np.int64(-1)
    for position in range(offsets[node], offsets[node + 1]):
        link = in_links[position]
        previous = link_sources[link]
        if hops[previous] < 0 or hops[previous] + 1 != hops[node]:
            continue
        if ticks[previous] + link_ticks[link] != ticks[node]:
            continue
        if blocked[previous] and previous != source:
            continue
        if equals > 0 and widths[link] != width:
            break
        width = widths[link]
        if equals == wanted:
            found = link
        equals += 1
    return found, equals


@njit
def walk_back(
    graph: tuple[IntArray, IntArray, IntArray, LongArray],
    costs: tuple[LongArray, LongArray, IntArray, npt.NDArray[np.bool_]],
    source: int,
    targets: IntArray,
    selectors: IntArray,
) -> IntArray:
    """Routes from a source to targets, one behind the other, by distances already known.

    Where several links are equally good the widest go first, and of those the selector's lowest
    digit decides, to the base of their
    number; the rest of the selector decides farther up.
    """
    link_sources, hops = graph[2], costs[2]
    total = 0
    for target in targets:
        total += hops[target]
    found = np.empty(total, np.int32)
    end = 0
    for route in range(len(targets)):
        node, digits = targets[route], selectors[route]
        end += hops[node]
        place = end
        while node != source:
            link, equals = _choose(graph, costs, (source, node), 0)
            if equals > 1:
                link, _ = _choose(graph, costs, (source, node), digits % equals)
                digits //= equals
            place -= 1
            found[place] = link
            node = link_sources[link]
    return found
