"""Dijkstra on arrays, compiled, from one end or from both; costs are whole (ticks, links) pairs.

For a pair in a large network the whole tree of its source is a waste: two searches that meet see a
small part of the network. They go on until their radii together exceed the distance; then every
shortest route begins with nodes that the forward search has settled and goes on with nodes that
the backward one has. How far the latter are from the source follows from the distance of the pair,
so one walk back from the target serves both kinds of search: they choose alike among equals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold._compiler import njit
from fivefold.network.topology.arrays import IntArray

LongArray = npt.NDArray[np.int64]


@njit
def _before(ticks: Any, hops: Any, a: int, b: int) -> bool:
    """Return whether node a is nearer than node b; equals are ordered by index."""
    if ticks[a] != ticks[b]:
        return bool(ticks[a] < ticks[b])
    if hops[a] != hops[b]:
        return bool(hops[a] < hops[b])
    return a < b


@njit
def _rise(heap: Any, places: Any, ticks: Any, hops: Any, place: int) -> None:
    """Move a node of a heap up to where it belongs."""
    node = heap[place]
    while place > 0:
        above = (place - 1) // 2
        if not _before(ticks, hops, node, heap[above]):
            break
        heap[place] = heap[above]
        places[heap[place]] = place
        place = above
    heap[place] = node
    places[node] = place


@njit
def _sink(heap: Any, places: Any, ticks: Any, hops: Any, size: int) -> None:
    """Move the first node of a heap down to where it belongs."""
    node = heap[0]
    place = 0
    while 2 * place + 1 < size:
        below = 2 * place + 1
        if below + 1 < size and _before(ticks, hops, heap[below + 1], heap[below]):
            below += 1
        if not _before(ticks, hops, heap[below], node):
            break
        heap[place] = heap[below]
        places[heap[place]] = place
        place = below
    heap[place] = node
    places[node] = place


# One side of a search: ticks, hops and place of each node, the heap, [its size, number of touched
# nodes], and the touched nodes, which alone are reset for the next pair. A place of -1 is unseen,
# -2 settled. The links of a side: offsets by node, links, the far end and the ticks of each link.


@njit
def _side(num_nodes: int) -> Any:
    ticks = np.full(num_nodes, -1, np.int64)
    hops = np.full(num_nodes, -1, np.int64)
    places = np.full(num_nodes, -1, np.int64)
    heap = np.zeros(num_nodes, np.int64)
    return ticks, hops, places, heap, np.zeros(2, np.int64), np.zeros(num_nodes, np.int64)


@njit
def _begin(side: Any, node: int) -> None:
    ticks, hops, places, heap, state, touched = side
    for index in range(state[1]):
        places[touched[index]] = -1
        ticks[touched[index]] = -1
        hops[touched[index]] = -1
    heap[0], places[node], ticks[node], hops[node] = node, 0, 0, 0
    state[0], state[1] = 1, 1
    touched[0] = node


@njit
def _settle(side: Any, links: Any, blocked: Any, end: int) -> Any:
    """Settle the nearest open node of one search and open its neighbours; gives the node."""
    ticks, hops, places, heap, state, touched = side
    offsets, by_node, far_ends, link_ticks = links[0], links[1], links[2], links[3]
    node = heap[0]
    places[node] = -2
    state[0] -= 1
    if state[0] > 0:
        heap[0] = heap[state[0]]
        _sink(heap, places, ticks, hops, state[0])
    if blocked[node] and node != end:
        return node
    for position in range(offsets[node], offsets[node + 1]):
        link = by_node[position]
        target = far_ends[link]
        if places[target] == -2:
            continue
        through, length = ticks[node] + link_ticks[link], hops[node] + 1
        if places[target] == -1:
            places[target] = state[0]
            heap[state[0]] = target
            state[0] += 1
            touched[state[1]] = target
            state[1] += 1
        elif through > ticks[target] or (through == ticks[target] and length >= hops[target]):
            continue
        ticks[target], hops[target] = through, length
        _rise(heap, places, ticks, hops, places[target])
    return node


@njit
def shortest_distances(
    offsets: IntArray,
    links: IntArray,
    link_targets: IntArray,
    link_ticks: LongArray,
    blocked: npt.NDArray[np.bool_],
    source: int,
) -> tuple[LongArray, IntArray]:
    """Return (ticks, hops) of each node from a source, or -1; blocked nodes end paths."""
    # The loop of _settle without what only pairs need: a sixth faster for whole trees.
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
            _sink(heap, places, ticks, hops, size)
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
            _rise(heap, places, ticks, hops, places[target])
    return ticks, hops


@njit
def _choose(
    graph: tuple[IntArray, IntArray, IntArray, LongArray],
    costs: tuple[LongArray, LongArray, IntArray, npt.NDArray[np.bool_]],
    ends: tuple[int, int],
    wanted: int,
) -> tuple[int, int]:
    """Choose the wanted one of the links by which a node is reached best, and count such links.

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
def _walk(graph: Any, costs: Any, ends: Any, digits: int, found: Any, end: int) -> None:
    """Walk a route back by distances from its source, and write its links down before an end.

    Where several links are equally good the widest go first, and of those the selector's lowest
    digit decides, to the base of their number; the rest of the selector decides farther up.
    """
    source, node = ends
    place = end
    while node != source:
        link, equals = _choose(graph, costs, (source, node), 0)
        if equals > 1:
            link, _ = _choose(graph, costs, (source, node), digits % equals)
            digits //= equals
        place -= 1
        found[place] = link
        node = np.int64(graph[2][link])


@njit
def walk_back(
    graph: tuple[IntArray, IntArray, IntArray, LongArray],
    costs: tuple[LongArray, LongArray, IntArray, npt.NDArray[np.bool_]],
    source: int,
    targets: IntArray,
    selectors: IntArray,
) -> IntArray:
    """Walk routes from a source to targets, one behind the other, by distances already known."""
    hops = costs[2]
    total = 0
    for target in targets:
        total += hops[target]
    found = np.empty(total, np.int32)
    end = 0
    for route in range(len(targets)):
        node, digits = np.int64(targets[route]), np.int64(selectors[route])
        end += hops[node]
        _walk(graph, costs, (np.int64(source), node), digits, found, end)
    return found


@njit
def _search(forward: Any, backward: Any, out: Any, into: Any, blocked: Any, ends: Any) -> Any:
    """Run both searches until all shortest routes are known; gives the distance, -1 for none."""
    source, target = ends
    _begin(forward, source)
    _begin(backward, target)
    best_ticks, best_hops = np.int64(-1), np.int64(-1)
    while forward[4][0] > 0 and backward[4][0] > 0:
        a, b = forward[3][0], backward[3][0]
        low_ticks, low_hops = forward[0][a] + backward[0][b], forward[1][a] + backward[1][b]
        if best_hops >= 0 and (
            low_ticks > best_ticks or (low_ticks == best_ticks and low_hops > best_hops)
        ):
            break
        # The smaller frontier goes first; the other catches up when it has grown.
        if forward[4][0] <= backward[4][0]:
            node = _settle(forward, out, blocked, source)
            own, other = forward, backward
        else:
            node = _settle(backward, into, blocked, target)
            own, other = backward, forward
        if other[1][node] < 0 or (blocked[node] and node not in (source, target)):
            continue
        ticks, hops = own[0][node] + other[0][node], own[1][node] + other[1][node]
        if best_hops < 0 or ticks < best_ticks or (ticks == best_ticks and hops < best_hops):
            best_ticks, best_hops = ticks, hops
    return best_ticks, best_hops


@njit
def _is_on_route(forward: Any, backward: Any, end: int, best: Any, node: int) -> bool:
    """Return whether a node is known from both ends and as near to them as the best route is."""
    known = forward[1][node] >= 0 and (backward[2][node] == -2 or node == end)
    ticks, hops = forward[0][node] + backward[0][node], forward[1][node] + backward[1][node]
    return bool(known and ticks == best[0] and hops == best[1])


@njit
def _complete(
    forward: Any, backward: Any, out: Any, blocked: Any, ends: Any, best: Any, stack: Any
) -> None:
    """Give the nodes of the backward search on shortest routes their distances from the source."""
    ticks, hops, _, _, state, touched = forward
    size = 0
    for index in range(backward[4][1]):
        if _is_on_route(forward, backward, ends[1], best, backward[5][index]):
            stack[size] = backward[5][index]
            size += 1
    while size > 0:
        size -= 1
        node = stack[size]
        if blocked[node] and node != ends[0]:
            continue
        for position in range(out[0][node], out[0][node + 1]):
            link = out[1][position]
            onward = out[2][link]
            if _is_on_route(forward, backward, ends[1], best, onward):
                continue  # it is, or was, on the stack
            before = ticks[onward], hops[onward]
            ticks[onward], hops[onward] = ticks[node] + out[3][link], hops[node] + 1
            if not _is_on_route(forward, backward, ends[1], best, onward):
                ticks[onward], hops[onward] = before
                continue
            if before[1] < 0:
                touched[state[1]] = onward
                state[1] += 1
            stack[size] = onward
            size += 1


@njit
def meeting_routes(
    out: tuple[IntArray, IntArray, IntArray, LongArray],
    into: tuple[IntArray, IntArray, IntArray, LongArray, LongArray],
    blocked: npt.NDArray[np.bool_],
    pairs: tuple[IntArray, IntArray],
    selectors: IntArray,
) -> tuple[LongArray, IntArray, int]:
    """Find shortest routes of pairs of nodes, one behind the other."""
    sources, targets = pairs
    num_nodes = len(out[0]) - 1
    forward, backward = _side(num_nodes), _side(num_nodes)
    stack = np.zeros(num_nodes, np.int64)
    graph = into[0], into[1], into[2], into[4]
    costs = into[3], forward[0], forward[1], blocked
    offsets = np.zeros(len(sources) + 1, np.int64)
    found = np.empty(8 * len(sources) + 64, np.int32)
    for pair in range(len(sources)):
        ends = np.int64(sources[pair]), np.int64(targets[pair])
        best = _search(forward, backward, out, into, blocked, ends)
        if best[1] < 0:
            return offsets, found, pair
        offsets[pair + 1] = offsets[pair] + best[1]
        while offsets[pair + 1] > len(found):
            found = np.concatenate((found, np.empty_like(found)))
        _complete(forward, backward, out, blocked, ends, best, stack)
        _walk(graph, costs, ends, np.int64(selectors[pair]), found, offsets[pair + 1])
    return offsets, found[: offsets[-1]], -1


@njit
def _next_level(graph: Any, state: Any, span: tuple[int, int], step: int) -> Any:
    """Reach what is one link further than a span of the queue; gives the queue's new end."""
    offsets, links, link_targets, link_ticks = graph
    queue, seen, ticks, level = state
    end = span[1]
    for at in range(span[0], span[1]):
        node = queue[at]
        for position in range(offsets[node], offsets[node + 1]):
            target = link_targets[links[position]]
            through = ticks[node] + link_ticks[links[position]]
            if seen[target] != step:
                seen[target], ticks[target], level[target] = step, through, level[node] + 1
                queue[end] = target
                end += 1
            elif level[target] == level[node] + 1 and through < ticks[target]:
                ticks[target] = through
    return end


@njit
def nearest_neighbour_tour(
    graph: tuple[IntArray, IntArray, IntArray, LongArray], nodes: IntArray
) -> tuple[IntArray, int]:
    """Visit nodes, each followed by the nearest one left: fewest links, least ticks, first given.

    Each step looks around level by level and ends at the first level that has a node left, so it
    sees a neighbourhood and not the network. Gives the places, and how many were reached.
    """
    num_nodes = len(graph[0]) - 1
    place_of = np.full(num_nodes, -1, np.int64)
    for place in range(1, len(nodes)):
        place_of[nodes[place]] = place
    queue, order = np.empty(num_nodes, np.int32), np.zeros(len(nodes), np.int32)
    seen, level = np.full(num_nodes, -1, np.int64), np.zeros(num_nodes, np.int64)
    ticks = np.zeros(num_nodes, np.int64)
    for step in range(1, len(nodes)):
        start = nodes[order[step - 1]]
        queue[0], seen[start], ticks[start], level[start] = start, step, 0, 0
        first, end, best = 0, 1, -1
        while best < 0 and first < end:
            last = end
            end = _next_level(graph, (queue, seen, ticks, level), (first, last), step)
            for node in queue[last:end]:
                if place_of[node] >= 0 and (
                    best < 0 or (ticks[node], place_of[node]) < (ticks[best], place_of[best])
                ):
                    best = node
            first = last
        if best < 0:
            return order, step
        order[step] = place_of[best]
        place_of[best] = -1
    return order, len(nodes)
