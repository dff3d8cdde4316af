"""The four-level feature store: every row of a batch from the level that holds it, exactly once.

Levels: a cache on the device, one in host memory, rows on disk that several batches of a segment
share, and those of one batch alone. The packer wrote which row comes from which level and where it
belongs, so nothing is looked up. With a Belady plan the host cache changes after each batch.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.loading.shared_rows import SLOWEST_BYTES_PER_S, rows_in_memory
from fivefold.gnn.packing import PackedStore
from fivefold.gnn.packing.record import BatchRecord
from fivefold.gnn.storage import RowReader
from fivefold.gnn.storage.pages import Array, aligned_empty, gather_rows
from fivefold.gnn.storage.reader import Backend, ReadStatistics

Rows = Array

LEVELS = ("device", "host", "shared", "private")
_CHUNK_BYTES = 32 << 20  # of a cache on its way to a device
_THREADS = 2  # enough for a disk's bandwidth with requests of a megabyte


class FeatureStore:
    """Serve the rows of batch records from all levels.

    ``readers`` is how many batches can be read at the same time, each with ``threads`` threads.
    With the device "cpu" the device cache lives in host memory. ``shared`` caches in host memory
    are those of all processes of this machine that have the same store.
    """

    def __init__(
        self,
        store: PackedStore,
        *,
        device: torch.device | str = "cpu",
        backend: Backend = "auto",
        threads: int | None = None,
        verify: bool = True,
        readers: int = 1,
        shared: bool = False,
    ) -> None:
        self.readers = readers
        section = store.rows.section("rows")
        self.row_shape: tuple[int, ...] = tuple(section.shape[1:])
        self.dtype: np.dtype[Any] = np.dtype(section.dtype)
        self.row_bytes = int(section.row_bytes)
        self._store = store
        self._device = torch.device(device)
        plan = store.plan
        self._how: dict[str, Any] = {"backend": backend, "verify": verify}
        # A cache that changes is nobody else's.
        self._shared = shared and plan.policy == "static"
        self._on_device = self._on_host = np.empty((0, *self.row_shape), self.dtype)
        self.cache_bytes = (len(plan.device_rows) + plan.num_host_slots) * self.row_bytes
        # Shared and private rows lie in one section and are read in one sweep.
        self._disks = [
            RowReader(
                store.rows,
                "rows",
                **self._how,
                max_gap_bytes=plan.max_gap_bytes,
                threads=_THREADS if threads is None else threads,
            )
            for _ in range(readers)
        ]
        self._idle: queue.SimpleQueue[RowReader] = queue.SimpleQueue()
        for disk in self._disks:
            self._idle.put(disk)
        self._lock = threading.Lock()
        self._device_rows: Tensor | None = None
        self._changes = plan.policy == "belady"
        self._filled, self._next = False, 0
        self._record_bytes = store.records.read("index")[:, 1]
        self.record_bytes = 0
        self.rows = dict.fromkeys(LEVELS, 0)
        self.reading = ReadStatistics()
        self.filling = ReadStatistics()

    @property
    def fill_patience_s(self) -> float:
        """Return the longest time that ``start`` may take on a disk that still works."""
        return self.cache_bytes / SLOWEST_BYTES_PER_S

    def start(self, batch: int) -> None:
        """Bring the caches into the state in which ``batch`` finds them.

        Static caches are filled once. A cache with a schedule is as the batches before this one
        leave it: it is filled as at the start, and what they admitted is read from the packed
        rows, unless the batches served last end where this one begins.
        """
        if not self._filled and self._device.type == "cpu":
            self._on_device = self._cached("device")
        elif not self._filled:
            self._fill_device(self._device)
        if self._changes and (not self._filled or batch < self._next):
            slots = self._store.plan.num_host_slots
            self._on_host, self._next = aligned_empty((slots, *self.row_shape), self.dtype), 0
        elif not self._filled:
            self._on_host = self._cached("host")
        self._filled = True
        if self._changes and batch > self._next:
            self._replay(range(self._next, batch))
        self._next = batch

    def _cached(self, section: str) -> Rows:
        """Read a cache into host memory, in one sequential pass, unless a process here has."""
        rows, cost = rows_in_memory(self._store.rows, section, shared=self._shared, **self._how)
        self.filling += cost
        return rows

    def _fill_device(self, device: torch.device) -> None:
        """Read the device's cache onto it, through a small buffer in host memory."""
        count = len(self._store.plan.device_rows)
        chunk_rows = max(1, _CHUNK_BYTES // max(1, self.row_bytes))
        chunk = aligned_empty((chunk_rows, *self.row_shape), self.dtype)
        staged = torch.from_numpy(chunk)
        self._device_rows = torch.empty((count, *self.row_shape), dtype=staged.dtype, device=device)
        with RowReader(self._store.rows, "device", **self._how) as reader:
            for start in range(0, count, chunk_rows):
                part = self._device_rows[start : start + chunk_rows]
                self.filling += reader.read_runs([start], [len(part)], [0], chunk)
                part.copy_(staged[: len(part)])

    def record(self, number: int) -> BatchRecord:
        """Read the record of a batch."""
        with self._lock:  # several may be read at the same time
            self.record_bytes += int(self._record_bytes[number])
        return self._store.record(number)

    def read_cold(self, record: BatchRecord, out: Rows) -> ReadStatistics:
        """Read the rows of the two disk levels into their places in ``out``."""
        served = record.num_cold + len(record.host_slots) + len(record.device_slots)
        if served != len(record.node_ids):
            raise DataError(
                f"the record of batch {record.number} places {served} rows for "
                f"{len(record.node_ids)} nodes",
                hint="pack the store again",
            )
        disk = self._idle.get()
        try:
            reading = disk.read_runs(
                record.run_starts, record.run_counts, record.run_destinations, out
            )
        finally:
            self._idle.put(disk)
        with self._lock:  # several batches may be read at the same time
            self.reading += reading
            self.rows["private"] += record.num_private
            self.rows["shared"] += record.num_cold - record.num_private
        return reading

    def gather_cached(self, record: BatchRecord, out: Rows) -> None:
        """Copy the rows of the caches in host memory; then let the batch's admissions in.

        Call it batch by batch, after ``read_cold`` of the same batch, in the planned order where
        the plan is a schedule.
        """
        if self._changes and record.number != self._next:
            raise ConfigurationError(
                f"the cache is ready for batch {self._next}, got batch {record.number}",
                hint="a Belady plan holds for the planned order: call start() to go elsewhere",
            )
        places = record.host_destinations
        gather_rows(self._on_host, record.host_slots, out, destinations=places)
        if self._device_rows is None:
            places = record.device_destinations
            gather_rows(self._on_device, record.device_slots, out, destinations=places)
        self.rows["host"] += len(record.host_slots)
        self.rows["device"] += len(record.device_slots)
        if self._changes:
            places = record.admitted_slots
            gather_rows(out, record.admitted_rows, self._on_host, destinations=places)
            self._next = record.number + 1

    def fill_device(self, record: BatchRecord, x: Tensor) -> None:
        """Copy the rows of the cache on the device into ``x`` on the device, on its stream."""
        if self._device_rows is None or not len(record.device_slots):
            return
        slots = torch.from_numpy(record.device_slots).to(self._device, non_blocking=True)
        places = torch.from_numpy(record.device_destinations).to(self._device, non_blocking=True)
        x.index_copy_(0, places, self._device_rows.index_select(0, slots))

    def close(self) -> None:
        """Close the reading engines; a second call does nothing."""
        for disk in self._disks:
            disk.close()

    def _replay(self, batches: range) -> None:
        """Read the rows that these batches leave in the host cache, each once."""
        owner = np.full(len(self._on_host), -1, np.int64)
        for record in map(self.record, batches):
            storage = np.full(len(record.node_ids), -1, np.int64)
            storage[record.cold_destinations] = record.cold_rows
            admitted = storage[record.admitted_rows]
            if np.any(admitted < 0):
                raise DataError(
                    f"batch {record.number} admits a row that it does not read from disk",
                    hint="pack the store again",
                )
            owner[record.admitted_slots] = admitted
        slots = np.flatnonzero(owner >= 0)
        slots = slots[np.argsort(owner[slots], kind="stable")]
        if len(slots):
            self.filling += self._disks[0].read_rows(
                owner[slots], self._on_host, destinations=slots
            )
