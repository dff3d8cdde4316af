"""How many batches share a segment: the size of least cost within the disk budget.

Larger segments share more rows and scatter those of a batch over more extents. The cost is seconds:
packing once, and reading all batches as often as training will. Of sizes within 2 percent of the
least, for prices are not more exact, that of least disk space is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from fivefold.errors import InfeasibleError
from fivefold.gnn.planning._caches import KeptArrays
from fivefold.gnn.planning._plan import SegmentCost
from fivefold.gnn.planning.geometry import Geometry
from fivefold.gnn.planning.id_sets import IdSet, SortedIds, union_of
from fivefold.gnn.planning.layout import SIZE_CLASSES, Refinement, read_costs
from fivefold.gnn.storage import DiskProfile
from fivefold.gnn.storage.pages import PAGE_BYTES, Array, Ids
from fivefold.units import format_bytes

_WINDOW = 64
_MOST_COUNTED = 16
_AS_GOOD = 1.02


@dataclass(frozen=True, kw_only=True)
class Space:
    """Disk space: how much there is, and what a number of packed rows takes of it."""

    disk_bytes: int
    kept_bytes: Callable[[int], int]  # of what so many packed rows and all beside them take
    ways: Callable[[int], list[Geometry]]  # of packing so many rows, cheapest first

    def way(self, packed_rows: int) -> Geometry | None:
        """Return the cheapest way of packing that fits; None where none does."""
        rest = self.disk_bytes - self.kept_bytes(packed_rows)
        return next((way for way in self.ways(packed_rows) if way.scratch_bytes <= rest), None)

    def least_bytes(self, packed_rows: int) -> int:
        """Return the smallest budget that fits so many packed rows."""
        scratch = min(way.scratch_bytes for way in self.ways(packed_rows))
        return self.kept_bytes(packed_rows) + scratch


@dataclass(frozen=True, kw_only=True)
class Found:
    """The size that was chosen, what it reads, and all that were considered."""

    segment_batches: int
    reads: Reads
    packing: Geometry
    choices: tuple[SegmentCost, ...]


def search_segments(
    question: SegmentQuestion, space: Space, *, segment_batches: int | None, num_passes: float
) -> Found:
    """Find the size of least cost, or check the one that was given."""
    search = _Search(question, space, num_passes)
    if segment_batches is not None:
        search.count(segment_batches)
    else:
        search.look_around()
        search.settle()
        search.enlarge()
    return search.result()


class _Search:
    """Costs by size, counted and estimated."""

    def __init__(self, question: SegmentQuestion, space: Space, num_passes: float) -> None:
        self._question, self._space, self._num_passes = question, space, num_passes
        self._most = max(1, len(question.cold))
        self._reads: dict[int, Reads] = {}
        self._costs: dict[int, SegmentCost] = {}

    def look_around(self) -> None:
        """Estimate many sizes, until one fits or there are no more."""
        window = min(_WINDOW, self._most)
        self._estimate(window)
        while window < self._most and not any(map(self._fits, self._costs.values())):
            window = min(2 * window, self._most)
            self._estimate(window)

    def settle(self) -> None:
        """Count the best size and its neighbours, until the best is one of those counted."""
        while len(self._reads) < _MOST_COUNTED:
            best = self._best(self._costs.values())
            near = [size for size in (best, best - 1, best + 1) if 1 <= size <= self._most]
            for size in near:
                self.count(size)
            if self._best(self._costs.values()) == best:
                return

    def enlarge(self) -> None:
        """Count larger sizes where none that was counted fits, and halve the way back."""
        low = max(self._reads)
        if any(self._fits(self._costs[size]) for size in self._reads):
            return
        high = low
        while high < self._most and not self._fits(self._costs[high]):
            low, high = high, min(2 * high, self._most)
            self.count(high)
        while high - low > max(1, high // 16):
            middle = (low + high) // 2
            self.count(middle)
            low, high = (low, middle) if self._fits(self._costs[middle]) else (middle, high)

    def count(self, size: int) -> None:
        """Count one size exactly."""
        if size in self._reads:
            return
        self._reads[size] = reads = count_reads(self._question, min(size, self._most))
        rows, size_bytes = int(reads.segment_rows[-1]), int(reads.read_bytes.sum())
        costs = reads.seconds, reads.max_gap_bytes
        self._note(size, rows, size_bytes, int(reads.requests.sum()), *costs, exact=True)

    def result(self) -> Found:
        """Return the best of the sizes that were counted and fit."""
        counted = [self._costs[size] for size in self._reads]
        best = self._costs[self._best(counted)]
        way = self._space.way(best.packed_rows)
        if way is None:
            least = min(self._space.least_bytes(cost.packed_rows) for cost in counted)
            raise InfeasibleError(
                f"a disk budget of {format_bytes(self._space.disk_bytes)} is too small for the "
                "packed rows",
                hint=f"give at least disk_bytes={least} ({format_bytes(least)}), or more memory "
                "for caches",
            )
        return Found(
            segment_batches=best.segment_batches,
            reads=self._reads[best.segment_batches],
            packing=way,
            choices=tuple(self._costs[size] for size in sorted(self._costs)),
        )

    def _estimate(self, window: int) -> None:
        costs = WindowCosts(self._question, window)
        for size in range(1, window + 1):
            self._note(size, *costs.estimate(size), exact=False)

    def _note(
        self,
        size: int,
        rows: int,
        read_bytes: int,
        requests: int,
        seconds: float,
        gap_bytes: int,
        *,
        exact: bool,
    ) -> None:
        way = self._space.way(rows) or self._space.ways(rows)[0]
        self._costs[size] = SegmentCost(
            segment_batches=size,
            read_seconds=seconds,
            read_bytes=read_bytes,
            requests=requests,
            packed_rows=rows,
            max_gap_bytes=gap_bytes,
            packing_seconds=way.seconds,
            exact=exact,
        )

    def _fits(self, cost: SegmentCost) -> bool:
        return self._space.way(cost.packed_rows) is not None

    def _best(self, costs: Iterable[SegmentCost]) -> int:
        """Return the best size of those that fit; where none fits, the one that lacks least."""
        costs = list(costs)
        fitting = [cost for cost in costs if self._fits(cost)]
        if not fitting:
            lacking = ((self._space.least_bytes(c.packed_rows), c.segment_batches) for c in costs)
            return min(lacking)[1]
        least = min(cost.total_seconds(self._num_passes) for cost in fitting)
        good = [c for c in fitting if c.total_seconds(self._num_passes) <= _AS_GOOD * least]
        return min(good, key=lambda cost: (cost.packed_rows, cost.segment_batches)).segment_batches


GAPS_BYTES = tuple(PAGE_BYTES * pages for pages in (0, 1, 2, 4, 8, 16, 32, 64))


@dataclass(frozen=True, kw_only=True)
class SegmentQuestion:
    """All that the cost of a segment size depends on, but the size."""

    cold: KeptArrays
    row_bytes: int
    disk: DiskProfile
    gaps_bytes: tuple[int, ...] = GAPS_BYTES
    progress: Callable[[int, int], None] = lambda _done, _total: None  # told of batches


@dataclass(frozen=True, kw_only=True)
class Reads:
    """Reads that one segment size leads to."""

    segment_rows: Ids  # rows before each segment, and all of them at the end [segments + 1]
    requests: Ids  # [batches]
    read_bytes: Ids  # [batches]
    seconds: float
    max_gap_bytes: int


def segments_of(num_batches: int, segment_batches: int) -> tuple[tuple[int, int], ...]:
    """Return the first batch and the batch after the last one of each segment."""
    firsts = range(0, num_batches, segment_batches)
    return tuple((first, min(first + segment_batches, num_batches)) for first in firsts)


def count_reads(question: SegmentQuestion, segment_batches: int) -> Reads:
    """Count the reads of all batches, and choose the gap."""
    num_batches = len(question.cold)
    costs = np.zeros((num_batches, len(question.gaps_bytes), SIZE_CLASSES, 2), np.int64)
    rows = [0]
    for first, stop in segments_of(num_batches, segment_batches):
        batches = question.cold.segment(first, stop)
        union = union_of(batches)
        for batch, (starts, counts) in enumerate(_runs(union, batches), start=first):
            costs[batch] = read_costs(
                starts + rows[-1],
                counts,
                row_bytes=question.row_bytes,
                gaps_bytes=np.array(question.gaps_bytes),
            )
        rows.append(rows[-1] + len(union))
        question.progress(stop, num_batches)
    best, seconds = choose_gap(question, costs.sum(axis=0))
    return Reads(
        segment_rows=np.array(rows, np.int64),
        requests=costs[:, best, :, 0].sum(axis=1),
        read_bytes=costs[:, best, :, 1].sum(axis=1),
        seconds=seconds,
        max_gap_bytes=question.gaps_bytes[best],
    )


def choose_gap(question: SegmentQuestion, costs: Array) -> tuple[int, float]:
    """Return the cheapest gap and its seconds, from costs [gaps, classes, 2].

    Requests of a class are of about equal size, which is what a disk's price is for.
    """
    price = question.disk.seconds
    seconds = [sum(price(float(r), float(size)) for r, size in gap if r) for gap in costs]
    best = int(np.argmin(seconds))
    return best, float(seconds[best])


def _runs(union: IdSet | SortedIds, batches: list[Ids]) -> Iterator[tuple[Ids, Ids]]:
    """Yield starts and counts of the runs of each batch of a segment, whose rows are the union."""
    refinement = Refinement(len(union))
    for ids in batches:
        starts, counts = refinement.split(union.locate(ids))
        # Rows that are first needed by later batches will stand before these.
        yield starts + (len(union) - refinement.num_seen), counts


class WindowCosts:
    """The cost of all segment sizes at once, from segments that begin at every window.

    The runs of a batch depend on the batches before it in the segment and
    on no later one. So one refinement over a window of w batches shows the segments of 1, 2, ..., w
    batches that begin there, and one pass over all batches shows every size up to w in all windows.
    What it leaves out: segments that begin elsewhere, and a segment's first row within a page.
    Kept are ratios to the cold rows needed, for batches that find an empty cache need more.
    """

    def __init__(self, question: SegmentQuestion, window: int) -> None:
        self._question = question
        num_batches = len(question.cold)
        needed, rows = np.zeros(window + 1), np.zeros(window + 1)
        reads = np.zeros((window + 1, len(question.gaps_bytes), SIZE_CLASSES, 2))
        for first in range(0, num_batches, window):
            stop = min(first + window, num_batches)
            self._walk(first, stop, needed, rows, reads)
            question.progress(stop, num_batches)
        scale = question.cold.sizes.sum() / np.maximum(needed, 1)
        self._rows = rows * scale
        self._reads = reads * scale[:, None, None, None]

    def estimate(self, segment_batches: int) -> tuple[int, int, int, float, int]:
        """Return packed rows, bytes, requests, seconds and best gap of a size, over all batches."""
        reads = self._reads[segment_batches]
        gap, seconds = choose_gap(self._question, reads)
        requests, size_bytes = reads[gap].sum(axis=0)
        rows = round(self._rows[segment_batches])
        gap_bytes = self._question.gaps_bytes[gap]
        return rows, round(size_bytes), round(requests), seconds, gap_bytes

    def _walk(self, first: int, stop: int, needed: Array, rows: Array, reads: Array) -> None:
        """Add one window: entry t of each array is about its first t batches."""
        batches = self._question.cold.segment(first, stop)
        union = union_of(batches)
        refinement = Refinement(len(union))
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
