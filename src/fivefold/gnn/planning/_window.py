"""The cost of all segment sizes at once, from segments that begin at every window.

In a membership layout the runs of a batch depend on the batches before it in the segment and on no
later one. So one refinement over a window of w batches shows the segments of 1, 2, ..., w batches
that begin there, and one pass over all batches shows every size up to w in all windows. What it
leaves out: segments that begin elsewhere, and the place of a segment's first row within a page.
"""

from __future__ import annotations

import numpy as np

from fivefold.gnn.planning._pages import SIZE_CLASSES, read_costs
from fivefold.gnn.planning._refinement import Refinement
from fivefold.gnn.planning._segments import SegmentQuestion, choose_gap
from fivefold.gnn.planning._sources import Array
from fivefold.gnn.planning._union import Union


class WindowCosts:
    """Rows and reads of the first t batches of a segment, per cold row that they need.

    Ratios, for batches differ: those that find an empty cache need more rows than all others.

    Args:
        question: Of a membership layout.
        window: Largest segment size of interest.
    """

    def __init__(self, question: SegmentQuestion, window: int) -> None:
        self._question = question
        num_batches = len(question.cold)
        needed, rows = np.zeros(window + 1), np.zeros(window + 1)
        reads = np.zeros((window + 1, len(question.gaps_bytes), SIZE_CLASSES, 2))
        for first in range(0, num_batches, window):
            self._walk(first, min(first + window, num_batches), needed, rows, reads)
        scale = question.cold.sizes.sum() / np.maximum(needed, 1)
        self._rows = rows * scale
        self._reads = reads * scale[:, None, None, None]

    def estimate(self, segment_batches: int) -> tuple[int, float, int, int, int]:
        """Packed rows, seconds, bytes, requests and the best gap of one size, over all batches."""
        reads = self._reads[segment_batches]
        gap, seconds = choose_gap(self._question, reads)
        requests, size_bytes = reads[gap].sum(axis=0)
        return (
            round(self._rows[segment_batches]),
            seconds,
            round(size_bytes),
            round(requests),
            self._question.gaps_bytes[gap],
        )

    def _walk(self, first: int, stop: int, needed: Array, rows: Array, reads: Array) -> None:
        """Add one window: entry t of each array is about its first t batches."""
        batches = self._question.cold.segment(first, stop)
        union = Union(batches)
        refinement = Refinement(len(union), folded=self._question.layout == "folded")
        gaps_bytes = np.array(self._question.gaps_bytes)
        total, total_needed = np.zeros(reads.shape[1:]), 0
        for length, ids in enumerate(batches, start=1):
            starts, counts = refinement.split(union.locate(ids))
            total += read_costs(
                starts, counts, row_bytes=self._question.row_bytes, gaps_bytes=gaps_bytes
            )
            total_needed += len(ids)
            needed[length] += total_needed
            rows[length] += refinement.num_seen
            reads[length] += total
