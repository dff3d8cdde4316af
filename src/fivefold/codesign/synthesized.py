"""Schedules of a group that are made for its topology, as flows beside those of other jobs.

Trees of shortest paths, grown by load, are searched for on the links of the group. What one link
carries of the schedule is a flow; what the schedule needs beyond its busiest link (latency, and the
filling of its pipeline) is a wait before. Answers are kept by topology, group, collective and size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from fivefold.collectives.pricing.phases import Phase, phases_time_s, ranks_by_host
from fivefold.errors import InfeasibleError
from fivefold.network.topology import Topology

_MOST_RANKS = 64
_UNEVEN = 1.25  # of two ranks' rates, above which a ring wastes what the faster one has
KINDS = ("all_reduce", "all_gather", "reduce_scatter")


@functools.lru_cache(maxsize=1024)
def may_synthesize(topology: Topology, group: tuple[int, ...]) -> bool:
    """Return whether a search may pay: hosts of one rank each, some of which are slower."""
    if not 2 < len(group) <= _MOST_RANKS or len(ranks_by_host(topology, group)) < len(group):
        return False
    ends = topology.link_sources, topology.link_targets
    capacities = topology.capacities_bytes_per_s
    rates = np.minimum(*(np.bincount(end, capacities, topology.num_nodes) for end in ends))
    own = rates[[topology.node_of_rank(rank) for rank in group]]
    if own.max() <= own.min() * _UNEVEN:
        return False
    return topology.subset(group).is_connected()


@functools.lru_cache(maxsize=1024)
def synthesized_phases(
    topology: Topology, group: tuple[int, ...], kind: str, size_bytes: float
) -> list[list[Phase]] | None:
    """Return a schedule's flows as one step; None where nothing was found."""
    from fivefold.collectives.synthesis import synthesize  # noqa: PLC0415 - compiles

    network = topology.subset(group)
    try:
        found = synthesize(kind, network, size_bytes=size_bytes, method="paths")
    except InfeasibleError:
        return None
    schedule = found.schedule
    sent = schedule.collective.chunk_bytes(size_bytes)[schedule.chunks]
    pairs = schedule.sources.astype(np.int64) * len(group) + schedule.targets
    keys, which = np.unique(pairs, return_inverse=True)
    total = np.bincount(which, sent)
    by_size: dict[float, list[tuple[int, int]]] = {}
    for key, size in zip(keys.tolist(), total.tolist(), strict=True):
        edge = group[key // len(group)], group[key % len(group)]
        by_size.setdefault(size, []).append(edge)
    phases = [Phase(tuple(edges), size, steps=1, coupled=False) for size, edges in by_size.items()]
    alone_s = phases_time_s(topology, phases, route=functools.partial(_route, topology))
    wait_s = max(found.time_s - alone_s, 0.0)
    first = phases[0]
    return [[Phase(first.edges, first.edge_bytes, 1, None, False, wait_s), *phases[1:]]]


def _route(topology: Topology, edge: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(link) for link in topology.shortest_route(edge[0], edge[1]))
