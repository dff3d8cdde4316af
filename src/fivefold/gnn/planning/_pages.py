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
from fivefold.gnn.planning._inputs import Array, Ids

PAGE_BYTES = 4096
BLOCK_BYTES = 1 << 20
_BLOCK_PAGES = BLOCK_BYTES // PAGE_BYTES
SIZE_CLASSES = _BLOCK_PAGES.bit_length()


def read_costs(starts: Array, counts: Array, *, row_bytes: int, gaps_bytes: Array) -> Ids:
    """Count requests and bytes of reading runs, for several gaps at once.

    Returns int64 [gaps, 9, 2]: (requests, bytes) of the requests of ``2**k`` to ``2**(k + 1) - 1``
    pages, k from 0 to 8 (a block of 1 MiB).
    """
    gap_pages = np.asarray(gaps_bytes, np.int64) // PAGE_BYTES
    costs = np.zeros((len(gap_pages), SIZE_CLASSES, 2), np.int64)
    starts, counts = np.asarray(starts, np.int64), np.asarray(counts, np.int64)
    _costs(starts, counts, row_bytes, gap_pages, costs)
    costs[..., 1] *= PAGE_BYTES
    return costs


def runs_of(rows: Ids) -> tuple[Ids, Ids]:
    """Return starts and counts of the runs of consecutive numbers in ascending distinct rows."""
    first = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    return rows[first], np.diff(first, append=len(rows))


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
