"""DiskGNN's own search for the batches per segment: approximate, by the first segment only.

A segment of s batches stores each cold row once that several of its batches need, and one row for
each that one batch needs. The published search streams the first batches and stops at the first s
for which (distinct cold rows of s batches) * batches / s is below the disk budget: the smallest,
since a larger s scatters more. Later segments are assumed to be like the first. Liu et al.,
arXiv 2405.05231, and its public code.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

__all__ = ["first_feasible_segment"]


def first_feasible_segment(
    cold_ids: Iterable[NDArray[np.int64]], *, num_ids: int, num_batches: int, max_rows: int | None
) -> int:
    """Find the smallest s that the published estimate finds small enough.

    Args:
        cold_ids: Ids that each batch needs from the disk, from the first batch on.
        num_ids: Ids are 0 to ``num_ids - 1``.
        num_batches: Of the epoch.
        max_rows: Rows that may be stored on disk; None for any number, which gives 1.

    Returns:
        Batches per segment, ``num_batches`` where no s is small enough.

    Example:
        >>> cold = [np.array([0, 1, 2]), np.array([0, 1, 3]), np.array([1, 2, 3])]
        >>> first_feasible_segment(cold, num_ids=4, num_batches=3, max_rows=7)
        2
    """
    if max_rows is None or num_batches <= 1:
        return 1
    seen = np.zeros(num_ids, np.bool_)
    distinct = 0
    for batches, ids in enumerate(cold_ids, start=1):
        distinct += int(np.count_nonzero(~seen[ids]))
        seen[ids] = True
        if distinct * num_batches < max_rows * batches:
            return batches
    return num_batches
