"""The loops of a counting sort and of hashing texts, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from fivefold._compiler import njit


@njit
def count_keys(values: Any, width: int, counts: Any) -> None:
    """Add to ``counts[value // width]`` for every value."""
    for value in values:
        counts[int(value) // width] += 1


@njit
def assign_places(values: Any, width: int, starts: Any, places: Any) -> None:
    """Where each value goes in a stable sort by ``value // width``; ``starts`` is used up."""
    for index in range(values.size):
        bucket = int(values[index]) // width
        places[index] = starts[bucket]
        starts[bucket] += 1


_OFFSET, _PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)
_SHIFT = np.uint64(32)


@njit
def hash_texts(offsets: Any, data: Any, out: Any) -> None:
    """FNV-1a of the bytes ``data[offsets[i]:offsets[i + 1]]``, its halves folded together."""
    for index in range(out.size):
        value = _OFFSET
        for place in range(offsets[index], offsets[index + 1]):
            value = (value ^ np.uint64(data[place])) * _PRIME
        out[index] = value ^ (value >> _SHIFT)
