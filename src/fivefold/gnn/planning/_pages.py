"""Page arithmetic: what a read of rows costs in pages and requests, exactly.

A section of rows begins on a page. Row ``r`` of ``b`` bytes lies in bytes ``r b`` to
``(r + 1) b - 1``, on whatever pages these touch. A run of rows is read as its whole pages; runs
that share a page, adjoin, or leave a gap of at most ``max_gap_bytes`` whole-page bytes between
them become one extent; an extent is read in requests of at most ``block_bytes``. The row readers
of ``fivefold.gnn.storage`` do the same, so that bytes predicted here are bytes read there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fivefold._compiler import njit
from fivefold.gnn.planning._sources import Array, Ids

PAGE_BYTES = 4096
BLOCK_BYTES = 1 << 20
_BLOCK_PAGES = BLOCK_BYTES // PAGE_BYTES
SIZE_CLASSES = _BLOCK_PAGES.bit_length()


def extent_pages(
    starts: Array, counts: Array, *, row_bytes: int, max_gap_bytes: int = 0
) -> tuple[Ids, Ids]:
    """Extents in pages that a reader touches for runs of rows.

    Args:
        starts: First row of each run, ascending.
        counts: Rows of each run; empty runs are allowed and cost nothing.
        row_bytes: Bytes of a row.
        max_gap_bytes: Gaps of up to so many bytes of whole pages are read through.

    Returns:
        First page and the page after the last one of each extent; both int64.

    Examples:
        >>> first, stop = extent_pages([0, 9, 40], [2, 1, 8], row_bytes=512)
        >>> first.tolist(), stop.tolist()  # rows 0, 1 and 9 lie on pages 0 and 1, which adjoin
        ([0, 5], [2, 6])
    """
    starts, counts = np.asarray(starts, np.int64), np.asarray(counts, np.int64)
    first, stop = np.empty(len(starts), np.int64), np.empty(len(starts), np.int64)
    number = _merge(starts, counts, row_bytes, max_gap_bytes // PAGE_BYTES, first, stop)
    return first[:number].copy(), stop[:number].copy()


def read_costs(starts: Array, counts: Array, *, row_bytes: int, gaps_bytes: Array) -> Ids:
    """Requests and bytes of reading runs, for several gaps at once and by the requests' sizes.

    Args:
        starts: First row of each run, ascending.
        counts: Rows of each run.
        row_bytes: Bytes of a row.
        gaps_bytes: Values of ``max_gap_bytes`` to count for.

    Returns:
        int64 [gaps, 9, 2]: (requests, bytes) of the requests of ``2**k`` to ``2**(k + 1) - 1``
        pages, k from 0 to 8 (a block of 1 MiB).

    Examples:
        >>> costs = read_costs(np.array([0, 24]), np.array([8, 8]), row_bytes=512,
        ...                    gaps_bytes=np.array([0, 8192]))
        >>> costs.sum(1).tolist(), costs[:, :3, 0].tolist()
        ([[2, 8192], [1, 16384]], [[2, 0, 0], [0, 0, 1]])
    """
    gap_pages = np.asarray(gaps_bytes, np.int64) // PAGE_BYTES
    costs = np.zeros((len(gap_pages), SIZE_CLASSES, 2), np.int64)
    starts, counts = np.asarray(starts, np.int64), np.asarray(counts, np.int64)
    _costs(starts, counts, row_bytes, gap_pages, costs)
    costs[..., 1] *= PAGE_BYTES
    return costs


def runs_of(rows: Ids) -> tuple[Ids, Ids]:
    """Starts and counts of the runs of consecutive numbers in ascending distinct rows.

    Examples:
        >>> starts, counts = runs_of(np.array([3, 4, 5, 9]))
        >>> starts.tolist(), counts.tolist()
        ([3, 9], [3, 1])
    """
    if not len(rows):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    first = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1)
    return rows[first], np.diff(first, append=len(rows))


@njit
def _merge(starts: Any, counts: Any, row_bytes: Any, gap_pages: Any, first: Any, stop: Any) -> Any:
    number = 0
    for run in range(starts.shape[0]):
        if counts[run] <= 0:
            continue
        begin = starts[run] * row_bytes // PAGE_BYTES
        end = ((starts[run] + counts[run]) * row_bytes + PAGE_BYTES - 1) // PAGE_BYTES
        if number and begin - stop[number - 1] <= gap_pages:
            stop[number - 1] = max(stop[number - 1], end)
        else:
            first[number], stop[number] = begin, end
            number += 1
    return number


@njit
def _costs(starts: Any, counts: Any, row_bytes: Any, gap_pages: Any, costs: Any) -> Any:
    # One walk over the runs for all gaps; open_first and open_stop are the extents being made.
    number = gap_pages.shape[0]
    open_first, open_stop = np.full(number, -1, np.int64), np.full(number, -1, np.int64)
    for run in range(starts.shape[0]):
        if counts[run] <= 0:
            continue
        begin = starts[run] * row_bytes // PAGE_BYTES
        end = ((starts[run] + counts[run]) * row_bytes + PAGE_BYTES - 1) // PAGE_BYTES
        for i in range(number):
            if open_stop[i] >= 0 and begin - open_stop[i] <= gap_pages[i]:
                open_stop[i] = max(open_stop[i], end)
                continue
            _add(costs[i], open_stop[i] - open_first[i])
            open_first[i], open_stop[i] = begin, end
    for i in range(number):
        _add(costs[i], open_stop[i] - open_first[i])


@njit
def _add(costs: Any, pages: Any) -> Any:
    """Count the requests of an extent: whole blocks, then the rest by its size."""
    blocks, rest = pages // _BLOCK_PAGES, pages % _BLOCK_PAGES
    costs[SIZE_CLASSES - 1, 0] += blocks
    costs[SIZE_CLASSES - 1, 1] += blocks * _BLOCK_PAGES
    if rest:
        size_class = 0
        while rest >> (size_class + 1):
            size_class += 1
        costs[size_class, 0] += 1
        costs[size_class, 1] += rest
