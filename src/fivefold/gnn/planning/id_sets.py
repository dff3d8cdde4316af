"""Sets of ids that sort, merge and number ids by position: one bit per possible id.

A batch needs a fair share of a graph's ids, so that bits are smaller than any table: reading them
in order sorts, joining merges, and the bits before an id count its place. Where ids are few and far
between, a sorted list answers the same questions (``SortedIds``).
"""

# ruff: noqa: ARG001 - numba reads the parameters' names from the signature
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fivefold._compiler import njit, numba
from fivefold.errors import DataError
from fivefold.gnn.storage.pages import Array, Ids

_DENSE_IDS_PER_ID = 256  # four words of bits to walk over for each id that is found
_WORD = 64


@numba.extending.intrinsic
def _trailing_zeros(_typing: Any, word: Any) -> Any:
    """Return the number of the lowest bit that is set."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        no = numba.core.cgutils.false_bit
        return builder.cttz(arguments[0], no)

    return numba.types.uint64(numba.types.uint64), generate


@numba.extending.intrinsic
def _ones(_typing: Any, word: Any) -> Any:
    """Return how many bits are set."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return numba.types.uint64(numba.types.uint64), generate


def is_dense(num_ids: int, bound: int) -> bool:
    """Return whether so many ids are worth a bit for each id below ``bound``."""
    return bound <= _DENSE_IDS_PER_ID * num_ids


class IdSet:
    """Distinct ids, each with its place among them in ascending order."""

    def __init__(self, bound: int, ids: Array | None = None) -> None:
        self.words = np.zeros(-(-bound // _WORD), np.uint64)
        self._before: Array | None = None
        self._size = 0
        if ids is not None:
            self.add(ids)

    @staticmethod
    def bytes_for(bound: int) -> int:
        """Return the memory of a set of ids below this bound."""
        return 12 * -(-bound // _WORD)

    @property
    def nbytes(self) -> int:
        """Return the memory of the set once places were asked for."""
        return self.bytes_for(_WORD * len(self.words))

    def __len__(self) -> int:
        return self._size

    def add(self, ids: Array) -> int:
        """Add ids; return how many of them were not in the set before."""
        added = int(_add(self.words, ids))
        if added < 0:
            raise DataError(
                f"id {ids[-1 - added]} is outside 0 to {64 * len(self.words) - 1}",
                hint="give ids of the graph that was sampled",
            )
        self._size += added
        self._before = None
        return added

    def ascending(self, *, without: IdSet | None = None) -> Ids:
        """Return the members in order, int64; those that are in another set left out."""
        others = self.words[:0] if without is None else without.words
        number = min(len(self.words), len(others))
        ids = np.empty(self._size - _common(self.words[:number], others[:number]), np.int64)
        _read(self.words, others, ids)
        return ids

    def locate(self, ids: Array) -> Array:
        """Return the place of each id among the members, int32; -1 for one that is none.

        Any ids in any order are looked up; ascending ones are several times faster.
        """
        if self._before is None:
            before = np.empty(len(self.words), np.uint32)
            _count_before(self.words, before)
            self._before = before  # whole: several threads may ask
        places = np.empty(len(ids), np.int32)
        _locate(self.words, self._before, ids, places)
        return places


class SortedIds:
    """The same answers from a sorted list, where ids are too few for bits or too large."""

    def __init__(self, ids: Array) -> None:
        self._ids = np.unique(np.asarray(ids, np.int64))

    @property
    def nbytes(self) -> int:
        """Return the memory of the list."""
        return self._ids.nbytes

    def __len__(self) -> int:
        return len(self._ids)

    def ascending(self) -> Ids:
        """Return the members in order, int64."""
        return self._ids

    def locate(self, ids: Array) -> Array:
        """Return the place of each id among the members, int32; -1 for one that is none."""
        if not len(self._ids):
            return np.full(len(ids), -1, np.int32)
        places = np.searchsorted(self._ids, ids)
        found = self._ids[np.minimum(places, len(self._ids) - 1)] == ids
        return np.where(found, places, -1).astype(np.int32)


def set_of(parts: Sequence[Array], bound: int, *, most_bytes: int) -> IdSet | SortedIds:
    """Return the ids below ``bound`` of some lists, as bits where these take no more memory."""
    if IdSet.bytes_for(bound) > most_bytes:
        return SortedIds(np.concatenate(parts))
    found = IdSet(bound)
    for ids in parts:
        found.add(ids)
    return found


def union_of(batches: Sequence[Ids]) -> IdSet | SortedIds:
    """Return the distinct ids of lists that each ascend."""
    bound = 1 + max((int(ids[-1]) for ids in batches if len(ids)), default=-1)
    if not is_dense(sum(map(len, batches)), bound):
        return SortedIds(np.concatenate([np.empty(0, np.int64), *batches]))
    union = IdSet(bound)
    for ids in batches:
        union.add(ids)
    return union


def sort_distinct(ids: Array, bound: int) -> Ids:
    """Return ids below ``bound`` in order, int64; of an id that stands twice both are kept."""
    if is_dense(len(ids), bound):
        members = IdSet(bound, ids)
        if len(members) == len(ids):
            return members.ascending()
    return np.sort(np.asarray(ids, np.int64))


def argsort_distinct(ids: Array, bound: int) -> Ids:
    """Return the order that sorts distinct ids below ``bound``, int64."""
    if not is_dense(len(ids), bound):
        return np.argsort(ids)
    order = np.empty(len(ids), np.int64)
    order[IdSet(bound, ids).locate(ids)] = np.arange(len(ids))
    return order


@njit
def _add(words: Any, ids: Any) -> Any:
    added = 0
    for index in range(ids.shape[0]):
        member = np.int64(ids[index])
        word, bit = member >> 6, np.uint64(1) << np.uint64(member & 63)
        if word < 0 or word >= words.shape[0]:
            return -1 - index
        added += (words[word] & bit) == 0
        words[word] |= bit
    return added


@njit
def _common(words: Any, others: Any) -> Any:
    total = np.int64(0)
    for word in range(words.shape[0]):
        total += np.int64(_ones(words[word] & others[word]))
    return total


@njit
def _read(words: Any, left_out: Any, ids: Any) -> None:
    number = 0
    for word in range(words.shape[0]):
        bits = words[word]
        if word < left_out.shape[0]:
            bits &= ~left_out[word]
        while bits:
            ids[number] = 64 * word + np.int64(_trailing_zeros(bits))
            number += 1
            bits &= bits - np.uint64(1)


@njit
def _count_before(words: Any, before: Any) -> None:
    total = np.uint32(0)
    for word in range(words.shape[0]):
        before[word] = total
        total += np.uint32(_ones(words[word]))


@njit
def _locate(words: Any, before: Any, ids: Any, places: Any) -> None:
    for index in range(ids.shape[0]):
        member = np.int64(ids[index])
        word, bit = member >> 6, np.uint64(member & 63)
        bits = words[word] if 0 <= word < words.shape[0] else np.uint64(0)
        if (bits >> bit) & np.uint64(1):
            lower = bits & ((np.uint64(1) << bit) - np.uint64(1))
            places[index] = before[word] + np.uint32(_ones(lower))
        else:
            places[index] = -1
