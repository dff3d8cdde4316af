"""Batch records: all that training needs to know of one mini-batch, besides the feature rows.

Nodes are renumbered: seeds first, then rows in the two caches by slot, then cold rows as they lie
on disk. So what is read lands in its place, and edges are permuted here instead of features in each
epoch. Legend: n nodes, b seeds, m expanded nodes, e edges, H hops, k runs of cold rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import DataError
from fivefold.gnn.planning.id_sets import argsort_distinct
from fivefold.gnn.planning.layout import runs_of
from fivefold.gnn.sampling.batches import SampledBatch
from fivefold.gnn.storage.pages import Bytes, Ids

_NONE = np.empty(0, np.int64)
_NUM_FIELDS = 20
_ASCENDING = frozenset({10, 13, 14, 16})  # slots of both caches, starts of runs, seeds among rows

_MAGIC = 0x5246_4542_4C4F_4635  # "5FOLBEFR": says that this is a record and its byte order
_WIDTHS = (1, 2, 4, 8)
_DIFFERENCES = 16  # flag beside the width
_HEADER_WORDS = 3  # magic, total bytes, number of arrays
_FIELD_WORDS = 3  # count, code, first value
_ALIGNMENT = 8
_HINT = "the file was damaged after it was written; pack the store again"


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchRecord:
    """One mini-batch in its final local order; ``x[i]`` is the row of ``node_ids[i]``."""

    number: int
    batch_size: int
    num_private: int
    node_ids: Ids
    nodes_per_hop: Ids
    edges_per_hop: Ids
    expanded: NDArray[np.int32]
    degrees: NDArray[np.int32]
    sources: NDArray[np.int32]
    edge_ids: Ids | None
    device_slots: Ids
    device_destinations: Ids
    host_slots: Ids
    host_destinations: Ids
    run_starts: Ids
    run_counts: Ids
    run_destinations: Ids
    admitted_rows: Ids
    admitted_slots: Ids

    @property
    def num_cold(self) -> int:
        """Rows that come from disk."""
        return int(self.run_counts.sum())

    @cached_property
    def cold_rows(self) -> Ids:
        """int64[num_cold], ascending rows of the section of packed rows."""
        return _expand(self.run_starts, self.run_counts)

    @cached_property
    def cold_destinations(self) -> Ids:
        """int64[num_cold], the local row that each cold row fills."""
        return _expand(self.run_destinations, self.run_counts)

    def edge_index(self) -> Ids:
        """Return int64[2, e]: local source over local target of each edge."""
        edges = np.empty((2, len(self.sources)), np.int64)
        edges[0] = self.sources
        edges[1] = np.repeat(self.expanded, self.degrees)
        return edges


def build_record(
    sampled: SampledBatch,
    *,
    slots: NDArray[np.integer],
    num_device: int,
    cold: Ids,
    cold_rows: Ids,
    num_private: int = 0,
    admitted: tuple[Ids, NDArray[np.integer]] = (_NONE, _NONE),
) -> BatchRecord:
    """Renumber one sampled batch."""
    seeds, n = sampled.batch_size, len(sampled.node_ids)
    cached = seeds + np.flatnonzero(slots[seeds:] >= 0)
    cached = cached[argsort_distinct(slots[cached], 1 + int(slots.max(initial=-1)))]
    old_of_new = np.concatenate([np.arange(seeds), cached, cold[cold >= seeds]])
    new_of_old = np.empty(n, np.int32)
    new_of_old[old_of_new] = np.arange(n, dtype=np.int32)
    in_order = slots[old_of_new[: seeds + len(cached)]]
    on_device = np.flatnonzero((in_order >= 0) & (in_order < num_device))
    on_host = np.flatnonzero(in_order >= num_device)
    runs = _runs(cold_rows, new_of_old[cold].astype(np.int64))
    edge_ids = sampled.edge_ids
    return BatchRecord(
        number=sampled.number,
        batch_size=seeds,
        num_private=num_private,
        node_ids=np.asarray(sampled.node_ids, np.int64)[old_of_new],
        nodes_per_hop=np.asarray(sampled.nodes_per_hop, np.int64),
        edges_per_hop=np.asarray(sampled.edges_per_hop, np.int64),
        expanded=new_of_old[: int(np.sum(sampled.nodes_per_hop[:-1]))],
        degrees=np.asarray(sampled.degrees, np.int32),
        sources=new_of_old[sampled.sources],
        edge_ids=None if edge_ids is None else np.asarray(edge_ids, np.int64),
        device_slots=in_order[on_device].astype(np.int64),
        device_destinations=on_device,
        host_slots=in_order[on_host].astype(np.int64) - num_device,
        host_destinations=on_host,
        run_starts=runs[0],
        run_counts=runs[1],
        run_destinations=runs[2],
        admitted_rows=new_of_old[admitted[0]].astype(np.int64),
        admitted_slots=np.asarray(admitted[1], np.int64),
    )


def encode_record(record: BatchRecord) -> Bytes:
    """Return the record's bytes; what follows from the order of the nodes is left out."""
    edge_ids = record.edge_ids
    facts = [record.number, record.batch_size, edge_ids is not None, record.num_private]
    cold, destinations = record.cold_rows, record.cold_destinations
    starts, counts = runs_of(cold)
    seeds_at = np.flatnonzero(destinations < record.batch_size)
    device = _split_seeds(record.device_slots, record.device_destinations, record.batch_size)
    host = _split_seeds(record.host_slots, record.host_destinations, record.batch_size)
    fields = [
        np.array(facts),
        record.nodes_per_hop,
        record.edges_per_hop,
        record.node_ids,
        record.expanded,
        record.degrees,
        record.sources,
        _NONE if edge_ids is None else edge_ids,
        *device,
        *host,
        starts,
        counts,
        seeds_at,
        destinations[seeds_at],
        record.admitted_rows,
        record.admitted_slots,
    ]
    return encode_arrays(fields, ascending=_ASCENDING)


def decode_record(block: Bytes, *, number: int) -> BatchRecord:
    """Read a record and put back what was left out."""
    fields = decode_arrays(block)
    if len(fields) != _NUM_FIELDS or int(fields[0][0]) != number:
        found = int(fields[0][0]) if len(fields) == _NUM_FIELDS else "no batch"
        hint = "the file was damaged or mixed with another; pack the store again"
        raise DataError(f"the record of batch {number} holds {found}", hint=hint)
    _, seeds, has_edge_ids, num_private = map(int, fields[0])
    wide = [field.astype(np.int64) for field in fields[8:]]
    device = _join_seeds(*wide[0:3], base=seeds)
    host = _join_seeds(*wide[3:6], base=seeds + len(wide[2]))
    runs = _place_runs(*wide[6:10], base=seeds + len(wide[2]) + len(wide[5]))
    return BatchRecord(
        number=number,
        batch_size=seeds,
        num_private=num_private,
        node_ids=fields[3].astype(np.int64),
        nodes_per_hop=fields[1].astype(np.int64),
        edges_per_hop=fields[2].astype(np.int64),
        expanded=fields[4].astype(np.int32),
        degrees=fields[5].astype(np.int32),
        sources=fields[6].astype(np.int32),
        edge_ids=fields[7].astype(np.int64) if has_edge_ids else None,
        device_slots=device[0],
        device_destinations=device[1],
        host_slots=host[0],
        host_destinations=host[1],
        run_starts=runs[0],
        run_counts=runs[1],
        run_destinations=runs[2],
        admitted_rows=wide[10],
        admitted_slots=wide[11],
    )


def _expand(starts: Ids, counts: Ids) -> Ids:
    """Return all numbers of the runs, one run after the other."""
    before = np.cumsum(counts) - counts
    numbers = np.arange(int(counts.sum()), dtype=np.int64)
    numbers += np.repeat(starts - before, counts)
    return numbers


def _runs(rows: Ids, destinations: Ids) -> tuple[Ids, Ids, Ids]:
    """Return the runs of ascending rows that are contiguous in the store and in the batch."""
    breaks = (np.diff(rows, prepend=-2) != 1) | (np.diff(destinations, prepend=-2) != 1)
    first = np.flatnonzero(breaks)
    return rows[first], np.diff(first, append=len(rows)), destinations[first]


def _split_seeds(slots: Ids, destinations: Ids, seeds: int) -> tuple[Ids, Ids, Ids]:
    """Return slots and places of the seeds, and the slots of the others."""
    among = int(np.count_nonzero(destinations < seeds))
    return slots[:among], destinations[:among], slots[among:]


def _join_seeds(seed_slots: Ids, seed_places: Ids, slots: Ids, *, base: int) -> tuple[Ids, Ids]:
    places = np.arange(base, base + len(slots), dtype=np.int64)
    return np.concatenate([seed_slots, slots]), np.concatenate([seed_places, places])


def _place_runs(
    starts: Ids, counts: Ids, seeds_at: Ids, seed_places: Ids, *, base: int
) -> tuple[Ids, Ids, Ids]:
    """Cut the runs at the seeds among them and say where each piece goes."""
    total = int(counts.sum())
    offsets = np.cumsum(counts) - counts
    cuts = np.unique(np.concatenate([offsets, seeds_at, seeds_at + 1]))
    cuts = cuts[cuts < total]
    run = np.searchsorted(offsets, cuts, side="right") - 1
    before = np.searchsorted(seeds_at, cuts)
    places = base + cuts - before
    is_seed = np.isin(cuts, seeds_at)
    places[is_seed] = seed_places[before[is_seed]]
    return starts[run] + cuts - offsets[run], np.diff(cuts, append=total), places


def encode_arrays(
    arrays: Sequence[NDArray[np.integer]], *, ascending: Collection[int] = ()
) -> Bytes:
    """Write arrays of non-negative integers into one block of bytes, a multiple of 8 long."""
    words = [_MAGIC, 0, len(arrays)]
    parts: list[Bytes] = []
    for number, array in enumerate(arrays):
        field, payload = _encode(array, differences=number in ascending and array.size > 1)
        words.extend(field)
        parts.append(payload)
    header_bytes = 8 * len(words)
    words[1] = header_bytes + sum(_padded(part.size) for part in parts)
    block = np.zeros(words[1], np.uint8)
    block[:header_bytes] = np.array(words, "<i8").view(np.uint8)
    place = header_bytes
    for part in parts:
        block[place : place + part.size] = part
        place += _padded(part.size)
    return block


def decode_arrays(block: Bytes) -> list[NDArray[np.integer]]:
    """Read what ``encode_arrays`` wrote; bytes behind its end are ignored."""
    total, count = _check_header(block)
    fields = block[24 : 24 + 24 * count].view("<i8").reshape(count, _FIELD_WORDS)
    place = 8 * (_HEADER_WORDS + _FIELD_WORDS * count)
    arrays: list[NDArray[np.integer]] = []
    for items, code, first in fields.tolist():
        width, differences = code & 15, code & _DIFFERENCES
        stored = max(items - 1, 0) if differences else items
        if width not in _WIDTHS or items < 0 or place + stored * width > total:
            raise DataError(f"a batch record is damaged: {items} items of code {code}", hint=_HINT)
        values = block[place : place + stored * width].view(f"<u{width}")
        arrays.append(_running_sum(values, items, first) if differences else values)
        place += _padded(stored * width)
    return arrays


def _check_header(block: Bytes) -> tuple[int, int]:
    if block.size < 8 * _HEADER_WORDS:
        raise DataError(f"a batch record of {block.size} bytes is cut short", hint=_HINT)
    magic, total, count = block[:24].view("<i8").tolist()
    if magic != _MAGIC or count < 0 or not 24 * (1 + count) <= total <= block.size:
        message = f"no batch record: mark {magic:#x}, {total} of {block.size} bytes"
        raise DataError(message, hint=_HINT)
    return total, count


def _encode(values: NDArray[np.integer], *, differences: bool) -> tuple[list[int], Bytes]:
    stored = np.diff(values) if differences else values
    assert stored.size == 0 or stored.min() >= 0, "records hold no negative numbers"
    width = _width(stored)
    first = int(values[0]) if values.size else 0
    payload = stored.astype(f"<u{width}").view(np.uint8)
    return [values.size, width | (_DIFFERENCES if differences else 0), first], payload


def _width(values: NDArray[np.integer]) -> int:
    largest = int(values.max()) if values.size else 0
    return next(width for width in _WIDTHS if largest < 1 << (8 * width))


def _running_sum(steps: NDArray[np.unsignedinteger], items: int, first: int) -> Ids:
    values = np.empty(items, np.int64)
    if items:
        values[0] = first
        values[1:] = steps
        np.cumsum(values, out=values)
    return values


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
