"""The compiled loop of greedy matching: whenever a port is free, give it a chunk that helps.

A *port* is a link that leaves a rank; behind a switch it serves all ranks that it reaches over
whichever links are free. Chunks held, and held or awaited, are bit sets. Of the chunks that a port
may send the rarest goes: the one that fewest ranks of the target's own neighbourhood have, then of
the next larger. References: TACOS, arXiv 2304.05301; rarest first is BitTorrent's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from fivefold._compiler import njit
from fivefold.collectives.schedules.arrays import (
    Floats,
    Ints,
    Longs,
    offsets_of,
    pop_event,
    push_event,
)
from fivefold.network.topology import Topology

_MOST_LEVELS = 4
_MOST_RATES = 32


def build_neighbourhoods(topology: Topology) -> Neighbourhoods:
    """Find the sets of ranks at each bandwidth that changes them, the fastest first.

    Level 0 are the single ranks, the last level is everybody.
    """
    members = [np.arange(topology.num_ranks, dtype=np.int32)]
    rates = [np.inf]
    capacities = topology.capacities_bytes_per_s
    distinct = np.unique(capacities)[::-1]
    if len(distinct) > _MOST_RATES:
        distinct = distinct[np.linspace(0, len(distinct) - 1, _MOST_RATES).astype(int)]
    for rate in distinct.tolist():
        kept = capacities >= rate
        ends = (topology.link_sources[kept], topology.link_targets[kept])
        shape = (topology.num_nodes, topology.num_nodes)
        graph = coo_array((np.ones(int(kept.sum()), np.int8), ends), shape=shape)
        of_node = connected_components(graph, directed=False)[1]
        sets = np.unique(of_node[topology.rank_nodes], return_inverse=True)[1].astype(np.int32)
        if sets.max() < members[-1].max():
            members.append(sets)
            rates.append(rate)
    if members[-1].max() > 0 or len(members) == 1:
        members.append(np.zeros(topology.num_ranks, np.int32))
        rates.append(0.0)
    if len(members) - 1 > _MOST_LEVELS:
        levels = np.linspace(1, len(members) - 1, _MOST_LEVELS).astype(int)
        members = [members[0], *(members[level] for level in levels)]
        rates = [rates[0], *(rates[level] for level in levels)]
    return Neighbourhoods(
        member=np.stack(members),
        offsets=np.zeros(len(members), np.int64),
        counts=np.zeros(0, np.int32),
        rates=np.array(rates),
    )


def build_fabric(topology: Topology, near: Neighbourhoods) -> Fabric:
    """Return the ports and what they reach."""
    is_rank = topology.is_rank
    sources, targets = topology.link_sources, topology.link_targets
    hops = np.zeros((topology.num_ranks, 0), np.int16)
    if not is_rank.all():
        arrays = (topology.incoming.offsets, topology.incoming.links, sources, is_rank)
        hops = hops_through_switches(*arrays, topology.rank_nodes)
    leaving = np.flatnonzero(is_rank[sources])
    ports = leaving[np.argsort(topology.rank_of_node[sources[leaving]], kind="stable")]
    target_order = [_target_order(topology, near, hops, int(link)) for link in ports]
    entering = np.flatnonzero(is_rank[targets] & ~is_rank[sources])
    last = entering[np.argsort(topology.rank_of_node[targets[entering]], kind="stable")]
    count = topology.num_ranks
    return Fabric(
        sources=sources,
        targets=targets,
        costs=np.stack([topology.capacities_bytes_per_s, topology.latencies_s]),
        rank_of_node=topology.rank_of_node,
        ports=ports.astype(np.int32),
        port_offsets=offsets_of(topology.rank_of_node[sources[ports]], count),
        target_offsets=np.cumsum([0, *map(len, target_order)]).astype(np.int64),
        target_order=np.concatenate([*target_order, np.zeros(0)]).astype(np.int32),
        out_offsets=topology.outgoing.offsets.astype(np.int64),
        out_links=topology.outgoing.links,
        last_offsets=offsets_of(topology.rank_of_node[targets[last]], count),
        last_links=last.astype(np.int32),
        hops=hops,
    )


def _target_order(
    topology: Topology, near: Neighbourhoods, hops: NDArray[np.int16], link: int
) -> Longs:
    """Order the ranks that a port serves: round the ring, or that of sets for slow ports."""
    head = int(topology.link_targets[link])
    if topology.is_rank[head]:
        return topology.rank_of_node[[head]].astype(np.int64)
    own = int(topology.rank_of_node[topology.link_sources[link]])
    reached: NDArray[Any] = np.flatnonzero(hops[:, head] >= 0)
    reached = reached[reached != own]
    rate = topology.capacities_bytes_per_s[link]
    sets = near.member[int((near.rates > rate).sum()) - 1]
    count = int(sets.max()) + 1
    away = (sets[reached] - sets[own]) % count
    away[away == 0] = count  # its own neighbourhood has faster links for this
    # Ranks that stand at the same place in their neighbourhoods are partners.
    places = _places(sets)
    aside = (places[reached] - places[own]) % (int(places.max()) + 1)
    return reached[np.lexsort((aside, away))].astype(np.int64)


def _places(sets: Ints) -> Longs:
    """Return the position of each rank within its set."""
    order = np.argsort(sets, kind="stable")
    starts = np.searchsorted(sets[order], sets[order])
    places = np.empty(len(sets), np.int64)
    places[order] = np.arange(len(sets)) - starts
    return places


@njit
def hops_through_switches(
    in_offsets: Any, in_links: Any, link_sources: Any, is_rank: Any, rank_nodes: Any
) -> Any:
    """Count links from each node to each rank over switches, int16 [ranks, nodes]; -1: no way."""
    num_nodes = len(is_rank)
    hops = np.full((len(rank_nodes), num_nodes), -1, np.int16)
    queue = np.empty(num_nodes, np.int64)
    for rank in range(len(rank_nodes)):
        row = hops[rank]
        queue[0] = rank_nodes[rank]
        row[rank_nodes[rank]] = 0
        first, last = 0, 1
        while first < last:
            node = queue[first]
            first += 1
            if is_rank[node] and node != rank_nodes[rank]:
                continue  # ranks do not forward within a transfer
            for place in range(in_offsets[node], in_offsets[node + 1]):
                before = link_sources[in_links[place]]
                if row[before] < 0:
                    row[before] = row[node] + 1
                    queue[last] = before
                    last += 1
    return hops


Words = NDArray[np.uint64]


class Fabric(NamedTuple):
    """The network as the loop sees it."""

    sources: Ints
    targets: Ints
    costs: Floats
    rank_of_node: Ints
    ports: Ints
    port_offsets: Longs
    target_offsets: Longs
    target_order: Ints
    out_offsets: Longs
    out_links: Ints
    last_offsets: Longs
    last_links: Ints
    hops: NDArray[np.int16]


class Neighbourhoods(NamedTuple):
    """Sets of ranks joined by fast links, coarser and coarser; level 0 are the single ranks."""

    member: Ints
    offsets: Longs
    counts: Ints
    rates: Floats


class Holdings(NamedTuple):
    """Bit sets of chunks."""

    held: Words
    taken: Words


class Transfers(NamedTuple):
    """Transfers that are decided, in order of start; the arrays have room for all of them."""

    chunks: Ints
    ports: Ints
    ends: Ints
    times: Floats
    route_offsets: Longs
    route_links: Ints


class Rules(NamedTuple):
    """Sizes and rules by which transfers are decided."""

    num_chunks: int
    chunk_bytes: float
    seed: int
    fresh_only: bool
    deadline_s: float


_ONE = np.uint64(1)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_TOP = np.uint64(58)
_BIT = np.zeros(64, np.int64)
for _place in range(64):
    _BIT[(int(_DE_BRUIJN) << _place & int(_ALL)) >> 58] = _place
_FIRST, _SECOND, _THIRD = np.uint64(13), np.uint64(7), np.uint64(17)
_LONGEST_ROUTE = 16
_MOST_STEPS = 256  # of one search for free links


@njit(inline="always")
def _random(state: Any, below: int) -> int:
    """Return the next number of a xorshift generator, below a bound."""
    value = state[0]
    value ^= value << _FIRST
    value ^= value >> _SECOND
    value ^= value << _THIRD
    state[0] = value
    return int((value >> np.uint64(33)) % np.uint64(below))


@njit(inline="always")
def _lowest(word: Any) -> int:
    """Return the place of the lowest bit that is set."""
    return int(_BIT[((word & (~word + _ONE)) * _DE_BRUIJN) >> _TOP])


@njit
def _level(member: Any, rank: int, other: int) -> int:
    """Return the finest level at which two ranks are in one set."""
    level = 1
    while level < len(member) - 1 and member[level, rank] != member[level, other]:
        level += 1
    return level


@njit(inline="always")
def _key(near: Any, places: tuple[int, int], chunk: int, rules: Any) -> int:
    """Return how common a chunk is where it would go; negative where it is not to go there."""
    common = int(near.counts[places[0] + chunk])
    if places[1] >= 0:
        there = int(near.counts[places[1] + chunk])
        if rules.fresh_only and there > 0:
            return -1
        common += there << 32
    return common


@njit
def _rarest(
    holdings: Any, near: Any, pair: tuple[int, int], level: int, rules: Any, state: Any
) -> Any:
    """Return the rarest chunk that the first of a pair has and the second lacks; -1 for none."""
    held, taken = holdings.held[pair[0]], holdings.taken[pair[1]]
    words, chunks = len(held), rules.num_chunks
    wide = near.offsets[level] + int(near.member[level, pair[1]]) * chunks
    fine = -1
    if level > 1:
        fine = near.offsets[level - 1] + int(near.member[level - 1, pair[1]]) * chunks
    best, least = -1, 1 << 62
    # The scan starts anywhere, so that the first of equals is a random one.
    start, turn = _random(state, words), np.uint64(_random(state, 64))
    for step in range(words + 1):
        place = start + step - (words if start + step >= words else 0)
        word = held[place] & ~taken[place]
        if step == 0:
            word &= _ALL << turn
        elif step == words:
            word &= ~(_ALL << turn)
        while word:
            chunk = (place << 6) + _lowest(word)
            word &= word - _ONE
            key = _key(near, (wide, fine), chunk, rules)
            if 0 <= key < least:
                best, least = chunk, key
                if key <= 1:  # nobody but the source has it
                    return best
    return best


@njit
def _find_route(fabric: Any, free_s: Any, now_s: float, target: int, path: Any, state: Any) -> int:
    """Complete ``path``, whose first link is given, by free links; its length, 0 for none."""
    node_hops = fabric.hops[target]
    tried = np.zeros(_LONGEST_ROUTE, np.int64)
    turns = np.zeros(_LONGEST_ROUTE, np.int64)
    depth = 1
    for _ in range(_MOST_STEPS):
        node = fabric.targets[path[depth - 1]]
        if fabric.rank_of_node[node] == target:
            return depth
        first, last = fabric.out_offsets[node], fabric.out_offsets[node + 1]
        if tried[depth] == 0:
            turns[depth] = _random(state, max(1, last - first))
        found = False
        while tried[depth] < last - first and not found:
            place = first + (tried[depth] + turns[depth]) % (last - first)
            tried[depth] += 1
            link = fabric.out_links[place]
            after = fabric.targets[link]
            nearer = node_hops[after] == node_hops[node] - 1
            # Ranks do not forward within a transfer, however near the target they are.
            passes = fabric.rank_of_node[after] < 0 or fabric.rank_of_node[after] == target
            found = nearer and passes and free_s[link] <= now_s
        if found and depth < _LONGEST_ROUTE - 1:
            path[depth] = link
            depth += 1
            tried[depth] = 0
        else:
            depth -= 1
            if depth == 0:
                return 0
    return 0


@njit
def _last_link_free(fabric: Any, free_s: Any, now_s: float, rank: int) -> bool:
    for place in range(fabric.last_offsets[rank], fabric.last_offsets[rank + 1]):
        if free_s[fabric.last_links[place]] <= now_s:
            return True
    return False


class Loop(NamedTuple):
    """State that changes while time passes."""

    free_s: Floats
    heap: tuple[Floats, Longs]
    queue: Longs
    queued: Longs
    idle: Longs
    path: Longs
    state: Words
    numbers: Longs
    port_of_link: Longs


_EVENTS, _QUEUED, _IDLE, DONE, _TURN = range(5)


@njit
def new_loop(fabric: Any, transfers: Any, seed: int) -> Any:
    """Return the state before anything is sent, all ports queued."""
    num_ports, num_links = len(fabric.ports), len(fabric.sources)
    per_transfer = 1 if len(transfers.route_offsets) == 0 else 4
    room = len(transfers.chunks) * per_transfer + num_links
    port_of_link = np.full(num_links, -1, np.int64)
    for port in range(num_ports):
        port_of_link[fabric.ports[port]] = port
    numbers = np.zeros(5, np.int64)
    numbers[_QUEUED] = num_ports
    return Loop(
        np.zeros(num_links),
        (np.empty(room), np.empty(room, np.int64)),
        np.arange(num_ports),
        np.zeros(num_ports, np.int64),
        np.empty(num_ports, np.int64),
        np.empty(_LONGEST_ROUTE, np.int64),
        np.array([seed], np.uint64),
        numbers,
        port_of_link,
    )


@njit
def _choose(
    fabric: Any, near: Any, holdings: Any, loop: Any, rules: Any, port: int, now_s: float
) -> tuple[int, int, int]:
    """Choose target, chunk and length of the route that a free port takes; target -1: nothing."""
    link = fabric.ports[port]
    source = fabric.rank_of_node[fabric.sources[link]]
    direct = fabric.rank_of_node[fabric.targets[link]] >= 0
    loop.path[0] = link
    for place in range(fabric.target_offsets[port], fabric.target_offsets[port + 1]):
        target = fabric.target_order[place]
        if not direct and not _last_link_free(fabric, loop.free_s, now_s, target):
            continue
        level = _level(near.member, source, target)
        # A slow way round within a set that fast links hold together would only block a chunk.
        slow = fabric.costs[0, link] < near.rates[level]
        if slow and rules.fresh_only and not direct:
            continue
        chunk = _rarest(holdings, near, (source, target), level, rules, loop.state)
        if chunk < 0:
            continue
        length = 1
        if not direct:
            length = _find_route(fabric, loop.free_s, now_s, target, loop.path, loop.state)
        if length:
            return target, chunk, length
    return -1, -1, 0


@njit
def _cost(fabric: Any, path: Any, length: int, size: float) -> tuple[float, float]:
    """Return the latency of a route, and the time that its narrowest link needs."""
    latency_s, bytes_s = 0.0, 0.0
    for place in range(length):
        latency_s += fabric.costs[1, path[place]]
        bytes_s = max(bytes_s, size / fabric.costs[0, path[place]])
    return latency_s, bytes_s


@njit
def _take(holdings: Any, near: Any, rank: int, chunk: int, num_chunks: int) -> None:
    """Note that the rank awaits the chunk: count it in all its sets."""
    holdings.taken[rank, chunk >> 6] |= _ONE << np.uint64(chunk & 63)
    for level in range(1, len(near.member)):
        first = near.offsets[level] + np.int64(near.member[level, rank]) * num_chunks
        near.counts[first + chunk] += 1


@njit
def _send(
    fabric: Any, transfers: Any, loop: Any, what: tuple[int, int, int], length: int,
    when: tuple[float, float, float], size: float,
) -> None:  # fmt: skip
    """Write a transfer down, occupy its links and announce its arrival."""
    number = loop.numbers[DONE]
    transfers.chunks[number], transfers.ports[number], transfers.ends[number] = what
    now_s, held_s, end_s = when
    transfers.times[0, number], transfers.times[1, number] = now_s, end_s
    if len(transfers.route_offsets):
        first = transfers.route_offsets[number]
        transfers.route_offsets[number + 1] = first + length
        for place in range(length):
            transfers.route_links[first + place] = loop.path[place]
    waiting = push_event(loop.heap, loop.numbers[_EVENTS], end_s, number)
    for place in range(length):
        link = loop.path[place]
        loop.free_s[link] = held_s + size / fabric.costs[0, link]
        if loop.free_s[link] < end_s:
            waiting = push_event(loop.heap, waiting, loop.free_s[link], -1 - link)
    loop.numbers[_EVENTS] = waiting
    loop.numbers[DONE] += 1


@njit
def _serve_queue(
    fabric: Any, near: Any, holdings: Any, transfers: Any, loop: Any, rules: Any, now_s: float
) -> None:
    """Give every queued port something to send, in random order."""
    size = loop.numbers[_QUEUED]
    for place in range(size - 1, 0, -1):
        other = _random(loop.state, place + 1)
        loop.queue[place], loop.queue[other] = loop.queue[other], loop.queue[place]
    loop.numbers[_IDLE] = 0
    for place in range(size):
        port = loop.queue[place]
        target, chunk, length = _choose(fabric, near, holdings, loop, rules, port, now_s)
        latency_s, bytes_s = _cost(fabric, loop.path, length, rules.chunk_bytes)
        end_s = now_s + latency_s + bytes_s
        if target < 0 or end_s > rules.deadline_s:
            loop.idle[loop.numbers[_IDLE]] = port
            loop.numbers[_IDLE] += 1
            continue
        when = (now_s, now_s + latency_s, end_s)
        _send(fabric, transfers, loop, (chunk, port, target), length, when, rules.chunk_bytes)
        _take(holdings, near, target, chunk, rules.num_chunks)


@njit
def _enqueue(fabric: Any, loop: Any, port: int, now_s: float) -> None:
    """Queue a port for this turn if its link is free."""
    if port < 0 or loop.queued[port] == loop.numbers[_TURN]:
        return
    if loop.free_s[fabric.ports[port]] <= now_s:
        loop.queued[port] = loop.numbers[_TURN]
        loop.queue[loop.numbers[_QUEUED]] = port
        loop.numbers[_QUEUED] += 1


@njit
def _advance(fabric: Any, holdings: Any, transfers: Any, loop: Any) -> float:
    """Let everything happen that happens next, and queue the ports that it concerns; the time."""
    loop.numbers[_TURN] += 1
    loop.numbers[_QUEUED] = 0
    waiting, now_s = loop.numbers[_EVENTS], 0.0
    # What differs by rounding only happens together, and now is the last of it.
    together_s = loop.heap[0][0] * (1 + 1e-12)
    while waiting and loop.heap[0][0] <= together_s:
        now_s, item = loop.heap[0][0], loop.heap[1][0]
        waiting = pop_event(loop.heap, waiting)
        if item < 0:
            _enqueue(fabric, loop, loop.port_of_link[-1 - item], together_s)
            continue
        chunk, rank = transfers.chunks[item], transfers.ends[item]
        holdings.held[rank, chunk >> 6] |= _ONE << np.uint64(chunk & 63)
        _enqueue(fabric, loop, transfers.ports[item], together_s)
        # What arrives may be what the rank's idle ports wait for.
        for port in range(fabric.port_offsets[rank], fabric.port_offsets[rank + 1]):
            _enqueue(fabric, loop, port, together_s)
    loop.numbers[_EVENTS] = waiting
    # Behind switches a port may also wait for links that others use: try again.
    for place in range(loop.numbers[_IDLE]):
        port = loop.idle[place]
        if fabric.rank_of_node[fabric.targets[fabric.ports[port]]] < 0:
            _enqueue(fabric, loop, port, now_s)
    return now_s


@njit
def match(
    fabric: Any, near: Any, holdings: Any, transfers: Any, rules: Any, loop: Any,
    clock: tuple[float, int],
) -> float:  # fmt: skip
    """Decide transfers for some turns, so that the caller can look at the clock in between."""
    now_s, turns = clock
    for _ in range(turns):
        _serve_queue(fabric, near, holdings, transfers, loop, rules, now_s)
        if loop.numbers[_EVENTS] == 0:
            return -1.0
        now_s = _advance(fabric, holdings, transfers, loop)
    return now_s
