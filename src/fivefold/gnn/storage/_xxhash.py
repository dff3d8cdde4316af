"""XXH64 in compiled Python: of any bytes, and of the pages of a file in one call.

The hash is Yann Collet's XXH64 (the algorithm's public specification, version 0.1.1): four
64-bit lanes over 32-byte stripes, then the tail, then an avalanche. It runs at several bytes per
clock cycle, so checking a page costs a small part of reading it. It finds damage, not forgery.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.gnn.storage._machine import compiled, load_u8, load_u32, load_u64

PAGE_BYTES = 4096

_PRIME_1 = np.uint64(0x9E3779B185EBCA87)
_PRIME_2 = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME_3 = np.uint64(0x165667B19E3779F9)
_PRIME_4 = np.uint64(0x85EBCA77C2B2AE63)
_PRIME_5 = np.uint64(0x27D4EB2F165667C5)
_BITS = np.uint64(64)
_LOW_32 = np.uint64(0xFFFFFFFF)


@compiled
def _rotate(value: Any, count: Any) -> Any:
    return (value << np.uint64(count)) | (value >> (_BITS - np.uint64(count)))


@compiled
def _round(lane: Any, word: Any) -> Any:
    return _rotate(lane + word * _PRIME_2, 31) * _PRIME_1


@compiled
def _merge(total: Any, lane: Any) -> Any:
    return (total ^ _round(np.uint64(0), lane)) * _PRIME_1 + _PRIME_4


@compiled
def _avalanche(value: Any) -> Any:
    value = (value ^ (value >> np.uint64(33))) * _PRIME_2
    value = (value ^ (value >> np.uint64(29))) * _PRIME_3
    return value ^ (value >> np.uint64(32))


@compiled
def _stripes(address: Any, count: Any, seed: Any) -> Any:
    """The lanes over ``count`` whole stripes of 32 bytes, merged."""
    lane_1 = seed + _PRIME_1 + _PRIME_2
    lane_2 = seed + _PRIME_2
    lane_3 = seed
    lane_4 = seed - _PRIME_1
    for stripe in range(count):
        place = address + 32 * stripe
        lane_1 = _round(lane_1, load_u64(place))
        lane_2 = _round(lane_2, load_u64(place + 8))
        lane_3 = _round(lane_3, load_u64(place + 16))
        lane_4 = _round(lane_4, load_u64(place + 24))
    total = _rotate(lane_1, 1) + _rotate(lane_2, 7) + _rotate(lane_3, 12) + _rotate(lane_4, 18)
    total = _merge(total, lane_1)
    total = _merge(total, lane_2)
    total = _merge(total, lane_3)
    return _merge(total, lane_4)


@compiled
def _tail(address: Any, stop: Any, total: Any) -> Any:
    """The last 0 to 31 bytes."""
    while address + 8 <= stop:
        total ^= _round(np.uint64(0), load_u64(address))
        total = _rotate(total, 27) * _PRIME_1 + _PRIME_4
        address += 8
    if address + 4 <= stop:
        total ^= np.uint64(load_u32(address)) * _PRIME_1
        total = _rotate(total, 23) * _PRIME_2 + _PRIME_3
        address += 4
    while address < stop:
        total ^= np.uint64(load_u8(address)) * _PRIME_5
        total = _rotate(total, 11) * _PRIME_1
        address += 1
    return total


@compiled
def _hash(address: Any, count: Any, seed: Any) -> Any:
    total = _stripes(address, count >> 5, seed) if count >= 32 else seed + _PRIME_5
    total += np.uint64(count)
    return _avalanche(_tail(address + (count >> 5 << 5), address + count, total))


@compiled
def hash_page(address: Any, seed: Any) -> Any:
    """Checksum of one page: the low 32 bits of XXH64."""
    total = _stripes(address, PAGE_BYTES >> 5, seed) + np.uint64(PAGE_BYTES)
    return np.uint32(_avalanche(total) & _LOW_32)


@compiled
def _hash_pages(address: Any, file_id: Any, first_page: Any, checksums: Any) -> None:
    for index in range(len(checksums)):
        seed = file_id + np.uint64(first_page + index)
        checksums[index] = hash_page(address + index * PAGE_BYTES, seed)


def xxh64(data: bytes | NDArray[np.uint8], seed: int = 0) -> int:
    """XXH64 of some bytes.

    Args:
        data: Bytes, or a contiguous array of them.
        seed: Any integer; its low 64 bits count.

    Returns:
        The hash, between 0 and 2**64 - 1.

    Examples:
        >>> hex(xxh64(b""))
        '0xef46db3751d8e999'
    """
    view = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    masked = np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
    return int(_hash(view.ctypes.data, len(view), masked))


def hash_pages(pages: NDArray[np.uint8], file_id: int, first_page: int) -> NDArray[np.uint32]:
    """Checksums of consecutive pages of a file.

    The seed of a page is the file's id plus the page's number, so that a page of another file,
    or of another place in this one, does not pass.
    """
    checksums = np.empty(len(pages) // PAGE_BYTES, np.uint32)
    _hash_pages(pages.ctypes.data, np.uint64(file_id), first_page, checksums)
    return checksums
