"""From paths to a schedule: hops from rank to rank, and who goes first.

Hops end at ranks; what lies between two ranks, switches included, is one transfer. Whoever has the
longest way to go is sent first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fivefold.collectives.schedules import Collective, Schedule
from fivefold.collectives.synthesis._deadline import OutOfTime, time_limit
from fivefold.collectives.synthesis._dispatch import dispatch
from fivefold.collectives.synthesis._flow import FlowOptimum, all_to_all_optimum
from fivefold.collectives.synthesis._flow_paths import Path, flow_paths, spread_chunks
from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.network.topology import Topology

Longs = NDArray[np.int64]
Rows = tuple[Longs, NDArray[np.int32]]


def all_to_all_flow(
    collective: Collective,
    topology: Topology,
    *,
    size_bytes: float | None = None,
    optimum: FlowOptimum | None = None,
    time_limit_s: float | None = None,
) -> Schedule:
    """Route the chunks of an all-to-all along an optimal flow.

    Args:
        collective: Any copying collective whose chunks go from one rank to one other: all-to-all,
            also uneven, scatter, gather. More chunks per pair follow the flow more closely.
        topology: The network.
        size_bytes: Size for which transfers get times in the serial model; None for none.
        optimum: The flow, where it is at hand; None to compute it. Where that would take too
            long, the shortest routes are taken, and the schedule's attributes say so.
        time_limit_s: When to give the flow up for the shortest routes; None for never.

    Returns:
        The schedule. Its attributes hold ``routing``, ``"flow"`` or ``"shortest"``.

    Raises:
        ConfigurationError: A chunk is summed, or has several holders or receivers.
        InfeasibleError: A rank cannot be reached.

    Examples:
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
    routing = "flow"
    try:
        with time_limit(time_limit_s):
            flow = all_to_all_optimum(topology, demands) if optimum is None else optimum
            weights = collective.chunk_weights[moved]
            table = flow_paths(flow)
            paths = _as_rows(spread_chunks(topology, (sources, targets), weights, table))
    except (OutOfTime, UnsupportedError):
        routing, routes = "shortest", topology.routes(sources, targets)
        paths = (np.asarray(routes.offsets, np.int64), np.asarray(routes.links))
    schedule = _hops(collective, topology, moved, paths, by_need=size_bytes is not None)
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


def _as_rows(paths: list[Path]) -> Rows:
    """Paths as offsets and links."""
    offsets = np.cumsum([0, *map(len, paths)]).astype(np.int64)
    return offsets, np.array([link for path in paths for link in path], np.int32)


def _hops(
    collective: Collective, topology: Topology, moved: Longs, paths: Rows, *, by_need: bool
) -> Schedule:
    """Transfers between ranks, the longest way to go first, or hop by hop."""
    offsets, links = paths
    owner = np.repeat(np.arange(len(moved)), np.diff(offsets))
    last = np.flatnonzero(topology.is_rank[topology.link_targets[links]])  # a hop ends at a rank
    first = np.concatenate([[0], last[:-1] + 1])[: len(last)].astype(np.int64)
    path = owner[last]
    counts = np.bincount(path, minlength=len(moved))
    number = np.arange(len(last)) - (np.cumsum(counts) - counts)[path]
    ranks = topology.rank_of_node
    sources = ranks[topology.link_sources[links[first]]]
    targets = ranks[topology.link_targets[links[last]]]
    # Each rank serves the next ranks first, so that not all of them meet at one.
    ahead = (targets - sources) % topology.num_ranks
    order = np.lexsort((ahead, number - counts[path] if by_need else number))
    lengths = (last - first + 1)[order]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    within = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    return Schedule(
        collective=collective,
        chunks=moved[path[order]].astype(np.int32),
        sources=sources[order],
        targets=targets[order],
        route_offsets=starts,
        route_links=links[np.repeat(first[order], lengths) + within],
        topology=topology,
        name="flow",
        solver="HiGHS",
    )
