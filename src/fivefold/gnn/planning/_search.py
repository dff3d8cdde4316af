"""How many batches share a segment: the size of least cost within the disk budget.

Larger segments share more rows, which saves disk space and packing time, and scatter the rows of a
batch over more extents, which costs reading time. The cost is seconds: packing once, and reading
in each of ``num_epochs`` epochs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fivefold.errors import InfeasibleError
from fivefold.gnn.planning._prediction import PackingCost, SegmentCost
from fivefold.gnn.planning._segments import Reads, SegmentQuestion, count_reads
from fivefold.units import format_bytes

__all__ = ["Found", "Space", "search_segments"]


@dataclass(frozen=True, kw_only=True)
class Space:
    """Disk space: how much there is, and what a number of packed rows takes of it.

    Args:
        disk_bytes: The budget.
        fixed_bytes: What is written besides packed rows and scratch.
        row_bytes: Bytes of a row.
        ways: Ways of packing so many rows, cheapest first.
    """

    disk_bytes: int
    fixed_bytes: int
    row_bytes: int
    ways: Callable[[int], list[PackingCost]]

    def way(self, packed_rows: int) -> PackingCost | None:
        """The cheapest way of packing that fits; None where none does."""
        rest = self.disk_bytes - self.fixed_bytes - packed_rows * self.row_bytes
        return next((way for way in self.ways(packed_rows) if way.scratch_bytes <= rest), None)

    def least_bytes(self, packed_rows: int) -> int:
        """The smallest budget that fits so many packed rows."""
        scratch = min(way.scratch_bytes for way in self.ways(packed_rows))
        return self.fixed_bytes + packed_rows * self.row_bytes + scratch


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
    num_epochs: int,
) -> Found:
    """Find the size of least cost, or check the one that was given.

    Raises:
        InfeasibleError: No size, or not the given one, fits the disk budget.
    """
    num_batches = max(1, len(question.cold))
    sizes = [segment_batches] if segment_batches else _candidates(num_batches)
    if question.layout == "packed":
        sizes = [1]
    counted = {size: count_reads(question, min(size, num_batches)) for size in sizes}
    costs = {size: _cost(space, size, reads) for size, reads in counted.items()}
    fitting = [cost for size, cost in costs.items() if space.way(cost.packed_rows) is not None]
    if not fitting:
        least = min(space.least_bytes(cost.packed_rows) for cost in costs.values())
        raise _too_small(space, least)
    best = min(fitting, key=lambda cost: (cost.total_seconds(num_epochs), cost.segment_batches))
    way = space.way(best.packed_rows)
    assert way is not None, "the best of those that fit fits"
    return Found(
        segment_batches=best.segment_batches,
        reads=counted[best.segment_batches],
        packing=way,
        choices=tuple(costs.values()),
    )


def _candidates(num_batches: int) -> list[int]:
    sizes = [size for size in (1, 2, 4, 8, 12, 16, 20, 24, 32, 64) if size < num_batches]
    return [*sizes, num_batches]


def _cost(space: Space, size: int, reads: Reads) -> SegmentCost:
    rows = int(reads.segment_rows[-1])
    way = space.way(rows) or space.ways(rows)[0]
    return SegmentCost(
        segment_batches=size,
        read_seconds=reads.seconds,
        read_bytes=int(reads.read_bytes.sum()),
        requests=int(reads.requests.sum()),
        packed_rows=rows,
        max_gap_bytes=reads.max_gap_bytes,
        packing_seconds=way.seconds,
        exact=True,
    )


def _too_small(space: Space, least: int) -> InfeasibleError:
    return InfeasibleError(
        f"a disk budget of {format_bytes(space.disk_bytes)} is too small for the packed rows",
        hint=f"give at least disk_bytes={least} ({format_bytes(least)}), or more memory for caches",
    )
