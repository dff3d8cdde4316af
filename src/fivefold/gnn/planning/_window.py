"""The cost of all segment sizes at once, from segments that begin at every window.

In a membership layout the runs of a batch depend on the batches before it in the segment and on no
later one. So one refinement over a window of w batches shows the segments of 1, 2, ..., w batches
that begin there, and one pass over all batches shows every size up to w in all windows. What it
leaves out: segments that begin elsewhere, and the place of a segment's first row within a page.
"""

from __future__ import annotations

import numpy as np

from fivefold.gnn.planning._pages import read_costs
from fivefold.gnn.planning._refinement import Refinement, locate, union_of
from fivefold.gnn.planning._segments import SegmentQuestion
from fivefold.gnn.planning._sources import Array

__all__ = ["WindowCosts"]


class WindowCosts:
    """Rows and reads of the first t batches of a segment, in the mean over the windows.

    Args:
        question: Of a membership layout.
        window: Largest segment size of interest.
    """

    def __init__(self, question: SegmentQuestion, window: int) -> None:
        self._question = question
        self._num_batches = len(question.cold)
        rows = np.zeros(window + 1)
        reads = np.zeros((window + 1, len(question.gaps_bytes), 2))
        times = np.zeros(window + 1)
        for first in range(0, self._num_batches, window):
            stop = min(first + window, self._num_batches)
            self._walk(first, stop, rows, reads, times)
        self._rows = rows / np.maximum(times, 1)
        self._reads = reads / np.maximum(times, 1)[:, None, None]

    def estimate(self, segment_batches: int) -> tuple[int, float, int, int, int]:
        """Packed rows, seconds, bytes, requests and the best gap of one size, over all batches."""
        full, rest = divmod(self._num_batches, segment_batches)
        rows = full * self._rows[segment_batches] + self._rows[rest]
        reads = full * self._reads[segment_batches] + self._reads[rest]
        disk, batches = self._question.disk, max(1, self._num_batches)
        seconds = [
            batches * disk.seconds(requests / batches, size_bytes / batches) if requests else 0.0
            for requests, size_bytes in reads
        ]
        gap = int(np.argmin(seconds))
        requests, size_bytes = reads[gap]
        gap_bytes = self._question.gaps_bytes[gap]
        return round(rows), float(seconds[gap]), round(size_bytes), round(requests), gap_bytes

    def _walk(self, first: int, stop: int, rows: Array, reads: Array, times: Array) -> None:
        """Add one window: entry t of each array is about its first t batches."""
        batches = self._question.cold.segment(first, stop)
        union = union_of(batches)
        refinement = Refinement(len(union), folded=self._question.layout == "folded")
        gaps_bytes = np.array(self._question.gaps_bytes)
        total = np.zeros(reads.shape[1:])
        for length, ids in enumerate(batches, start=1):
            starts, counts = refinement.split(locate(ids, union))
            total += read_costs(
                starts, counts, row_bytes=self._question.row_bytes, gaps_bytes=gaps_bytes
            )
            rows[length] += refinement.num_seen
            reads[length] += total
            times[length] += 1
