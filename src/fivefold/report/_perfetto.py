"""A run's spans as a timeline that Perfetto and ``chrome://tracing`` open.

Chrome's trace-event format: one process per rank, one thread per lane of the training loop, one
asynchronous track for the collectives in flight (they overlap, so they cannot nest), and a
counter of the wait that was exposed so far. Times are microseconds from the earliest span of any
rank. Reference: "Trace Event Format", the catapult project. This module knows no run folders.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fivefold.report._files import write_text_atomically

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from fivefold.report._records import RankTrace, Run, Span

__all__ = ["trace_events", "write_timeline"]

_LANES = ("compute", "wait", "boundary", "data", "validation", "checkpoint")
_THREAD_NAMES = {"wait": "wait (exposed communication)"}
_US_PER_S = 1e6
_THREADS_PER_LANE = 100  # thread ids of lane i: 100 (i + 1) and up


def trace_events(ranks: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """Turn the ranks' spans into trace events.

    Spans of one lane that overlap without nesting go to further threads of that lane, since a
    viewer would draw them wrongly on one.

    Args:
        ranks: The ranks of one run, on one time axis.

    Returns:
        Metadata first, then the events of all ranks in the order of time.

    Example:
        >>> from fivefold.report._records import RankTrace, Span
        >>> span = Span("compute", "step 1", 100.0, 100.5)
        >>> event = trace_events([RankTrace(0, (span,))])[-1]
        >>> event["ph"], event["ts"], event["dur"]
        ('X', 0.0, 500000.0)
    """
    start_s = min((span.start_s for rank in ranks for span in rank.spans), default=0.0)
    metadata: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for rank in ranks:
        metadata += _named(rank.rank, "process", f"rank {rank.rank}", position=rank.rank)
        for lane in dict.fromkeys([*_LANES, *(span.lane for span in rank.spans)]):
            spans = [span for span in rank.spans if span.lane == lane]
            if lane == "flight":
                events += _flights(rank.rank, spans, start_s)
                continue
            for number, track in enumerate(_nesting_tracks(spans)):
                thread = _THREADS_PER_LANE * (_lane_number(lane) + 1) + number
                name = _THREAD_NAMES.get(lane, lane) + (f" {number + 1}" if number else "")
                metadata += _named(rank.rank, "thread", name, position=thread)
                events += [_complete(rank.rank, thread, span, start_s) for span in track]
        events += _wait_counter(rank, start_s)
    return metadata + sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0.0)))


def write_timeline(run: Run, path: Path) -> Path:
    """Write a run's timeline as JSON that opens in Perfetto.

    Args:
        run: The run.
        path: File to write, usually ``timeline.json`` in the run's folder.

    Returns:
        The path that was written.

    Raises:
        DataError: The file cannot be written.

    Example:
        >>> import tempfile, pathlib
        >>> from fivefold.report._records import Manifest, Run
        >>> fields = {"schema": 1, "fivefold": "0", "method": "ddp", "label": "", "world_size": 2}
        >>> target = pathlib.Path(tempfile.mkdtemp()) / "timeline.json"
        >>> run = Run(path=target, name="a", label="", manifest=Manifest(**fields))
        >>> write_timeline(run, target).exists()
        True
    """
    trace = {
        "traceEvents": trace_events(run.ranks),
        "displayTimeUnit": "ms",
        "otherData": {"method": run.label, "fivefold": run.manifest.fivefold},
    }
    return write_text_atomically(path, json.dumps(trace, separators=(",", ":")) + "\n")


def _lane_number(lane: str) -> int:
    return _LANES.index(lane) if lane in _LANES else len(_LANES)


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
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.lane,
        "pid": process,
        "tid": thread,
        "ts": begin,
        "dur": round(_microseconds(span.end_s, start_s) - begin, 3),
    }


def _flights(process: int, spans: Iterable[Span], start_s: float) -> list[dict[str, Any]]:
    events = []
    for number, span in enumerate(spans):
        common = {"name": span.name, "cat": "flight", "pid": process, "tid": 0}
        identity = {**common, "id": f"{process}.{number}"}
        events.append({**identity, "ph": "b", "ts": _microseconds(span.start_s, start_s)})
        events.append({**identity, "ph": "e", "ts": _microseconds(span.end_s, start_s)})
    return events


def _wait_counter(rank: RankTrace, start_s: float) -> list[dict[str, Any]]:
    total_s = 0.0
    events = []
    for span in sorted((span for span in rank.spans if span.lane == "wait"), key=_start):
        for time_s, added_s in ((span.start_s, 0.0), (span.end_s, span.end_s - span.start_s)):
            total_s += added_s
            events.append(
                {
                    "ph": "C",
                    "name": "exposed wait so far",
                    "pid": rank.rank,
                    "tid": 0,
                    "ts": _microseconds(time_s, start_s),
                    "args": {"ms": round(total_s * 1e3, 3)},
                }
            )
    return events


def _start(span: Span) -> float:
    return span.start_s


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
