"""The io_uring back end: each worker keeps many reads in flight on a ring of its own.

By raw system calls, for no binding is fit to depend on. The queues are memory shared with the
kernel: who writes entries moves the tail with a release store after them, who reads them loads the
tail with acquire, then moves the head with a release store.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from typing import Any, Literal, NamedTuple

import numpy as np

from fivefold._compiler import njit
from fivefold.errors import StorageError, UnsupportedError
from fivefold.gnn.storage._machine import (
    load_acquire_u32,
    load_u64,
    read_errno,
    store_release_u32,
    store_u32,
    store_u64,
    syscall,
)
from fivefold.gnn.storage._requests import (
    DONE,
    ENDED,
    FAILED,
    STOPPED,
    Requests,
    Work,
    deliver,
    halt,
    take,
)
from fivefold.gnn.storage.files import Files
from fivefold.gnn.storage.pages import PAGE_BYTES, Ids, aligned_empty

_SETUP, _ENTER = 425, 426  # the same numbers on every architecture
_PARAMETERS_BYTES = 120
_SINGLE_MAP = 1
_SQES_OFFSET = 0x10000000
_OP_READ = 22
_GET_EVENTS = 1
_SQE_BYTES, _CQE_BYTES = 64, 16

# Places in the array of numbers that compiled code gets.
_FD, _SQ_HEAD, _SQ_TAIL, _SQ_MASK, _SQ_ARRAY, _SQES = range(6)
_CQ_HEAD, _CQ_TAIL, _CQ_MASK, _CQES = range(6, 10)


class Ring:
    """One io_uring."""

    def __init__(self, entries: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        parameters = ctypes.create_string_buffer(_PARAMETERS_BYTES)
        self._descriptor = libc.syscall(
            ctypes.c_long(_SETUP), ctypes.c_uint(entries), ctypes.byref(parameters)
        )
        if self._descriptor < 0:
            raise _unsupported(os.strerror(ctypes.get_errno()))
        os.set_inheritable(self._descriptor, False)
        fields = struct.unpack("<10I7IIQ7IIQ", parameters.raw)
        sq_entries, cq_entries, features = fields[0], fields[1], fields[5]
        submission, completion = fields[10:18], fields[19:27]
        if not features & _SINGLE_MAP:
            os.close(self._descriptor)
            reason = "the kernel is older than 5.4"
            raise _unsupported(reason)
        rings_bytes = max(submission[6] + 4 * sq_entries, completion[5] + _CQE_BYTES * cq_entries)
        self._rings = self._map(rings_bytes, 0)
        self._sqes = self._map(_SQE_BYTES * sq_entries, _SQES_OFFSET)
        rings, sqes = (np.frombuffer(m, np.uint8).ctypes.data for m in (self._rings, self._sqes))
        masks = np.frombuffer(self._rings, "<u4").copy()
        self.numbers: Ids = np.array(
            [
                self._descriptor,
                rings + submission[0],
                rings + submission[1],
                masks[submission[2] // 4],
                rings + submission[6],
                sqes,
                rings + completion[0],
                rings + completion[1],
                masks[completion[2] // 4],
                rings + completion[5],
            ],
            np.int64,
        )

    def _map(self, length: int, offset: int) -> mmap.mmap:
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        try:
            return mmap.mmap(self._descriptor, length, flags=flags, offset=offset)
        except OSError as error:
            os.close(self._descriptor)
            raise _unsupported(f"its queues cannot be mapped ({error.strerror})") from error

    def close(self) -> None:
        """Give the ring back; nothing may be in flight."""
        if self._descriptor >= 0:
            self._rings.close()  # the maps hold descriptors of their own
            self._sqes.close()
            os.close(self._descriptor)
            self._descriptor = -1


def _unsupported(reason: str) -> UnsupportedError:
    denied = os.strerror(errno.EPERM)
    hint = 'use backend="threads" or "auto"'
    if reason == denied:
        hint += ", or allow it (sysctl kernel.io_uring_disabled, seccomp profile of the container)"
    return UnsupportedError(f"io_uring is not available: {reason}", hint=hint)


@njit
def _prepare_read(
    numbers: Any, descriptor: Any, address: Any, count: Any, offset: Any, user: Any
) -> None:
    """Queue one read; there is room, for no more are in flight than the ring has entries."""
    tail = load_acquire_u32(numbers[_SQ_TAIL])  # only this thread writes it
    index = np.int64(tail) & numbers[_SQ_MASK]
    sqe = numbers[_SQES] + index * _SQE_BYTES
    store_u64(sqe, np.uint64(_OP_READ) | (np.uint64(descriptor) << np.uint64(32)))
    store_u64(sqe + 8, np.uint64(offset))
    store_u64(sqe + 16, np.uint64(address))
    store_u64(sqe + 24, np.uint64(count))  # the length in the low half, no flags in the high one
    store_u64(sqe + 32, np.uint64(user))
    store_u64(sqe + 40, np.uint64(0))
    store_u64(sqe + 48, np.uint64(0))
    store_u64(sqe + 56, np.uint64(0))
    store_u32(numbers[_SQ_ARRAY] + 4 * index, np.uint32(index))
    store_release_u32(numbers[_SQ_TAIL], np.uint32(tail + np.uint32(1)))


@njit
def _enter(numbers: Any) -> Any:
    """Submit what is queued and wait for one completion; returns 0 or the error number."""
    waiting = np.uint32(load_acquire_u32(numbers[_SQ_TAIL]) - load_acquire_u32(numbers[_SQ_HEAD]))
    done = syscall(
        np.int64(_ENTER), numbers[_FD], np.int64(waiting), np.int64(1), np.int64(_GET_EVENTS),
        np.int64(0), np.int64(0),
    )  # fmt: skip
    return read_errno() if done < 0 else 0


_ARENA_BYTES = 4 << 20
_EINTR, _EAGAIN, _EBUSY = 4, 11, 16
_STUCK = 5  # status: the ring itself failed while reads were in flight
# Columns of a slot: request, bytes read, begin in the arena, length, whether it is finished.
_REQUEST, _DONE, _BEGIN, _LENGTH, _FINISHED = range(5)
# State of a worker: oldest slot, slots in use, begin of the oldest piece, end of the newest.
_OLDEST, _USED, _LOW, _HIGH, _IN_FLIGHT = range(5)
_LOW_32 = np.uint64(0xFFFFFFFF)


class _Own(NamedTuple):
    """Ring, descriptors and arena of one worker."""

    ring: Ids
    direct: int
    plain: int
    arena: int
    arena_bytes: int


@njit
def _place(state: Any, arena_bytes: Any, length: Any) -> Any:
    """Return where a piece of this length fits in the circle now, or -1."""
    low, high = state[_LOW], state[_HIGH]
    if state[_USED] == 0:
        return 0 if length <= arena_bytes else -1
    if high > low:
        if arena_bytes - high >= length:
            return high
        return 0 if low >= length else -1
    return high if low - high >= length else -1


@njit
def _issue(own: Any, slots: Any, slot: Any, work: Any) -> None:
    """Queue what is left of a slot's request."""
    done = slots[slot, _DONE]
    descriptor = own.direct if done % PAGE_BYTES == 0 else own.plain
    offset = work.requests.first_pages[slots[slot, _REQUEST]] * PAGE_BYTES + done
    address = own.arena + slots[slot, _BEGIN] + done
    _prepare_read(own.ring, descriptor, address, slots[slot, _LENGTH] - done, offset, slot)


@njit
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


@njit
def _reclaim(slots: Any, state: Any) -> None:
    """Give back the oldest slots that are finished.

    In the order in which they were taken: what is free of the arena stays one piece of the circle.
    """
    while state[_USED] > 0 and slots[state[_OLDEST], _FINISHED]:
        state[_OLDEST] = (state[_OLDEST] + 1) % len(slots)
        state[_USED] -= 1
        state[_LOW] = slots[state[_OLDEST], _BEGIN]


@njit
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


@njit
def _reap(own: Any, slots: Any, state: Any, work: Any, status: Any) -> None:
    """Handle all completions that are there."""
    ring = own.ring
    head = load_acquire_u32(ring[_CQ_HEAD])
    while head != load_acquire_u32(ring[_CQ_TAIL]):
        entry = ring[_CQES] + (np.int64(head) & ring[_CQ_MASK]) * _CQE_BYTES
        slot = np.int64(load_u64(entry))
        result = np.int64(np.int32(load_u64(entry + 8) & _LOW_32))
        head = np.uint32(head + np.uint32(1))
        store_release_u32(ring[_CQ_HEAD], head)
        if _advance(slots, slot, result, work.requests, status):
            _issue(own, slots, slot, work)
            continue
        if status[0] == DONE:
            deliver(own.arena + slots[slot, _BEGIN], slots[slot, _REQUEST], work, status)
        if status[0] not in (DONE, STOPPED):
            halt(work.shared)
        slots[slot, _FINISHED] = 1
        state[_IN_FLIGHT] -= 1
    _reclaim(slots, state)


@njit
def _ring_share(own: Any, depth: Any, work: Any, status: Any) -> None:
    """Keep the ring full and handle what comes back until nothing is left, as one worker."""
    status[0] = DONE
    slots = np.zeros((depth, 5), np.int64)
    state = np.zeros(5, np.int64)
    request = take(work, status)
    while True:
        while request >= 0 and _start(own, slots, state, request, work):
            request = take(work, status)
        if state[_IN_FLIGHT] == 0:  # not earlier: the kernel writes into the arena until then
            return
        number = _enter(own.ring)
        if number not in (0, _EINTR, _EAGAIN, _EBUSY):
            status[0], status[1], status[3] = FAILED, number, _STUCK
            halt(work.shared)
            return
        _reap(own, slots, state, work, status)
        if status[0] != DONE:
            request = -1


class RingBackend:
    """Reads through one io_uring per worker."""

    name: Literal["io_uring"] = "io_uring"

    def __init__(self, files: Files, *, workers: int, block_bytes: int, queue_depth: int) -> None:
        self._depth = max(1, queue_depth // workers)
        self._direct, self._plain = files.direct, files.plain
        self._arena_bytes = max(_ARENA_BYTES, 2 * block_bytes)
        self._rings: list[Ring] = []
        self._arenas: list[Any] = []
        try:
            for _ in range(workers):  # a ring belongs to one thread at a time
                self._rings.append(Ring(self._depth))
                self._arenas.append(aligned_empty(self._arena_bytes))
            self._try_a_read()
        except BaseException:
            self.close()
            raise

    def _try_a_read(self) -> None:
        """Read the header: a kernel before 5.6 has rings but not this kind of read."""
        one, none, status = np.ones(1, np.int64), np.empty(0, np.int64), np.zeros((1, 4), np.int64)
        page = Requests(one - 1, one, one - 1, one - 1, none, none, none, bytes_used=0)
        shared, unchecked = np.zeros(2, np.int64), np.empty(0, np.uint32)
        unchecked.flags.writeable = False  # as those of a file: one compiled version
        self.share(0, Work(page, 0, unchecked, np.uint64(0), shared.ctypes.data), status)
        if status[0, 0] != DONE:
            raise _unsupported(f"a first read failed ({os.strerror(int(status[0, 1]))})")

    def share(self, worker: int, work: Work, status: Ids) -> None:
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
