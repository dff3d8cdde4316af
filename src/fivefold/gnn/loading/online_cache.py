"""Caches that learn as they go, for systems that do not know what comes: LRU and SIEVE.

A cache decides which ids hold which slots; the rows themselves are its owner's. One batch is one
transaction, as in GraphBolt's CPU cache: all ids are looked up, then all that missed are admitted,
one after another. The lists are linked through arrays, so that a batch of hundreds of thousands of
ids costs milliseconds. SIEVE: Zhang et al., NSDI 2024.

It must not know where rows come from.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fivefold._compiler import njit
from fivefold.errors import ConfigurationError
from fivefold.gnn.storage.pages import Ids

__all__ = ["CachePolicy", "OnlineCache"]

Slots = NDArray[np.int32]
Mask = NDArray[np.bool_]
CachePolicy = Literal["lru", "sieve"]
_HEAD, _TAIL, _HAND, _USED = 0, 1, 2, 3  # of the state array


class OnlineCache:
    """Slots for the ids that were used last (LRU) or that were used again (SIEVE).

    Args:
        num_ids: Ids are 0 to ``num_ids - 1``.
        num_slots: Rows that the cache holds; 0 is allowed and never hits.
        policy: ``"lru"`` or ``"sieve"``.

    Raises:
        ConfigurationError: A count is negative or the policy is unknown.

    Examples:
        >>> cache = OnlineCache(10, num_slots=2)
        >>> cache.admit(np.array([3, 5])).tolist()
        [0, 1]
        >>> cache.lookup(np.array([5, 7])).tolist()
        [1, -1]
        >>> cache.admit(np.array([7])).tolist(), cache.lookup(np.array([3])).tolist()
        ([0], [-1])
    """

    def __init__(self, num_ids: int, *, num_slots: int, policy: CachePolicy = "lru") -> None:
        if num_ids < 0 or num_slots < 0:
            raise ConfigurationError(
                f"counts must not be negative; got num_ids={num_ids}, num_slots={num_slots}"
            )
        if policy not in {"lru", "sieve"}:
            raise ConfigurationError(
                f"policy must be 'lru' or 'sieve'; got {policy!r}", hint="choose one of the two"
            )
        self.num_slots = min(num_slots, num_ids)
        self.policy = policy
        self._slot_of = np.full(num_ids, -1, np.int32)
        self._id_in = np.full(self.num_slots, -1, np.int64)
        self._older = np.full(self.num_slots, -1, np.int32)
        self._newer = np.full(self.num_slots, -1, np.int32)
        self._visited = np.zeros(self.num_slots, np.bool_)
        self._state = np.array([-1, -1, -1, 0], np.int64)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tables, which a fair budget counts as well as the rows."""
        arrays = (self._slot_of, self._id_in, self._older, self._newer, self._visited)
        return sum(array.nbytes for array in arrays)

    def lookup(self, ids: Ids) -> NDArray[np.int32]:
        """Find ids and note that they were used.

        Args:
            ids: Distinct ids.

        Returns:
            The slot of each; -1 where it is not there.
        """
        slots = np.empty(len(ids), np.int32)
        _lookup(ids, slots, self.policy == "lru", *self._lists())
        return slots

    def admit(self, ids: Ids) -> NDArray[np.int32]:
        """Take in ids that are not there, one after another, each in the place of another.

        Args:
            ids: Distinct ids that the last lookup did not find.

        Returns:
            The slot that each has in the end; -1 where a later one of the same call displaced it.
        """
        slots = np.full(len(ids), -1, np.int32)
        if self.num_slots:
            _admit(ids, self._id_in, self.policy == "lru", *self._lists())
            slots[:] = self._slot_of[ids]
        return slots

    def held(self) -> tuple[Ids, Ids]:
        """Return the ids that are there and their slots."""
        slots = np.flatnonzero(self._id_in >= 0)
        return self._id_in[slots], slots

    def _lists(self) -> tuple[Any, ...]:
        return self._slot_of, self._older, self._newer, self._visited, self._state


@njit
def _unlink(slot: int, older: Slots, newer: Slots, state: Ids) -> None:
    before, after = newer[slot], older[slot]
    if before >= 0:
        older[before] = after
    else:
        state[_HEAD] = after
    if after >= 0:
        newer[after] = before
    else:
        state[_TAIL] = before


@njit
def _push(slot: int, older: Slots, newer: Slots, state: Ids) -> None:
    head = state[_HEAD]
    older[slot] = head
    newer[slot] = -1
    if head >= 0:
        newer[head] = slot
    else:
        state[_TAIL] = slot
    state[_HEAD] = slot


@njit
def _lookup(  # noqa: PLR0913, PLR0917 - a kernel takes its arrays one by one
    ids: Ids, found: Slots, lru: bool, slot_of: Slots,  # noqa: FBT001
    older: Slots, newer: Slots, visited: Mask, state: Ids,
) -> None:  # fmt: skip
    for i in range(len(ids)):
        slot = slot_of[ids[i]]
        found[i] = slot
        if slot < 0:
            continue
        if lru:
            _unlink(slot, older, newer, state)
            _push(slot, older, newer, state)
        else:
            visited[slot] = True


@njit
def _sieve_victim(newer: Slots, visited: Mask, state: Ids) -> Any:
    """Walk the hand from old to new, sparing each visited slot once; return where it stops."""
    hand = state[_HAND]
    if hand < 0:
        hand = state[_TAIL]
    while visited[hand]:
        visited[hand] = False
        hand = newer[hand] if newer[hand] >= 0 else state[_TAIL]
    state[_HAND] = newer[hand]
    return hand


@njit
def _admit(  # noqa: PLR0913, PLR0917 - a kernel takes its arrays one by one
    ids: Ids, id_in: Ids, lru: bool, slot_of: Slots,  # noqa: FBT001
    older: Slots, newer: Slots, visited: Mask, state: Ids,
) -> None:  # fmt: skip
    for i in range(len(ids)):
        if slot_of[ids[i]] >= 0:
            continue
        if state[_USED] < len(id_in):
            slot = state[_USED]
            state[_USED] += 1
        else:
            slot = state[_TAIL] if lru else _sieve_victim(newer, visited, state)
            slot_of[id_in[slot]] = -1
            _unlink(slot, older, newer, state)
        id_in[slot] = ids[i]
        slot_of[ids[i]] = slot
        visited[slot] = False
        _push(slot, older, newer, state)
