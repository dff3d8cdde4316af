"""The first step of packing: which rows each batch needs from disk, and in which order they lie.

Segment by segment: find each batch's cold nodes and lay the segment out. The file holds ``order``,
the node id of each packed row, and for each batch its places, the rows of its segment that it
reads. From the order rows can be moved and from the places records can be made, both at once.
Memory is that of one segment; a killed run goes on with the segment that was under way.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import DataError, InfeasibleError
from fivefold.gnn.packing._overlap import Progress, in_threads
from fivefold.gnn.planning import IdSet, Plan, SegmentLayout, SortedIds, sort_distinct
from fivefold.gnn.sampling import SampleFile
from fivefold.gnn.storage import Container, ContainerWriter
from fivefold.units import format_bytes

KIND_LAYOUTS = "packing-layouts"
# Measured: ids, places and what a layout keeps while it sorts, for each batch and cold node.
_BYTES_PER_COLD_ENTRY = {"gray": 28, "folded": 28, "packed": 38, "minhash": 42, "popularity": 42}
_THREADS = 2
_COLD = -1


class SlotTracker:
    """The contents of a plan's two caches, before the first batch and then after each.

    Static caches never change; under Belady's policy the host cache changes after each batch.
    Slots are numbered over both caches: device slots first, host slot s is ``num_device + s``. The
    ids that are ever cached are kept as bits when these take no more than ``dense_bytes``.
    """

    def __init__(self, plan: Plan, *, num_nodes: int, dense_bytes: int) -> None:
        self._schedule = plan.cache_schedule
        device, host = plan.device_rows, plan.host_rows
        later = host[:0] if self._schedule is None else self._schedule.admitted_rows
        cached = np.concatenate([device, host, later]).astype(np.int64)
        fits = IdSet.bytes_for(num_nodes) <= dense_bytes
        self._ids = IdSet(num_nodes, cached) if fits else SortedIds(cached)
        # The last entry is that of place -1, where ids are that are never cached.
        self._slot = np.full(len(self._ids) + 1, _COLD, np.int32)
        self._content = np.full(plan.num_host_slots, _COLD, np.int64)
        self.num_device = len(device)
        self._slot[self._ids.locate(device)] = np.arange(len(device))
        self._admit(host, np.arange(len(host)))

    @property
    def nbytes(self) -> int:
        """Memory that the tables take."""
        return self._slot.nbytes + self._content.nbytes + self._ids.nbytes

    def slots(self, node_ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the slot of each node, -1 where it is in no cache; several threads may ask."""
        found: NDArray[np.int32] = self._slot[self._ids.locate(node_ids)]
        return found

    def advance(self, batch: int) -> None:
        """Let in what the plan admits after this batch; static caches stay as they are."""
        if self._schedule is not None:
            self._admit(*self._schedule.admissions(batch))

    def _admit(self, node_ids: NDArray[np.int64], host_slots: NDArray[np.integer]) -> None:
        """Put nodes into host slots; what was there is cold from now on."""
        evicted = self._content[host_slots]
        self._slot[self._ids.locate(evicted[evicted >= 0])] = _COLD
        self._content[host_slots] = node_ids
        self._slot[self._ids.locate(node_ids)] = self.num_device + host_slots


def write_layouts(
    path: Path,
    samples: SampleFile,
    plan: Plan,
    *,
    memory_bytes: int,
    attributes: dict[str, Any],
    progress: Progress,
) -> Container:
    """Lay all segments out; what an earlier run has done is kept."""
    num_batches = samples.num_batches
    ids = np.uint32 if samples.num_nodes < 2**32 else np.int64
    sections = {
        "places": (np.uint32, (None,)),
        "order": (ids, (int(plan.segment_rows[-1]),)),
        "index": (np.int64, (num_batches, 3)),  # where its places begin, how many, how many private
    }
    with ContainerWriter(
        path, kind=KIND_LAYOUTS, sections=sections, attributes=attributes, resume=True
    ) as writer:
        done = writer.progress or {"segments": 0, "places": 0, "rows": 0}
        work = _Work(samples, plan, writer, memory_bytes=memory_bytes, done=done)
        for number in range(done["segments"], len(plan.segments)):
            work.add_segment(number)
            writer.mark({"segments": number + 1, **work.done})
            progress("layouts", plan.segments[number][1], num_batches)
        return writer.commit()


def places_of(layouts: Container, batch: int) -> tuple[NDArray[np.int64], int]:
    """Return the segment's rows that a batch reads, ascending, and how many no other reads."""
    start, count, private = layouts.read("index", batch, batch + 1)[0].tolist()
    return layouts.read("places", start, start + count).astype(np.int64), private


class _Work:
    """Lay out one segment after the other."""

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
        self._ids = np.uint32 if samples.num_nodes < 2**32 else np.int64
        self._tracker = SlotTracker(
            plan, num_nodes=samples.num_nodes, dense_bytes=memory_bytes // 8
        )
        self._memory_bytes = memory_bytes - self._tracker.nbytes
        self._places, self._rows = done["places"], done["rows"]
        for segment in plan.segments[: done["segments"]]:
            for batch in range(*segment):
                self._tracker.advance(batch)

    @property
    def done(self) -> dict[str, int]:
        """Places and packed rows so far."""
        return {"places": self._places, "rows": self._rows}

    def add_segment(self, number: int) -> None:
        """Lay one segment out."""
        first, stop = self._plan.segments[number]
        layout = self._plan.lay_out(number, self._cold_ids(first, stop))
        if self._rows + len(layout.order) != self._plan.segment_rows[number + 1]:
            message = f"segment {number} has other rows than the plan says"
            raise DataError(message, hint="make the plan again from these samples")
        self._write_places(first, layout)
        self._writer.write("order", self._rows, layout.order.astype(self._ids))
        self._rows += len(layout.order)

    def _write_places(self, first: int, layout: SegmentLayout) -> None:
        uses = np.zeros(len(layout.order), np.int32)
        for rows in layout.rows:
            uses[rows] += 1
        for batch, rows in enumerate(layout.rows, start=first):
            private = int(np.count_nonzero(uses[rows] == 1))
            entry = np.array([[self._places, len(rows), private]], np.int64)
            self._writer.append("places", rows.astype(np.uint32))
            self._writer.write("index", batch, entry)
            self._places += len(rows)

    def _cold_ids(self, first: int, stop: int) -> list[NDArray[np.int64]]:
        """Return the cold ids of the segment's batches, each ascending."""
        found: list[NDArray[np.int64]] = []
        # What a batch finds in a cache that moves depends on the batch before it.
        threads = _THREADS if self._plan.cache_schedule is None else 1
        asking = [partial(self._ask, batch) for batch in range(first, stop)]
        for ids in in_threads(asking, threads=threads):
            found.append(ids)
            self._check_memory(found, first, stop)
        return found

    def _ask(self, batch: int) -> NDArray[np.int64]:
        """Return a batch's cold ids in order, and let the cache move on."""
        node_ids = self._samples.node_ids(batch)
        cold = node_ids[self._tracker.slots(node_ids) < 0]
        self._tracker.advance(batch)
        return sort_distinct(cold, self._samples.num_nodes)

    def _check_memory(self, cold_ids: list[NDArray[np.int64]], first: int, stop: int) -> None:
        needed = _BYTES_PER_COLD_ENTRY[self._plan.layout] * sum(map(len, cold_ids))
        if needed > self._memory_bytes:
            total = format_bytes(needed * (stop - first) / len(cold_ids) + self._tracker.nbytes)
            raise InfeasibleError(
                f"laying out the segment of batches {first} to {stop - 1} takes about {total} "
                f"of memory, more than memory_bytes={self._memory_bytes + self._tracker.nbytes}",
                hint="give packing more memory, or plan with smaller segments (segment_batches)",
            )
