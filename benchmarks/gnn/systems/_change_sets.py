"""Ginex's optimal cache: what to keep after each batch of a super-batch whose ids are known.

Belady's rule at the granularity of batches. Three passes over the ids: count uses and take the
first ids in order of access as the initial cache; lay out the batches in which each id is used
(CSR, ascending, the last one marked); then walk through the batches: of the cache and the batch
together, keep those whose next use comes soonest. The published program runs the passes on a GPU;
here they are compiled for the CPU. Park et al., VLDB 2022; passes as in its public code.

A pure function of the ids; it must not know what a row is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fivefold._compiler import njit
from fivefold.errors import ConfigurationError

__all__ = ["ChangeSet", "ChangeSets", "belady_change_sets", "stream_change_sets"]

_LAST = np.uint16(0x8000)  # the top bit of the last use of an id
MAX_BATCHES = 0x7FFF

Ids = NDArray[np.int64]
Uses = NDArray[np.uint16]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class ChangeSet:
    """What happens to the cache after one batch.

    Attributes:
        admitted: Ids that enter.
        positions: Their places in the batch's ids.
        evicted: Ids that leave.
    """

    admitted: NDArray[np.int64]
    positions: NDArray[np.int64]
    evicted: NDArray[np.int64]


@dataclass(frozen=True)
class ChangeSets:
    """The cache's whole course over a super-batch.

    Attributes:
        initial: Ids in the cache before the first batch.
        after: One change set per batch.
        num_misses: Ids per batch that were not in the cache when the batch came.
    """

    initial: NDArray[np.int64]
    after: tuple[ChangeSet, ...]
    num_misses: NDArray[np.int64]


def belady_change_sets(batches: Sequence[Ids], *, num_ids: int, num_slots: int) -> ChangeSets:
    """Compute the initial cache and all change sets of a super-batch.

    Args:
        batches: The ids of each batch, distinct within a batch.
        num_ids: Ids are 0 to ``num_ids - 1``.
        num_slots: Rows that the cache holds.

    Returns:
        The change sets. No other choice after the same initial cache has fewer misses.

    Raises:
        ConfigurationError: There are more batches than 15 bits count, or a number is negative.

    Example:
        >>> batches = [np.array(b) for b in ([0, 1], [2, 0], [1, 2], [0, 2])]
        >>> sets = belady_change_sets(batches, num_ids=3, num_slots=2)
        >>> sets.initial.tolist(), sets.num_misses.tolist()
        ([0, 1], [0, 1, 0, 1])
    """
    initial, course = stream_change_sets(batches, num_ids=num_ids, num_slots=num_slots)
    steps = list(course)
    misses = np.array([step[0] for step in steps], np.int64)
    return ChangeSets(initial, tuple(step[1] for step in steps), misses)


def stream_change_sets(
    batches: Collection[Ids], *, num_ids: int, num_slots: int
) -> tuple[Ids, Iterator[tuple[int, ChangeSet]]]:
    """As ``belady_change_sets``, one batch in memory at a time; the batches are read three times.

    Args:
        batches: The ids of each batch; iterating gives them in order, as often as asked for.
        num_ids: Ids are 0 to ``num_ids - 1``.
        num_slots: Rows that the cache holds.

    Returns:
        The initial ids, and for each batch its misses and its change set.

    Raises:
        ConfigurationError: There are more batches than 15 bits count, or a number is negative.
    """
    if len(batches) > MAX_BATCHES or num_slots < 0 or num_ids < 0:
        raise ConfigurationError(
            f"a super-batch has up to {MAX_BATCHES} batches and counts are not negative; got "
            f"{len(batches)} batches, num_slots={num_slots}, num_ids={num_ids}",
            hint="split the epoch into super-batches of about 1000 batches",
        )
    counts, initial = _count_uses(batches, num_ids, num_slots)
    pointers, uses = _lay_out_uses(batches, counts)
    cache = _Cache(initial, pointers, uses, num_slots=num_slots, num_batches=len(batches))
    course = ((cache.misses(ids), cache.step(ids, i)) for i, ids in enumerate(batches))
    return initial, course


def _count_uses(batches: Collection[Ids], num_ids: int, num_slots: int) -> tuple[Uses, Ids]:
    counts = np.zeros(num_ids, np.uint16)
    initial = np.empty(min(num_slots, num_ids), np.int64)
    filled = 0
    for ids in batches:
        filled = _count(ids, counts, initial, filled)
    return counts, initial[:filled]


def _lay_out_uses(batches: Collection[Ids], counts: Uses) -> tuple[Ids, Uses]:
    """Pointer of each id to its first use, and all uses; each id's last one has its top bit set."""
    pointers = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=pointers[1:])
    uses = np.empty(int(pointers[-1]), np.uint16)
    for number, ids in enumerate(batches):
        _place(ids, number, pointers, uses)  # moves each pointer to behind what it placed
    _rewind(pointers, counts, uses)
    return pointers, uses


class _Cache:
    """The content after each batch, and the uses that lie ahead."""

    def __init__(
        self, initial: Ids, pointers: Ids, uses: Uses, *, num_slots: int, num_batches: int
    ) -> None:
        self.pointers, self.uses, self.never = pointers, uses, num_batches
        self.num_slots = num_slots
        self.cached = np.empty(num_slots, np.int64)
        self.cached[: len(initial)] = initial
        self.filled = len(initial)
        self.inside = np.zeros(len(pointers) - 1, np.bool_)
        self.inside[initial] = True
        self.threshold = 0

    def misses(self, ids: Ids) -> int:
        return len(ids) - int(np.count_nonzero(self.inside[ids]))

    def step(self, ids: Ids, number: int) -> ChangeSet:
        """Of cache and batch keep what is used soonest; ties stay where they are."""
        _advance(ids, self.pointers, self.uses)
        cached = self.cached[: self.filled]
        next_cached, next_batch = np.empty(len(cached), np.int64), np.empty(len(ids), np.int64)
        _next_uses(cached, self.never, self.pointers, self.uses, next_cached)
        _next_uses(ids, self.never, self.pointers, self.uses, next_batch)
        histogram = np.bincount(next_cached, minlength=self.never + 1)
        _histogram(ids, next_batch, self.inside, histogram)
        # The threshold moves in steps of one from where it was.
        start = max(self.threshold, number + 1)
        self.threshold, ties = _find_threshold(histogram, start, self.num_slots)
        evicted = np.empty(len(cached), np.int64)
        kept, ties = _drop(self.cached, next_cached, self.threshold, ties, evicted)
        evicted = evicted[: len(cached) - kept].copy()
        positions = np.empty(len(ids), np.int64)
        chosen = _choose(ids, next_batch, self.inside, self.threshold, ties, positions)
        positions = positions[:chosen].copy()
        admitted = ids[positions]
        self.cached[kept : kept + chosen] = admitted
        self.filled = kept + chosen
        self.inside[evicted] = False
        self.inside[admitted] = True
        return ChangeSet(admitted, positions, evicted)


@njit
def _count(ids: Ids, counts: Uses, initial: Ids, filled: int) -> int:
    for i in range(len(ids)):
        v = ids[i]
        if counts[v] == 0 and filled < len(initial):
            initial[filled] = v
            filled += 1
        counts[v] += 1
    return filled


@njit
def _place(ids: Ids, number: int, pointers: Ids, uses: Uses) -> None:
    for i in range(len(ids)):
        uses[pointers[ids[i]]] = number
        pointers[ids[i]] += 1


@njit
def _rewind(pointers: Ids, counts: Uses, uses: Uses) -> None:
    for v in range(len(counts)):
        if counts[v]:
            uses[pointers[v] - 1] |= _LAST
            pointers[v] -= counts[v]


@njit
def _advance(ids: Ids, pointers: Ids, uses: Uses) -> None:
    """Past the use that is happening; an id that is never used again points to -1."""
    for i in range(len(ids)):
        v = ids[i]
        pointers[v] = -1 if uses[pointers[v]] & _LAST else pointers[v] + 1


@njit
def _next_use(v: int, never: int, pointers: Ids, uses: Uses) -> int:
    if pointers[v] < 0:
        return never
    return int(uses[pointers[v]] & ~_LAST)


@njit
def _next_uses(ids: Ids, never: int, pointers: Ids, uses: Uses, out: Ids) -> None:
    for i in range(len(ids)):
        out[i] = _next_use(ids[i], never, pointers, uses)


@njit
def _find_threshold(histogram: Ids, threshold: int, num_slots: int) -> tuple[int, int]:
    """All that are used before the threshold fit; how many of those at it fit as well."""
    below = histogram[:threshold].sum()
    while threshold > 0 and below > num_slots:
        threshold -= 1
        below -= histogram[threshold]
    while threshold < len(histogram) and below + histogram[threshold] <= num_slots:
        below += histogram[threshold]
        threshold += 1
    return threshold, num_slots - below


@njit
def _histogram(ids: Ids, next_uses: Ids, counted: Mask, histogram: Ids) -> None:
    for i in range(len(ids)):
        if not counted[ids[i]]:
            histogram[next_uses[i]] += 1


@njit
def _drop(cached: Ids, next_uses: Ids, threshold: int, ties: int, evicted: Ids) -> tuple[int, int]:
    """Keep what is soon enough at the front of ``cached``; how many were kept, ties left."""
    kept = out = 0
    for i in range(len(next_uses)):
        if next_uses[i] < threshold or (next_uses[i] == threshold and ties > 0):
            ties -= next_uses[i] == threshold
            cached[kept] = cached[i]
            kept += 1
        else:
            evicted[out] = cached[i]
            out += 1
    return kept, ties


@njit
def _choose(
    ids: Ids, next_uses: Ids, inside: Mask, threshold: int, ties: int, positions: Ids
) -> int:
    chosen = 0
    for i in range(len(ids)):
        if inside[ids[i]]:
            continue
        if next_uses[i] < threshold or (next_uses[i] == threshold and ties > 0):
            ties -= next_uses[i] == threshold
            positions[chosen] = i
            chosen += 1
    return chosen
