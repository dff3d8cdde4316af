"""An io_uring by raw system calls: set-up here, its memory as addresses for compiled code.

The ring's two queues are memory shared with the kernel. Who produces entries writes them first and
then moves the tail with a release store; who consumes reads the tail with an acquire load, then the
entries, then moves the head with a release store. The kernel does the same on its side, so this
holds on every processor. One ring is used by one thread at a time.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import UnsupportedError
from fivefold.gnn.storage._machine import (
    compiled,
    load_acquire_u32,
    read_errno,
    store_release_u32,
    store_u32,
    store_u64,
    syscall,
)

_SETUP, _ENTER = 425, 426  # the same numbers on every architecture
_PARAMETERS_BYTES = 120
_SINGLE_MAP = 1
_SQES_OFFSET = 0x10000000
_OP_READ = 22
_GET_EVENTS = 1
_SQE_BYTES, CQE_BYTES = 64, 16

# Places in the array of numbers that compiled code gets.
_FD, _SQ_HEAD, _SQ_TAIL, _SQ_MASK, _SQ_ARRAY, _SQES = range(6)
CQ_HEAD, CQ_TAIL, CQ_MASK, CQES = range(6, 10)


class Ring:
    """One io_uring.

    Attributes:
        numbers: Descriptor, addresses and masks, for the compiled functions of this module.
    """

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
        rings_bytes = max(submission[6] + 4 * sq_entries, completion[5] + CQE_BYTES * cq_entries)
        self._rings = self._map(rings_bytes, 0)
        self._sqes = self._map(_SQE_BYTES * sq_entries, _SQES_OFFSET)
        rings, sqes = (_address(memory) for memory in (self._rings, self._sqes))
        masks = np.frombuffer(self._rings, "<u4").copy()
        self.numbers: NDArray[np.int64] = np.array(
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


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _unsupported(reason: str) -> UnsupportedError:
    denied = os.strerror(errno.EPERM)
    hint = 'use backend="threads" or "auto"'
    if reason == denied:
        hint += ", or allow it (sysctl kernel.io_uring_disabled, seccomp profile of the container)"
    return UnsupportedError(f"io_uring is not available: {reason}", hint=hint)


@compiled
def prepare_read(
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


@compiled
def enter(numbers: Any) -> Any:
    """Submit what is queued and wait for one completion; returns 0 or the error number."""
    waiting = np.uint32(load_acquire_u32(numbers[_SQ_TAIL]) - load_acquire_u32(numbers[_SQ_HEAD]))
    done = syscall(
        np.int64(_ENTER), numbers[_FD], np.int64(waiting), np.int64(1), np.int64(_GET_EVENTS),
        np.int64(0), np.int64(0),
    )  # fmt: skip
    return read_errno() if done < 0 else 0
