"""A run's spans as a timeline that Perfetto and ``chrome://tracing`` open.

Chrome's trace-event format: one process per rank, one thread per lane of the training loop, as
many threads for messages as are in flight at once (one per fragment, where the model is sent in
fragments), and counters: the wait that was exposed so far, messages in flight, local steps of each
round, bytes sent so far. Times are microseconds from the earliest span of any rank. Reference:
"Trace Event Format", the catapult project. This module knows no run folders.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from fivefold.report._html import spread, write_text_atomically
from fivefold.report._records import RankTrace, Run, Span
from fivefold.report._spans import at_once, round_points, separate_fragments

_LANES = ("compute", "in_flight", "wait", "boundary", "data", "validation", "checkpoint")
_THREAD_NAMES = {"wait": "wait (exposed communication)", "in_flight": "in flight"}
_DETAILS = ("round", "fragment", "sent_bytes")
_US_PER_S = 1e6
_THREADS_PER_LANE = 100  # thread ids of lane i: 100 (i + 1) and up


def trace_events(ranks: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """Turn the ranks' spans into trace events.

    Spans of one lane that overlap without nesting go to further threads of that lane, since a
    viewer would draw them wrongly on one.
    """
    start_s = min((span.start_s for rank in ranks for span in rank.spans), default=0.0)
    metadata: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for rank in ranks:
        metadata += _named(rank.rank, "process", f"rank {rank.rank}", position=rank.rank)
        for lane in dict.fromkeys([*_LANES, *(span.lane for span in rank.spans)]):
            spans = [span for span in rank.spans if span.lane == lane]
            place = _LANES.index(lane) if lane in _LANES else len(_LANES)
            for number, (name, track) in enumerate(_tracks(lane, spans)):
                thread = _THREADS_PER_LANE * (place + 1) + number
                metadata += _named(rank.rank, "thread", name, position=thread)
                events += [_complete(rank.rank, thread, span, start_s) for span in track]
        events += _counters(rank, start_s)
    return metadata + sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0.0)))


def write_timeline(run: Run, path: Path) -> Path:
    """Write a run's timeline as JSON that opens in Perfetto.

    Args:
        run: The run.
        path: File to write, usually ``timeline.json`` in the run's folder.

    Raises:
        DataError: The file cannot be written.
    """
    trace = {
        "traceEvents": trace_events(run.ranks),
        "displayTimeUnit": "ms",
        "otherData": {"method": run.label, "fivefold": run.manifest.fivefold},
    }
    return write_text_atomically(path, json.dumps(trace, separators=(",", ":")) + "\n")


def _named(process: int, kind: str, name: str, *, position: int) -> list[dict[str, Any]]:
    thread = position if kind == "thread" else 0
    common = {"ph": "M", "pid": process, "tid": thread}
    return [
        {**common, "name": f"{kind}_name", "args": {"name": name}},
        {**common, "name": f"{kind}_sort_index", "args": {"sort_index": position}},
    ]


def _microseconds(time_s: float, start_s: float) -> float:
    return round((time_s - start_s) * _US_PER_S, 3)


def _complete(process: int, thread: int, span: Span, start_s: float) -> dict[str, Any]:
    begin = _microseconds(span.start_s, start_s)
    event = {
        "ph": "X",
        "name": span.name,
        "cat": span.lane,
        "pid": process,
        "tid": thread,
        "ts": begin,
        "dur": round(_microseconds(span.end_s, start_s) - begin, 3),
    }
    details = {name: value for name in _DETAILS if (value := getattr(span, name)) is not None}
    return {**event, "args": details} if details else event


def _counters(rank: RankTrace, start_s: float) -> list[dict[str, Any]]:
    """Return what adds up or changes over the run, as tracks of numbers."""
    messages = round_points(rank)
    sent_bytes = list(accumulate(point.sent_bytes or 0 for point in messages))
    points = [point for point in messages if point.round is not None]
    fragments = sorted({point.fragment for point in points})
    in_flight = at_once([span for span in rank.spans if span.lane == "in_flight"])
    series: list[tuple[str, str, Sequence[tuple[float, float]]]] = [
        ("exposed wait so far", "ms", _wait_so_far_ms(rank)),
        ("messages in flight", "messages", in_flight),
    ]
    for fragment in fragments:
        name = "local steps of the round"
        name += f", fragment {fragment}" if len(fragments) > 1 else ""
        steps = [(p.launched_s, p.local_steps) for p in points if p.fragment == fragment]
        series.append((name, "steps", steps))
    if sent_bytes and sent_bytes[-1]:
        pairs = zip(messages, sent_bytes, strict=True)
        series.append(("sent so far", "MB", [(p.launched_s, size / 1e6) for p, size in pairs]))
    return [
        {
            "ph": "C",
            "name": name,
            "pid": rank.rank,
            "tid": 0,
            "ts": _microseconds(at_s, start_s),
            "args": {unit: round(float(value), 3)},
        }
        for name, unit, values in series
        for at_s, value in values
    ]


def _wait_so_far_ms(rank: RankTrace) -> list[tuple[float, float]]:
    total_s = 0.0
    values = []
    waits = [span for span in rank.spans if span.lane == "wait"]
    for span in sorted(waits, key=lambda span: span.start_s):
        values.append((span.start_s, 1e3 * total_s))
        total_s += span.end_s - span.start_s
        values.append((span.end_s, 1e3 * total_s))
    return values


def _tracks(lane: str, spans: Sequence[Span]) -> list[tuple[str, list[Span]]]:
    """Name the threads of a lane; those of messages by fragment, where there are some."""
    name = _THREAD_NAMES.get(lane, lane)
    named = {name: _nesting_tracks(spans)}
    if lane == "in_flight":
        by_fragment = separate_fragments(spans)
        several = len(by_fragment) > 1
        named = {
            name + (f", fragment {fragment}" if several else ""): separate_tracks(messages)
            for fragment, messages in by_fragment.items()
        }
    return [
        (f"{name} {number}" if number > 1 else name, track)
        for name, tracks in named.items()
        for number, track in enumerate(tracks, start=1)
    ]


def _nesting_tracks(spans: Iterable[Span]) -> list[list[Span]]:
    """Spread spans over as few tracks as a greedy pass finds, so that on each they nest."""
    tracks: list[list[Span]] = []
    open_ends: list[list[float]] = []  # per track: the ends of the spans open at this moment
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        for track, ends in zip(tracks, open_ends, strict=True):
            while ends and ends[-1] <= span.start_s:
                ends.pop()
            if not ends or span.end_s <= ends[-1]:
                track.append(span)
                ends.append(span.end_s)
                break
        else:
            tracks.append([span])
            open_ends.append([span.end_s])
    return tracks


def separate_tracks(spans: Iterable[Span]) -> list[list[Span]]:
    """Spread spans over the fewest tracks on which no two overlap."""
    in_order = sorted(spans, key=lambda span: (span.start_s, span.end_s))
    return spread(in_order, lambda last, span: last.end_s <= span.start_s)
