"""How many batches share a segment: the size of least cost within the disk budget.

Larger segments share more rows, which saves disk space and packing time, and scatter the rows of a
batch over more extents, which costs reading time. The cost is seconds: packing once, and reading
all batches as often as training will.

For membership layouts one pass over the batches estimates every size up to a window (``_window``),
and the window grows until a size fits the disk. Other layouts have no such pass: powers of two are
counted. Then the best size and its neighbours are counted exactly, all segments of them, until the
best one is among those. Sizes whose cost is within 2 percent of the least are held to be as good,
for the prices are not more exact than that; of them the one of least disk space is the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fivefold.errors import InfeasibleError
from fivefold.gnn.planning._prediction import PackingCost, SegmentCost
from fivefold.gnn.planning._segments import Reads, SegmentQuestion, count_reads
from fivefold.gnn.planning._window import WindowCosts
from fivefold.units import format_bytes

_WINDOW = 64
_MOST_COUNTED = 16
_AS_GOOD = 1.02


@dataclass(frozen=True, kw_only=True)
class Space:
    """Disk space: how much there is, and what a number of packed rows takes of it.

    Args:
        disk_bytes: The budget.
        fixed_bytes: Bytes of the cached rows.
        record_bytes: Bytes of the records for so many packed rows.
        row_bytes: Bytes of a row.
        ways: Ways of packing so many rows, cheapest first.
    """

    disk_bytes: int
    fixed_bytes: int
    record_bytes: Callable[[int], int]
    row_bytes: int
    ways: Callable[[int], list[PackingCost]]

    def way(self, packed_rows: int) -> PackingCost | None:
        """The cheapest way of packing that fits; None where none does."""
        rest = self.disk_bytes - self._kept_bytes(packed_rows)
        return next((way for way in self.ways(packed_rows) if way.scratch_bytes <= rest), None)

    def least_bytes(self, packed_rows: int) -> int:
        """The smallest budget that fits so many packed rows."""
        scratch = min(way.scratch_bytes for way in self.ways(packed_rows))
        return self._kept_bytes(packed_rows) + scratch

    def _kept_bytes(self, packed_rows: int) -> int:
        rows_bytes = packed_rows * self.row_bytes
        return rows_bytes + self.fixed_bytes + self.record_bytes(packed_rows)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The size that was chosen, what it reads, and all that were considered."""

    segment_batches: int
    reads: Reads
    packing: PackingCost
    choices: tuple[SegmentCost, ...]


def search_segments(
    question: SegmentQuestion,
    space: Space,
    *,
    segment_batches: int | None,
    num_passes: float,
) -> Found:
    """Find the size of least cost, or check the one that was given.

    Args:
        question: What is read, how, and at which prices.
        space: The disk budget.
        segment_batches: Take this size; None: search.
        num_passes: How often all batches will be read.

    Raises:
        InfeasibleError: No size, or not the given one, fits the disk budget.
    """
    search = _Search(question, space, num_passes)
    if segment_batches is not None:
        search.count(segment_batches)
    elif question.layout == "packed":
        search.count(1)
    else:
        search.look_around()
        search.settle()
    return search.result()


class _Search:
    """Costs by size, counted and estimated."""

    def __init__(self, question: SegmentQuestion, space: Space, num_passes: float) -> None:
        self._question, self._space, self._num_passes = question, space, num_passes
        self._most = max(1, len(question.cold))
        self._reads: dict[int, Reads] = {}
        self._costs: dict[int, SegmentCost] = {}

    def look_around(self) -> None:
        """Estimate or count many sizes, until one fits or there are no more."""
        if self._question.layout not in {"gray", "folded"}:
            for power in range(self._most.bit_length()):
                self.count(2**power)
            self.count(self._most)
            return
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

    def count(self, size: int) -> None:
        """Count one size exactly."""
        if size in self._reads:
            return
        reads = count_reads(self._question, min(size, self._most))
        self._reads[size] = reads
        self._costs[size] = self._cost(
            size,
            (
                int(reads.segment_rows[-1]),
                reads.seconds,
                int(reads.read_bytes.sum()),
                int(reads.requests.sum()),
                reads.max_gap_bytes,
            ),
            exact=True,
        )

    def result(self) -> Found:
        """The best of the sizes that were counted and fit.

        Raises:
            InfeasibleError: None fits.
        """
        counted = [self._costs[size] for size in self._reads]
        best = self._costs[self._best(counted)]
        way = self._space.way(best.packed_rows)
        if way is None:
            raise _too_small(self._space, min(self._least(cost) for cost in counted))
        return Found(
            segment_batches=best.segment_batches,
            reads=self._reads[best.segment_batches],
            packing=way,
            choices=tuple(self._costs[size] for size in sorted(self._costs)),
        )

    def _estimate(self, window: int) -> None:
        costs = WindowCosts(self._question, window)
        for size in range(1, window + 1):
            self._costs[size] = self._cost(size, costs.estimate(size), exact=False)

    def _cost(
        self, size: int, numbers: tuple[int, float, int, int, int], *, exact: bool
    ) -> SegmentCost:
        rows, seconds, read_bytes, requests, gap_bytes = numbers
        way = self._space.way(rows) or self._space.ways(rows)[0]
        return SegmentCost(
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

    def _least(self, cost: SegmentCost) -> int:
        return self._space.least_bytes(cost.packed_rows)

    def _best(self, costs: Iterable[SegmentCost]) -> int:
        """Of those that fit the best; where none fits, the one that lacks least."""
        costs = list(costs)
        fitting = [cost for cost in costs if self._fits(cost)]
        if not fitting:
            return min(
                costs, key=lambda cost: (self._least(cost), cost.segment_batches)
            ).segment_batches
        least = min(cost.total_seconds(self._num_passes) for cost in fitting)
        good = [c for c in fitting if c.total_seconds(self._num_passes) <= _AS_GOOD * least]
        return min(good, key=lambda cost: (cost.packed_rows, cost.segment_batches)).segment_batches


def _too_small(space: Space, least: int) -> InfeasibleError:
    return InfeasibleError(
        f"a disk budget of {format_bytes(space.disk_bytes)} is too small for the packed rows",
        hint=f"give at least disk_bytes={least} ({format_bytes(least)}), or more memory for caches",
    )
