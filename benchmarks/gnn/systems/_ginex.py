"""Ginex: super-batches of known ids, Belady's optimal cache, one direct read per miss.

The ids of a super-batch are spilled before it runs (here: the sample file), its change sets are
computed and written, the cache is filled with the initial set by random reads, and then batches
run one by one: hits are copied, each miss is one O_DIRECT read of the 4 KiB pages of its row (no
sorting, no page shared by two rows), and only after the gather the evicted slots are overwritten
from the batch. While a super-batch runs, the change sets of the next are computed. Park et al.,
VLDB 2022; details as in the public code.

The neighbour cache is a policy for sampling from a topology on disk: ``neighbor_cache_ids``. In our
harness the topology is in memory for every system.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.gnn.systems._change_sets import ChangeSet, stream_change_sets
from benchmarks.gnn.systems._page_reads import PageReader
from benchmarks.gnn.systems._simple import read_sorted, source_counts
from benchmarks.gnn.systems._system import Preparation, SystemBatch, SystemStatistics, Workload
from fivefold.errors import ConfigurationError
from fivefold.gnn.sampling import Adjacency, SampleFile
from fivefold.gnn.sampling.batches import SampledBatch
from fivefold.gnn.storage.pages import gather_rows

__all__ = ["GinexSystem", "neighbor_cache_ids"]

_QUEUED = 2
_LOADERS = 4
Ids = NDArray[np.int64]


def neighbor_cache_ids(topology: Adjacency, *, budget_bytes: int) -> Ids:
    """The nodes whose neighbour lists Ginex keeps in memory.

    Nodes by descending out-degree / in-degree, short lists that many samples meet, as long as the
    lists and one word for each fit the budget.

    Args:
        topology: The lists of in-neighbours.
        budget_bytes: For the lists, 8 bytes per entry; the address table of 8 bytes per node is
            taken out of it first.

    Returns:
        The ids, best first.

    Example:
        >>> graph = Adjacency(np.array([0, 2, 3, 3]), np.array([1, 2, 2]))
        >>> neighbor_cache_ids(graph, budget_bytes=8 * (3 + 1 + 2)).tolist()
        [2, 1]
    """
    in_degrees = np.diff(np.asarray(topology.indptr))
    with np.errstate(divide="ignore", invalid="ignore"):
        scores = np.true_divide(source_counts(topology), in_degrees, dtype=np.float64)
    scores = np.nan_to_num(scores, nan=0.0, posinf=np.inf)
    order = np.argsort(-scores, kind="stable")
    entries = np.cumsum(in_degrees[order] + 1)
    left = max(0, budget_bytes // 8 - topology.num_nodes)
    return order[: int(np.searchsorted(entries, left, side="right"))].astype(np.int64)


@dataclass(frozen=True)
class _Inspected:
    """A super-batch that is ready to run."""

    first: int
    initial: Ids
    misses: Ids
    changes: Path
    offsets: Ids


class GinexSystem:
    """Inspect and execute, super-batch by super-batch.

    Args:
        workload: What to run on; 4 bytes per node of its cache budget go to the address table.
        super_batch: Batches that are inspected together.
        inspect_every_epoch: Compute the change sets in every epoch as published, where samples
            are drawn anew. By default those of ``prepare`` serve all epochs: the samples are the
            same, which spares Ginex the time.

    Raises:
        ConfigurationError: The super-batch is empty.

    Example:
        >>> GinexSystem.__name__
        'GinexSystem'
    """

    name = "Ginex"

    def __init__(
        self,
        workload: Workload,
        *,
        super_batch: int = 1000,
        inspect_every_epoch: bool = False,
    ) -> None:
        if super_batch < 1:
            raise ConfigurationError(f"super_batch must be positive; got {super_batch}")
        self.workload = workload
        self._every_epoch = inspect_every_epoch
        batches = workload.samples.num_batches
        self._bounds = [
            (first, min(first + super_batch, batches)) for first in range(0, batches, super_batch)
        ]
        section = workload.features.sections[workload.section]
        self._reader = PageReader(
            workload.features.path,
            base=section.offset,
            row_bytes=workload.row_bytes,
            threads=workload.threads,
        )
        self.num_entries = workload.cache_rows(bookkeeping_bytes=4 * workload.num_nodes)
        self._rows = workload.empty_rows(self.num_entries)
        self._slot_of = np.full(workload.num_nodes, -1, np.int32)
        self._free: Ids = np.arange(self.num_entries)[::-1]
        self._inspected: dict[int, _Inspected] = {}
        self._ready_for: int | None = None
        self._folder = workload.folder / "ginex"
        self._statistics = SystemStatistics()

    def prepare(self) -> Preparation:
        """Inspect: all super-batches, or with ``inspect_every_epoch`` the first one."""
        started_s = time.perf_counter()
        self._folder.mkdir(parents=True, exist_ok=True)
        count = 1 if self._every_epoch else len(self._bounds)
        for number in range(min(count, len(self._bounds))):
            self._inspected[number] = self._inspect(number)
        written = sum(found.changes.stat().st_size for found in self._inspected.values())
        misses = sum(int(found.misses.sum()) for found in self._inspected.values())
        return Preparation(
            seconds=time.perf_counter() - started_s,
            bytes_written=written,
            details={"misses": misses, "entries": self.num_entries},
        )

    def _inspect(self, number: int) -> _Inspected:
        first, stop = self._bounds[number]
        initial, course = stream_change_sets(
            _SpilledIds(self.workload.samples, first, stop),
            num_ids=self.workload.num_nodes,
            num_slots=self.num_entries,
        )
        path = self._folder / f"changes-{number:05d}"
        misses, offsets = _write_changes(path, course, stop - first)
        return _Inspected(first, initial, misses, path, offsets)

    def seek(self, start: int) -> None:
        """Bring the cache to where it is before a batch, by large reads and not by Ginex's own."""
        if not self._bounds:
            return
        number = next(n for n, (first, stop) in enumerate(self._bounds) if first <= start < stop)
        found = self._inspected_again(number)
        inside = np.zeros(self.workload.num_nodes, np.bool_)
        inside[found.initial] = True
        for at in range(start - found.first):
            change = _read_change(found, at)
            inside[change.evicted] = False
            inside[change.admitted] = True
        ids = np.flatnonzero(inside)
        self._place(ids)
        step = max(1, (64 << 20) // max(1, self.workload.row_bytes))
        for a in range(0, len(ids), step):
            self._rows[a : a + len(ids[a : a + step])] = read_sorted(
                self.workload, ids[a : a + step]
            )
        self._ready_for = start

    def _inspected_again(self, number: int) -> _Inspected:
        if number not in self._inspected:
            self._inspected[number] = self._inspect(number)
        return self._inspected[number]

    def _place(self, ids: Ids) -> None:
        """Give ids the first slots, in order."""
        self._slot_of.fill(-1)
        self._slot_of[ids] = np.arange(len(ids), dtype=np.int32)
        self._free = np.arange(len(ids), self.num_entries)[::-1]

    def fill(self, number: int = 0) -> int:
        """Fill the cache with the initial set of a super-batch by random reads, as published.

        Args:
            number: Of the super-batch.

        Returns:
            Rows read.
        """
        initial = self._inspected_again(number).initial
        self._place(initial)
        read = self._reader.read(initial, np.arange(len(initial)), _bytes_of(self._rows))
        self._statistics.bytes_read += read
        self._statistics.requests += len(initial)
        return len(initial)

    def epoch(
        self, number: int, *, start: int = 0, stop: int | None = None
    ) -> Iterator[SystemBatch]:
        """Hand out batches; from where ``seek`` led no cache is filled before the first one."""
        del number
        stop = self.workload.samples.num_batches if stop is None else stop
        skip_fill, self._ready_for = self._ready_for == start, None
        with ThreadPoolExecutor(1, thread_name_prefix="inspect") as inspector:
            following: Future[_Inspected] | None = None
            for at, (first, end) in enumerate(self._bounds):
                if end <= start or first >= stop:
                    continue
                if following is not None:
                    self._inspected[at] = following.result()
                found = self._inspected_again(at)
                if not skip_fill:
                    self.fill(at)
                skip_fill = False
                after = (at + 1) % len(self._bounds)
                following = None
                if end < stop and (self._every_epoch or after not in self._inspected):
                    following = inspector.submit(self._inspect, after)
                yield from self._execute(found, max(start, first), min(stop, end))
                # A stretch that ends inside a super-batch leaves the cache ready for the next one.
                self._ready_for = stop if stop < end else None

    def _execute(self, found: _Inspected, start: int, stop: int) -> Iterator[SystemBatch]:
        """Batches with their ids, adjacencies and change sets loaded two ahead."""

        def load(i: int) -> tuple[SampledBatch, ChangeSet, Callable[[], Ids]]:
            sample = self.workload.samples.batch(i)
            edges = sample.edge_index()
            return sample, _read_change(found, i - found.first), lambda: edges

        with ThreadPoolExecutor(_LOADERS, thread_name_prefix="loader") as loaders:
            waiting = [loaders.submit(load, i) for i in range(start, min(start + _QUEUED, stop))]
            for i in range(start, stop):
                sample, change, edges = waiting.pop(0).result()
                if i + _QUEUED < stop:
                    waiting.append(loaders.submit(load, i + _QUEUED))
                x = self._gather(sample.node_ids)
                self._update(change, x)
                yield SystemBatch(i, sample.node_ids, x, sample.batch_size, edges)

    def _gather(self, ids: Ids) -> NDArray[np.generic]:
        x = self.workload.empty_rows(len(ids))
        slots = self._slot_of[ids]
        hits, missing = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
        gather_rows(self._rows, slots[hits].astype(np.int64), x, destinations=hits)
        self._statistics.bytes_read += self._reader.read(ids[missing], missing, _bytes_of(x))
        self._statistics.requests += len(missing)
        self._statistics.rows_requested += len(ids)
        self._statistics.rows_cached += len(hits)
        return x

    def _update(self, change: ChangeSet, x: NDArray[np.generic]) -> None:
        freed = self._slot_of[change.evicted].astype(np.int64)
        self._slot_of[change.evicted] = -1
        free = np.concatenate([self._free, freed])
        count = len(change.admitted)
        slots, self._free = free[len(free) - count :], free[: len(free) - count]
        self._slot_of[change.admitted] = slots
        gather_rows(x, change.positions, self._rows, destinations=slots)

    def work(self, start: int, stop: int) -> int:
        """Reads: the misses, and the fill of each super-batch that begins here."""
        reads = 0
        for number, (first, end) in enumerate(self._bounds):
            found = self._inspected_again(number)
            a, b = max(start, first), min(stop, end)
            reads += int(found.misses[a - first : b - first].sum()) if a < b else 0
            reads += len(found.initial) if start <= first < stop else 0
        return reads

    def statistics(self) -> SystemStatistics:
        """Return the running totals."""
        return self._statistics

    def close(self) -> None:
        """Free the cache, delete the change sets, end the threads."""
        self._reader.close()
        self._rows = self.workload.empty_rows(0)
        for found in self._inspected.values():
            found.changes.unlink(missing_ok=True)
        self._inspected.clear()


class _SpilledIds(Collection[Ids]):
    """The ids of a super-batch, read from the disk in each pass as published."""

    def __init__(self, samples: SampleFile, first: int, stop: int) -> None:
        self._samples, self._range = samples, range(first, stop)

    def __len__(self) -> int:
        return len(self._range)

    def __iter__(self) -> Iterator[Ids]:
        return (self._samples.node_ids(i) for i in self._range)

    def __contains__(self, ids: object) -> bool:
        return any(ids is found for found in self)


def _write_changes(
    path: Path, course: Iterator[tuple[int, ChangeSet]], count: int
) -> tuple[Ids, Ids]:
    """Write ids and positions as int64; misses of each batch, and where its parts begin."""
    misses, offsets = np.zeros(count, np.int64), np.zeros((count, 4), np.int64)
    at = 0
    with path.open("wb") as file:
        for i, (missed, change) in enumerate(course):
            misses[i] = missed
            for j, part in enumerate((change.admitted, change.positions, change.evicted)):
                offsets[i, j] = at
                file.write(part.astype(np.int64).tobytes())
                at += len(part)
            offsets[i, 3] = at
    return misses, offsets


def _read_change(found: _Inspected, at: int) -> ChangeSet:
    a, b, c, d = found.offsets[at].tolist()
    flat = np.fromfile(found.changes, np.int64, count=d - a, offset=8 * a)
    return ChangeSet(flat[: b - a], flat[b - a : c - a], flat[c - a :])


def _bytes_of(rows: NDArray[np.generic]) -> NDArray[np.uint8]:
    return rows.view(np.uint8).reshape(len(rows), rows.shape[1] * rows.itemsize)
