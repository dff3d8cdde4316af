"""What the caches hold under each policy, and what that leaves for the disk.

Device slots are filled first, by access count, and never change. Host slots hold the next rows by
count (``static``) or follow the known order of the batches (``belady``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from fivefold._compiler import njit
from fivefold.errors import DataError
from fivefold.gnn.planning._belady import CacheSchedule, belady
from fivefold.gnn.planning._id_set import IdSet, SortedIds, is_dense, sort_distinct
from fivefold.gnn.planning._inputs import Array, DiskCost, FeatureInfo, Ids, SampleSource
from fivefold.gnn.planning._kept import Scratch
from fivefold.gnn.planning._pages import read_costs

Policy = Literal["static", "belady"]
_LARGEST_SET = 1 << 30  # bits; beyond, sorted lists are asked, so that memory stays small


@dataclass(frozen=True, kw_only=True, eq=False)
class Caches:
    """Contents of both caches."""

    device_rows: Ids  # node id in each slot of the device, ascending
    host_rows: Ids  # node id in the first slots of the host before the first batch, ascending
    num_host_slots: int
    schedule: CacheSchedule | None = None  # how the host's cache changes

    @classmethod
    def fill(
        cls,
        samples: SampleSource,
        policy: Policy,
        *,
        device_slots: int,
        host_slots: int,
        scratch: Scratch,
    ) -> Caches:
        """Choose the contents for a policy."""
        device = _hottest(samples, device_slots)
        if policy == "static":
            both = _hottest(samples, device_slots + host_slots)
            host = np.setdiff1d(both, device, assume_unique=True)
            return cls(device_rows=device, host_rows=host, num_host_slots=len(host))
        schedule = belady(samples, num_rows=host_slots, pinned=device, scratch=scratch)
        return cls(
            device_rows=device,
            host_rows=np.empty(0, np.int64),
            num_host_slots=schedule.num_slots,
            schedule=schedule,
        )

    @property
    def filled_rows(self) -> int:
        """Rows that are read into the caches before the first batch."""
        return len(self.device_rows) + len(self.host_rows)

    @cached_property
    def _cached(self) -> IdSet | SortedIds:
        return _set_of(np.concatenate([self.device_rows, self.host_rows]))

    @cached_property
    def _on_device(self) -> IdSet | SortedIds:
        return _set_of(np.asarray(self.device_rows))

    def device_hits(self, node_ids: Array) -> int:
        """Return how many of the ids are cached on the device."""
        if not len(self.device_rows):
            return 0
        return int(np.count_nonzero(self._on_device.locate(node_ids) >= 0))

    def cold_ids(self, batch: int, node_ids: Array) -> Ids:
        """Return those ids of a batch, given in sampled order, that come from disk, ascending."""
        ids = np.asarray(node_ids, np.int64)
        bound = 1 + int(ids.max(initial=-1))
        if self.schedule is not None:
            return sort_distinct(ids[self.schedule.misses(batch, len(ids))], bound)
        if isinstance(self._cached, IdSet) and is_dense(len(ids), bound):
            members = IdSet(bound, ids)
            if len(members) == len(ids):
                return members.ascending(without=self._cached)
        ids = np.sort(ids)  # first, for ascending ids are looked up much faster
        return ids[self._cached.locate(ids) < 0]


def _set_of(rows: Ids) -> IdSet | SortedIds:
    bound = 1 + int(rows.max(initial=-1))
    return IdSet(bound, rows) if bound <= _LARGEST_SET else SortedIds(rows)


def _hottest(samples: SampleSource, num_rows: int) -> Ids:
    # Counts are as long as the graph: they are asked for only where something is cached.
    return hottest_rows(samples.counts, num_rows) if num_rows else np.empty(0, np.int64)


class Tally:
    """Walk through the batches once, hand out their cold ids and count along the way."""

    def __init__(
        self, samples: SampleSource, features: FeatureInfo, caches: Caches, disk: DiskCost
    ) -> None:
        self._samples, self._features, self._caches, self._disk = samples, features, caches, disk
        self.accesses = self.device_hits = self.cold_rows = 0
        self.online_seconds = 0.0

    @property
    def hit_rates(self) -> dict[str, float]:
        """Share of the accesses by level."""
        host = self.accesses - self.device_hits - self.cold_rows
        counts = {"device": self.device_hits, "host": host, "disk": self.cold_rows}
        return {level: count / max(1, self.accesses) for level, count in counts.items()}

    def cold_ids(self) -> Iterator[Ids]:
        """Yield the cold ids of each batch, ascending."""
        for batch in range(self._samples.num_batches):
            ids = self._samples.node_ids(batch)
            cold = self._caches.cold_ids(batch, ids)
            if not (cold[1:] > cold[:-1]).all():
                raise DataError(
                    f"batch {batch} has a node id twice",
                    hint="the ids of a batch are distinct; sample it again",
                )
            self.accesses += len(ids)
            self.device_hits += self._caches.device_hits(ids)
            self.cold_rows += len(cold)
            self.online_seconds += self._online(cold)
            yield cold

    def _online(self, cold: Ids) -> float:
        """Return the seconds to gather these rows from the features, every page once."""
        if not len(cold):
            return 0.0
        (by_size,) = read_costs(
            cold,
            np.ones(len(cold), np.int64),
            row_bytes=self._features.row_bytes,
            gaps_bytes=np.zeros(1, np.int64),
        )
        return sum(self._disk.seconds(int(r), int(b)) for r, b in by_size if r)


def hottest_rows(counts: Array, num_rows: int) -> Ids:
    """Return the ``num_rows`` ids of highest count above zero, ties by id; ascending by id."""
    if num_rows <= 0 or not len(counts):
        return np.empty(0, np.int64)
    histogram = np.zeros(int(counts.max()) + 1, np.int64)
    _histogram(counts, histogram)
    at_least = np.cumsum(histogram[::-1])[::-1]  # at_least[c]: rows of count c or more
    # All rows of this count or more fit; those of the count just below fit in part or are unused.
    threshold = max(1, int(np.count_nonzero(at_least > num_rows)))
    num_taken = int(at_least[threshold]) if threshold < len(at_least) else 0
    num_ties = num_rows - num_taken if threshold > 1 else 0
    rows = np.empty(min(num_rows, num_taken + num_ties), np.int64)
    return rows[: _take(counts, threshold, num_ties, rows)]


@njit
def _histogram(counts: Any, histogram: Any) -> Any:
    for place in range(counts.shape[0]):
        histogram[counts[place]] += 1


@njit
def _take(counts: Any, threshold: Any, num_ties: Any, rows: Any) -> Any:
    """Take all rows of at least ``threshold`` and the first ties of the count just below it."""
    number = 0
    for node in range(counts.shape[0]):
        take = counts[node] >= threshold
        if not take and num_ties > 0 and counts[node] == threshold - 1:
            take = True
            num_ties -= 1
        if take:
            rows[number] = node
            number += 1
    return number
