"""In-network sums: what a request's tree costs, and whether its switches can do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.simulation._tasks import AggregationRequest

if TYPE_CHECKING:
    from fivefold.network.topology import Topology


@dataclass(frozen=True)
class Tree:
    """A request in terms of links and switches.

    Attributes:
        route: Every link of the tree, up and (for an all-reduce) down, then the adders as links
            behind the real ones.
        latency_s: From the last byte sent to the last received.
        pool_rate_bytes_per_s: What the slots allow: pool over round trip; ``inf`` without latency.
        slots: (switch ability, slots) of each summing switch.
    """

    route: tuple[int, ...]
    latency_s: float
    pool_rate_bytes_per_s: float
    slots: tuple[tuple[int, float], ...]


def plan_tree(topology: Topology, request: AggregationRequest) -> Tree:
    """Find a request's links, latency, rate and slots.

    Args:
        topology: Where it runs.
        request: What is asked for.

    Returns:
        The tree; where its switches can never make the sum, one that is always refused.

    Raises:
        ConfigurationError: Two neighbours of the tree have no link.
        InfeasibleError: A switch can never make the sum, and there is no fallback.
    """
    edges = request.tree.items()
    up = {child: _link(topology, request, (child, parent)) for child, parent in edges}
    down = {child: _link(topology, request, (parent, child)) for child, parent in edges}
    links = [*up.values(), *(down.values() if request.broadcast else ())]
    numbers = {ability.node: number for number, ability in enumerate(topology.switches)}
    impossible = _why_impossible(topology, request, numbers)
    if impossible is not None:
        if request.fallback is None:
            raise InfeasibleError(
                f"request {request.request_id!r} can never run: {impossible}",
                hint="give it a fallback, fewer slots or another tree",
            )
        # One slot of a switch that has none: the fallback always runs.
        return Tree(tuple(links), 0.0, np.inf, ((len(topology.switches), 1.0),))
    # Adders at line rate limit nothing.
    adders = [
        topology.num_links + numbers[node] for node in request.summing if _adds(topology, node)
    ]
    rise = max(_path_s(topology, request, (up, leaf)) for leaf in request.leaves)
    fall = max(_path_s(topology, request, (down, leaf)) for leaf in request.leaves)
    return Tree(
        route=(*links, *adders),
        latency_s=rise + fall if request.broadcast else rise,
        pool_rate_bytes_per_s=_pool_rate(topology, request, rise + fall),
        slots=tuple((numbers[node], float(request.slots)) for node in request.summing),
    )


def _link(topology: Topology, request: AggregationRequest, ends: tuple[str, str]) -> int:
    source, target = topology.index(ends[0]), topology.index(ends[1])
    leaving = topology.out_links(source)
    found = leaving[topology.link_targets[leaving] == target]
    if not found.size:
        raise ConfigurationError(
            f"request {request.request_id!r}: there is no link {ends[0]!r} -> {ends[1]!r}",
            hint="a tree's edges are links of the topology, both ways",
        )
    return int(found[np.argmax(topology.capacities_bytes_per_s[found])])


def _why_impossible(
    topology: Topology, request: AggregationRequest, numbers: dict[str, int]
) -> str | None:
    for node in request.summing:
        pool = topology.switches[numbers[node]].aggregation if node in numbers else None
        if pool is None:
            return f"{node!r} does not aggregate"
        if request.slots > pool.slots:
            return f"{node!r} has {pool.slots} slots, not {request.slots}"
        if request.dtype is not None and pool.dtypes and request.dtype not in pool.dtypes:
            return f"{node!r} cannot add {request.dtype}"
    return None


def _adds(topology: Topology, node: str) -> bool:
    pool = topology.ability_of(node).aggregation
    return pool is not None and pool.rate_bytes_per_s is not None


def _path_s(
    topology: Topology, request: AggregationRequest, path: tuple[dict[str, int], str]
) -> float:
    links, node = path
    total = 0.0
    while node in request.tree:
        total += float(topology.latencies_s[links[node]])
        node = request.tree[node]
    return total


def _pool_rate(topology: Topology, request: AggregationRequest, round_trip_s: float) -> float:
    if round_trip_s == 0.0:
        return float("inf")
    sizes = [
        pool.slot_bytes
        for node in request.summing
        if (pool := topology.ability_of(node).aggregation) is not None
    ]
    return request.slots * min(sizes) / round_trip_s
