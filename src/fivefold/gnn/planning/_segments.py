"""What a number of batches per segment costs: counted from who needs what, nothing assumed.

For one size the layout of every segment is made and the extents of every batch are counted, for
several gaps at once; the gap that is cheapest on this disk wins. The membership layouts need no
order of single rows for that: groups of equal rows and their sizes say everything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from fivefold.gnn.planning._kept import KeptArrays
from fivefold.gnn.planning._layout import Layout, segment_layout
from fivefold.gnn.planning._pages import PAGE_BYTES, SIZE_CLASSES, read_costs
from fivefold.gnn.planning._refinement import Refinement
from fivefold.gnn.planning._sources import Array, DiskCost, Ids
from fivefold.gnn.planning._union import Union

GAPS_BYTES = tuple(PAGE_BYTES * pages for pages in (0, 1, 2, 4, 8, 16, 32, 64))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentQuestion:
    """All that the cost of a segment size depends on, but the size.

    Args:
        cold: Cold ids of every batch.
        layout: Name of the layout.
        minhash_functions: For ``minhash``.
        row_bytes: Bytes of a row.
        disk: Prices of reads.
        gaps_bytes: Gaps to choose from.
    """

    cold: KeptArrays
    layout: Layout
    minhash_functions: int
    row_bytes: int
    disk: DiskCost
    gaps_bytes: tuple[int, ...] = GAPS_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reads:
    """What one segment size leads to.

    Args:
        segment_rows: Rows before each segment, and all of them at the end, int64 [segments + 1].
        requests: Requests of each batch, int64 [batches].
        read_bytes: Bytes of each batch, int64 [batches].
        seconds: Disk time of an epoch.
        max_gap_bytes: The gap chosen.
    """

    segment_rows: Ids
    requests: Ids
    read_bytes: Ids
    seconds: float
    max_gap_bytes: int


def segments_of(num_batches: int, segment_batches: int) -> tuple[tuple[int, int], ...]:
    """First batch and the batch after the last one of each segment."""
    firsts = range(0, num_batches, segment_batches)
    return tuple((first, min(first + segment_batches, num_batches)) for first in firsts)


def count_reads(question: SegmentQuestion, segment_batches: int) -> Reads:
    """Count the reads of all batches, and choose the gap."""
    num_batches = len(question.cold)
    costs = np.zeros((num_batches, len(question.gaps_bytes), SIZE_CLASSES, 2), np.int64)
    rows = [0]
    for first, stop in segments_of(num_batches, segment_batches):
        batches = question.cold.segment(first, stop)
        num_rows, runs = _segment_runs(question, batches, first)
        for batch, (starts, counts) in enumerate(runs, start=first):
            costs[batch] = read_costs(
                starts + rows[-1],
                counts,
                row_bytes=question.row_bytes,
                gaps_bytes=np.array(question.gaps_bytes),
            )
        rows.append(rows[-1] + num_rows)
    best, seconds = choose_gap(question, costs.sum(axis=0))
    return Reads(
        segment_rows=np.array(rows, np.int64),
        requests=costs[:, best, :, 0].sum(axis=1),
        read_bytes=costs[:, best, :, 1].sum(axis=1),
        seconds=seconds,
        max_gap_bytes=question.gaps_bytes[best],
    )


def choose_gap(question: SegmentQuestion, costs: Array) -> tuple[int, float]:
    """The cheapest gap and its seconds, from costs [gaps, classes, 2]; of equal ones the smallest.

    Requests of a class are of about equal size, which is what a disk's price is for.
    """
    seconds = [
        sum(
            question.disk.seconds(float(requests), float(size_bytes))
            for requests, size_bytes in of_gap
            if requests
        )
        for of_gap in costs
    ]
    best = int(np.argmin(seconds))
    return best, float(seconds[best])


def _segment_runs(
    question: SegmentQuestion, batches: list[Ids], first: int
) -> tuple[int, Iterator[tuple[Ids, Ids]]]:
    """Rows of a segment, and starts and counts of the runs of each of its batches."""
    if question.layout in {"gray", "folded"}:
        union = Union(batches)
        return len(union), _membership_runs(union, batches, question.layout)
    laid_out = segment_layout(
        batches,
        layout=question.layout,
        minhash_functions=question.minhash_functions,
        first_batch=first,
        num_batches=len(question.cold),
    )
    return len(laid_out.order), (laid_out.runs(batch) for batch in range(len(batches)))


def _membership_runs(union: Union, batches: list[Ids], layout: Layout) -> Iterator[tuple[Ids, Ids]]:
    refinement = Refinement(len(union), folded=layout == "folded")
    for ids in batches:
        starts, counts = refinement.split(union.locate(ids))
        # Rows that are first needed by later batches will stand before these.
        yield starts + (len(union) - refinement.num_seen), counts
