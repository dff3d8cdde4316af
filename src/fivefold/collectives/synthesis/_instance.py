"""What TACCL sees: chunks, who holds and who wants them, and the logical links.

A logical link joins two ranks, directly or through switches; the physical links of its route
are its resources, which it shares with other logical links. Symmetries (permutations of the
ranks) make variables equal: an orbit of (chunk, link) pairs is decided once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from fivefold.collectives.schedules import Collective, Schedule, lower_bound
from fivefold.collectives.schedules.bounds import Bound, rounds_bound
from fivefold.collectives.schedules.schedule import compose_all_reduce, require_match
from fivefold.collectives.schedules.timing import CostModel
from fivefold.collectives.synthesis._solver import check_time
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.topology import Topology

Key = TypeVar("Key", bound=Hashable)

UNREACHABLE = 1 << 40  # a distance longer than every schedule


@dataclass(frozen=True)
class Instance:
    """A collective on logical links, without prices."""

    num_ranks: int
    sources: NDArray[np.int32]
    targets: NDArray[np.int32]
    resources: tuple[tuple[int, ...], ...]
    num_resources: int
    holders: tuple[frozenset[int], ...]
    wanted: tuple[frozenset[int], ...]

    @property
    def num_links(self) -> int:
        """Return the number of logical links L."""
        return len(self.sources)

    @property
    def num_chunks(self) -> int:
        """Return the number of chunks."""
        return len(self.holders)


def hops_from(
    starts: Iterable[int], sources: NDArray[Any], targets: NDArray[Any], num_ranks: int
) -> NDArray[np.int64]:
    """Return the links from the nearest start to each rank, `UNREACHABLE` where there is no way."""
    hops = np.full(num_ranks, UNREACHABLE, np.int64)
    hops[sorted(starts)] = 0
    for _ in range(num_ranks):
        before = hops.copy()
        np.minimum.at(hops, targets, before[sources] + 1)
        if np.array_equal(before, hops):
            break
    return np.minimum(hops, UNREACHABLE)


class Orbits:
    """Classes of (chunk, link) and (chunk, rank) pairs that a group of symmetries makes equal."""

    def __init__(self, instance: Instance, permutations: Sequence[NDArray[np.int32]] = ()) -> None:
        chunks = [map_chunks(instance, permutation) for permutation in permutations]
        links = [map_links(instance, permutation) for permutation in permutations]
        self.link_orbits = _orbits((instance.num_chunks, instance.num_links), chunks, links)
        self.rank_orbits = _orbits((instance.num_chunks, instance.num_ranks), chunks, permutations)

    def representative_ranks(self) -> NDArray[np.bool_]:
        """Return whether (chunk, rank) is the first pair of its orbit, bool [chunks, ranks]."""
        numbers = np.arange(self.rank_orbits.size).reshape(self.rank_orbits.shape)
        return np.asarray(self.rank_orbits == numbers)


def _orbits(
    shape: tuple[int, int], chunks: list[NDArray[np.int64]], others: Sequence[NDArray[Any]]
) -> NDArray[np.int64]:
    """Return the least number of the orbit of each pair, int64 [shape]."""
    numbers = np.arange(shape[0] * shape[1])
    if not chunks or not numbers.size:
        return numbers.reshape(shape)
    check_time()
    images = [
        (chunk[:, None] * shape[1] + other[None, :]).ravel()
        for chunk, other in zip(chunks, others, strict=True)
    ]
    ends = np.tile(numbers, len(images)), np.concatenate(images)
    graph = coo_array((np.ones(len(ends[0]), np.int8), ends), shape=(numbers.size, numbers.size))
    labels = connected_components(graph, directed=False)[1]
    least = np.unique(labels, return_index=True)[1][labels]
    return np.asarray(least, np.int64).reshape(shape)


def _images(
    keys: Sequence[Key], becomes: Callable[[Key], Key], refusal: Callable[[int], str]
) -> NDArray[np.int64]:
    """Return the item that each item becomes; those of equal keys keep their order."""
    places: dict[Key, list[int]] = {}
    for item, key in enumerate(keys):
        places.setdefault(key, []).append(item)
    image = np.zeros(len(keys), np.int64)
    for key, items in places.items():
        check_time()
        others = places.get(becomes(key), [])
        if len(others) != len(items):
            message = f"the symmetry maps {refusal(items[0])}"
            raise ConfigurationError(message, hint="drop the symmetry for this collective")
        image[items] = others
    return image


def map_links(instance: Instance, permutation: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the logical link that each logical link becomes; parallel ones keep their order."""
    ends = list(zip(instance.sources.tolist(), instance.targets.tolist(), strict=True))

    def becomes(pair: tuple[int, int]) -> tuple[int, int]:
        return int(permutation[pair[0]]), int(permutation[pair[1]])

    def refusal(link: int) -> str:
        (a, b), (c, d) = ends[link], becomes(ends[link])
        return f"link {a} -> {b} to {c} -> {d}, which is no such link"

    return _images(ends, becomes, refusal)


def map_chunks(instance: Instance, permutation: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the chunk that each chunk becomes: by who holds and who wants it, then by number."""

    def becomes(kind: tuple[frozenset[int], ...]) -> tuple[frozenset[int], ...]:
        return tuple(frozenset(int(permutation[rank]) for rank in ranks) for ranks in kind)

    kinds: list[tuple[frozenset[int], ...]]
    kinds = list(zip(instance.holders, instance.wanted, strict=True))
    return _images(kinds, becomes, lambda chunk: f"chunk {chunk} to a chunk that does not exist")


def prune(instance: Instance, transfers: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Drop transfers that nobody needs."""
    kept = []
    needed = {(chunk, rank) for chunk, ranks in enumerate(instance.wanted) for rank in ranks}
    for time, chunk, link in sorted(transfers, reverse=True):
        if (chunk, int(instance.targets[link])) in needed:
            needed.add((chunk, int(instance.sources[link])))
            kept.append((time, chunk, link))
    return kept[::-1]


@dataclass(frozen=True)
class Logical(Instance):
    """A collective on the logical links of a topology, with prices."""

    collective: Collective
    topology: Topology
    latencies_s: NDArray[np.float64]
    capacities_bytes_per_s: NDArray[np.float64]
    crosses: NDArray[np.bool_]
    boxes: tuple[tuple[int, ...], ...]

    def seconds_per_byte(self) -> NDArray[np.float64]:
        """Return the inverse rate of the narrowest resource of each logical link."""
        narrowest = [
            min(float(self.capacities_bytes_per_s[resource]) for resource in resources)
            for resources in self.resources
        ]
        return np.asarray(1.0 / np.array(narrowest, np.float64))

    def chunk_bytes(self, size_bytes: float) -> float:
        """Return the size of every chunk."""
        sizes = np.unique(self.collective.chunk_bytes(size_bytes))
        if len(sizes) > 1:
            message = f"chunks of {sizes[0]:.0f} to {sizes[-1]:.0f} bytes"
            hint = "use method='library' for uneven chunks, 'flow' for those from one rank to one"
            raise ConfigurationError(f"{message}: this search needs equal chunks", hint=hint)
        return float(sizes[0]) if len(sizes) else 0.0


def boxes_of(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Return the ranks by host, in the order of ranks; ranks without a host share one box."""
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
    """Return chunks, holders, receivers and logical links of a collective that copies."""
    if collective.reducing:
        message = f"{collective.name} sums"
        raise ConfigurationError(message, hint="solve its inverse on the reversed topology")
    require_match(collective, topology)
    graph = topology.rank_graph
    pairs = zip(graph.sources.tolist(), graph.targets.tolist(), strict=True)
    kept = [edge for edge, pair in enumerate(pairs) if allow is None or allow(*pair)]
    chunks = range(collective.num_chunks)
    check_time()
    holders = tuple(frozenset(collective.holders(chunk).tolist()) for chunk in chunks)
    receivers = (frozenset(collective.receivers(chunk).tolist()) for chunk in chunks)
    # What a rank holds already it does not want.
    wanted = tuple(want - have for want, have in zip(receivers, holders, strict=True))
    sources, targets = graph.sources[kept], graph.targets[kept]
    groups = boxes_of(topology) if boxes is None else tuple(tuple(ranks) for ranks in boxes)
    box = np.zeros(topology.num_ranks, np.int64)
    for number, ranks in enumerate(groups):
        box[list(ranks)] = number
    return Logical(
        num_ranks=topology.num_ranks,
        sources=sources,
        targets=targets,
        resources=tuple(tuple(graph.of(edge).tolist()) for edge in kept),
        num_resources=topology.num_links,
        holders=holders,
        wanted=wanted,
        collective=collective,
        topology=topology,
        latencies_s=graph.latencies_s[kept],
        capacities_bytes_per_s=topology.capacities_bytes_per_s,
        crosses=box[sources] != box[targets],
        boxes=groups,
    )


def schedule_of(
    logical: Logical,
    transfers: Sequence[tuple[int, int]],
    *,
    times_s: tuple[Sequence[float], Sequence[float]] | None = None,
    name: str,
    attributes: dict[str, Any],
) -> Schedule:
    """Return the schedule of (chunk, logical link) pairs in their order."""
    links = np.array([link for _, link in transfers], np.int64)
    routes = [logical.resources[link] for link in links.tolist()]
    return Schedule(
        collective=logical.collective,
        topology=logical.topology,
        chunks=np.array([chunk for chunk, _ in transfers], np.int32),
        sources=logical.sources[links],
        targets=logical.targets[links],
        starts_s=None if times_s is None else np.array(times_s[0], np.float64),
        ends_s=None if times_s is None else np.array(times_s[1], np.float64),
        route_offsets=np.cumsum([0, *map(len, routes)], dtype=np.int64),
        route_links=np.array([link for route in routes for link in route], np.int32),
        name=name,
        solver="fivefold",
        attributes=attributes,
    )


def by_inversion(
    collective: Collective, topology: Topology, find: Callable[[Collective, Topology], Schedule]
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
    """Return an all-reduce as (all-gather, reduce-scatter); rank i * N // chunks owns chunk i."""
    chunks = np.arange(collective.num_chunks)
    owners = chunks * collective.num_ranks // max(collective.num_chunks, 1)
    plain = collective.replaced(name="custom")
    gather = plain.replaced(reducing=False, pre_chunks=chunks, pre_ranks=owners)
    return gather, plain.replaced(post_chunks=chunks, post_ranks=owners)


def bound_of(
    collective: Collective, topology: Topology, size_bytes: float, *, model: CostModel = "serial"
) -> Bound:
    """Return the best bound, or none where ranks cannot reach others but nobody asks them to."""
    try:
        found = [lower_bound(collective, topology, size_bytes)]
        if model == "serial":
            found.append(rounds_bound(collective, topology))
        return max(found, key=lambda bound: bound.seconds)
    except InfeasibleError:
        for chunk in range(collective.num_chunks):
            for holder in collective.holders(chunk).tolist():
                for receiver in collective.receivers(chunk).tolist():
                    if holder != receiver and (collective.reducing or collective.single_source):
                        topology.shortest_route(holder, receiver)
        reason = "the topology is not connected both ways, and the bounds need that"
        return Bound(seconds=0.0, kind="none", reason=reason)
