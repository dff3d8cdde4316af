"""Compact byte form of a few integer arrays: what one batch record is made of.

Each array is stored in the smallest of 1, 2, 4 and 8 bytes that holds its values; an ascending
array is stored as differences. Decoding is a cast or a running sum, so that it costs little
more than the read. Words are little-endian. This module knows nothing of what the arrays mean.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import DataError

_MAGIC = 0x5246_4542_4C4F_4635  # "5FOLBEFR": says that this is a record and its byte order
_WIDTHS = (1, 2, 4, 8)
_DIFFERENCES = 16  # flag beside the width
_HEADER_WORDS = 3  # magic, total bytes, number of arrays
_FIELD_WORDS = 3  # count, code, first value
_ALIGNMENT = 8


def encode_arrays(
    arrays: Sequence[NDArray[np.integer]], *, ascending: Collection[int] = ()
) -> NDArray[np.uint8]:
    """Write arrays of non-negative integers into one block of bytes, a multiple of 8 long.

    Args:
        arrays: One-dimensional, any integer type, values from 0 to 2^63 - 1.
        ascending: Numbers of the arrays that are stored as differences.

    Examples:
        >>> block = encode_arrays([np.array([3, 5, 900]), np.array([7, 1])], ascending={0})
        >>> [array.tolist() for array in decode_arrays(block)]
        [[3, 5, 900], [7, 1]]
    """
    words = [_MAGIC, 0, len(arrays)]
    parts: list[NDArray[np.uint8]] = []
    for number, array in enumerate(arrays):
        field, payload = _encode(array, differences=number in ascending and array.size > 1)
        words.extend(field)
        parts.append(payload)
    header_bytes = 8 * len(words)
    words[1] = header_bytes + sum(_padded(part.size) for part in parts)
    block = np.zeros(words[1], np.uint8)
    block[:header_bytes] = np.array(words, "<i8").view(np.uint8)
    place = header_bytes
    for part in parts:
        block[place : place + part.size] = part
        place += _padded(part.size)
    return block


def decode_arrays(block: NDArray[np.uint8]) -> list[NDArray[np.integer]]:
    """Read what ``encode_arrays`` wrote; bytes behind its end are ignored.

    Returns:
        The arrays: int64 where differences were stored, else an unsigned view into ``block``.

    Raises:
        DataError: The bytes are no such block, or they are cut short.
    """
    total, count = _check_header(block)
    fields = block[24 : 24 + 24 * count].view("<i8").reshape(count, _FIELD_WORDS)
    place = 8 * (_HEADER_WORDS + _FIELD_WORDS * count)
    arrays: list[NDArray[np.integer]] = []
    for items, code, first in fields.tolist():
        width, differences = code & 15, code & _DIFFERENCES
        stored = max(items - 1, 0) if differences else items
        if width not in _WIDTHS or items < 0 or place + stored * width > total:
            raise DataError(f"a batch record is damaged: {items} items of code {code}", hint=_HINT)
        values = block[place : place + stored * width].view(f"<u{width}")
        arrays.append(_running_sum(values, items, first) if differences else values)
        place += _padded(stored * width)
    return arrays


_HINT = "the file was damaged after it was written; pack the store again"


def _check_header(block: NDArray[np.uint8]) -> tuple[int, int]:
    if block.size < 8 * _HEADER_WORDS:
        raise DataError(f"a batch record of {block.size} bytes is cut short", hint=_HINT)
    magic, total, count = block[:24].view("<i8").tolist()
    if magic != _MAGIC or count < 0 or not 24 * (1 + count) <= total <= block.size:
        message = f"no batch record: mark {magic:#x}, {total} of {block.size} bytes"
        raise DataError(message, hint=_HINT)
    return total, count


def _encode(
    values: NDArray[np.integer], *, differences: bool
) -> tuple[list[int], NDArray[np.uint8]]:
    stored = np.diff(values) if differences else values
    assert stored.size == 0 or stored.min() >= 0, "records hold no negative numbers"
    width = _width(stored)
    first = int(values[0]) if values.size else 0
    payload = stored.astype(f"<u{width}").view(np.uint8)
    return [values.size, width | (_DIFFERENCES if differences else 0), first], payload


def _width(values: NDArray[np.integer]) -> int:
    largest = int(values.max()) if values.size else 0
    return next(width for width in _WIDTHS if largest < 1 << (8 * width))


def _running_sum(steps: NDArray[np.unsignedinteger], items: int, first: int) -> NDArray[np.int64]:
    values = np.empty(items, np.int64)
    if items:
        values[0] = first
        values[1:] = steps
        np.cumsum(values, out=values)
    return values


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
