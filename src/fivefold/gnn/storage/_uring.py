"""The io_uring back end: each worker keeps many reads in flight on a ring of its own.

Buffers come from an arena used in a circle: a request takes the next piece that is long enough,
and pieces are given back in the order in which they were taken. Each result is looked at: a short
read goes on where it ended, an interrupted one is asked again, an error stops all workers. A
worker returns only when nothing of its own is in flight, for the kernel writes into the arena.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import StorageError, UnsupportedError
from fivefold.gnn.storage._backends import Files
from fivefold.gnn.storage._buffers import aligned_empty
from fivefold.gnn.storage._kernels import (
    DONE,
    ENDED,
    FAILED,
    STOPPED,
    deliver_checked,
    halt,
    take,
)
from fivefold.gnn.storage._machine import (
    compiled,
    load_acquire_u32,
    load_u64,
    store_release_u32,
)
from fivefold.gnn.storage._plan_runs import Work
from fivefold.gnn.storage._ring import (
    CQ_HEAD,
    CQ_MASK,
    CQ_TAIL,
    CQE_BYTES,
    CQES,
    Ring,
    enter,
    prepare_read,
)
from fivefold.gnn.storage._xxhash import PAGE_BYTES

_ARENA_BYTES = 4 << 20
_EINTR, _EAGAIN, _EBUSY = 4, 11, 16
_STUCK = 5  # status: the ring itself failed while reads were in flight
# Columns of a slot: request, bytes read, begin in the arena, length, whether it is finished.
_REQUEST, _DONE, _BEGIN, _LENGTH, _FINISHED = range(5)
# State of a worker: oldest slot, slots in use, begin of the oldest piece, end of the newest.
_OLDEST, _USED, _LOW, _HIGH, _IN_FLIGHT = range(5)
_LOW_32 = np.uint64(0xFFFFFFFF)


class _Own(NamedTuple):
    """What one worker has to itself: ring, descriptors, arena."""

    ring: NDArray[np.int64]
    direct: int
    plain: int
    arena: int
    arena_bytes: int


@compiled
def _place(state: Any, arena_bytes: Any, length: Any) -> Any:
    """Where a piece of this length fits in the circle now, or -1."""
    low, high = state[_LOW], state[_HIGH]
    if state[_USED] == 0:
        return 0 if length <= arena_bytes else -1
    if high > low:
        if arena_bytes - high >= length:
            return high
        return 0 if low >= length else -1
    return high if low - high >= length else -1


@compiled
def _issue(own: Any, slots: Any, slot: Any, work: Any) -> None:
    """Queue what is left of a slot's request."""
    done = slots[slot, _DONE]
    descriptor = own.direct if done % PAGE_BYTES == 0 else own.plain
    offset = work.requests.first_pages[slots[slot, _REQUEST]] * PAGE_BYTES + done
    address = own.arena + slots[slot, _BEGIN] + done
    prepare_read(own.ring, descriptor, address, slots[slot, _LENGTH] - done, offset, slot)


@compiled
def _start(own: Any, slots: Any, state: Any, request: Any, work: Any) -> Any:
    """Give a request a slot and a piece of the arena; False where there is no room yet."""
    length = work.requests.num_pages[request] * PAGE_BYTES
    begin = _place(state, own.arena_bytes, length)
    if begin < 0 or state[_USED] == len(slots):
        return False
    slot = (state[_OLDEST] + state[_USED]) % len(slots)
    slots[slot, _REQUEST], slots[slot, _DONE] = request, 0
    slots[slot, _BEGIN], slots[slot, _LENGTH], slots[slot, _FINISHED] = begin, length, 0
    if state[_USED] == 0:
        state[_LOW] = begin
    state[_HIGH] = begin + length
    state[_USED] += 1
    state[_IN_FLIGHT] += 1
    _issue(own, slots, slot, work)
    return True


@compiled
def _reclaim(slots: Any, state: Any) -> None:
    """Give back the oldest slots that are finished."""
    while state[_USED] > 0 and slots[state[_OLDEST], _FINISHED]:
        state[_OLDEST] = (state[_OLDEST] + 1) % len(slots)
        state[_USED] -= 1
        state[_LOW] = slots[state[_OLDEST], _BEGIN]


@compiled
def _advance(slots: Any, slot: Any, result: Any, requests: Any, status: Any) -> Any:
    """Take in one result; True if the rest of the request must be asked for again."""
    if result in (-_EINTR, -_EAGAIN):
        return True
    if result > 0:
        slots[slot, _DONE] += result
        return slots[slot, _DONE] < slots[slot, _LENGTH]
    if status[0] == DONE:
        status[0] = ENDED if result == 0 else FAILED
        status[1] = -result
        first = requests.first_pages[slots[slot, _REQUEST]]
        status[2] = first * PAGE_BYTES + slots[slot, _DONE]
    return False


@compiled
def _reap(own: Any, slots: Any, state: Any, work: Any, status: Any) -> None:
    """Handle all completions that are there."""
    ring = own.ring
    head = load_acquire_u32(ring[CQ_HEAD])
    while head != load_acquire_u32(ring[CQ_TAIL]):
        entry = ring[CQES] + (np.int64(head) & ring[CQ_MASK]) * CQE_BYTES
        slot = np.int64(load_u64(entry))
        result = np.int64(np.int32(load_u64(entry + 8) & _LOW_32))
        head = np.uint32(head + np.uint32(1))
        store_release_u32(ring[CQ_HEAD], head)
        if _advance(slots, slot, result, work.requests, status):
            _issue(own, slots, slot, work)
            continue
        if status[0] == DONE:
            deliver_checked(own.arena + slots[slot, _BEGIN], slots[slot, _REQUEST], work, status)
        if status[0] not in (DONE, STOPPED):
            halt(work.shared)
        slots[slot, _FINISHED] = 1
        state[_IN_FLIGHT] -= 1
    _reclaim(slots, state)


@compiled
def _ring_share(own: Any, depth: Any, work: Any, status: Any) -> None:
    """One worker: keep the ring full, handle what comes back, until nothing is left."""
    status[0] = DONE
    slots = np.zeros((depth, 5), np.int64)
    state = np.zeros(5, np.int64)
    request = take(work, status)
    while True:
        while request >= 0 and _start(own, slots, state, request, work):
            request = take(work, status)
        if state[_IN_FLIGHT] == 0:
            return
        number = enter(own.ring)
        if number not in (0, _EINTR, _EAGAIN, _EBUSY):
            status[0], status[1], status[3] = FAILED, number, _STUCK
            halt(work.shared)
            return
        _reap(own, slots, state, work, status)
        if status[0] != DONE:
            request = -1


class RingBackend:
    """Reads through one io_uring per worker."""

    name = "io_uring"

    def __init__(self, files: Files, *, workers: int, block_bytes: int, queue_depth: int) -> None:
        self._depth = max(1, queue_depth // workers)
        self._direct, self._plain = files.direct, files.plain
        self._arena_bytes = max(_ARENA_BYTES, 2 * block_bytes)
        self.buffer_bytes = workers * self._arena_bytes
        self._rings: list[Ring] = []
        self._arenas: list[Any] = []
        try:
            for _ in range(workers):
                self._rings.append(Ring(self._depth))
                self._arenas.append(aligned_empty(self._arena_bytes))
            self._try_a_read()
        except BaseException:
            self.close()
            raise

    def _try_a_read(self) -> None:
        """A kernel before 5.6 has rings but not this kind of read."""
        numbers = self._rings[0].numbers
        prepare_read(numbers, self._direct, self._arenas[0].ctypes.data, PAGE_BYTES, 0, 0)
        number = enter(numbers)
        result = np.int32(_take_result(numbers)) if number == 0 else -number
        if result <= 0:  # a short read is an answer, too
            raise UnsupportedError(
                f"io_uring is not available: a first read gave {result}",
                hint='use backend="threads" or "auto"',
            )

    def share(self, worker: int, work: Work, status: NDArray[np.int64]) -> None:
        """Do requests of a job until none is left."""
        own = _Own(
            ring=self._rings[worker].numbers,
            direct=self._direct,
            plain=self._plain,
            arena=self._arenas[worker].ctypes.data,
            arena_bytes=self._arena_bytes,
        )
        _ring_share(own, self._depth, work, status[worker])
        if status[worker, 3] == _STUCK:
            # Reads may still be in flight into the arena: it must never be given to others.
            _never_freed.append(self._arenas[worker])
            message = "io_uring failed while reads were in flight"
            raise StorageError(message, hint='open the reader again, with backend="threads"')

    def close(self) -> None:
        """Give the rings back."""
        for ring in self._rings:
            ring.close()
        self._rings = []


_never_freed: list[Any] = []


@compiled
def _take_result(numbers: Any) -> Any:
    """The result of the oldest completion, which is taken off the queue."""
    head = load_acquire_u32(numbers[CQ_HEAD])
    while head == load_acquire_u32(numbers[CQ_TAIL]):
        enter(numbers)
    entry = numbers[CQES] + (np.int64(head) & numbers[CQ_MASK]) * CQE_BYTES
    result = np.int32(load_u64(entry + 8) & _LOW_32)
    store_release_u32(numbers[CQ_HEAD], np.uint32(head + np.uint32(1)))
    return result
