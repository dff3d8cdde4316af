"""Requests against a slow reference: no page twice, every wanted byte once, any size of file."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError
from fivefold.gnn.storage._requests import join_rows, plan_requests

PAGE = 4096


def plan(runs, **changes):
    settings_ = {
        "offset": PAGE,
        "row_bytes": 100,
        "num_rows": 2**40,
        "out_rows": 2**40,
        "block_bytes": 4 * PAGE,
        "max_gap_bytes": 0,
        **changes,
    }
    return plan_requests(np.array(runs, np.int64).reshape(-1, 3).T.copy(), **settings_)


@st.composite
def cases(draw):
    base = draw(st.sampled_from([0, 7, 2**31 - 3, 2**33]))  # row numbers beyond 32 bits, too
    runs, row = [], base
    for _ in range(draw(st.integers(0, 12))):
        row += draw(st.integers(0, 300))
        count = draw(st.integers(0, 200))
        runs.append((row, count, draw(st.integers(0, 10**6))))
        row += count
    return runs, {
        "offset": PAGE * draw(st.integers(1, 2**31)),
        "row_bytes": draw(st.sampled_from([0, 1, 12, 400, 512, 4096, 4100, 30_000])),
        "block_bytes": PAGE * draw(st.integers(1, 5)),
        "max_gap_bytes": draw(st.sampled_from([0, 1, PAGE, 5 * PAGE])),
    }


@given(case=cases())
def test_requests_cover_what_is_wanted_once_and_nothing_else(case):
    runs, numbers = case
    made = plan(runs, **numbers)
    ranges = [(int(p), int(p + n)) for p, n in zip(made.first_pages, made.num_pages, strict=True)]
    assert all(before[1] <= after[0] for before, after in pairwise(ranges))
    assert all(0 < high - low <= numbers["block_bytes"] // PAGE for low, high in ranges)
    wanted = []  # page ranges of the runs
    for row, count, _ in runs:
        begin = numbers["offset"] + row * numbers["row_bytes"]
        end = begin + count * numbers["row_bytes"]
        if begin < end:
            wanted.append((begin // PAGE, -(-end // PAGE)))
    joined = []
    for low, high in wanted:
        if joined and (low - joined[-1][1]) * PAGE <= numbers["max_gap_bytes"]:
            joined[-1][1] = max(high, joined[-1][1])
        else:
            joined.append([low, high])
    assert sum(high - low for low, high in ranges) == sum(high - low for low, high in joined)
    assert len(ranges) == sum(-(-(b - a) * PAGE // numbers["block_bytes"]) for a, b in joined)
    delivered = dict.fromkeys(range(len(runs)), 0)
    for request, (low, high) in enumerate(ranges):
        for run in range(int(made.first_runs[request]), int(made.stop_runs[request])):
            begin = int(made.run_begins[run])
            end = begin + int(made.run_bytes[run])
            delivered[run] += max(0, min(end, high * PAGE) - max(begin, low * PAGE))
    assert [delivered[run] for run in range(len(runs))] == [
        count * numbers["row_bytes"] for _, count, _ in runs
    ]
    assert made.bytes_used == sum(delivered.values())


@given(
    rows=st.lists(st.integers(0, 60), unique=True).map(sorted),
    shift=st.sampled_from([0, 1]),
)
def test_rows_are_joined_where_both_sides_go_on(rows, shift):
    places = np.arange(len(rows)) + shift * (np.arange(len(rows)) > len(rows) // 2)
    runs = np.empty((3, len(rows)), np.int64)
    used = join_rows(np.array(rows, np.int64), places, runs)
    unfolded = [
        (row + i, place + i)
        for row, count, place in runs[:, :used].T.tolist()
        for i in range(count)
    ]
    assert unfolded == list(zip(rows, places.tolist(), strict=True))
    for before, after in zip(runs[:, :used].T, runs[:, 1:used].T, strict=False):
        follows = before[0] + before[1] == after[0] and before[2] + before[1] == after[2]
        assert not follows


@pytest.mark.parametrize(
    "runs",
    [
        [(2**62, 2**62, 0)],
        [(0, 2**62, 2**62)],
        [(5, 2, 0), (6, 1, 9)],
        [(2**40, 1, 0)],
        [(0, 1, 2**40)],
    ],
)
def test_impossible_runs_are_refused(runs):
    with pytest.raises(ConfigurationError, match="is not allowed"):
        plan(runs)
