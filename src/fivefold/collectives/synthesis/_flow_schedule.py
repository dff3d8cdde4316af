"""From paths to a schedule: hops from rank to rank, and who goes first.

Hops end at ranks; what lies between two ranks, switches included, is one transfer. Whoever has the
longest way to go is sent first.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fivefold.collectives.schedules import Collective, Schedule
from fivefold.collectives.synthesis._dispatch import dispatch
from fivefold.collectives.synthesis._flow import FlowOptimum, all_to_all_optimum
from fivefold.collectives.synthesis._flow_paths import Path, PathTable, flow_paths, spread_chunks
from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.network.topology import Topology

__all__ = ["all_to_all_flow"]

Longs = NDArray[np.int64]


def all_to_all_flow(
    collective: Collective,
    topology: Topology,
    *,
    size_bytes: float | None = None,
    optimum: FlowOptimum | None = None,
) -> Schedule:
    """Route the chunks of an all-to-all along an optimal flow.

    Args:
        collective: Any copying collective whose chunks go from one rank to one other: all-to-all,
            also uneven, scatter, gather. More chunks per pair follow the flow more closely.
        topology: The network.
        size_bytes: Size for which transfers get times in the serial model; None for none.
        optimum: The flow, where it is at hand; None to compute it. Where that would take too
            long, the shortest routes are taken, and the schedule's attributes say so.

    Returns:
        The schedule. Its attributes hold ``routing``, ``"flow"`` or ``"shortest"``.

    Raises:
        ConfigurationError: A chunk is summed, or has several holders or receivers.
        InfeasibleError: A rank cannot be reached.

    Example:
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
    routing, table = "flow", PathTable()
    try:
        table = flow_paths(all_to_all_optimum(topology, demands) if optimum is None else optimum)
    except UnsupportedError:
        routing = "shortest"
    weights = collective.chunk_weights[moved]
    chosen = spread_chunks(topology, (sources, targets), weights, table)
    schedule = _hops(collective, topology, moved, chosen, by_need=size_bytes is not None)
    schedule = schedule.replaced(attributes={"routing": routing})
    return schedule if size_bytes is None else _dispatched(schedule, size_bytes)


def _dispatched(schedule: Schedule, size_bytes: float) -> Schedule:
    """The better of two rules for who goes first."""
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


def _hops(
    collective: Collective,
    topology: Topology,
    moved: Longs,
    chosen: list[Path],
    *,
    by_need: bool,
) -> Schedule:
    """Transfers between ranks, the longest way to go first, or hop by hop."""
    ranks_after = topology.rank_of_node[topology.link_targets].tolist()
    ranks_before = topology.rank_of_node[topology.link_sources].tolist()
    rows: list[tuple[int, int, int, Path, int, int]] = []
    for chunk, path in zip(moved.tolist(), chosen, strict=True):
        cuts = [0, *(place + 1 for place, link in enumerate(path) if ranks_after[link] >= 0)]
        for hop, (first, last) in enumerate(pairwise(cuts)):
            ends = (ranks_before[path[first]], ranks_after[path[last - 1]])
            rows.append((chunk, *ends, path[first:last], hop, len(cuts) - 1 - hop))
    numbers = np.array([(row[0], row[1], row[2], row[4], row[5]) for row in rows], np.int64)
    numbers = numbers.reshape(-1, 5)
    # Each rank serves the next ranks first, so that not all of them meet at one.
    ahead = (numbers[:, 2] - numbers[:, 1]) % topology.num_ranks
    urgency = -numbers[:, 4] if by_need else numbers[:, 3]
    order = np.lexsort((ahead, urgency))
    routes = [rows[place][3] for place in order.tolist()]
    return Schedule(
        collective=collective,
        chunks=numbers[order, 0],
        sources=numbers[order, 1],
        targets=numbers[order, 2],
        route_offsets=np.cumsum([0, *map(len, routes)]).astype(np.int64),
        route_links=np.array([link for route in routes for link in route], np.int32),
        topology=topology,
        name="flow",
        solver="HiGHS",
    )
