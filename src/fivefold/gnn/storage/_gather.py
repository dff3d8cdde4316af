"""Gathering rows of an array in memory, of any dtype and row size, in compiled code."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold._compiler import njit
from fivefold.errors import ConfigurationError
from fivefold.gnn.storage._machine import copy_bytes, prefetch

_AHEAD = 8  # rows whose first lines are asked for early: memory latency over copy time


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
    source: NDArray[Any],
    rows: NDArray[np.integer[Any]],
    out: NDArray[Any],
    destinations: NDArray[np.integer[Any]] | None = None,
) -> None:
    """Copy rows of an array in memory, or of a memory map, into another; without Python's lock.

    Args:
        source: Rows, each contiguous.
        rows: Numbers of rows, in any order, repetitions allowed.
        out: Contiguous rows of the same dtype and row shape; it does not overlap the source.
        destinations: Row of ``out`` for each; None puts them one after another.

    Raises:
        ConfigurationError: Dtypes or shapes differ, an array is not contiguous, or an index is
            out of range. Nothing has been copied then.

    Examples:
        >>> table = np.arange(6.0).reshape(3, 2)
        >>> out = np.zeros((3, 2))
        >>> gather_rows(table, np.array([2, 0]), out, np.array([1, 0]))
        >>> out.tolist()
        [[0.0, 1.0], [4.0, 5.0], [0.0, 0.0]]
    """
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
