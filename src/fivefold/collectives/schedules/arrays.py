"""Small helpers for read-only arrays, which collectives and schedules are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fivefold._compiler import njit
from fivefold.errors import ConfigurationError

Array = NDArray[Any]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float64]


_MOST_PAIRS = 1 << 27  # beyond, memory would end before any work began
_CAST = {"i": "iu", "b": "iub", "f": "iuf"}  # kinds of numbers that one of these may be read from


def frozen(values: ArrayLike, dtype: type) -> Array:
    """Return a read-only view; refuse a value that is another in this type (1.5, 2^32, true)."""
    given = np.asarray(values)
    fine = not given.size or given.dtype.kind in _CAST[np.dtype(dtype).kind]
    view: Array = given.astype(dtype, copy=False).view() if fine else given
    if not fine or (view.dtype != given.dtype and view.dtype.kind != "f" and (view != given).any()):
        message = f"{given!r:.60} is no array of {np.dtype(dtype)}"
        raise ConfigurationError(message, hint="give whole numbers, or true and false")
    view.flags.writeable = False
    return view


def of_one_kind(*arrays: Array) -> tuple[Array, ...]:
    """Return contiguous read-only views: a loop is compiled once, not for each kind of array."""
    views = tuple(np.ascontiguousarray(array).view() for array in arrays)
    for view in views:
        view.flags.writeable = False
    return views


def offsets_of(sorted_keys: Array, count: int) -> Longs:
    """Return where each key 0..count-1 begins in a sorted array of keys; int64 [count + 1]."""
    found = np.searchsorted(sorted_keys, np.arange(count + 1, dtype=sorted_keys.dtype))
    return found.astype(np.int64)


def rows_of(offsets: Array, rows: Array) -> tuple[Longs, Longs]:
    """Pick rows of a ragged table: offsets of what is picked, and its positions in the table."""
    lengths = np.diff(offsets)[rows]
    found = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return found, np.arange(found[-1]) + np.repeat(offsets[:-1][rows] - found[:-1], lengths)


def require_pairs(what: str, count: int) -> None:
    """Refuse more (chunk, rank) pairs, chunks or ranks than memory could hold."""
    if count > _MOST_PAIRS:
        shown = f"{count}" if count < 10**18 else "more than 10^18"
        raise ConfigurationError(
            f"the collective has {shown} {what}, more than {_MOST_PAIRS}",
            hint="use fewer ranks or chunks",
        )


@njit
def group_by_key(keys: Array, count: int) -> tuple[Longs, Longs]:
    """Group the positions of the keys 0..count-1, in their old order: (offsets, positions)."""
    offsets = np.zeros(count + 1, np.int64)
    for key in keys:
        offsets[key + 1] += 1
    for key in range(count):
        offsets[key + 1] += offsets[key]
    fill = offsets[:-1].copy()
    positions = np.empty(keys.size, np.int64)
    for index in range(keys.size):
        positions[fill[keys[index]]] = index
        fill[keys[index]] += 1
    return offsets, positions


@njit
def push_event(heap: tuple[Any, Any], size: int, time_s: float, item: int) -> int:
    """Put an event into a heap of this size; gives the new size."""
    times_s, items = heap
    place = size
    while place > 0:
        above = (place - 1) >> 1
        if times_s[above] <= time_s:
            break
        times_s[place], items[place] = times_s[above], items[above]
        place = above
    times_s[place], items[place] = time_s, item
    return size + 1


@njit
def pop_event(heap: tuple[Any, Any], size: int) -> int:
    """Remove the first event, which stands at place 0; gives the new size."""
    times_s, items = heap
    size -= 1
    time_s, item = times_s[size], items[size]
    place = 0
    while 2 * place + 1 < size:
        below = 2 * place + 1
        if below + 1 < size and times_s[below + 1] < times_s[below]:
            below += 1
        if times_s[below] >= time_s:
            break
        times_s[place], items[place] = times_s[below], items[below]
        place = below
    times_s[place], items[place] = time_s, item
    return size


@njit
def number_slots(
    grouped: tuple[Any, Any], sources: Any, targets: Any, pre: tuple[Any, Any], num_ranks: int
) -> tuple[Any, Any, Any]:
    """Number the slots that transfers read and write, and note which are filled at first."""
    offsets, positions = grouped
    count = sources.size
    read, written = np.empty(count, np.int32), np.empty(count, np.int32)
    filled = np.zeros(2 * count, np.bool_)
    slot_of = np.full(num_ranks, -1, np.int32)
    last = 0
    for chunk in range(offsets.size - 1):
        members = positions[offsets[chunk] : offsets[chunk + 1]]
        first = last
        for index in members:
            for source in (True, False):
                rank = sources[index] if source else targets[index]
                if slot_of[rank] < 0:
                    slot_of[rank] = last
                    last += 1
                if source:
                    read[index] = slot_of[rank]
                else:
                    written[index] = slot_of[rank]
        if last > first:
            for holder in pre[1][pre[0][chunk] : pre[0][chunk + 1]]:
                if slot_of[holder] >= 0:
                    filled[slot_of[holder]] = True
        for index in members:
            slot_of[sources[index]] = -1
            slot_of[targets[index]] = -1
    return read, written, filled[:last].copy()
