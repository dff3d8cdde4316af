"""The timeline: what Chrome's trace-event format asks for, and the spans' own values."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import DataError
from fivefold.report import read_run, write_timeline
from fivefold.report._records import RankTrace, Span
from fivefold.report.perfetto import trace_events


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
        "in flight",
        "in flight 2",
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


def test_messages_that_overlap_are_on_threads_of_their_own(events):
    lanes = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["name"] == "thread_name" and event["pid"] == 0
    }
    messages = defaultdict(list)
    for event in events:
        if event.get("cat") == "in_flight" and event["pid"] == 0:
            messages[lanes[event["tid"]]].append((event["name"], event["ts"], event["dur"]))
    assert {name: len(found) for name, found in messages.items()} == {
        "in flight": 64,
        "in flight 2": 64,
    }
    # The second bucket of the first step begins while the first is in flight.
    assert messages["in flight"][0] == ("all-reduce bucket 0", 125_000, 375_000)
    assert messages["in flight 2"][0] == ("all-reduce bucket 1", 250_000, 500_000)


def test_fragments_have_a_thread_each_with_their_details():
    messages = [
        Span(
            "in_flight", "round 0, fragment 1", 1.0, 2.0, round=0, fragment=1, sent_bytes=2_000_000
        ),
        Span(
            "in_flight", "round 0, fragment 0", 1.5, 2.5, round=0, fragment=0, sent_bytes=1_000_000
        ),
        Span(
            "in_flight", "round 1, fragment 1", 1.8, 4.0, round=1, fragment=1, sent_bytes=2_000_000
        ),
    ]
    events = trace_events([RankTrace(0, tuple(messages))])
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    drawn = {e["name"]: (names[e["tid"]], e["args"]) for e in events if e["ph"] == "X"}
    assert drawn == {
        "round 0, fragment 0": (
            "in flight, fragment 0",
            {"round": 0, "fragment": 0, "sent_bytes": 1_000_000},
        ),
        "round 0, fragment 1": (
            "in flight, fragment 1",
            {"round": 0, "fragment": 1, "sent_bytes": 2_000_000},
        ),
        "round 1, fragment 1": (
            "in flight, fragment 1 2",
            {"round": 1, "fragment": 1, "sent_bytes": 2_000_000},
        ),
    }
    assert _counter(events, "messages in flight") == [
        (0, 1),
        (0.5, 2),
        (0.8, 3),
        (1, 2),
        (1.5, 1),
        (3, 0),
    ]
    assert _counter(events, "sent so far") == [(0, 2), (0.5, 3), (0.8, 5)]


def _counter(events, name):
    return [
        (event["ts"] / 1e6, next(iter(event["args"].values())))
        for event in events
        if event["ph"] == "C" and event["name"] == name
    ]


def test_local_steps_of_each_round_are_counted(make_run, tmp_path):
    events = trace_events(read_run(make_run(tmp_path / "co2", "co2")).ranks[:1])
    steps = _counter(events, "local steps of the round")
    assert [value for _, value in steps] == [8] * 8
    # The first round ends after eight steps of 0.25 s and its boundary.
    assert steps[0][0] == 8 * 0.25 + 0.0625


def test_the_counter_ends_at_the_exposed_wait(events):
    rank = [event for event in events if event["pid"] == 0]
    values = [value for _, value in _counter(rank, "exposed wait so far")]
    assert values == sorted(values)
    assert values[-1] == pytest.approx(32_000)  # 64 steps of 0.5 s


def test_nothing_recorded_gives_an_empty_timeline():
    assert trace_events([]) == []


def test_an_unwritable_folder_is_a_clear_error(comparison):
    run = read_run(comparison / "co2")
    (comparison / "file").touch()
    with pytest.raises(DataError, match=r"timeline\.json cannot be written.*check the folder"):
        write_timeline(run, comparison / "file" / "timeline.json")


_times = st.integers(0, 60).map(lambda ticks: ticks / 8)
_spans = st.lists(
    st.builds(
        lambda lane, start, length: Span(lane, f"{lane} at {start}", start, start + length),
        st.sampled_from(["compute", "wait", "in_flight", "something new"]),
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
    assert sum(map(len, threads.values())) == sum(map(len, ranks))  # none lost, none doubled
