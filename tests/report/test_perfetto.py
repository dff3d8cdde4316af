"""The timeline: what Chrome's trace-event format asks for, and the spans' own values."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import DataError
from fivefold.report import read_run, trace_events, write_timeline
from fivefold.report._records import RankTrace, Span


@pytest.fixture
def events(comparison):
    run = read_run(comparison / "ddp")
    path = write_timeline(run, comparison / "ddp" / "timeline.json")
    return json.loads(path.read_text())["traceEvents"]


def test_processes_and_threads_are_named(events):
    names = [
        (event["pid"], event["args"]["name"])
        for event in events
        if event["name"] in ("process_name", "thread_name")
    ]
    assert [name for pid, name in names if pid == 1] == [
        "rank 1",
        "compute",
        "wait (exposed communication)",
        "validation",
    ]


def test_values_of_one_step_in_microseconds(events):
    steps = [event for event in events if event.get("cat") == "compute" and event["pid"] == 1]
    assert len(steps) == 64
    # The second step begins after 0.25 s of computation and 0.5 s of waiting.
    assert (steps[1]["name"], steps[1]["ts"], steps[1]["dur"]) == ("step 2", 750_000, 250_000)


def test_ranks_are_aligned(events):
    first = {event["pid"]: event["ts"] for event in reversed(events) if event["ph"] == "X"}
    assert first == {0: 0.0, 1: 0.0}


def test_times_are_monotone_and_no_duration_is_negative(events):
    timed = [event for event in events if event["ph"] != "M"]
    assert all(before["ts"] <= after["ts"] for before, after in pairwise(timed))
    assert all(event["dur"] >= 0 for event in timed if event["ph"] == "X")


def test_overlapping_flights_are_asynchronous_and_paired(events):
    flights = defaultdict(list)
    for event in events:
        if event.get("cat") == "flight":
            flights[event["pid"], event["id"]].append(event)
    assert len(flights) == 2 * 2 * 64  # ranks, buckets, steps
    for begin, end in flights.values():
        assert (begin["ph"], end["ph"], begin["name"]) == ("b", "e", end["name"])
    begin, end = flights[0, "0.1"]  # second bucket of the first step
    assert (begin["ts"], end["ts"]) == (250_000, 750_000)


def test_the_counter_ends_at_the_exposed_wait(events):
    counters = [event for event in events if event["ph"] == "C" and event["pid"] == 0]
    values = [event["args"]["ms"] for event in counters]
    assert values == sorted(values)
    assert values[-1] == pytest.approx(32_000)  # 64 steps of 0.5 s


def test_nothing_recorded_gives_an_empty_timeline():
    assert trace_events([]) == []


def test_an_unwritable_folder_is_a_clear_error(comparison):
    run = read_run(comparison / "co2")
    with pytest.raises(DataError, match=r"timeline\.json cannot be written.*check the folder"):
        write_timeline(run, comparison / "nowhere" / "timeline.json")


_times = st.integers(0, 60).map(lambda ticks: ticks / 8)
_spans = st.lists(
    st.builds(
        lambda lane, start, length: Span(lane, f"{lane} at {start}", start, start + length),
        st.sampled_from(["compute", "wait", "flight", "something new"]),
        _times,
        _times,
    ),
    max_size=25,
)


@given(ranks=st.lists(_spans, max_size=3))
def test_on_every_thread_spans_nest_or_are_apart(ranks):
    events = trace_events([RankTrace(rank, tuple(spans)) for rank, spans in enumerate(ranks)])
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for intervals in threads.values():
        for index, (start, end) in enumerate(intervals):
            for other_start, other_end in intervals[:index]:
                apart = other_end <= start or end <= other_start
                inside = other_start <= start and end <= other_end
                around = start <= other_start and other_end <= end
                assert apart or inside or around
    recorded = sum(span.lane != "flight" for spans in ranks for span in spans)
    assert sum(map(len, threads.values())) == recorded  # none lost, none doubled
