"""What the caches hold under each policy, and what that leaves for the disk.

Device slots are filled first, by access count, and never change. Host slots hold the next rows by
count (``static``) or follow the known order of the batches (``belady``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from fivefold.errors import DataError
from fivefold.gnn.planning._belady import belady
from fivefold.gnn.planning._budgets import FeatureInfo
from fivefold.gnn.planning._id_set import IdSet, is_dense, sort_distinct
from fivefold.gnn.planning._kept import Scratch
from fivefold.gnn.planning._pages import read_costs
from fivefold.gnn.planning._schedule import CacheSchedule
from fivefold.gnn.planning._sources import Array, DiskCost, Ids, SampleSource
from fivefold.gnn.planning._static import find_slots, hottest_rows

Policy = Literal["static", "belady"]
_LARGEST_SET = 1 << 30  # bits; beyond, sorted lists are asked, so that memory stays small


@dataclass(frozen=True, kw_only=True, eq=False)
class Caches:
    """Contents of both caches.

    Args:
        device_rows: Node id in each slot of the device, ascending.
        host_rows: Node id in the first slots of the host before the first batch, ascending.
        num_host_slots: Slots of the host that are ever used.
        schedule: How the host's cache changes; None where it does not.
    """

    device_rows: Ids
    host_rows: Ids
    num_host_slots: int
    schedule: CacheSchedule | None = None

    @classmethod
    def fill(
        cls,
        samples: SampleSource,
        policy: Policy,
        *,
        device_slots: int,
        host_slots: int,
        scratch: Scratch | None = None,
    ) -> Caches:
        """Choose the contents for a policy."""
        device = _hottest(samples, device_slots)
        if policy == "static":
            both = _hottest(samples, device_slots + host_slots)
            host = np.setdiff1d(both, device, assume_unique=True)
            return cls(device_rows=device, host_rows=host, num_host_slots=len(host))
        course = belady(samples, num_rows=host_slots, pinned=device, scratch=scratch)
        return cls(
            device_rows=device,
            host_rows=course.initial_rows,
            num_host_slots=course.num_slots,
            schedule=course.schedule,
        )

    @property
    def filled_rows(self) -> int:
        """Rows that are read into the caches before the first batch."""
        return len(self.device_rows) + len(self.host_rows)

    @cached_property
    def _cached(self) -> IdSet | None:
        return _set_of(np.concatenate([self.device_rows, self.host_rows]))

    @cached_property
    def _on_device(self) -> IdSet | None:
        return _set_of(np.asarray(self.device_rows))

    def device_hits(self, node_ids: Array) -> int:
        """How many of the ids are cached on the device."""
        if not len(self.device_rows):
            return 0
        found = (
            find_slots(self.device_rows, node_ids)
            if self._on_device is None
            else self._on_device.locate(node_ids)
        )
        return int(np.count_nonzero(found >= 0))

    def cold_ids(self, batch: int, node_ids: Array) -> Ids:
        """Of a batch's ids in the order of the samples those that come from disk, ascending."""
        ids = np.asarray(node_ids, np.int64)
        bound = 1 + int(ids.max(initial=-1))
        if self.schedule is not None:
            return sort_distinct(ids[self.schedule.misses(batch, len(ids))], bound)
        if self._cached is not None and is_dense(len(ids), bound):
            members = IdSet(bound, ids)
            if len(members) == len(ids):
                return members.ascending(without=self._cached)
        ids = np.sort(ids)  # first, for ascending ids are looked up much faster
        for rows in (self.device_rows, self.host_rows):
            ids = ids[find_slots(rows, ids) < 0]
        return ids


def _set_of(rows: Ids) -> IdSet | None:
    """The ids as a set, which is fast to ask; None where they are too large for that."""
    bound = 1 + int(rows.max(initial=-1))
    return IdSet(bound, rows) if bound <= _LARGEST_SET else None


def _hottest(samples: SampleSource, num_rows: int) -> Ids:
    # Counts are as long as the graph: they are asked for only where something is cached.
    return hottest_rows(samples.counts, num_rows) if num_rows else np.empty(0, np.int64)


class Tally:
    """Walks through the batches once, hands out their cold ids and counts along the way.

    Args:
        samples: The batches.
        features: Size of a row.
        caches: What is not cold.
        disk: Prices, for the cost of reading the same rows without packing.
    """

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
        """Cold ids of each batch, ascending.

        Raises:
            DataError: A batch has an id twice.
        """
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
        """Seconds to gather these rows from the features, every page once."""
        if not len(cold):
            return 0.0
        (by_size,) = read_costs(
            cold,
            np.ones(len(cold), np.int64),
            row_bytes=self._features.row_bytes,
            gaps_bytes=np.zeros(1, np.int64),
        )
        return sum(self._disk.seconds(int(r), int(b)) for r, b in by_size if r)
