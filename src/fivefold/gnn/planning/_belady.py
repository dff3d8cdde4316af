"""The cache that knows what comes: after every batch it keeps the rows that are needed soonest.

Belady's rule at the granularity of batches. A backward sweep over the batches finds, for each use
of a row, the batch of its next use. Going forward, of the cache and the batch together the
``num_rows`` rows of soonest next use stay; rows that are never used again do not enter. Ties: rows
that are in the cache stay, then lower node ids enter. The number of misses is the least that any
cache of this size can have which admits rows only from the batch that brought them.

The cache starts empty and fills with rows that the first batches read anyway, which costs no more
reads than a fill: a row that is read ahead saves exactly one later read.

References: Belady, IBM Systems Journal 5(2), 1966; Ginex (Park et al.), VLDB 2022, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold._compiler import njit
from fivefold.errors import DataError
from fivefold.gnn.planning._inputs import Array, Ids, SampleSource
from fivefold.gnn.planning._kept import KeptArrays, Scratch

_ABSENT, _PINNED = -1, -2


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheSchedule:
    """Which rows of each batch are misses, and which rows enter the cache after it."""

    hit_bits: NDArray[np.uint8]  # a bit per node id of the samples, each batch from a new byte on
    hit_starts: Ids  # [batches + 1], first byte of each batch
    admitted_rows: Ids  # node ids that enter after each batch, ascending per batch
    admitted_slots: NDArray[np.int32]  # the slots that they take
    admitted_starts: Ids  # [batches + 1], first place of each batch in both

    @property
    def num_slots(self) -> int:
        """Slots that are ever used."""
        return int(self.admitted_slots.max(initial=-1)) + 1

    def misses(self, batch: int, num_ids: int) -> NDArray[np.bool_]:
        """Return which ids of a batch, in the order of the samples, come from disk."""
        packed = self.hit_bits[self.hit_starts[batch] : self.hit_starts[batch + 1]]
        missed: NDArray[np.bool_] = np.unpackbits(packed, count=num_ids) == 0
        return missed

    def admissions(self, batch: int) -> tuple[Ids, NDArray[np.int32]]:
        """Return the node ids that enter after a batch, ascending, and the slots that they take."""
        place = slice(self.admitted_starts[batch], self.admitted_starts[batch + 1])
        return self.admitted_rows[place], self.admitted_slots[place]

    def arrays(self) -> dict[str, Array]:
        """Return the arrays by name."""
        return dict(vars(self))

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> CacheSchedule:
        """Return the schedule whose ``arrays`` these are; others are ignored."""
        return cls(**{name: np.asarray(arrays[name]) for name in cls.__dataclass_fields__})


def belady(
    samples: SampleSource, *, num_rows: int, pinned: Array, scratch: Scratch
) -> CacheSchedule:
    """Return the best course of a cache of ``num_rows`` rows for this order of the batches.

    Rows of ``pinned`` are always cached elsewhere: they count as hits and never enter.
    """
    size, never = min(num_rows, samples.num_nodes), samples.num_batches
    nexts = _next_uses(samples, scratch)
    slot_of = np.full(samples.num_nodes, _ABSENT, np.int32)
    slot_of[np.asarray(pinned, np.int64)] = _PINNED
    node_in, next_in = np.full(size, _ABSENT, np.int64), np.full(size, never, np.int32)
    uses = np.zeros(never + 1, np.int64)  # rows held or offered, by their next use
    bits, rows, slots = list[Array](), list[Ids](), list[Array]()
    for batch in range(never):
        ids, following = np.asarray(samples.node_ids(batch), np.int64), nexts[never - 1 - batch]
        hits = np.zeros(len(ids), np.bool_)
        _use(ids, following, slot_of, next_in, uses, hits)
        limit = _threshold(uses, batch, size)
        wanted = np.flatnonzero(~hits & (following < never))
        wanted = wanted[np.argsort(ids[wanted])]
        entering, places = _exchange(
            ids[wanted], following[wanted], limit, slot_of, node_in, next_in, uses
        )
        bits.append(np.packbits(hits))
        rows.append(entering)
        slots.append(places)
    nexts.close()
    return CacheSchedule(
        hit_bits=np.concatenate([np.empty(0, np.uint8), *bits]),
        hit_starts=_starts(bits),
        admitted_rows=np.concatenate([np.empty(0, np.int64), *rows]),
        admitted_slots=np.concatenate([np.empty(0, np.int32), *slots]),
        admitted_starts=_starts(rows),
    )


def _starts(parts: Sequence[Array]) -> Ids:
    return np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)


def _next_uses(samples: SampleSource, scratch: Scratch) -> KeptArrays:
    """Return the next use of every id of every batch, last batch first; never: their number."""
    following = np.full(samples.num_nodes, samples.num_batches, np.int32)

    def backwards() -> Iterator[Array]:
        for batch in reversed(range(samples.num_batches)):
            ids = np.asarray(samples.node_ids(batch), np.int64)
            nexts = np.empty(len(ids), np.int32)
            bad = _look_ahead(ids, batch, following, nexts)
            if bad >= 0:
                raise DataError(
                    f"batch {batch} has node id {ids[bad]} twice, or it is not one of 0 to "
                    f"{samples.num_nodes - 1}",
                    hint="the ids of a batch are distinct and those of the graph",
                )
            yield nexts

    return KeptArrays(backwards(), limit=samples.num_batches + 1, scratch=scratch)


@njit
def _look_ahead(ids: Any, batch: Any, following: Any, nexts: Any) -> Any:
    """Find the next use of each id; return the first place that is wrong, or -1."""
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
    """Return the next use up to which rows stay, and how many of those at it have room."""
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
