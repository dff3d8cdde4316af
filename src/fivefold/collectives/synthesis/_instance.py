"""What every exact search sees: chunks, who holds and who wants them, and the logical links.

A logical link joins two ranks, directly or through switches; the physical links of its route
are its resources, which it shares with other logical links. Symmetries (permutations of the
ranks) make variables equal: an orbit of (chunk, link) pairs is decided once. This module knows
no solver.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fivefold.collectives.synthesis._deadline import check_time
from fivefold.errors import ConfigurationError, InfeasibleError

UNREACHABLE = 1 << 40
"""A distance longer than every schedule."""


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


@dataclass(frozen=True)
class Reach:
    """When a chunk can be where: the window that no schedule can leave."""

    earliest: NDArray[np.int64]
    remaining: NDArray[np.int64]

    def windows(
        self, instance: Instance, delays: NDArray[np.int64], length: int
    ) -> Iterator[tuple[int, int, int, int]]:
        """(chunk, link, first start, last start + 1) of all transfers that can be of use.

        A transfer starts once its source can hold the chunk, and early enough for some rank that
        wants the chunk; nobody sends to a rank that holds it from the start.
        """
        for chunk, holders in enumerate(instance.holders):
            first = self.earliest[chunk, instance.sources]
            end = length - self.remaining[chunk, instance.targets] - delays + 1
            useful = (end > first) & ~np.isin(instance.targets, sorted(holders))
            check_time()
            for link in np.flatnonzero(useful).tolist():
                yield chunk, link, int(first[link]), int(end[link])

    def horizon(self, instance: Instance) -> int:
        """Least time by which each chunk can be wherever it is wanted (the latency bound)."""
        needs = [
            int(self.earliest[chunk, rank])
            for chunk, ranks in enumerate(instance.wanted)
            for rank in ranks
        ]
        return max(needs, default=0)


def reach(instance: Instance, times: Sequence[int] | NDArray[np.int64]) -> Reach:
    """Shortest times of all chunks to and from all ranks."""
    distances = _all_distances(instance, np.asarray(times, np.int64))
    shape = (instance.num_chunks, instance.num_ranks)
    earliest, remaining = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for chunk in range(instance.num_chunks):
        check_time()
        holders, wanted = sorted(instance.holders[chunk]), sorted(instance.wanted[chunk])
        earliest[chunk] = _least(distances, holders)
        remaining[chunk] = _least(distances.T, wanted)
        lost = [rank for rank in wanted if earliest[chunk, rank] >= UNREACHABLE]
        if lost:
            message = f"chunk {chunk} of rank {holders} cannot reach rank {lost[0]}"
            raise InfeasibleError(message, hint="add links, or allow them in the sketch")
    return Reach(earliest, remaining)


def _least(distances: NDArray[np.int64], ranks: list[int]) -> NDArray[np.int64]:
    if not ranks:
        return np.full(distances.shape[1], UNREACHABLE, np.int64)
    return np.asarray(distances[ranks].min(axis=0))


def _all_distances(instance: Instance, times: NDArray[np.int64]) -> NDArray[np.int64]:
    count = instance.num_ranks
    distances = np.full((count, count), UNREACHABLE, np.int64)
    np.fill_diagonal(distances, 0)
    np.minimum.at(distances, (instance.sources, instance.targets), times)
    for middle in range(count):  # Floyd-Warshall, one row and column at a time
        through = distances[:, middle, None] + distances[None, middle, :]
        np.minimum(distances, through, out=distances)
    return np.minimum(distances, UNREACHABLE)


class Orbits:
    """Which (chunk, link) and (chunk, rank) pairs a group of symmetries makes equal."""

    def __init__(
        self, instance: Instance, permutations: Sequence[NDArray[np.int32]] | None = None
    ) -> None:
        chunks = instance.num_chunks
        link_labels = np.arange(chunks * instance.num_links)
        rank_labels = np.arange(chunks * instance.num_ranks)
        link_maps, rank_maps = [], []
        for permutation in permutations or ():
            chunk_map = map_chunks(instance, permutation)
            link_map = map_links(instance, permutation)
            link_maps.append(_product_map(chunk_map, link_map))
            rank_maps.append(_product_map(chunk_map, np.asarray(permutation)))
        shape = (chunks, instance.num_links)
        self.link_orbits: NDArray[np.int64] = _merge(link_labels, link_maps).reshape(shape)
        shape = (chunks, instance.num_ranks)
        self.rank_orbits: NDArray[np.int64] = _merge(rank_labels, rank_maps).reshape(shape)

    def representative_ranks(self) -> NDArray[np.bool_]:
        """Return whether (chunk, rank) is the first pair of its orbit, bool [chunks, ranks]."""
        numbers = np.arange(self.rank_orbits.size).reshape(self.rank_orbits.shape)
        return np.asarray(self.rank_orbits == numbers)


def _product_map(chunk_map: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    return (chunk_map[:, None] * len(other) + other[None, :]).ravel()


def _merge(labels: NDArray[np.int64], maps: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The least number in each orbit, by passing labels along the maps until nothing changes."""
    changed = bool(maps)
    while changed:
        check_time()
        before = labels.copy()
        for image in maps:
            least = np.minimum(labels, labels[image])
            labels = least.copy()
            labels[image] = np.minimum(labels[image], least)
        changed = not np.array_equal(before, labels)
    return labels


def map_links(instance: Instance, permutation: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the logical link that each logical link becomes; parallel ones keep their order."""
    places: dict[tuple[int, int], list[int]] = {}
    ends = list(zip(instance.sources.tolist(), instance.targets.tolist(), strict=True))
    for link, pair in enumerate(ends):
        places.setdefault(pair, []).append(link)
    image = np.zeros(instance.num_links, np.int64)
    for (source, target), links in places.items():
        pair = int(permutation[source]), int(permutation[target])
        others = places.get(pair, [])
        if len(others) != len(links):
            message = f"the symmetry maps link {source} -> {target} to {pair[0]} -> {pair[1]}"
            raise ConfigurationError(f"{message}, which is no such link")
        image[links] = others
    return image


def map_chunks(instance: Instance, permutation: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the chunk that each chunk becomes: by who holds and who wants it, then by number."""
    if sorted(np.asarray(permutation).tolist()) != list(range(instance.num_ranks)):
        message = f"{list(permutation)} is no permutation of {instance.num_ranks} ranks"
        raise ConfigurationError(message)
    kinds: dict[tuple[frozenset[int], frozenset[int]], list[int]] = {}
    for chunk in range(instance.num_chunks):
        check_time()
        kinds.setdefault((instance.holders[chunk], instance.wanted[chunk]), []).append(chunk)
    image = np.zeros(instance.num_chunks, np.int64)
    for (holders, wanted), chunks in kinds.items():
        kind = frozenset(int(permutation[rank]) for rank in holders)
        others = kinds.get((kind, frozenset(int(permutation[rank]) for rank in wanted)), [])
        if len(others) != len(chunks):
            message = f"the symmetry maps chunk {chunks[0]} to a chunk that does not exist"
            raise ConfigurationError(message, hint="drop the symmetry for this collective")
        image[chunks] = others
    return image


def prune(instance: Instance, transfers: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Drop transfers that nobody needs."""
    kept = []
    needed = {(chunk, rank) for chunk, ranks in enumerate(instance.wanted) for rank in ranks}
    for time, chunk, link in sorted(transfers, reverse=True):
        if (chunk, int(instance.targets[link])) in needed:
            needed.add((chunk, int(instance.sources[link])))
            kept.append((time, chunk, link))
    return kept[::-1]
