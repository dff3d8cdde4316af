"""The two simplest systems: all rows in memory, and rows gathered through a memory map.

A memory map needs ``MADV_RANDOM``: with the default advice the kernel reads megabytes around each
fault. The plain map is here to show that trap, and is of no other use. The variant with a static
cache keeps the rows of the nodes that most edges start from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.gnn.systems._system import (
    Preparation,
    SystemBatch,
    SystemStatistics,
    Workload,
    staged,
)
from fivefold.errors import ConfigurationError
from fivefold.gnn.sampling import Adjacency
from fivefold.gnn.sampling.batches import SampledBatch
from fivefold.gnn.storage import RowReader
from fivefold.gnn.storage.pages import gather_rows

__all__ = ["InMemorySystem", "MappedSystem", "source_counts", "top_rows"]

_CHUNK = 1 << 24


def source_counts(topology: Adjacency) -> NDArray[np.int64]:
    """How many edges start from each node: how likely a neighbour sampler is to meet it.

    Args:
        topology: In memory or mapped; it is read in pieces.

    Returns:
        One count per node.

    Example:
        >>> source_counts(Adjacency(np.array([0, 2, 3]), np.array([1, 0, 1]))).tolist()
        [1, 2]
    """
    counts = np.zeros(topology.num_nodes, np.int64)
    for start in range(0, topology.num_edges, _CHUNK):
        piece = np.asarray(topology.indices[start : start + _CHUNK])
        counts += np.bincount(piece, minlength=topology.num_nodes)
    return counts


def top_rows(scores: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Ids of the highest scores, ascending; of equal scores, the lower ids.

    Args:
        scores: One per id.
        count: How many.

    Returns:
        The ids.

    Example:
        >>> top_rows(np.array([3, 9, 3, 1]), 2).tolist()
        [0, 1]
    """
    order = np.argsort(-scores.astype(np.float64), kind="stable")
    return np.sort(order[:count]).astype(np.int64)


class InMemorySystem:
    """All rows in memory: the floor of the time, and what every other system must equal.

    Args:
        workload: Its budget is not looked at.

    Example:
        >>> InMemorySystem.__name__
        'InMemorySystem'
    """

    name = "in memory"

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._rows: NDArray[Any] | None = None
        self._statistics = SystemStatistics()

    def prepare(self) -> Preparation:
        """Load all rows."""
        started_s = time.perf_counter()
        rows = self.workload.empty_rows(self.workload.num_nodes)
        if len(rows):
            with_reader = RowReader(self.workload.features, self.workload.section)
            try:
                with_reader.read_runs(_one(0), _one(len(rows)), _one(0), rows)
            finally:
                with_reader.close()
        self._rows = rows
        return Preparation(seconds=time.perf_counter() - started_s)

    def seek(self, start: int) -> None:
        """Do nothing: there is no state."""

    def epoch(
        self, number: int, *, start: int = 0, stop: int | None = None
    ) -> Iterator[SystemBatch]:
        """Hand out batches in the order of the sample file."""
        del number
        assert self._rows is not None, "prepare() comes first"
        for i, sample, edges in loaded(self.workload, start, stop):
            x = self.workload.empty_rows(len(sample.node_ids))
            gather_rows(self._rows, sample.node_ids, x)
            self._statistics.rows_requested += len(x)
            self._statistics.rows_cached += len(x)
            yield SystemBatch(i, sample.node_ids, x, sample.batch_size, edges)

    def work(self, start: int, stop: int) -> int:
        """Rows."""
        return requested_rows(self.workload, start, stop)

    def statistics(self) -> SystemStatistics:
        """Return the running totals."""
        return self._statistics

    def close(self) -> None:
        """Free the rows."""
        self._rows = None


class MappedSystem:
    """Rows gathered through a memory map, with or without a static cache.

    Args:
        workload: What to run on; its threads fault pages in side by side.
        advice: Of the map: ``"random"``, or ``"normal"`` to show the trap.
        scores: Rows of the highest scores are kept in memory; None for no such cache.

    Raises:
        ConfigurationError: The advice is unknown, or the scores are not one per node.

    Example:
        >>> MappedSystem.__name__
        'MappedSystem'
    """

    def __init__(
        self,
        workload: Workload,
        *,
        advice: Literal["random", "normal"] = "random",
        scores: NDArray[Any] | None = None,
    ) -> None:
        if advice not in {"random", "normal"}:
            raise ConfigurationError(f"advice must be 'random' or 'normal'; got {advice!r}")
        if scores is not None and scores.shape != (workload.num_nodes,):
            raise ConfigurationError(
                f"scores must be one per node, {workload.num_nodes}; got shape {scores.shape}"
            )
        self.workload, self._scores = workload, scores
        kind = "mmap" if advice == "random" else "mmap plain"
        self.name = kind if scores is None else f"{kind} + degree cache"
        self._advice: Literal["random", "normal"] = advice
        self._pool = ThreadPoolExecutor(workload.threads, thread_name_prefix="mapped")
        self._cached = workload.empty_rows(0)
        self._slot_of: NDArray[np.int32] | None = None
        self._statistics = SystemStatistics()

    def prepare(self) -> Preparation:
        """Fill the static cache, if there is one."""
        started_s = time.perf_counter()
        if self._scores is not None:
            count = self.workload.cache_rows(bookkeeping_bytes=4 * self.workload.num_nodes)
            ids = top_rows(self._scores, count)
            self._scores = None
            self._slot_of = np.full(self.workload.num_nodes, -1, np.int32)
            self._slot_of[ids] = np.arange(len(ids), dtype=np.int32)
            self._cached = read_sorted(self.workload, ids)
        return Preparation(seconds=time.perf_counter() - started_s)

    def seek(self, start: int) -> None:
        """Gather the batch before, so that the page cache holds something."""
        if start:
            for _ in self.epoch(0, start=start - 1, stop=start):
                pass

    def epoch(
        self, number: int, *, start: int = 0, stop: int | None = None
    ) -> Iterator[SystemBatch]:
        """Hand out batches in the order of the sample file."""
        del number
        # Mapped for the epoch only: pages that are mapped would survive a drop of the page cache.
        rows = self.workload.features.memory_map(self.workload.section, advice=self._advice)
        for i, sample, edges in loaded(self.workload, start, stop):
            x = self.workload.empty_rows(len(sample.node_ids))
            self._gather(rows, sample.node_ids, x)
            yield SystemBatch(i, sample.node_ids, x, sample.batch_size, edges)

    def _gather(self, rows: NDArray[Any], ids: NDArray[np.int64], x: NDArray[Any]) -> None:
        missing = np.arange(len(ids))
        if self._slot_of is not None:
            slots = self._slot_of[ids]
            hits = np.flatnonzero(slots >= 0)
            missing = np.flatnonzero(slots < 0)
            gather_rows(self._cached, slots[hits].astype(np.int64), x, destinations=hits)
        parts = np.array_split(missing, self.workload.threads)
        calls = [
            self._pool.submit(gather_rows, rows, ids[part], x, destinations=part)
            for part in parts
            if len(part)
        ]
        for call in calls:
            call.result()
        self._statistics.rows_requested += len(ids)
        self._statistics.rows_cached += len(ids) - len(missing)

    def work(self, start: int, stop: int) -> int:
        """Rows that go through the map."""
        if self._slot_of is None:
            return requested_rows(self.workload, start, stop)
        samples = self.workload.samples
        slot_of = self._slot_of
        return sum(
            int(np.count_nonzero(slot_of[samples.node_ids(i)] < 0)) for i in range(start, stop)
        )

    def statistics(self) -> SystemStatistics:
        """Return the running totals; what the kernel read for the map is not known to us."""
        return self._statistics

    def close(self) -> None:
        """Free the cache and end the threads."""
        self._pool.shutdown(wait=True)
        self._cached, self._slot_of = self.workload.empty_rows(0), None


def read_sorted(workload: Workload, ids: NDArray[np.int64]) -> NDArray[Any]:
    """Rows of ascending ids, in large reads where they lie close together."""
    rows = workload.empty_rows(len(ids))
    if len(ids):
        reader = RowReader(workload.features, workload.section, max_gap_bytes=1 << 16)
        try:
            reader.read_rows(ids, rows)
        finally:
            reader.close()
    return rows


def loaded(
    workload: Workload, start: int, stop: int | None
) -> Iterator[tuple[int, SampledBatch, Callable[[], NDArray[np.int64]]]]:
    """Samples with their edges, loaded by a thread of their own, two ahead."""

    def load(number: int) -> tuple[int, SampledBatch, Callable[[], NDArray[np.int64]]]:
        sample = workload.samples.batch(number)
        edges = sample.edge_index()
        return number, sample, lambda: edges

    return staged(range(start, _stop(workload, stop)), load)


def requested_rows(workload: Workload, start: int, stop: int) -> int:
    """Rows that the batches of a stretch ask for."""
    return sum(len(workload.samples.node_ids(i)) for i in range(start, stop))


def _stop(workload: Workload, stop: int | None) -> int:
    return workload.samples.num_batches if stop is None else stop


def _one(value: int) -> NDArray[np.int64]:
    return np.array([value], np.int64)
