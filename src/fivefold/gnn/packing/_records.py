"""What is written before and beside the rows: where they will lie, and the records of the batches.

Layouts hold ``order``, the node id of each packed row, and for each batch its places, the rows of
its segment that it reads. Records are made of the places, not of the rows, so that rows are moved
in the same time. A killed run goes on with the segment under way, or after the last mark.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import DataError, InfeasibleError
from fivefold.gnn.data.parts import Progress
from fivefold.gnn.packing.record import build_record, encode_record
from fivefold.gnn.planning import Plan
from fivefold.gnn.planning.geometry import (
    DENSE_SHARE,
    RECORD_WRITER_BYTES,
    recording_bytes,
    recording_threads,
)
from fivefold.gnn.planning.id_sets import IdSet, SortedIds, is_dense, set_of
from fivefold.gnn.sampling import SampleFile
from fivefold.gnn.sampling.batches import SampledBatch
from fivefold.gnn.storage import Container, ContainerWriter
from fivefold.gnn.storage.pages import PAGE_BYTES, Bytes, Ids
from fivefold.gnn.storage.parallel import in_threads
from fivefold.units import format_bytes

KIND_LAYOUTS = "packing-layouts"
# Measured: ids, places and what the layout keeps while it sorts, for each batch and cold node.
_BYTES_PER_COLD_ENTRY = 28
_THREADS = 2
_COLD = -1
_PLACED_AT_ONCE = 1 << 20  # whole arrays of a large cache's ids would take gigabytes for a moment


class SlotTracker:
    """The contents of a plan's two caches, before the first batch and then after each.

    Static caches never change; under Belady's policy the host cache changes after each batch.
    Slots are numbered over both caches: device slots first, host slot s is ``num_device + s``. The
    ids that are ever cached are kept as bits when these take no more than ``dense_bytes``.
    """

    def __init__(self, plan: Plan, *, num_nodes: int, dense_bytes: int) -> None:
        self._schedule = plan.cache_schedule
        device, host = plan.device_rows, plan.host_rows
        cached = [device, host]
        if self._schedule is not None:
            cached.append(self._schedule.admitted_rows)
        self._ids = set_of(cached, num_nodes, most_bytes=dense_bytes)
        # The last entry is that of place -1, where ids are that are never cached.
        self._slot = np.full(len(self._ids) + 1, _COLD, np.int32)
        self.num_device = len(device)
        for first, rows in ((0, device), (len(device), host)):
            for start in range(0, len(rows), _PLACED_AT_ONCE):
                part = rows[start : start + _PLACED_AT_ONCE]
                slots = np.arange(first + start, first + start + len(part), dtype=np.int32)
                self._slot[self._ids.locate(part)] = slots
        num_changing = 0 if self._schedule is None else plan.num_host_slots
        self._content = np.full(num_changing, _COLD, np.int64)
        self._content[: len(host)] = host[:num_changing]

    def slots(self, node_ids: Ids) -> NDArray[np.int32]:
        """Return the slot of each node, -1 where it is in no cache; several threads may ask."""
        found: NDArray[np.int32] = self._slot[self._ids.locate(node_ids)]
        return found

    def advance(self, batch: int) -> None:
        """Let in what the plan admits after this batch; static caches stay as they are."""
        if self._schedule is None:
            return
        node_ids, host_slots = self._schedule.admissions(batch)
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
    ids = np.uint32 if samples.num_nodes < 2**32 else np.int64
    sections = {
        "places": (np.uint32, (None,)),
        "order": (ids, (int(plan.segment_rows[-1]),)),
        "index": (np.int64, (samples.num_batches, 3)),  # first place, how many, how many private
    }
    with ContainerWriter(
        path, kind=KIND_LAYOUTS, sections=sections, attributes=attributes, resume=True
    ) as writer:
        caches = dataclasses.replace(plan.caches, most_set_bytes=memory_bytes // DENSE_SHARE)
        held_bytes = caches.prepare()

        def ask(batch: int) -> Ids:
            return caches.cold_ids(batch, samples.node_ids(batch))

        done = writer.progress or {"segments": 0, "places": 0, "rows": 0}
        places, row = done["places"], done["rows"]
        for number in range(done["segments"], len(plan.segments)):
            first, stop = plan.segments[number]
            layout = plan.lay_out(_cold_ids(ask, range(first, stop), held_bytes, memory_bytes))
            uses = np.zeros(len(layout.order), np.int32)
            for rows in layout.rows:
                uses[rows] += 1
            for batch, rows in enumerate(layout.rows, start=first):
                private = int(np.count_nonzero(uses[rows] == 1))
                writer.append("places", rows.astype(np.uint32))
                writer.write("index", batch, np.array([[places, len(rows), private]], np.int64))
                places += len(rows)
            if row + len(layout.order) != plan.segment_rows[number + 1]:
                message = f"segment {number} has other rows than the plan says"
                raise DataError(message, hint="make the plan again from these samples")
            writer.write("order", row, layout.order.astype(ids))
            row += len(layout.order)
            writer.mark({"segments": number + 1, "places": places, "rows": row})
            progress("layouts", stop, samples.num_batches)
        return writer.commit()


def _cold_ids(
    ask: Callable[[int], Ids], segment: range, held_bytes: int, memory_bytes: int
) -> list[Ids]:
    """Return the cold ids of a segment's batches, each ascending; ``held_bytes`` are taken."""
    found: list[Ids] = []
    asking = [partial(ask, batch) for batch in segment]
    for ids in in_threads(asking, threads=_THREADS):
        found.append(ids)
        needed = _BYTES_PER_COLD_ENTRY * sum(map(len, found))
        if held_bytes + needed > memory_bytes:
            total = format_bytes(held_bytes + needed * len(segment) / len(found))
            raise InfeasibleError(
                f"laying out the segment of batches {segment[0]} to {segment[-1]} takes about "
                f"{total} of memory, more than memory_bytes={memory_bytes}",
                hint="give packing more memory, or plan with smaller segments (segment_batches)",
            )
    return found


def places_of(layouts: Container, batch: int) -> tuple[Ids, int]:
    """Return the segment's rows that a batch reads, ascending, and how many no other reads."""
    start, count, private = layouts.read("index", batch, batch + 1)[0].tolist()
    return layouts.read("places", start, start + count).astype(np.int64), private


KIND_RECORDS = "packed-records"
_MARK_BYTES = 64 << 20  # a mark waits for the disk; this much is redone after a kill
_NONE = np.empty(0, np.int64)

_Call = Callable[[], tuple[Bytes, int, int]]


class Recorder:
    """Make the records of a plan's batches."""

    def __init__(
        self, samples: SampleFile, plan: Plan, layouts: Container, *, memory_bytes: int
    ) -> None:
        self._samples, self._plan, self._layouts = samples, plan, layouts
        self._dense_bytes = memory_bytes // DENSE_SHARE
        own_bytes = recording_bytes(
            samples,
            plan.caches,
            segment_rows=int(np.diff(plan.segment_rows).max(initial=0)),
            memory_bytes=memory_bytes,
        )
        self.needed_bytes = own_bytes + RECORD_WRITER_BYTES
        if own_bytes > memory_bytes:
            raise InfeasibleError(
                f"making the records of the batches takes {format_bytes(own_bytes)} of memory, "
                f"more than memory_bytes={memory_bytes}",
                hint="give packing more memory, or sample smaller batches",
            )

    def write(self, path: Path, *, attributes: dict[str, Any], progress: Progress) -> Container:
        """Write the records; what an earlier run has done is kept."""
        num_batches = self._samples.num_batches
        train_ids = self._samples.train_ids
        sections = {
            "data": (np.uint8, (None,)),
            "index": (np.int64, (num_batches, 4)),  # place and bytes of the record, nodes, edges
            "train_ids": (np.int64, (len(train_ids),)),
        }
        with ContainerWriter(
            path, kind=KIND_RECORDS, sections=sections, attributes=attributes, resume=True
        ) as writer:
            writer.write("train_ids", 0, train_ids)
            done = writer.progress or {"batches": 0, "bytes": 0}
            place = marked = done["bytes"]
            for batch, (block, nodes, edges) in enumerate(
                in_threads(self._calls(done["batches"]), threads=recording_threads()),
                start=done["batches"],
            ):
                writer.append("data", block)
                entry = np.array([[place, len(block), nodes, edges]], np.int64)
                writer.write("index", batch, entry)
                place += len(block)
                if place - marked >= _MARK_BYTES:
                    writer.mark({"batches": batch + 1, "bytes": place})
                    marked = place
                progress("records", batch + 1, num_batches)
            return writer.commit()

    def _calls(self, first: int) -> Iterator[_Call]:
        """Yield a call for each batch; what they find in the caches is asked here, in order."""
        tracker = SlotTracker(
            self._plan, num_nodes=self._samples.num_nodes, dense_bytes=self._dense_bytes
        )
        for batch in range(first):
            tracker.advance(batch)
        for segment, (start, stop) in enumerate(self._plan.segments):
            if stop <= first:
                continue
            begin, end = self._plan.segment_rows[segment : segment + 2].tolist()
            order = self._layouts.read("order", begin, end)
            for batch in range(max(start, first), stop):
                sampled = self._samples.batch(batch)
                slots = tracker.slots(sampled.node_ids)
                tracker.advance(batch)
                rows, private = places_of(self._layouts, batch)
                yield partial(
                    self._make, sampled, slots,
                    num_device=tracker.num_device, stored=order[rows], cold_rows=begin + rows,
                    num_private=private,
                )  # fmt: skip

    def _make(
        self,
        sampled: SampledBatch,
        slots: NDArray[np.int32],
        *,
        stored: NDArray[np.integer],
        **known: Any,
    ) -> tuple[Bytes, int, int]:
        """Return the bytes of a batch's record, its nodes and its edges; in several threads."""
        schedule = self._plan.cache_schedule
        place_of = places_in(sampled.node_ids, self._samples.num_nodes)
        entering, into = (_NONE, _NONE) if schedule is None else schedule.admissions(sampled.number)
        admitted = place_of(entering)
        cold = place_of(stored)
        belongs = (cold >= 0).all() and (admitted >= 0).all() and (slots[cold] < 0).all()
        if not belongs or len(cold) != np.count_nonzero(slots < 0):
            message = f"the plan's layout does not hold the cold nodes of batch {sampled.number}"
            raise DataError(message, hint="make the plan again from these samples")
        record = build_record(sampled, slots=slots, cold=cold, admitted=(admitted, into), **known)
        block = encode_record(record)
        padded = np.zeros(-(-len(block) // PAGE_BYTES) * PAGE_BYTES, np.uint8)
        padded[: len(block)] = block
        return padded, len(record.node_ids), len(record.sources)


def places_in(node_ids: Ids, num_nodes: int) -> Callable[[NDArray[np.integer]], Ids]:
    """Return what gives the place of each node within a batch of distinct ones; -1 for others."""
    dense = is_dense(len(node_ids), num_nodes)
    members = IdSet(num_nodes, node_ids) if dense else SortedIds(node_ids)
    by_id = np.full(len(node_ids) + 1, -1, np.int64)  # the last is that of place -1
    by_id[members.locate(node_ids)] = np.arange(len(node_ids))
    return lambda ids: by_id[members.locate(ids)]
