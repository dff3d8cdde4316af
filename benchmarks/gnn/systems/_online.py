"""Online gather with a cache that learns: the strongest way to run without any preparation.

As GraphBolt's disk features behind its CPU cache: look all ids of a batch up, read what is missing
with O_DIRECT, each page once and pages that lie side by side in one request, then take the read
rows into the cache. LRU by default, SIEVE as GraphBolt's own default.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gnn.systems._simple import loaded, read_sorted
from benchmarks.gnn.systems._system import Preparation, SystemBatch, SystemStatistics, Workload
from fivefold.gnn.loading.rows import CachePolicy, OnlineCache
from fivefold.gnn.storage import RowReader
from fivefold.gnn.storage.pages import gather_rows

__all__ = ["OnlineSystem"]

_BOOKKEEPING_PER_NODE = 4  # the slot of each id; the lists of the slots are counted per row


class OnlineSystem:
    """Reads what its cache misses, pages deduplicated, batch by batch.

    Args:
        workload: What to run on.
        policy: ``"lru"`` or ``"sieve"``.
        reader_threads: Of the reading engine.

    Raises:
        ConfigurationError: The policy is unknown.

    Example:
        >>> OnlineSystem.__name__
        'OnlineSystem'
    """

    def __init__(
        self, workload: Workload, *, policy: CachePolicy = "lru", reader_threads: int = 4
    ) -> None:
        self.name = f"online {policy.upper()}"
        self.workload, self.policy = workload, policy
        self._reader = RowReader(workload.features, workload.section, threads=reader_threads)
        self._cache = self._new_cache()
        self._rows = workload.empty_rows(self._cache.num_slots)
        self._misses: NDArray[np.int64] | None = None
        self._statistics = SystemStatistics()

    def _new_cache(self) -> OnlineCache:
        w = self.workload
        per_row = 8 + 4 + 4 + 1  # id, two links, mark
        left = max(0, w.cache_bytes - _BOOKKEEPING_PER_NODE * w.num_nodes)
        slots = left // (max(1, w.row_bytes) + per_row)
        return OnlineCache(w.num_nodes, num_slots=slots, policy=self.policy)

    def prepare(self) -> Preparation:
        """Do nothing: that is the point of it."""
        return Preparation()

    def seek(self, start: int) -> None:
        """Bring the cache to where it is before a batch of the first epoch."""
        self._cache = self._new_cache()
        for i in range(start):
            self._pass_by(self._cache, self.workload.samples.node_ids(i))
        ids, slots = self._cache.held()
        order = np.argsort(ids)
        step = max(1, (64 << 20) // max(1, self.workload.row_bytes))
        for first in range(0, len(ids), step):
            part = order[first : first + step]
            self._rows[slots[part]] = read_sorted(self.workload, ids[part])

    @staticmethod
    def _pass_by(cache: OnlineCache, ids: NDArray[np.int64]) -> int:
        missing = ids[cache.lookup(ids) < 0]
        cache.admit(missing)
        return len(missing)

    def epoch(
        self, number: int, *, start: int = 0, stop: int | None = None
    ) -> Iterator[SystemBatch]:
        """Hand out batches in the order of the sample file."""
        del number
        for i, sample, edges in loaded(self.workload, start, stop):
            x = self._gather(sample.node_ids)
            yield SystemBatch(i, sample.node_ids, x, sample.batch_size, edges)

    def _gather(self, ids: NDArray[np.int64]) -> NDArray[Any]:
        x = self.workload.empty_rows(len(ids))
        slots = self._cache.lookup(ids)
        hits, missing = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
        gather_rows(self._rows, slots[hits].astype(np.int64), x, destinations=hits)
        if len(missing):
            places = missing[np.argsort(ids[missing])]
            read = self._reader.read_rows(ids[places], x, destinations=places)
            self._statistics.bytes_read += read.bytes_read
            self._statistics.requests += read.requests
            entered = self._cache.admit(ids[missing])
            kept = np.flatnonzero(entered >= 0)
            gather_rows(x, missing[kept], self._rows, destinations=entered[kept].astype(np.int64))
        self._statistics.rows_requested += len(ids)
        self._statistics.rows_cached += len(hits)
        return x

    def work(self, start: int, stop: int) -> int:
        """Rows that miss in the first epoch."""
        if self._misses is None:
            samples, cache = self.workload.samples, self._new_cache()
            self._misses = np.array(
                [self._pass_by(cache, samples.node_ids(i)) for i in range(samples.num_batches)],
                np.int64,
            )
        return int(self._misses[start:stop].sum())

    def statistics(self) -> SystemStatistics:
        """Return the running totals."""
        return self._statistics

    def close(self) -> None:
        """Free the cache and close the reader."""
        self._reader.close()
        self._rows = self.workload.empty_rows(0)
