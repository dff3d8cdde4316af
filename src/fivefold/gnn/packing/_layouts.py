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
from fivefold.gnn.packing._slots import SlotTracker
from fivefold.gnn.planning import Plan, SegmentLayout, sort_distinct
from fivefold.gnn.sampling import SampleFile
from fivefold.gnn.storage import Container, ContainerWriter
from fivefold.units import format_bytes

KIND_LAYOUTS = "packing-layouts"
# Measured: ids, places and what a layout keeps while it sorts, for each batch and cold node.
_BYTES_PER_COLD_ENTRY = {"gray": 28, "folded": 28, "packed": 38, "minhash": 42, "popularity": 42}
_THREADS = 2


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
