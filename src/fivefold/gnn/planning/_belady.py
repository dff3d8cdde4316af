"""The cache that knows what comes: after every batch it keeps the rows that are needed soonest.

Belady's rule at the granularity of batches. A backward sweep over the batches finds, for each use
of a row, the batch of its next use. Going forward, of the cache and the batch together the
``num_rows`` rows of soonest next use stay; rows that are never used again do not enter. Ties: rows
that are in the cache stay, then lower node ids enter. The number of misses is the least that any
cache of this size can have which admits rows only from the batch that brought them.

By default the cache starts empty and fills with rows that the first batches read anyway, which
costs no more reads than a fill: a row that is read ahead saves exactly one later read.

References: Belady, IBM Systems Journal 5(2), 1966; Ginex (Park et al.), VLDB 2022, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fivefold._compiler import njit
from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.planning._kept import KeptArrays, Scratch
from fivefold.gnn.planning._schedule import CacheSchedule
from fivefold.gnn.planning._sources import Array, BatchList, Ids, SampleSource, folder_of

Initial = Literal["empty", "first-use"]
_ABSENT, _PINNED = -1, -2


@dataclass(frozen=True, kw_only=True, eq=False)
class BeladyCache:
    """The course of a cache over all batches.

    Args:
        initial_rows: Node ids in slots 0, 1, ... before the first batch, ascending.
        num_slots: Slots that are ever used.
        misses: Rows of each batch that are neither pinned nor in the cache, int64 [batches].
        schedule: Hits and admissions of each batch.

    Examples:
        >>> belady([np.array([5, 3]), np.array([3])], num_rows=1).misses.tolist()
        [2, 0]
    """

    initial_rows: Ids
    num_slots: int
    misses: Ids
    schedule: CacheSchedule


def belady(
    samples: SampleSource | Sequence[Array],
    *,
    num_rows: int,
    initial: Initial = "empty",
    pinned: Array | None = None,
    scratch: Scratch | None = None,
) -> BeladyCache:
    """The best course of a cache when the order of the batches is known.

    Args:
        samples: Batches in the order in which they will be used; distinct node ids in each.
        num_rows: Rows that the cache holds.
        initial: ``"empty"``, or ``"first-use"``: before the first batch the cache is filled with
            the rows that are used first, as Ginex does; that costs ``num_rows`` reads.
        pinned: Node ids that are always cached elsewhere; they count as hits and never enter.
        scratch: Where a scratch file goes if the ids of all batches are many; None: beside the
            samples where they are a file, else in the system's folder for temporary files.

    Returns:
        What is in the cache at first, what misses and what enters after each batch.

    Raises:
        ConfigurationError: An argument is out of range.
        DataError: A batch has an id twice, or one that is out of range.
        StorageError: The scratch file cannot be written.

    Examples:
        >>> course = belady([np.array([1, 2]), np.array([3, 1]), np.array([2])], num_rows=1)
        >>> course.misses.tolist(), course.schedule.admissions(0)[0].tolist()
        ([2, 1, 1], [1])
    """
    if num_rows < 0 or initial not in {"empty", "first-use"}:
        raise ConfigurationError(
            f"num_rows={num_rows}, initial={initial!r}",
            hint="num_rows is 0 or more; initial is 'empty' or 'first-use'",
        )
    source = _as_source(samples)
    size = min(num_rows, source.num_nodes)
    nexts, first_use = _next_uses(source, scratch or Scratch(folder=folder_of(samples)))
    cache = _Cache(source.num_nodes, size, never=source.num_batches, pinned=pinned)
    if initial == "first-use":
        cache.fill(first_use)
    del first_use
    initial_rows = cache.content()
    steps = _Steps()
    for batch in range(source.num_batches):
        ids = np.asarray(source.node_ids(batch), np.int64)
        steps.add(*cache.step(batch, ids, nexts[source.num_batches - 1 - batch]))
    nexts.close()
    return BeladyCache(
        initial_rows=initial_rows,
        num_slots=cache.num_used,
        misses=np.array(steps.misses, np.int64),
        schedule=steps.schedule(),
    )


def lru_misses(samples: SampleSource | Sequence[Array], *, num_rows: int) -> Ids:
    """Misses of each batch when the least recently used row gives way, for comparison.

    Ids are looked up and admitted one after another, in the order of the batch.

    Args:
        samples: Batches in order.
        num_rows: Rows that the cache holds; it starts empty.

    Examples:
        >>> lru_misses([np.array([1, 2]), np.array([2, 3]), np.array([2, 1])], num_rows=2).tolist()
        [2, 1, 1]
    """
    source = _as_source(samples)
    # A list linked both ways through arrays; place num_nodes stands for both its ends.
    older, newer = np.full((2, source.num_nodes + 1), _ABSENT, np.int64)
    older[-1] = newer[-1] = source.num_nodes
    misses = np.zeros(source.num_batches, np.int64)
    held = 0
    for batch in range(source.num_batches):
        ids = np.asarray(source.node_ids(batch), np.int64)
        misses[batch], held = _lru(ids, older, newer, held, num_rows)
    return misses


class _Cache:
    """Slots and what is in them."""

    def __init__(self, num_nodes: int, size: int, *, never: int, pinned: Array | None) -> None:
        self._never = never
        self._slot_of = np.full(num_nodes, _ABSENT, np.int32)
        if pinned is not None:
            self._slot_of[np.asarray(pinned, np.int64)] = _PINNED
        self._node_in = np.full(size, _ABSENT, np.int64)
        self._next_in = np.full(size, never, np.int32)
        self._uses = np.zeros(never + 1, np.int64)  # rows held or offered, by their next use

    @property
    def num_used(self) -> int:
        return int(np.count_nonzero(self._node_in >= 0))

    def content(self) -> Ids:
        return self._node_in[self._node_in >= 0]

    def fill(self, first_use: Array) -> None:
        """Take the rows of earliest first use; ties by node id."""
        free = np.where(self._slot_of == _PINNED, self._never, first_use)
        used = np.flatnonzero(free < self._never)
        rows = np.sort(used[np.argsort(free[used], kind="stable")][: len(self._node_in)])
        slots = np.arange(len(rows))
        self._node_in[slots], self._next_in[slots] = rows, first_use[rows]
        self._slot_of[rows] = slots
        np.add.at(self._uses, first_use[rows], 1)

    def step(self, batch: int, ids: Ids, nexts: Ids) -> tuple[Array, Ids, Array, int]:
        """Hits of a batch; then what enters, ascending, and where; and the misses."""
        hits = np.zeros(len(ids), np.bool_)
        _use(ids, nexts, self._slot_of, self._next_in, self._uses, hits)
        limit = _threshold(self._uses, batch, len(self._node_in))
        wanted = np.flatnonzero(~hits & (nexts < self._never))
        wanted = wanted[np.argsort(ids[wanted])]
        entering, slots = _exchange(
            ids[wanted], nexts[wanted], limit,
            self._slot_of, self._node_in, self._next_in, self._uses,
        )  # fmt: skip
        return hits, entering, slots, int(len(ids) - np.count_nonzero(hits))


class _Steps:
    """Collects what happened at each batch."""

    def __init__(self) -> None:
        self.misses: list[int] = []
        self._bits: list[Array] = []
        self._rows: list[Ids] = []
        self._slots: list[Array] = []

    def add(self, hits: Array, rows: Ids, slots: Array, misses: int) -> None:
        self._bits.append(np.packbits(hits))
        self._rows.append(rows)
        self._slots.append(slots)
        self.misses.append(misses)

    def schedule(self) -> CacheSchedule:
        return CacheSchedule(
            hit_bits=np.concatenate([np.empty(0, np.uint8), *self._bits]),
            hit_starts=_starts(self._bits),
            admitted_rows=np.concatenate([np.empty(0, np.int64), *self._rows]),
            admitted_slots=np.concatenate([np.empty(0, np.int32), *self._slots]),
            admitted_starts=_starts(self._rows),
        )


def _starts(parts: Sequence[Array]) -> Ids:
    return np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)


def _as_source(samples: SampleSource | Sequence[Array]) -> SampleSource:
    if not isinstance(samples, Sequence):
        return samples
    largest = max((int(np.max(ids)) for ids in samples if len(ids)), default=-1)
    return BatchList(samples, num_nodes=largest + 1)


def _next_uses(source: SampleSource, scratch: Scratch) -> tuple[KeptArrays, Array]:
    """Next use of every id of every batch, last batch first; and the first use of every node.

    The number of the batches stands for never.
    """
    following = np.full(source.num_nodes, source.num_batches, np.int32)

    def backwards() -> Iterator[Array]:
        for batch in reversed(range(source.num_batches)):
            ids = np.asarray(source.node_ids(batch), np.int64)
            nexts = np.empty(len(ids), np.int32)
            bad = _look_ahead(ids, batch, following, nexts)
            if bad >= 0:
                raise DataError(
                    f"batch {batch} has node id {ids[bad]} twice, or it is not one of 0 to "
                    f"{source.num_nodes - 1}",
                    hint="the ids of a batch are distinct and those of the graph",
                )
            yield nexts

    kept = KeptArrays(backwards(), limit=source.num_batches + 1, scratch=scratch)
    return kept, following


@njit
def _look_ahead(ids: Any, batch: Any, following: Any, nexts: Any) -> Any:
    """Next use of each id, which is then this batch; the first place that is wrong, or -1."""
    for i in range(ids.shape[0]):
        if ids[i] < 0 or ids[i] >= following.shape[0] or following[ids[i]] == batch:
            return i
        nexts[i] = following[ids[i]]
        following[ids[i]] = batch
    return -1


@njit
def _use(ids: Any, nexts: Any, slot_of: Any, next_in: Any, uses: Any, hits: Any) -> Any:
    for i in range(ids.shape[0]):
        slot = slot_of[ids[i]]
        hits[i] = slot != _ABSENT
        if slot >= 0:
            uses[next_in[slot]] -= 1
            next_in[slot] = nexts[i]
        if slot != _PINNED:
            uses[nexts[i]] += 1


@njit
def _threshold(uses: Any, batch: Any, size: Any) -> Any:
    """The next use up to which rows stay, and how many of those at it have room."""
    never, held = uses.shape[0] - 1, 0
    for following in range(batch + 1, never):
        if held + uses[following] > size:
            return following, size - held
        held += uses[following]
    return never, 0


@njit
def _exchange(
    ids: Any, nexts: Any, limit: Any, slot_of: Any, node_in: Any, next_in: Any, uses: Any
) -> Any:
    """Let rows in, in the place of free slots and of rows of later use."""
    threshold, room = limit
    staying = 0  # cached rows of the threshold itself have the first claim to the room
    for slot in range(node_in.shape[0]):
        if staying < room and next_in[slot] == threshold:
            staying += 1
    room -= staying
    entering, slots = np.empty(ids.shape[0], np.int64), np.empty(ids.shape[0], np.int32)
    number, slot = 0, -1
    for i in range(ids.shape[0]):
        if nexts[i] > threshold or (nexts[i] == threshold and room <= 0):
            uses[nexts[i]] -= 1
            continue
        if nexts[i] == threshold:
            room -= 1
        slot += 1
        while next_in[slot] < threshold or (next_in[slot] == threshold and staying > 0):
            if next_in[slot] == threshold:
                staying -= 1
            slot += 1
        if node_in[slot] >= 0:
            slot_of[node_in[slot]] = _ABSENT
            uses[next_in[slot]] -= 1
        node_in[slot], next_in[slot], slot_of[ids[i]] = ids[i], nexts[i], slot
        entering[number], slots[number] = ids[i], slot
        number += 1
    return entering[:number].copy(), slots[:number].copy()


@njit
def _lru(ids: Any, older: Any, newer: Any, held: Any, size: Any) -> Any:
    ends, misses = older.shape[0] - 1, 0
    for node in ids:
        if older[node] != _ABSENT:
            older[newer[node]], newer[older[node]] = older[node], newer[node]
        else:
            misses += 1
            if size == 0:
                continue
            if held == size:
                oldest = newer[ends]
                newer[ends], older[newer[oldest]] = newer[oldest], ends
                older[oldest] = newer[oldest] = _ABSENT
            else:
                held += 1
        older[node], newer[node] = older[ends], ends
        newer[older[ends]] = node
        older[ends] = node
    return misses, held
