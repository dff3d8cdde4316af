"""In which order the cold rows of a segment lie on disk, and which of them each batch reads.

A segment is consecutive batches that share one stretch of the packed file, in which each row lies
once, ordered by which batches need it (see ``Refinement``). No file, no page. Reference: Gray, US
patent 2632058 (reflected binary code).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from fivefold._compiler import njit
from fivefold.gnn.planning.id_sets import sort_distinct, union_of
from fivefold.gnn.storage.pages import PAGE_BYTES, Array, Ids

BLOCK_BYTES = 1 << 20
_BLOCK_PAGES = BLOCK_BYTES // PAGE_BYTES
SIZE_CLASSES = _BLOCK_PAGES.bit_length()


def read_costs(starts: Array, counts: Array, *, row_bytes: int, gaps_bytes: Array) -> Ids:
    """Count requests and bytes of reading runs, for several gaps at once.

    Runs whose pages meet, or leave a gap of at most so many bytes, become one extent, which is read
    in requests of at most a block, as the row readers of ``fivefold.gnn.storage`` do it.

    Returns int64 [gaps, 9, 2]: (requests, bytes) of the requests of ``2**k`` to ``2**(k + 1) - 1``
    pages, k from 0 to 8 (a block of 1 MiB).
    """
    gap_pages = np.asarray(gaps_bytes, np.int64) // PAGE_BYTES
    costs = np.zeros((len(gap_pages), SIZE_CLASSES, 2), np.int64)
    starts, counts = np.asarray(starts, np.int64), np.asarray(counts, np.int64)
    _costs(starts, counts, row_bytes, gap_pages, costs)
    costs[..., 1] *= PAGE_BYTES
    return costs


def runs_of(rows: Ids) -> tuple[Ids, Ids]:
    """Return starts and counts of the runs of consecutive numbers in ascending distinct rows."""
    first = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    return rows[first], np.diff(first, append=len(rows))


@njit
def _costs(starts: Any, counts: Any, row_bytes: Any, gap_pages: Any, costs: Any) -> Any:
    # One walk over the runs for all gaps; open_first and open_stop are the extents being made.
    number = gap_pages.shape[0]
    open_first, open_stop = np.full(number, -1, np.int64), np.full(number, -1, np.int64)
    for run in range(starts.shape[0]):
        if counts[run] <= 0:
            continue
        begin = starts[run] * row_bytes // PAGE_BYTES
        end = ((starts[run] + counts[run]) * row_bytes + PAGE_BYTES - 1) // PAGE_BYTES
        for i in range(number):
            if open_stop[i] >= 0 and begin - open_stop[i] <= gap_pages[i]:
                open_stop[i] = max(open_stop[i], end)
                continue
            _add(costs[i], open_stop[i] - open_first[i])
            open_first[i], open_stop[i] = begin, end
    for i in range(number):
        _add(costs[i], open_stop[i] - open_first[i])


@njit
def _add(costs: Any, pages: Any) -> Any:
    """Count the requests of an extent: whole blocks, then the rest by its size."""
    blocks, rest = pages // _BLOCK_PAGES, pages % _BLOCK_PAGES
    costs[SIZE_CLASSES - 1, 0] += blocks
    costs[SIZE_CLASSES - 1, 1] += blocks * _BLOCK_PAGES
    if rest:
        size_class = 0
        while rest >> (size_class + 1):
            size_class += 1
        costs[size_class, 0] += 1
        costs[size_class, 1] += rest


@dataclasses.dataclass(frozen=True)
class SegmentLayout:
    """Storage order of the cold rows of one segment, and the rows of each of its batches."""

    order: Ids
    rows: list[Ids]

    def node_ids(self, batch: int) -> Ids:
        """Return the node ids of the rows that a batch of the segment reads, in storage order."""
        return self.order[self.rows[batch]]

    def runs(self, batch: int) -> tuple[Ids, Ids]:
        """Return starts and counts of the runs of rows that a batch of the segment reads."""
        return runs_of(self.rows[batch])


def segment_layout(cold_ids: Sequence[Ids]) -> SegmentLayout:
    """Lay out the cold rows of one segment, given the ascending cold ids of each of its batches."""
    batches = [np.ascontiguousarray(ids, np.int64) for ids in cold_ids]
    union = union_of(batches)
    refinement = Refinement(len(union))
    members = [union.locate(ids) for ids in batches]
    for member in members:
        refinement.split(member)
    places = refinement.positions()
    order = np.empty(len(union), np.int64)
    order[places] = union.ascending()
    return SegmentLayout(order, [sort_distinct(places[member], len(places)) for member in members])


class Refinement:
    """Order of a segment's rows: every batch splits each group of equal rows in two.

    Rows that the same batches need form a group. Batch after batch, each group is split into the
    rows that the batch needs and the rows that it does not, side by side. Groups of equal
    membership stay together whatever the number of batches, so no mask of a fixed width is needed,
    and the runs of a batch are never cut by a later one. On which side the needed part goes
    decides how many runs the batch has: it goes by the Gray-code rank of the membership mask whose
    most significant bit is the first batch. Appending a bit ``b`` to a mask of rank ``r`` gives
    rank ``2 r + ((r & 1) ^ b)``, so the needed part comes second in a group of even rank and first
    in one of odd rank, and a group has to remember one bit.
    """

    def __init__(self, num_rows: int) -> None:
        self._labels = np.zeros(num_rows, np.int32)  # group of each row; groups keep their number
        self._order = np.zeros(1 if num_rows else 0, np.int32)
        self._sizes = np.full(len(self._order), num_rows, np.int64)
        self._odd = np.zeros(len(self._order), np.bool_)
        self._unseen = num_rows  # rows that no batch has needed yet: group 0, which comes first

    @property
    def num_seen(self) -> int:
        """Rows that some batch has needed."""
        return len(self._labels) - self._unseen

    def split(self, members: Array) -> tuple[Ids, Ids]:
        """Split all groups by a batch; return starts and counts of its runs.

        They count among the rows seen so far: a row that is first needed later goes before all of
        them, so later batches shift all runs alike.
        """
        inside = np.zeros(len(self._sizes), np.int64)
        _count(members, self._labels, inside)
        if self._unseen:
            self._unseen -= int(inside[0])
        parts = _split(self._order, self._sizes, self._odd, inside)
        self._order, self._sizes, self._odd, hit, target = parts
        _move(members, self._labels, target)
        starts, counts = _runs(self._order, self._sizes, hit, self._unseen)
        return starts, counts

    def positions(self) -> Array:
        """Return the place of every row in the order, int32; rows of one group stay ascending."""
        places = np.empty(len(self._labels), np.int32)
        _place(self._labels, self._order, self._sizes, places)
        return places


@njit
def _count(members: Any, labels: Any, inside: Any) -> Any:
    for member in members:
        inside[labels[member]] += 1


@njit
def _move(members: Any, labels: Any, target: Any) -> Any:
    for member in members:
        labels[member] = target[labels[member]]


@njit
def _split(order: Any, sizes: Any, odd: Any, inside: Any) -> Any:
    """Return the groups after a batch: order, sizes, parities of rank, whether hit; targets.

    Of a group that is split the part that is not needed keeps the number.
    """
    number = order.shape[0]
    total = number
    for group in range(number):
        total += 0 < inside[group] < sizes[group]
    new_order, hit = np.empty(total, np.int32), np.zeros(total, np.bool_)
    new_sizes, new_odd = np.empty(total, np.int64), np.empty(total, np.bool_)
    new_sizes[:number], new_odd[:number] = sizes, odd
    target = np.arange(number).astype(np.int32)
    place, spare = 0, number
    for group in order:
        needed = inside[group]
        if needed == 0 or needed == sizes[group]:
            hit[group], new_odd[group] = needed > 0, odd[group] != (needed > 0)
            new_order[place] = group
            place += 1
            continue
        target[group], hit[spare], new_odd[spare] = spare, True, not odd[group]
        new_sizes[spare], new_sizes[group] = needed, sizes[group] - needed
        new_order[place] = spare if odd[group] else group
        new_order[place + 1] = group if odd[group] else spare
        place, spare = place + 2, spare + 1
    return new_order, new_sizes, new_odd, hit, target


@njit
def _runs(order: Any, sizes: Any, hit: Any, unseen: Any) -> Any:
    starts, counts = np.empty(order.shape[0], np.int64), np.empty(order.shape[0], np.int64)
    number, place, joins = 0, -unseen, False
    for group in order:
        if hit[group]:
            if joins:
                counts[number - 1] += sizes[group]
            else:
                starts[number], counts[number] = place, sizes[group]
                number += 1
        joins = hit[group]
        place += sizes[group]
    return starts[:number].copy(), counts[:number].copy()


@njit
def _place(labels: Any, order: Any, sizes: Any, places: Any) -> Any:
    following = np.empty(order.shape[0], np.int64)
    place = 0
    for group in order:
        following[group] = place
        place += sizes[group]
    for row in range(labels.shape[0]):
        places[row] = following[labels[row]]
        following[labels[row]] += 1
