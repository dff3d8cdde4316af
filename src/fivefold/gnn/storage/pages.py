"""Pages of 4 KiB: their checksums, memory for them that direct I/O and CUDA accept, gathered rows.

The checksum is XXH64 (Yann Collet's specification, version 0.1.1), compiled here for one page,
because readers compare pages inside loops that do not hold the interpreter's lock: 12 GB/s on one
core, where a call of the ``xxhash`` package for each page reaches 4. It finds damage, not forgery.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fivefold._compiler import njit
from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.gnn.storage._machine import copy_bytes, load_u64, prefetch

Array = NDArray[Any]  # these types stand in signatures of the whole package
Ids = NDArray[np.int64]  # ids, counts, places
Bytes = NDArray[np.uint8]

PAGE_BYTES = 4096

_PRIME_1 = np.uint64(0x9E3779B185EBCA87)
_PRIME_2 = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME_3 = np.uint64(0x165667B19E3779F9)
_PRIME_4 = np.uint64(0x85EBCA77C2B2AE63)
_BITS = np.uint64(64)
_LOW_32 = np.uint64(0xFFFFFFFF)
_AHEAD = 8  # rows whose first lines are asked for early: memory latency over copy time


@njit
def _rotate(value: Any, count: Any) -> Any:
    return (value << np.uint64(count)) | (value >> (_BITS - np.uint64(count)))


@njit
def _round(lane: Any, word: Any) -> Any:
    return _rotate(lane + word * _PRIME_2, 31) * _PRIME_1


@njit
def _merge(total: Any, lane: Any) -> Any:
    return (total ^ _round(np.uint64(0), lane)) * _PRIME_1 + _PRIME_4


@njit
def hash_page(address: Any, seed: Any) -> Any:
    """Return the checksum of one page: the low 32 bits of XXH64."""
    lane_1 = seed + _PRIME_1 + _PRIME_2
    lane_2 = seed + _PRIME_2
    lane_3 = seed
    lane_4 = seed - _PRIME_1
    for place in range(address, address + PAGE_BYTES, 32):
        lane_1 = _round(lane_1, load_u64(place))
        lane_2 = _round(lane_2, load_u64(place + 8))
        lane_3 = _round(lane_3, load_u64(place + 16))
        lane_4 = _round(lane_4, load_u64(place + 24))
    total = _rotate(lane_1, 1) + _rotate(lane_2, 7) + _rotate(lane_3, 12) + _rotate(lane_4, 18)
    for lane in (lane_1, lane_2, lane_3, lane_4):
        total = _merge(total, lane)
    total += np.uint64(PAGE_BYTES)
    total = (total ^ (total >> np.uint64(33))) * _PRIME_2
    total = (total ^ (total >> np.uint64(29))) * _PRIME_3
    return np.uint32((total ^ (total >> np.uint64(32))) & _LOW_32)


@njit
def hash_into(address: Any, first_page: Any, file_id: Any, checksums: Any) -> None:
    """Write the checksums of consecutive pages of a file.

    The seed of a page is the file's id plus the page's number, so that a page of another file, or
    of another place in this one, does not pass.
    """
    for index in range(len(checksums)):
        seed = file_id + np.uint64(first_page + index)
        checksums[index] = hash_page(address + index * PAGE_BYTES, seed)


def first_outside(ids: Array, bound: int) -> int:
    """Return the first place whose id is not one of 0 to ``bound`` - 1, or -1."""
    if not ids.size or 0 <= int(ids.min()) <= int(ids.max()) < bound:
        return -1
    return int(np.flatnonzero((ids < 0) | (ids >= bound))[0])


def hash_pages(pages: Bytes, file_id: int, first_page: int) -> NDArray[np.uint32]:
    """Return the checksums of consecutive pages of a file, given as contiguous bytes."""
    checksums = np.empty(len(pages) // PAGE_BYTES, np.uint32)
    hash_into(pages.ctypes.data, first_page, np.uint64(file_id), checksums)
    return checksums


def aligned(count: int) -> int:
    """Return the smallest multiple of the page size that holds this many bytes."""
    return -(-count // PAGE_BYTES) * PAGE_BYTES


def aligned_empty(
    shape: int | tuple[int, ...], dtype: DTypeLike = np.uint8, *, pin: bool = False
) -> Array:
    """Return an array whose first byte lies on a page boundary; its contents are not set."""
    kind = np.dtype(dtype)
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    count = math.prod(sizes) * kind.itemsize
    # Pinned memory is registered by whole pages, so the last one must be ours as well.
    padded = aligned(count)
    memory = np.empty(padded + PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES
    if pin and padded:
        _pin(memory, start, padded)
    array: Array = memory[start : start + count].view(kind).reshape(sizes)
    return array


def _pin(memory: Bytes, start: int, count: int) -> None:
    import torch  # noqa: PLC0415 - loading torch takes seconds, and most callers do not pin

    if not torch.cuda.is_available():
        message = "memory cannot be pinned: torch sees no CUDA device"
        raise UnsupportedError(message, hint="leave pin=False")
    address = memory.ctypes.data + start
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(runtime.cudaHostRegister(address, count, 0))
    if status:
        raise UnsupportedError(
            f"CUDA error {status} on pinning {count} bytes",
            hint="raise the limit on locked memory (ulimit -l) or leave pin=False",
        )
    # The base array outlives every view of it.
    weakref.finalize(memory, runtime.cudaHostUnregister, address)


@njit
def _gather(  # noqa: PLR0913, PLR0917 - numba takes no keyword-only parameters
    source: Any,
    num_rows: Any,
    stride: Any,
    row_bytes: Any,
    rows: Any,
    places: Any,
    out: Any,
    out_rows: Any,
) -> Any:
    """Copy rows; returns the first index that is out of range, or -1."""
    for index in range(len(rows)):
        row, place = np.int64(rows[index]), np.int64(places[index])
        if row < 0 or row >= num_rows or place < 0 or place >= out_rows:
            return index
    for index in range(len(rows)):
        ahead = index + _AHEAD
        if ahead < len(rows):
            start = source + np.int64(rows[ahead]) * stride
            for line in range(0, min(row_bytes, 512), 64):
                prefetch(start + line)
        copy_bytes(
            out + np.int64(places[index]) * row_bytes,
            source + np.int64(rows[index]) * stride,
            row_bytes,
        )
    return -1


def gather_rows(
    source: Array,
    rows: NDArray[np.integer[Any]],
    out: Array,
    destinations: NDArray[np.integer[Any]] | None = None,
) -> None:
    """Copy rows of an array in memory, or of a memory map, into another; without Python's lock."""
    places = np.arange(len(rows)) if destinations is None else np.asarray(destinations, np.int64)
    row_shape = source.shape[1:]
    row_bytes = math.prod(row_shape) * source.itemsize
    same = out.dtype == source.dtype and out.shape[1:] == row_shape and out.ndim > 0
    contiguous = len(source) == 0 or source[:1].flags.c_contiguous
    if not same or not contiguous or not out.flags.c_contiguous or not out.flags.writeable:
        raise ConfigurationError(
            f"rows of {source.dtype} {row_shape} cannot be gathered into {out.dtype} {out.shape}",
            hint="give arrays of one dtype and row shape, contiguous, the second writable",
        )
    if len(places) != len(rows):
        raise ConfigurationError(
            f"{len(rows)} rows and {len(places)} destinations", hint="give one per row"
        )
    numbers = np.asarray(rows, np.int64)
    bad = _gather(
        source.ctypes.data,
        len(source),
        source.strides[0],
        row_bytes,
        numbers,
        places,
        out.ctypes.data,
        len(out),
    )
    if bad >= 0:
        raise ConfigurationError(
            f"row {numbers[bad]} into row {places[bad]} is out of range",
            hint=f"there are {len(source)} rows, and {len(out)} in the output",
        )
