"""Page arithmetic against sets of pages, and against what a reader really reads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.gnn.planning.layout import read_costs, runs_of
from fivefold.gnn.storage import ContainerWriter, RowReader


@st.composite
def runs(draw):
    gaps = draw(st.lists(st.integers(0, 60), max_size=12))
    counts = draw(st.lists(st.integers(0, 30), min_size=len(gaps), max_size=len(gaps)))
    starts, place = [], 0
    for gap, count in zip(gaps, counts, strict=True):
        starts.append(place + gap)
        place += gap + count
    return starts, counts


@given(some=runs(), row_bytes=st.sampled_from([1, 12, 400, 512, 1536, 4096, 4100, 9000, 300_000]))
def test_costs_are_those_of_the_extents_cut_into_blocks(extents_of, some, row_bytes):
    starts, counts = some
    gaps = np.array([0, 8192 + 17, 1 << 20])
    costs = read_costs(np.array(starts), np.array(counts), row_bytes=row_bytes, gaps_bytes=gaps)
    for gap, by_size in zip(gaps, costs, strict=True):
        first, stop = extents_of(starts, counts, row_bytes=row_bytes, max_gap_bytes=int(gap))
        sizes = [
            min(256, pages - block)
            for pages in (stop - first).tolist()
            for block in range(0, pages, 256)
        ]
        for size_class, (requests, size_bytes) in enumerate(by_size.tolist()):
            of_class = [size for size in sizes if size.bit_length() == size_class + 1]
            assert (requests, size_bytes) == (len(of_class), 4096 * sum(of_class))


def test_runs_of_rows():
    for rows in ([], [4], [0, 1, 2], [1, 3, 4, 9, 10, 11]):
        starts, counts = runs_of(np.array(rows, np.int64))
        found = [
            row
            for start, count in zip(starts, counts, strict=True)
            for row in range(start, start + count)
        ]
        assert found == rows
        assert (starts[1:] > starts[:-1] + counts[:-1]).all()


@pytest.mark.parametrize("dim", [1, 3, 100, 128, 1025])
@pytest.mark.parametrize("max_gap_bytes", [0, 16384])
def test_predicted_reads_are_those_of_the_reader(tmp_path, dim, max_gap_bytes):
    generator = np.random.default_rng(dim)
    rows = generator.random((3000, dim), np.float32)
    with ContainerWriter(
        tmp_path / "x.fvf", kind="test", sections={"x": (rows.dtype, rows.shape)}, attributes={}
    ) as writer:
        writer.write("x", 0, rows)
        container = writer.commit()
    wanted = np.flatnonzero(np.repeat(generator.random(60) < 0.3, 50))
    starts, counts = runs_of(wanted)
    out = np.empty((len(wanted), dim), np.float32)
    places = np.concatenate([[0], np.cumsum(counts)[:-1]])
    with container, RowReader(container, "x", max_gap_bytes=max_gap_bytes) as reader:
        measured = reader.read_runs(starts, counts, places, out)
    predicted = read_costs(
        starts, counts, row_bytes=4 * dim, gaps_bytes=np.array([max_gap_bytes])
    ).sum(axis=(0, 1))
    assert np.array_equal(out, rows[wanted])
    assert [measured.requests, measured.bytes_read] == predicted.tolist()
