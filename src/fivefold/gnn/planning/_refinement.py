"""Order of a segment's rows by refinement: every batch splits each group of equal rows in two.

Rows that the same batches need form a group. Batch after batch, each group is split into the rows
that the batch needs and the rows that it does not, side by side. Groups of equal membership stay
together whatever the number of batches, so no mask of a fixed width is needed, and the runs of a
batch are never cut by a later one. On which side the needed part goes decides how many runs the
batch has:

* ``gray``: by the Gray-code rank of the membership mask whose most significant bit is the first
  batch. Appending a bit ``b`` to a mask of rank ``r`` gives rank ``2 r + ((r & 1) ^ b)``: the
  needed part comes second in a group of even rank and first in one of odd rank, so that a group
  has to remember one bit.
* ``folded``: beside the needed rows of the group before, if that one ends in needed rows, else at
  the group's end, where the next group can join. No other choice for this batch has fewer runs.
  It is the Gray code over the masks that occur; where all masks occur the two are the same.

U: rows of the segment (its distinct ids, ascending). It knows nothing of pages or bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fivefold._compiler import njit
from fivefold.gnn.planning._sources import Array, Ids


class Refinement:
    """Groups of rows, split by one batch after another.

    Args:
        num_rows: Distinct rows of the segment.
        folded: Whether sides are chosen by the group before; else by Gray-code rank.
    """

    def __init__(self, num_rows: int, *, folded: bool = False) -> None:
        self._folded = folded
        self._labels = np.zeros(num_rows, np.int32)  # group of each row; groups keep their number
        self._order = np.zeros(1 if num_rows else 0, np.int32)
        self._sizes = np.full(len(self._order), num_rows, np.int64)
        self._odd = np.zeros(len(self._order), np.bool_)
        self._unseen = num_rows  # rows that no batch has needed yet: group 0, which comes first

    @property
    def num_groups(self) -> int:
        """Groups so far, that of the rows which no batch has needed yet included."""
        return len(self._sizes)

    @property
    def num_seen(self) -> int:
        """Rows that some batch has needed."""
        return len(self._labels) - self._unseen

    def split(self, members: Array) -> tuple[Ids, Ids]:
        """Split all groups by a batch.

        Args:
            members: Numbers of the rows that the batch needs.

        Returns:
            Starts and counts of the batch's runs among the rows seen so far. A row that is first
            needed later goes before all of them, so later batches shift all runs alike.
        """
        inside = np.zeros(len(self._sizes), np.int64)
        _count(members, self._labels, inside)
        if self._unseen:
            self._unseen -= int(inside[0])
        parts = _split(self._order, self._sizes, self._odd, inside, self._folded)
        self._order, self._sizes, self._odd, hit, target = parts
        _move(members, self._labels, target)
        starts, counts = _runs(self._order, self._sizes, hit, self._unseen)
        return starts, counts

    def positions(self) -> Array:
        """Place of every row in the order, int32 [U]; rows of one group stay ascending."""
        places = np.empty(len(self._labels), np.int32)
        _place(self._labels, self._order, self._sizes, places)
        return places


def union_of(cold_ids: Sequence[Ids]) -> Ids:
    """The distinct ids of several lists that ascend and hold no id twice, ascending."""
    lists = list(cold_ids) or [np.empty(0, np.int64)]
    while len(lists) > 1:
        rest = [lists[-1]] if len(lists) % 2 else []
        lists = [_merge(*pair) for pair in zip(lists[::2], lists[1::2], strict=False)] + rest
    return lists[0]


def locate(ids: Ids, union: Ids) -> Array:
    """Place of each of the ascending ``ids`` in the ascending ``union`` that holds them, int32."""
    places = np.empty(len(ids), np.int32)
    _locate(ids, union, places)
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
def _split(order: Any, sizes: Any, odd: Any, inside: Any, folded: Any) -> Any:
    """The groups after a batch: order, sizes, parities of rank, whether hit; who moves where.

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
    place, spare, joins = 0, number, False  # joins: the rows before are needed ones
    for group in order:
        needed = inside[group]
        if needed == 0 or needed == sizes[group]:
            joins = needed > 0
            hit[group], new_odd[group] = joins, odd[group] != joins
            new_order[place] = group
            place += 1
            continue
        needed_first = joins if folded else odd[group]
        target[group], hit[spare], new_odd[spare] = spare, True, not odd[group]
        new_sizes[spare], new_sizes[group] = needed, sizes[group] - needed
        new_order[place] = spare if needed_first else group
        new_order[place + 1] = group if needed_first else spare
        joins = not needed_first
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


@njit
def _merge(left: Any, right: Any) -> Any:
    merged = np.empty(left.shape[0] + right.shape[0], np.int64)
    i, j, number = 0, 0, 0
    while i < left.shape[0] and j < right.shape[0]:
        merged[number] = min(left[i], right[j])
        # Both sums without a branch, for whether it is taken is a coin toss.
        step_left, step_right = left[i] <= right[j], right[j] <= left[i]
        i += step_left
        j += step_right
        number += 1
    for rest in range(i, left.shape[0]):
        merged[number] = left[rest]
        number += 1
    for rest in range(j, right.shape[0]):
        merged[number] = right[rest]
        number += 1
    return merged[:number].copy()


@njit
def _locate(ids: Any, union: Any, places: Any) -> Any:
    """Gallop: twice as far until past the id, then halve; few steps where ids are far apart."""
    place = 0
    for i in range(ids.shape[0]):
        step = 1
        while place + step < union.shape[0] and union[place + step] <= ids[i]:
            place += step
            step *= 2
        while step > 1:
            step //= 2
            if place + step < union.shape[0] and union[place + step] <= ids[i]:
                place += step
        places[i] = place
