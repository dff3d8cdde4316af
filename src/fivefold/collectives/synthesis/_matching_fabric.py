"""A topology as the matching loop needs it: ports, whom they serve, and neighbourhoods.

A neighbourhood is a set of ranks that links of at least some bandwidth hold together, such as a
box among boxes. Where all links are equal there is one, and it is everybody.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from fivefold._compiler import njit
from fivefold.network.topology import Topology

_MOST_LEVELS = 4
_MOST_RATES = 32


def build_neighbourhoods(topology: Topology) -> Neighbourhoods:
    """The sets of ranks at each bandwidth that changes them, the fastest first; counts are empty.

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
    """Ports and what they reach."""
    is_rank = topology.is_rank
    sources, targets = topology.link_sources, topology.link_targets
    hops = np.zeros((topology.num_ranks, 0), np.int16)
    if not is_rank.all():
        arrays = (topology.incoming.offsets, topology.incoming.links, sources, is_rank)
        hops = hops_through_switches(*arrays, topology.rank_nodes)
    leaving = np.flatnonzero(is_rank[sources])
    ports = leaving[np.argsort(topology.rank_of_node[sources[leaving]], kind="stable")]
    wishes = [_wishes(topology, near, hops, int(link)) for link in ports]
    entering = np.flatnonzero(is_rank[targets] & ~is_rank[sources])
    last = entering[np.argsort(topology.rank_of_node[targets[entering]], kind="stable")]
    count = topology.num_ranks
    return Fabric(
        sources=sources,
        targets=targets,
        costs=np.stack([topology.capacities_bytes_per_s, topology.latencies_s]),
        rank_of_node=topology.rank_of_node,
        ports=ports.astype(np.int32),
        port_offsets=_offsets(topology.rank_of_node[sources[ports]], count),
        wish_offsets=np.cumsum([0, *map(len, wishes)]).astype(np.int64),
        wishes=np.concatenate([*wishes, np.zeros(0)]).astype(np.int32),
        out_offsets=topology.outgoing.offsets.astype(np.int64),
        out_links=topology.outgoing.links,
        last_offsets=_offsets(topology.rank_of_node[targets[last]], count),
        last_links=last.astype(np.int32),
        hops=hops,
    )


def _offsets(sorted_keys: Ints, count: int) -> Longs:
    return np.searchsorted(sorted_keys, np.arange(count + 1)).astype(np.int64)


def _wishes(topology: Topology, near: Neighbourhoods, hops: NDArray[np.int16], link: int) -> Longs:
    """Ranks that a port serves: round the ring of ranks, or of neighbourhoods for slow ports."""
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
    """Position of each rank within its set."""
    order = np.argsort(sets, kind="stable")
    starts = np.searchsorted(sets[order], sets[order])
    places = np.empty(len(sets), np.int64)
    places[order] = np.arange(len(sets)) - starts
    return places


@njit
def hops_through_switches(
    in_offsets: Any, in_links: Any, link_sources: Any, is_rank: Any, rank_nodes: Any
) -> Any:
    """Links from each node to each rank over switches, int16 [ranks, nodes]; -1 for no way."""
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


Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float64]
Words = NDArray[np.uint64]


class Fabric(NamedTuple):
    """The network as the loop sees it."""

    sources: Ints
    targets: Ints
    costs: Floats
    rank_of_node: Ints
    ports: Ints
    port_offsets: Longs
    wish_offsets: Longs
    wishes: Ints
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
    """What is decided, in order of start; the arrays have room for all of it."""

    chunks: Ints
    ports: Ints
    ends: Ints
    times: Floats
    route_offsets: Longs
    route_links: Ints


class Rules(NamedTuple):
    """How to decide."""

    num_chunks: int
    chunk_bytes: float
    seed: int
    fresh_only: bool
    deadline_s: float
