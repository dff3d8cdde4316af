"""The measured overlap against values by hand and against counting ticks one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.report import build_report, read_run
from fivefold.report._records import RankTrace, Span
from fivefold.report._spans import measure_overlap, overlap_of_ranks, round_points
from fivefold.report.perfetto import separate_tracks


def test_by_hand():
    spans = (
        Span("compute", "step 1", 0.0, 4.0),
        Span("wait", "a", 4.0, 5.0),
        Span("boundary", "outer step", 5.0, 5.5),
        Span("in_flight", "a", 1.0, 5.0),
        Span("in_flight", "b", 2.0, 6.0),  # beside the first: the seconds count once
    )
    found = measure_overlap(RankTrace(3, spans))
    assert (found.rank, found.in_flight_s, found.most_in_flight) == (3, 5.0, 2)
    assert found.seconds == {
        "compute": 3.0,
        "exposed_communication": 1.0,
        "boundary": 0.5,
        "data": 0.0,
        "validation": 0.0,
        "checkpoint": 0.0,
        "other": 0.5,
    }
    assert (found.hidden_s, found.fraction) == (4.0, 0.8)


def test_a_wait_for_something_else_while_nothing_flies_does_not_count():
    spans = (Span("in_flight", "a", 0.0, 1.0), Span("wait", "agreement", 2.0, 9.0))
    assert measure_overlap(RankTrace(0, spans)).fraction == 1.0


def test_without_messages_there_is_no_fraction():
    assert measure_overlap(RankTrace(0, (Span("compute", "a", 0.0, 1.0),))) is None
    assert measure_overlap(RankTrace(0, (Span("in_flight", "a", 1.0, 1.0),))) is None
    assert overlap_of_ranks([]) is None


def test_of_the_runs(comparison):
    runs = {run.method: run for run in build_report([comparison]).summaries}
    assert runs["none"].overlap == ()
    # DDP: from 0.125 s to 0.75 s of each step something flies, and 0.5 s of it is waited for.
    assert [rank.fraction for rank in runs["ddp"].overlap] == pytest.approx([0.2, 0.2], abs=1e-6)
    # CO2: eight messages of 0.5 s, the last one waited for.
    assert [rank.fraction for rank in runs["co2"].overlap] == pytest.approx([7 / 8] * 2, abs=1e-6)
    assert runs["co2"].overlap[1].in_flight_s == pytest.approx(4.0)
    assert runs["co2"].overlap_fraction == pytest.approx(7 / 8, abs=1e-6)


def test_a_slower_rank_counts_by_its_seconds_in_flight():
    fast = measure_overlap(RankTrace(0, (Span("in_flight", "a", 0, 3), Span("wait", "a", 0, 3))))
    slow = measure_overlap(RankTrace(1, (Span("in_flight", "a", 2, 3), Span("compute", "a", 0, 3))))
    assert (fast.fraction, slow.fraction) == (0.0, 1.0)
    assert overlap_of_ranks([fast, slow]) == 0.25


_spans = st.lists(
    st.builds(
        lambda lane, start, length: Span(lane, lane, start, start + length),
        st.sampled_from(["compute", "wait", "in_flight", "boundary"]),
        st.integers(0, 40),
        st.integers(1, 12),
    ),
    max_size=20,
)


@given(_spans)
def test_seconds_are_those_of_counting_ticks(spans):
    found = measure_overlap(RankTrace(0, tuple(spans)))

    def covers(lane, tick):
        return sum(s.lane == lane and s.start_s <= tick < s.end_s for s in spans)

    flown = [tick for tick in range(60) if covers("in_flight", tick)]
    if not flown:
        assert found is None
        return
    assert found.in_flight_s == len(flown)
    assert found.seconds["compute"] == sum(covers("compute", tick) > 0 for tick in flown)
    waited = sum(covers("wait", tick) > 0 for tick in flown)
    assert found.fraction == pytest.approx(1 - waited / len(flown))
    assert found.most_in_flight == max(covers("in_flight", tick) for tick in flown)


@given(_spans)
def test_tracks_are_the_fewest_and_lose_nothing(spans):
    tracks = separate_tracks(spans)
    flat = [span for track in tracks for span in track]
    assert sorted(map(id, flat)) == sorted(map(id, spans))
    for track in tracks:
        assert all(a.end_s <= b.start_s for a, b in pairwise(track))
    most = max((sum(s.start_s <= t < s.end_s for s in spans) for t in range(60)), default=0)
    assert len(tracks) == most


def test_rounds_of_a_run(tmp_path, make_run):
    points = round_points(read_run(make_run(tmp_path / "co2", "co2")).ranks[1])
    assert [point.round for point in points] == list(range(1, 9))
    assert [point.local_steps for point in points] == [8] * 8
    assert [point.waited_s for point in points] == pytest.approx([0.0] * 7 + [0.5], abs=1e-6)
    assert [point.in_flight_s for point in points] == pytest.approx([0.5] * 8, abs=1e-6)
    assert {point.sent_bytes for point in points} == {12_000_000}


def test_rounds_of_uneven_length_pieces_of_steps_and_fragments():
    spans = [
        Span("compute", "step 1", 0.0, 0.5),
        Span("compute", "step 1", 0.6, 0.9),  # the same step after a boundary
        Span("compute", "step 2", 1.0, 1.9),
        Span("compute", "step 3", 2.0, 2.9),
        Span("compute", "step 3", 3.0, 3.9),  # done again after a resume: one step here
        Span("compute", "step 4", 4.0, 4.9),
        Span("in_flight", "r0 f0", 0.95, 1.5, round=0, fragment=0),
        Span("in_flight", "r0 f1", 1.95, 2.5, round=0, fragment=1),
        Span("in_flight", "r1 f0", 4.95, 5.5, round=1, fragment=0),
    ]
    points = round_points(RankTrace(0, tuple(spans)))
    assert [(p.round, p.fragment, p.local_steps) for p in points] == [
        (0, 0, 1),
        (0, 1, 2),
        (1, 0, 3),
    ]


def test_waits_of_a_name_used_twice_go_to_the_flight_before_them():
    spans = (
        Span("in_flight", "all-reduce round 4", 0.0, 1.0, round=4),
        Span("wait", "all-reduce round 4", 0.5, 1.0),
        Span("in_flight", "all-reduce round 4", 5.0, 6.0, round=4),
        Span("wait", "all-reduce round 4", 5.75, 6.0),
        Span("wait", "agreement", 7.0, 8.0),
    )
    assert [point.waited_s for point in round_points(RankTrace(0, spans))] == [0.5, 0.25]
