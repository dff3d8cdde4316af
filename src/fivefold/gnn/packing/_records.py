"""The first half of packing: records of all batches, and which node each packed row holds.

Segment by segment: find each batch's cold nodes, lay the segment out, renumber its batches and
append their records. One file holds the records (page-aligned), their index and ``order``, the
node id of each packed row. Memory is that of one segment; a killed run goes on with the segment
that was under way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import DataError, InfeasibleError
from fivefold.gnn.packing._levels import LocalNumbers, SlotTracker
from fivefold.gnn.packing._overlap import in_threads
from fivefold.gnn.packing._record import BatchRecord, build_record, encode_record
from fivefold.gnn.planning import Plan, segment_layout, sort_distinct
from fivefold.gnn.sampling import SampleFile
from fivefold.gnn.storage import Container, ContainerWriter
from fivefold.units import format_bytes

__all__ = ["KIND_RECORDS", "caches_of", "write_records"]

KIND_RECORDS = "packed-records"
_PAGE_BYTES = 4096
# Measured: ids, places and what a layout keeps while it sorts, for each batch and cold node.
_BYTES_PER_COLD_ENTRY = {"gray": 28, "folded": 28, "packed": 38, "minhash": 42, "popularity": 42}
_BYTES_PER_NODE = 96  # of each batch whose record is being built
_THREADS = 2
_NONE = np.empty(0, np.int64)

Progress = Callable[[str, int, int], None]


def write_records(
    path: Path,
    samples: SampleFile,
    plan: Plan,
    *,
    memory_bytes: int,
    attributes: dict[str, Any],
    progress: Progress,
) -> Container:
    """Write the records of all batches; what an earlier run has done is kept.

    Args:
        path: File to write.
        samples: The sampled batches.
        plan: Caches, segments and layout.
        memory_bytes: What the caches' tables and one segment may take.
        attributes: Fingerprints of what the records are made from.
        progress: Called with a stage, what is done and what there is in all.

    Raises:
        InfeasibleError: One segment needs more memory.
        DataError: The plan does not fit the samples.
    """
    num_batches = samples.num_batches
    ids = np.uint32 if samples.num_nodes < 2**32 else np.int64
    sections = {
        "data": (np.uint8, (None,)),
        "order": (ids, (int(plan.segment_rows[-1]),)),
        "index": (np.int64, (num_batches, 4)),  # place and bytes of the record, nodes, edges
        "train_ids": (np.int64, (len(samples.train_ids),)),
    }
    with ContainerWriter(
        path, kind=KIND_RECORDS, sections=sections, attributes=attributes, resume=True
    ) as writer:
        writer.write("train_ids", 0, samples.train_ids)
        done = writer.progress or {"segments": 0, "bytes": 0, "rows": 0}
        recorder = _Recorder(samples, plan, writer, memory_bytes=memory_bytes, done=done)
        for number in range(done["segments"], len(plan.segments)):
            recorder.add_segment(number)
            writer.mark({"segments": number + 1, **recorder.done})
            progress("records", plan.segments[number][1], num_batches)
        return writer.commit()


def caches_of(plan: Plan) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Node ids of the device cache and of the host cache at the start, in slot order."""
    return np.asarray(plan.device_rows, np.int64), np.asarray(plan.host_rows, np.int64)


class _Recorder:
    """Appends the records of one segment after the other."""

    def __init__(
        self,
        samples: SampleFile,
        plan: Plan,
        writer: ContainerWriter,
        *,
        memory_bytes: int,
        done: dict[str, int],
    ) -> None:
        self._samples, self._plan, self._writer = samples, plan, writer
        self._schedule = plan.cache_schedule
        later = np.empty(0, np.int64) if self._schedule is None else self._schedule.admitted_rows
        device, host = caches_of(plan)
        self._tracker = SlotTracker(
            device,
            host,
            num_nodes=samples.num_nodes,
            later_rows=later,
            dense_bytes=memory_bytes // 8,
        )
        self._numbers = SimpleQueue[LocalNumbers]()  # a table for each thread
        self._memory_bytes = memory_bytes - self._tracker.nbytes
        for _ in range(_THREADS):
            table = LocalNumbers(samples.num_nodes, dense_bytes=memory_bytes // 8)
            self._numbers.put(table)
            self._memory_bytes -= table.nbytes
        self._bytes, self._rows = done["bytes"], done["rows"]
        for segment in plan.segments[: done["segments"]]:
            for batch in range(*segment):
                self._advance(batch)

    @property
    def done(self) -> dict[str, int]:
        """Bytes of records and packed rows so far."""
        return {"bytes": self._bytes, "rows": self._rows}

    def add_segment(self, number: int) -> None:
        """Lay one segment out and write its records.

        Raises:
            DataError: It has other rows than the plan says.
            InfeasibleError: It needs more memory.
        """
        first, stop = self._plan.segments[number]
        slots, cold_ids = self._classify(first, stop)
        layout = segment_layout(
            cold_ids,
            layout=self._plan.layout,
            minhash_functions=self._plan.minhash_functions,
            first_batch=first,
            num_batches=self._plan.num_batches,
        )
        if self._rows + len(layout.order) != self._plan.segment_rows[number + 1]:
            message = f"segment {number} has other rows than the plan says"
            raise DataError(message, hint="make the plan again from these samples")
        uses = np.zeros(len(layout.order), np.int32)
        for rows in layout.rows:
            uses[rows] += 1
        making = [
            partial(self._make, first + place, slots[place], layout.order, rows, uses)
            for place, rows in enumerate(layout.rows)
        ]
        for place, made in enumerate(in_threads(making, threads=_THREADS)):
            self._append(first + place, *made)
        order_type = np.uint32 if self._samples.num_nodes < 2**32 else np.int64
        self._writer.write("order", self._rows, layout.order.astype(order_type))
        self._rows += len(layout.order)

    def _classify(
        self, first: int, stop: int
    ) -> tuple[list[NDArray[np.int32]], list[NDArray[np.int64]]]:
        """Slots of all nodes of the segment's batches, and their cold ids, ascending."""
        slots, cold_ids = [], []
        # What a batch finds in a cache that moves depends on the batch before it.
        threads = _THREADS if self._schedule is None else 1
        asking = [partial(self._ask, batch) for batch in range(first, stop)]
        for found, cold in in_threads(asking, threads=threads):
            slots.append(found)
            cold_ids.append(cold)
            self._check_memory(slots, cold_ids, first, stop)
        return slots, cold_ids

    def _ask(self, batch: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Slots of a batch's nodes, and its cold ids in order; then the cache moves on."""
        node_ids = self._samples.node_ids(batch)
        slots = self._tracker.slots(node_ids)
        self._advance(batch)
        return slots, sort_distinct(node_ids[slots < 0], self._samples.num_nodes)

    def _check_memory(
        self,
        slots: list[NDArray[np.int32]],
        cold_ids: list[NDArray[np.int64]],
        first: int,
        stop: int,
    ) -> None:
        needed = _BYTES_PER_COLD_ENTRY[self._plan.layout] * sum(map(len, cold_ids))
        needed += 4 * sum(map(len, slots)) + _THREADS * _BYTES_PER_NODE * max(map(len, slots))
        if needed > self._memory_bytes:
            total = format_bytes(needed * (stop - first) / len(slots) + self._tracker.nbytes)
            raise InfeasibleError(
                f"laying out the segment of batches {first} to {stop - 1} takes about {total} "
                f"of memory, more than memory_bytes={self._memory_bytes + self._tracker.nbytes}",
                hint="give packing more memory, or plan with smaller segments (segment_batches)",
            )

    def _advance(self, batch: int) -> None:
        if self._schedule is not None:
            self._tracker.admit(*self._schedule.admissions(batch))

    def _make(
        self,
        batch: int,
        slots: NDArray[np.int32],
        order: NDArray[np.int64],
        rows: NDArray[np.int64],
        uses: NDArray[np.int32],
    ) -> tuple[NDArray[np.uint8], int, int]:
        """The bytes of a batch's record, its nodes and its edges; several threads do this."""
        numbers = self._numbers.get()
        try:
            record = self._record(batch, slots, order[rows], numbers, rows, uses)
        finally:
            self._numbers.put(numbers)
        block = encode_record(record)
        padded = np.zeros(-(-len(block) // _PAGE_BYTES) * _PAGE_BYTES, np.uint8)
        padded[: len(block)] = block
        return padded, len(record.node_ids), len(record.sources)

    def _record(
        self,
        batch: int,
        slots: NDArray[np.int32],
        stored: NDArray[np.int64],
        numbers: LocalNumbers,
        rows: NDArray[np.int64],
        uses: NDArray[np.int32],
    ) -> BatchRecord:
        sampled = self._samples.batch(batch)
        numbers.begin(sampled.node_ids)
        try:
            cold = numbers.of(stored)
        except KeyError:
            cold = _NONE
        if len(cold) != np.count_nonzero(slots < 0) or (slots[cold] >= 0).any():
            message = f"the plan's layout does not hold the cold nodes of batch {batch}"
            raise DataError(message, hint="make the plan again from these samples")
        enters = (_NONE, _NONE) if self._schedule is None else self._schedule.admissions(batch)
        return build_record(
            sampled,
            slots=slots,
            num_device=self._tracker.num_device,
            cold=cold,
            cold_rows=self._rows + rows,
            num_private=int(np.count_nonzero(uses[rows] == 1)),
            admitted=(numbers.of(enters[0]), enters[1]),
        )

    def _append(self, batch: int, block: NDArray[np.uint8], nodes: int, edges: int) -> None:
        self._writer.append("data", block)
        entry = [self._bytes, len(block), nodes, edges]
        self._writer.write("index", batch, np.array([entry], np.int64))
        self._bytes += len(block)
