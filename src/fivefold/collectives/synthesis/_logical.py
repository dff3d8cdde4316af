"""From a collective on a topology to what the searches see: logical links with their prices.

Sums are not searched for: a reduce-scatter is an all-gather on the reversed topology, run
backwards, a reduce is a broadcast, and an all-reduce is the one after the other. ``by_inversion``
does that for every search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.collectives.schedules import Collective, Schedule, compose_all_reduce, custom
from fivefold.collectives.synthesis._deadline import check_time
from fivefold.collectives.synthesis._instance import Instance
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.topology import Topology

_LARGEST_CAPACITY = 10_000  # units per round; beyond it the capacities have no common measure


@dataclass(frozen=True)
class Logical:
    """A collective on the logical links of a topology, with prices."""

    collective: Collective
    topology: Topology
    instance: Instance
    latencies_s: NDArray[np.float64]
    capacities_bytes_per_s: NDArray[np.float64]
    crosses: NDArray[np.bool_]
    boxes: tuple[tuple[int, ...], ...]

    def seconds_per_byte(self) -> NDArray[np.float64]:
        """Inverse rate of the narrowest resource of each logical link."""
        narrowest = [
            min(float(self.capacities_bytes_per_s[resource]) for resource in resources)
            for resources in self.instance.resources
        ]
        return np.asarray(1.0 / np.array(narrowest, np.float64))

    def chunk_bytes(self, size_bytes: float) -> float:
        """Size of every chunk."""
        sizes = np.unique(self.collective.chunk_bytes(size_bytes))
        if len(sizes) > 1:
            message = f"chunks of {sizes[0]:.0f} to {sizes[-1]:.0f} bytes"
            hint = "use method='flow' or 'matching' for uneven collectives"
            raise ConfigurationError(f"{message}: this search needs equal chunks", hint=hint)
        return float(sizes[0]) if len(sizes) else 0.0


def boxes_of(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Ranks by host, in the order of ranks; ranks without a host share one box."""
    boxes: dict[str | None, list[int]] = {}
    for rank in range(topology.num_ranks):
        boxes.setdefault(topology.host_of(rank), []).append(rank)
    return tuple(tuple(ranks) for ranks in boxes.values())


def logical_of(
    collective: Collective,
    topology: Topology,
    *,
    allow: Callable[[int, int], bool] | None = None,
    boxes: Sequence[Sequence[int]] | None = None,
) -> Logical:
    """Chunks, holders, receivers and logical links of a collective that copies."""
    if collective.reducing:
        message = f"{collective.name} sums"
        raise ConfigurationError(message, hint="solve its inverse on the reversed topology")
    if collective.num_ranks != topology.num_ranks:
        message = f"{collective.num_ranks} ranks in the collective, {topology.num_ranks} in"
        raise ConfigurationError(f"{message} topology {topology.name!r}")
    graph = topology.rank_graph
    pairs = zip(graph.sources.tolist(), graph.targets.tolist(), strict=True)
    kept = [edge for edge, pair in enumerate(pairs) if allow is None or allow(*pair)]
    holders, wanted = _ends_of_chunks(collective)
    instance = Instance(
        num_ranks=topology.num_ranks,
        sources=graph.sources[kept],
        targets=graph.targets[kept],
        resources=tuple(tuple(graph.route(edge).tolist()) for edge in kept),
        num_resources=topology.num_links,
        holders=holders,
        wanted=wanted,
    )
    groups = boxes_of(topology) if boxes is None else tuple(tuple(ranks) for ranks in boxes)
    box = np.zeros(topology.num_ranks, np.int64)
    for number, ranks in enumerate(groups):
        box[list(ranks)] = number
    return Logical(
        collective=collective,
        topology=topology,
        instance=instance,
        latencies_s=graph.latencies_s[kept],
        capacities_bytes_per_s=topology.capacities_bytes_per_s,
        crosses=box[instance.sources] != box[instance.targets],
        boxes=groups,
    )


def _ends_of_chunks(
    collective: Collective,
) -> tuple[tuple[frozenset[int], ...], tuple[frozenset[int], ...]]:
    chunks = range(collective.num_chunks)
    check_time()
    holders = tuple(frozenset(collective.holders(chunk).tolist()) for chunk in chunks)
    wanted = tuple(frozenset(collective.receivers(chunk).tolist()) for chunk in chunks)
    # What a rank holds already it does not want.
    wanted = tuple(want - have for want, have in zip(wanted, holders, strict=True))
    return holders, wanted


def schedule_of(
    logical: Logical,
    transfers: Sequence[tuple[int, int]],
    *,
    steps: Sequence[int] | None = None,
    times_s: tuple[Sequence[float], Sequence[float]] | None = None,
    name: str,
    attributes: dict[str, Any],
) -> Schedule:
    """Return the schedule of (chunk, logical link) pairs in their order."""
    instance = logical.instance
    links = np.array([link for _, link in transfers], np.int64)
    routes = [instance.resources[link] for link in links.tolist()]
    offsets = np.cumsum([0, *(len(route) for route in routes)])
    return Schedule(
        collective=logical.collective,
        topology=logical.topology,
        chunks=np.array([chunk for chunk, _ in transfers], np.int32),
        sources=instance.sources[links],
        targets=instance.targets[links],
        steps=None if steps is None else np.array(steps, np.int32),  # type: ignore[arg-type]
        starts_s=None if times_s is None else np.array(times_s[0], np.float64),
        ends_s=None if times_s is None else np.array(times_s[1], np.float64),
        route_offsets=offsets.astype(np.int64),
        route_links=np.array([link for route in routes for link in route], np.int32),
        name=name,
        solver="fivefold",
        attributes=attributes,
    )


def integer_capacities(topology: Topology) -> tuple[NDArray[np.int64], float]:
    """Capacities as whole multiples of their largest common divisor."""
    rates = [Fraction(float(rate)) for rate in topology.capacities_bytes_per_s]
    if not rates:
        return np.zeros(0, np.int64), 1.0
    shared = math.lcm(*(rate.denominator for rate in rates))
    whole = [int(rate * shared) for rate in rates]
    unit = reduce(math.gcd, whole)
    if max(whole) // unit > _LARGEST_CAPACITY:
        message = f"the link rates of topology {topology.name!r} have no common measure"
        hint = "round them, or use method='taccl', 'trees' or 'matching'"
        raise ConfigurationError(message, hint=hint)
    return np.array([value // unit for value in whole], np.int64), float(Fraction(unit, shared))


def by_inversion(
    collective: Collective,
    topology: Topology,
    find: Callable[[Collective, Topology], Schedule],
) -> Schedule:
    """Solve a collective that may sum with a search that only copies."""
    if not collective.reducing:
        return find(collective, topology)
    if collective.name == "all_reduce":
        gather, scatter = all_reduce_halves(collective)
        first = _inverse_solved(scatter, topology, find)
        return compose_all_reduce(first, find(gather, topology))
    if not collective.single_target:
        message = f"{collective.name} sums a chunk for several ranks"
        raise ConfigurationError(message, hint="split it into a reduce-scatter and an all-gather")
    return _inverse_solved(collective, topology, find)


def _inverse_solved(
    collective: Collective, topology: Topology, find: Callable[[Collective, Topology], Schedule]
) -> Schedule:
    try:
        found = find(collective.inverted(), topology.reversed())
    except InfeasibleError as error:
        message = f"{collective.name}, solved as {collective.inverted().name}: {error.message}"
        raise InfeasibleError(message, hint=error.hint) from error
    return found.inverted().replaced(topology=topology, collective=collective)


def all_reduce_halves(collective: Collective) -> tuple[Collective, Collective]:
    """An all-reduce as (all-gather, reduce-scatter), chunk i owned by rank i * N // chunks."""
    ranks, chunks = range(collective.num_ranks), range(collective.num_chunks)
    owner = [chunk * len(ranks) // len(chunks) for chunk in chunks]
    at_owner = [(chunk, owner[chunk]) for chunk in chunks]
    everywhere = [(chunk, rank) for chunk in chunks for rank in ranks]
    weights = collective.chunk_weights
    gather = custom(len(ranks), at_owner, post=everywhere, chunk_weights=weights)
    scatter = custom(len(ranks), everywhere, post=at_owner, reducing=True, chunk_weights=weights)
    return gather, scatter
