"""Static caches: the rows that most batches use, chosen once for the whole run.

DiskGNN's first two levels: rows by descending access count, ties by node id; the first fill the
device's slots, the next the host's. Rows that no batch uses are never cached.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fivefold._compiler import njit
from fivefold.gnn.planning._sources import Array, Ids


def hottest_rows(counts: Array, num_rows: int) -> Ids:
    """The ``num_rows`` ids of highest count above zero, ties by id; ascending by id.

    Examples:
        >>> hottest_rows(np.array([3, 0, 5, 3], np.uint32), 2).tolist()
        [0, 2]
    """
    if num_rows <= 0 or not len(counts):
        return np.empty(0, np.int64)
    histogram = np.zeros(int(counts.max()) + 1, np.int64)
    _histogram(counts, histogram)
    at_least = np.cumsum(histogram[::-1])[::-1]  # at_least[c]: rows of count c or more
    # All rows of this count or more fit; those of the count just below fit in part or are unused.
    threshold = max(1, int(np.count_nonzero(at_least > num_rows)))
    num_taken = int(at_least[threshold]) if threshold < len(at_least) else 0
    num_ties = num_rows - num_taken if threshold > 1 else 0
    rows = np.empty(min(num_rows, num_taken + num_ties), np.int64)
    return rows[: _take(counts, threshold, num_ties, rows)]


def find_slots(rows: Ids, node_ids: Ids) -> Array:
    """Place of each id in the ascending rows, -1 where it is not among them (int32)."""
    if not len(rows):
        return np.full(len(node_ids), -1, np.int32)
    places = np.searchsorted(rows, node_ids)
    found = rows[np.minimum(places, len(rows) - 1)] == node_ids
    return np.where(found, places, -1).astype(np.int32)


@njit
def _histogram(counts: Any, histogram: Any) -> Any:
    for place in range(counts.shape[0]):
        histogram[counts[place]] += 1


@njit
def _take(counts: Any, threshold: Any, num_ties: Any, rows: Any) -> Any:
    """All rows of at least ``threshold`` and the first ties of the count just below it."""
    number = 0
    for node in range(counts.shape[0]):
        take = counts[node] >= threshold
        if not take and num_ties > 0 and counts[node] == threshold - 1:
            take = True
            num_ties -= 1
        if take:
            rows[number] = node
            number += 1
    return number
