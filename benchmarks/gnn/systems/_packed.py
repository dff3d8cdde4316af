"""The two systems that read packed rows: DiskGNN as published, and ours.

Both are planned and packed by this package; what differs is what DiskGNN leaves open. As
published: static caches by offline count, the smallest segment that its approximate search finds
feasible, MinHash order with two functions, shared rows read as single pages of 4 KiB, the private
chunk of a batch read in one stretch, no checksums; loading of blocks, reading and assembling in a
thread each, with queues of 2 between them. Ours: the Gray-coded membership layout, the
segment of least cost, extents instead of pages, verified, through ``DiskLoader``.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.gnn.systems._minhash import by_minhash
from benchmarks.gnn.systems._segments import first_feasible_segment
from benchmarks.gnn.systems._simple import requested_rows, top_rows
from benchmarks.gnn.systems._system import (
    Preparation,
    SystemBatch,
    SystemStatistics,
    Workload,
    staged,
)
from fivefold.errors import InfeasibleError
from fivefold.gnn.packing import PackedStore, pack
from fivefold.gnn.packing.record import BatchRecord
from fivefold.gnn.planning import Budgets, Plan, make_plan
from fivefold.gnn.storage import DiskProfile, RowReader
from fivefold.gnn.storage.pages import gather_rows

if TYPE_CHECKING:
    from fivefold.gnn.loading import DiskLoader

__all__ = ["DiskGnnSystem", "PackedLoaderSystem"]

_PAGE_BYTES = 4096
_CHUNK_BYTES = 1 << 20
_NUM_EPOCHS = 50  # over which packing is spread, as in the published figures
Ids = NDArray[np.int64]


class _Packed:
    """Planning and packing, which both have in common."""

    name = "packed"

    def __init__(
        self,
        workload: Workload,
        profile: DiskProfile,
        *,
        disk_rows: int | None,
        packing_bytes: int,
    ) -> None:
        self.workload, self.profile = workload, profile
        self.packing_bytes = packing_bytes
        self.disk_rows = disk_rows
        self.plan: Plan | None = None
        self.store: PackedStore | None = None
        self._folder = workload.folder / self.name.replace(" ", "-").lower()
        self._statistics = SystemStatistics()

    def make_plan(self) -> Plan:
        """Decide what goes where; each of the two in its own way.

        Raises:
            NotImplementedError: Here; subclasses decide.
        """
        raise NotImplementedError

    def prepare(self) -> Preparation:
        """Plan, and pack or take what an earlier run has packed."""
        started_s = time.perf_counter()
        self.plan = self.make_plan()
        planned_s = time.perf_counter() - started_s
        w = self.workload
        self.store = pack(
            w.features,
            w.samples,
            self.plan,
            self._folder,
            memory_bytes=self.packing_bytes,
            profile=self.profile,
        )
        seconds = time.perf_counter() - started_s
        predicted = self.plan.predicted
        return Preparation(
            seconds=seconds,
            bytes_written=_bytes_below(self._folder),
            details={
                "planning seconds": planned_s,
                "packing seconds": seconds - planned_s,
                "segment batches": self.plan.segment_batches,
                "rows on disk": predicted.packed_rows,
                "predicted bytes": predicted.read_bytes_per_epoch,
                "predicted requests": predicted.requests_per_epoch,
            },
        )

    def _budgets(self) -> Budgets:
        w = self.workload
        w.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(w.folder).free
        return Budgets(host_bytes=w.cache_rows() * w.row_bytes, disk_bytes=free)

    def seek(self, start: int) -> None:
        """Do nothing: a static cache has no state, and epochs of a moving one begin anew."""

    def work(self, start: int, stop: int) -> int:
        """Bytes that the plan reads for these batches; rows where nothing is read."""
        assert self.plan is not None, "prepare() comes first"
        read = int(self.plan.batch_bytes[start:stop].sum())
        return read or requested_rows(self.workload, start, stop)

    def statistics(self) -> SystemStatistics:
        """Return the running totals."""
        return self._statistics

    def close(self) -> None:
        """Close the store."""
        if self.store is not None:
            self.store.close()
            self.store = None


class DiskGnnSystem(_Packed):
    """DiskGNN with the published choices.

    Args:
        workload: What to run on.
        profile: Of the disk; the published choices do not look at it.
        disk_rows: Rows that may be stored, the "blow-up" times the nodes; None for any number.
        packing_bytes: Memory for packing.
        reader_threads: Of each of the two reading engines.

    Raises:
        InfeasibleError: The disk is short.

    Example:
        >>> DiskGnnSystem.name
        'DiskGNN'
    """

    name = "DiskGNN"

    def __init__(
        self,
        workload: Workload,
        profile: DiskProfile,
        *,
        disk_rows: int | None = None,
        packing_bytes: int = 256 << 20,
        reader_threads: int = 4,
    ) -> None:
        super().__init__(workload, profile, disk_rows=disk_rows, packing_bytes=packing_bytes)
        self._threads = reader_threads
        self._cached = workload.empty_rows(0)
        self._readers: list[RowReader] = []

    def make_plan(self) -> Plan:
        """Static caches by count, the first feasible segment, MinHash with two functions.

        Planning counts the reads of our order too, which the published system does not.
        """
        w = self.workload
        hot = np.zeros(w.num_nodes, np.bool_)
        hot[top_rows(w.samples.counts, w.cache_rows())] = True
        ids = (w.samples.node_ids(i) for i in range(w.samples.num_batches))
        segment = first_feasible_segment(
            (found[~hot[found]] for found in ids),
            num_ids=w.num_nodes,
            num_batches=w.samples.num_batches,
            max_rows=self.disk_rows,
        )
        plan = make_plan(
            w.samples,
            w.features,
            self._budgets(),
            self.profile,
            policy="static",
            segment_batches=segment,
            max_gap_bytes=0,
            buffer_batches=0,
        )
        return by_minhash(plan, w.samples)

    def prepare(self) -> Preparation:
        """Plan, pack, load the cache, open the readers."""
        done = super().prepare()
        assert self.store is not None, "it was just packed"
        self._cached = self.store.rows.read("host")
        self._readers = [
            RowReader(
                self.store.rows, "rows", threads=self._threads, block_bytes=size, verify=False
            )
            for size in (_PAGE_BYTES, _CHUNK_BYTES)
        ]
        return done

    def epoch(
        self, number: int, *, start: int = 0, stop: int | None = None
    ) -> Iterator[SystemBatch]:
        """Hand out batches in the order of the sample file."""
        del number
        assert self.store is not None, "prepare() comes first"
        numbers = range(start, self.store.num_batches if stop is None else stop)
        yield from staged(numbers, self._load, self._read, self._assemble)

    def _load(self, number: int) -> tuple[BatchRecord, NDArray[np.int64]]:
        """Blocks and address tables."""
        assert self.store is not None, "prepare() comes first"
        record = self.store.record(number)
        return record, record.edge_index()

    def _read(
        self, loaded: tuple[BatchRecord, NDArray[np.int64]]
    ) -> tuple[BatchRecord, NDArray[np.int64], NDArray[Any]]:
        """The packed chunk and the pages of shared rows."""
        record, edges = loaded
        x = self.workload.empty_rows(len(record.node_ids))
        for reader, runs in zip(self._readers, split_runs(record), strict=True):
            if len(runs[0]):
                read = reader.read_runs(*runs, x)
                self._statistics.bytes_read += read.bytes_read
                self._statistics.requests += read.requests
        return record, edges, x

    def _assemble(self, read: tuple[BatchRecord, NDArray[np.int64], NDArray[Any]]) -> SystemBatch:
        """The cached rows, and the batch."""
        record, edges, x = read
        gather_rows(self._cached, record.host_slots, x, destinations=record.host_destinations)
        self._statistics.rows_requested += len(x)
        self._statistics.rows_cached += len(record.host_slots)
        return SystemBatch(record.number, record.node_ids, x, record.batch_size, lambda: edges)

    def close(self) -> None:
        """Free the cache and close the readers."""
        for reader in self._readers:
            reader.close()
        self._readers = []
        self._cached = self.workload.empty_rows(0)
        super().close()


def split_runs(record: BatchRecord) -> tuple[tuple[Ids, Ids, Ids], tuple[Ids, Ids, Ids]]:
    """The runs of shared rows and those of the private chunk, which come last in the file."""
    starts, counts, places = record.run_starts, record.run_counts, record.run_destinations
    ends = np.cumsum(counts)
    shared = record.num_cold - record.num_private
    before = np.clip(shared - (ends - counts), 0, counts)
    head = before > 0
    tail = counts > before
    return (
        (starts[head], before[head], places[head]),
        ((starts + before)[tail], (counts - before)[tail], (places + before)[tail]),
    )


class PackedLoaderSystem(_Packed):
    """Ours: the Gray-coded layout, read through ``DiskLoader``.

    Args:
        workload: What to run on.
        profile: Of the disk; the segment of least cost is chosen by it.
        policy: ``"static"`` caches, or ``"belady"`` for the planned order.
        disk_rows: Rows that may be stored; None for any number.
        packing_bytes: Memory for packing.
        make_loader: Makes the loader from the store; None for the defaults.

    Raises:
        InfeasibleError: No segment is small enough, or the disk is short.

    Example:
        >>> PackedLoaderSystem.__name__
        'PackedLoaderSystem'
    """

    def __init__(
        self,
        workload: Workload,
        profile: DiskProfile,
        *,
        policy: Literal["static", "belady"] = "static",
        disk_rows: int | None = None,
        packing_bytes: int = 256 << 20,
        make_loader: Callable[[PackedStore], DiskLoader] | None = None,
    ) -> None:
        self.policy: Literal["static", "belady"] = policy
        self.name = f"ours {policy}"
        super().__init__(workload, profile, disk_rows=disk_rows, packing_bytes=packing_bytes)
        self._make_loader = make_loader
        self.loader: DiskLoader | None = None

    def make_plan(self) -> Plan:
        """The segment of least cost whose rows fit.

        Raises:
            InfeasibleError: No segment stores few enough rows.
        """
        plan = self._plan(None)
        if self.disk_rows is None or plan.predicted.packed_rows <= self.disk_rows:
            return plan
        small = [cost for cost in plan.choices if cost.packed_rows <= self.disk_rows]
        if not small:
            raise InfeasibleError(
                f"no segment stores {self.disk_rows} rows or fewer",
                hint="allow more rows on disk or a larger cache",
            )
        best = min(small, key=lambda cost: cost.total_seconds(_NUM_EPOCHS))
        return self._plan(best.segment_batches)

    def _plan(self, segment: int | None) -> Plan:
        return make_plan(
            self.workload.samples,
            self.workload.features,
            self._budgets(),
            self.profile,
            policy=self.policy,
            segment_batches=segment,
            buffer_batches=0,
            training_epochs=_NUM_EPOCHS,
        )

    def prepare(self) -> Preparation:
        """Plan, pack, open the loader."""
        done = super().prepare()
        assert self.store is not None, "it was just packed"
        if self._make_loader is None:
            # Only here: the other systems need no torch, whose import takes seconds.
            from fivefold.gnn.loading import DiskLoader  # noqa: PLC0415

            self._make_loader = DiskLoader
        self.loader = self._make_loader(self.store)
        return done

    def epoch(
        self, number: int, *, start: int = 0, stop: int | None = None
    ) -> Iterator[SystemBatch]:
        """Hand out an epoch in the loader's order, or as many batches of it as asked for."""
        assert self.loader is not None, "prepare() comes first"
        self.loader.set_epoch(number)
        count = None if stop is None else stop - start
        before = self.loader.statistics()
        for batch in islice(self.loader, count):
            assert batch.edge_index is not None, "the form has an edge_index"
            yield SystemBatch(
                batch.number,
                batch.n_id.numpy(),
                batch.x.numpy(),
                batch.batch_size,
                batch.edge_index.numpy,
            )
        done = self.loader.statistics() - before
        self._statistics.rows_requested += sum(done.rows.values())
        self._statistics.rows_cached += done.rows.get("host", 0) + done.rows.get("device", 0)
        self._statistics.bytes_read += done.bytes_read
        self._statistics.requests += done.requests

    def close(self) -> None:
        """End the loader and close the store."""
        if self.loader is not None:
            self.loader.close()
            self.loader = None
        super().close()


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
