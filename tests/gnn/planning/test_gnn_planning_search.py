"""Costs of segment sizes against counting by hand; the searches against trying everything."""

import numpy as np
import pytest

from fivefold.errors import InfeasibleError
from fivefold.gnn.planning._caches import KeptArrays
from fivefold.gnn.planning._search import (
    SegmentQuestion,
    Space,
    WindowCosts,
    count_reads,
    search_segments,
    segments_of,
)
from fivefold.gnn.planning.geometry import PackingTask
from fivefold.gnn.planning.layout import segment_layout

ROW_BYTES = 700


def pages_of(rows, row_bytes, offset=0):
    return {
        page
        for row in rows
        for page in range(
            (offset + row) * row_bytes // 4096, ((offset + row + 1) * row_bytes - 1) // 4096 + 1
        )
    }


@pytest.fixture
def question(make_batches, disk):
    source = make_batches(5, num_nodes=900, num_batches=21, share=0.5)
    cold = [np.sort(source.node_ids(i)) for i in range(21)]

    def ask(gaps_bytes=(0, 4096, 16384)):
        return SegmentQuestion(
            cold=KeptArrays(iter(cold), limit=900),
            row_bytes=ROW_BYTES,
            disk=disk,
            gaps_bytes=gaps_bytes,
        )

    return ask


@pytest.mark.parametrize("size", [1, 4, 21])
def test_counted_reads_are_the_pages_of_the_layout(question, size):
    asked = question(gaps_bytes=(0,))
    reads = count_reads(asked, size)
    offset = 0
    for number, (first, stop) in enumerate(segments_of(21, size)):
        laid_out = segment_layout(asked.cold.segment(first, stop))
        assert reads.segment_rows[number] == offset
        for batch in range(first, stop):
            pages = pages_of(laid_out.rows[batch - first].tolist(), ROW_BYTES, offset)
            assert reads.read_bytes[batch] == 4096 * len(pages)
        offset += len(laid_out.order)
    assert reads.segment_rows[-1] == offset


def test_the_gap_is_the_cheapest_one(question):
    asked = question()
    chosen = count_reads(asked, 7)
    alone = {gap: count_reads(question((gap,)), 7) for gap in asked.gaps_bytes}
    least = min(reads.seconds for reads in alone.values())
    assert chosen.seconds == pytest.approx(least)
    assert chosen.read_bytes.tolist() == alone[chosen.max_gap_bytes].read_bytes.tolist()


def test_one_window_over_all_batches_is_nearly_exact(question):
    """Only the place of a segment within a page is left out, so bytes differ by few pages."""
    asked = question(gaps_bytes=(0,))
    costs = WindowCosts(asked, 21)
    rows, read_bytes, requests, _, _ = costs.estimate(21)
    reads = count_reads(asked, 21)
    assert rows == reads.segment_rows[-1]
    assert requests == pytest.approx(int(reads.requests.sum()), rel=0.03)
    assert read_bytes == pytest.approx(int(reads.read_bytes.sum()), rel=0.03)


@pytest.mark.parametrize("disk_rows", [10_000, 3000, 1500])
def test_the_search_finds_what_trying_all_sizes_finds(question, disk, disk_rows):
    asked = question()
    space = space_of(disk, disk_rows)
    found = search_segments(asked, space, segment_batches=None, num_passes=50)
    costs = {}
    for size in range(1, 22):
        reads = count_reads(asked, size)
        rows = int(reads.segment_rows[-1])
        if space.way(rows):
            costs[size] = 50 * reads.seconds + space.way(rows).seconds
    chosen = costs[found.segment_batches]
    assert chosen <= 1.05 * min(costs.values())  # 2 % are held to be as good; estimates add some
    assert int(found.reads.segment_rows[-1]) <= disk_rows


def space_of(disk, disk_rows):
    return Space(
        disk_bytes=disk_rows * ROW_BYTES,
        kept_bytes=lambda rows: rows * ROW_BYTES,  # a store without records
        ways=lambda rows: PackingTask(
            num_nodes=900,
            row_bytes=ROW_BYTES,
            sections={"rows": rows},
            read_bytes_per_s=disk.sequential_read_bytes_per_s,
            write_bytes_per_s=disk.sequential_write_bytes_per_s,
        ).ways(10**6),
    )


def test_too_small_a_disk_names_the_smallest_that_does(question, disk):
    with pytest.raises(InfeasibleError, match="disk_bytes=") as caught:
        search_segments(question(), space_of(disk, 200), segment_batches=None, num_passes=50)
    least = int(caught.value.hint.split("disk_bytes=")[1].split()[0])
    assert least % ROW_BYTES == 0
    enough = space_of(disk, least // ROW_BYTES)
    found = search_segments(question(), enough, segment_batches=None, num_passes=50)
    assert int(found.reads.segment_rows[-1]) * ROW_BYTES <= least
    with pytest.raises(InfeasibleError):
        search_segments(
            question(),
            space_of(disk, least // ROW_BYTES - 1),
            segment_batches=None,
            num_passes=50,
        )


def test_more_disk_is_never_too_little(disk):
    """Batches repeat after 150: estimates of up to 256 batches are lower than what is counted."""
    cold = [np.arange(3) + 3 * (batch % 150) for batch in range(300)]
    asked = SegmentQuestion(
        cold=KeptArrays(iter(cold), limit=450), row_bytes=ROW_BYTES, disk=disk, gaps_bytes=(0,)
    )
    for disk_rows in (450, 529, 560, 900):
        space = space_of(disk, disk_rows)
        found = search_segments(asked, space, segment_batches=None, num_passes=50)
        assert int(found.reads.segment_rows[-1]) <= disk_rows
    with pytest.raises(InfeasibleError, match=f"disk_bytes={450 * ROW_BYTES} "):
        search_segments(asked, space_of(disk, 449), segment_batches=None, num_passes=50)
