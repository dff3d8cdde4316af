"""The zoomed timeline: which stretch of each run to show, and where its boxes lie.

All runs are drawn to one time scale, so that widths compare. The stretch is long enough for a few
rounds of the slowest cycle, lies near the middle of the run, and avoids validation and
checkpoints. Pure geometry in SVG units; the template draws it.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from fivefold.report._tracks import separate_fragments, separate_tracks
from fivefold.units import format_bytes, format_duration_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fivefold.report._records import RankTrace, Run, Span

LEFT = 120.0
WIDTH = 1000.0
_ROW = 18.0
_GAP = 4.0
_TRACK = 13.0  # of one flight among several at once
_MOST_FLIGHTS_HEIGHT = 78.0
_RANK_GAP = 12.0
_AXIS = 26.0
_MOST_RANKS = 4
_MOST_RANKS_OF_MANY_RUNS = 2
_MANY_RUNS = 4
_CYCLES = 2.5
_MOST_CANDIDATES = 200
_ROWS = (("training", None), ("in flight", "flight"), ("waiting", "wait"))
_TRAINING_LANES = ("compute", "data", "boundary", "validation", "checkpoint")
_CLASSES = {"wait": "exposed_communication"}
_TOUCHING_S = 1e-4  # spans of one thread may seem to overlap by the rounding of two clocks
_THINNEST = 0.2  # faint, but there: a wider box would make short waits look long
_LABEL_WIDTH = 6.2  # of one character at the size that the template uses


@dataclass(frozen=True, slots=True)
class Box:
    """One span as a box; ``label`` is empty where it would not fit."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    title: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Lane:
    """One row's name, the height of its middle, and how high it is."""

    y: float
    height: float
    text: str
    rank: str


@dataclass(frozen=True, slots=True)
class Panel:
    """The timeline of one run."""

    title: str
    width: float
    height: float
    left: float
    lanes: tuple[Lane, ...]
    boxes: tuple[Box, ...]
    ticks: tuple[tuple[float, str], ...]
    hidden_ranks: int
    duration: str


def timeline_panels(runs: Sequence[Run]) -> list[Panel]:
    """Lay out one panel per run that has a timeline, all to one time scale."""
    drawn = [run for run in runs if any(rank.spans for rank in run.ranks)]
    cycles = [cycle for run in drawn if (cycle := _cycle_s(run)) is not None]
    if not cycles:
        return []
    window_s = _CYCLES * max(cycles)
    most_ranks = _MOST_RANKS if len(drawn) < _MANY_RUNS else _MOST_RANKS_OF_MANY_RUNS
    return [_panel(run, window_s, most_ranks=most_ranks) for run in drawn]


def _cycle_s(run: Run) -> float | None:
    """Seconds between two rounds; between two steps where the method has no rounds."""
    starts = _cycle_starts(run)
    gaps = [after - before for before, after in pairwise(starts) if after > before]
    return statistics.median(gaps) if gaps else None


def _cycle_starts(run: Run) -> list[float]:
    spans = next((rank.spans for rank in run.ranks if rank.spans), ())
    if run.manifest.method not in ("none", "ddp"):
        flights = separate_fragments(span for span in spans if span.lane == "flight")
        launches = [sorted(span.start_s for span in found) for found in flights.values()]
        if launches and len(launches[0]) > 1:
            return launches[0]
    first: dict[str, float] = {}
    for span in spans:
        if span.lane == "compute":
            first.setdefault(span.name, span.start_s)
    return sorted(first.values())


def _window_start(run: Run, window_s: float) -> float:
    """A start of a cycle near the middle whose window holds least validation and checkpoint."""
    starts = _cycle_starts(run)
    spans = next(rank.spans for rank in run.ranks if rank.spans)
    if not starts:
        return min(span.start_s for span in spans)
    last_s = max(span.end_s for span in spans)
    whole = [start for start in starts if start + window_s <= last_s] or starts[:1]
    middle_s = (starts[0] + last_s - window_s) / 2
    near = sorted(whole, key=lambda start: abs(start - middle_s))[:_MOST_CANDIDATES]
    pauses = [span for span in spans if span.lane in ("validation", "checkpoint")]

    def badness(start: float) -> tuple[float, float]:
        paused = sum(_overlap_s(span, start, start + window_s) for span in pauses)
        return (round(paused, 6), abs(start - middle_s))

    return min(near, key=badness)


def _overlap_s(span: Span, start_s: float, end_s: float) -> float:
    return max(0.0, min(span.end_s, end_s) - max(span.start_s, start_s))


def _panel(run: Run, window_s: float, *, most_ranks: int) -> Panel:
    start_s = _window_start(run, window_s)
    ranks = [rank for rank in run.ranks if rank.spans]
    shown = ranks[:most_ranks]
    lanes: list[Lane] = []
    boxes: list[Box] = []
    y = 4.0
    for rank in shown:
        for row, (text, lane) in enumerate(_ROWS):
            tracks = _visible_tracks(rank, lane, start_s=start_s, window_s=window_s)
            height = _row_height(lane, len(tracks))
            name = f"rank {rank.rank}" if row == 0 else ""
            lanes.append(Lane(y + height / 2, height, text, name))
            for number, track in enumerate(tracks):
                size = height / len(tracks)
                place = {"y": y + number * size, "height": size}
                boxes += [_box(s, **place, start_s=start_s, window_s=window_s) for s in track]
            y += height + _GAP
        y += _RANK_GAP
    return Panel(
        title=run.label,
        width=WIDTH,
        height=y + _AXIS - _RANK_GAP,
        left=LEFT,
        lanes=tuple(lanes),
        boxes=tuple(boxes),
        ticks=tuple(_ticks(window_s)),
        hidden_ranks=len(ranks) - len(shown),
        duration=format_duration_s(window_s),
    )


def _visible_tracks(
    rank: RankTrace, lane: str | None, *, start_s: float, window_s: float
) -> list[list[Span]]:
    """What one row shows: spans of the window, those at one time on tracks of their own."""
    lanes = (lane,) if lane else _TRAINING_LANES
    visible = [
        span
        for span in rank.spans
        if span.lane in lanes and _overlap_s(span, start_s, start_s + window_s) > 0
    ]
    if lane != "flight":
        return separate_tracks(visible, touching_s=_TOUCHING_S)
    return [
        track
        for flights in separate_fragments(visible).values()
        for track in separate_tracks(flights, touching_s=_TOUCHING_S)
    ]


def _row_height(lane: str | None, tracks: int) -> float:
    if lane != "flight" or tracks < 2:
        return _ROW
    return max(_ROW, min(_TRACK * tracks, _MOST_FLIGHTS_HEIGHT))


def _box(span: Span, *, y: float, height: float, start_s: float, window_s: float) -> Box:
    scale = (WIDTH - LEFT) / window_s
    width = max(_THINNEST, _overlap_s(span, start_s, start_s + window_s) * scale)
    short = span.name.removeprefix("all-reduce ")
    fits = span.lane == "flight" and height >= _TRACK and len(short) * _LABEL_WIDTH + 8 < width
    return Box(
        x=round(LEFT + max(0.0, span.start_s - start_s) * scale, 2),
        y=round(y, 2),
        width=round(width, 2),
        height=round(height, 2),
        kind=_CLASSES.get(span.lane, span.lane),
        title=_title(span),
        label=short if fits else "",
    )


def _title(span: Span) -> str:
    sent = "" if span.sent_bytes is None else f", {format_bytes(span.sent_bytes)} sent"
    return f"{span.name}: {span.lane}, {format_duration_s(span.end_s - span.start_s)}{sent}"


def _ticks(window_s: float) -> list[tuple[float, str]]:
    """Positions and labels at a round step, four to nine of them."""
    step = 10.0**-9
    while window_s / step > 8:
        for factor in (2.0, 2.5, 2.0):  # 1, 2, 5, 10, ...
            step *= factor
            if window_s / step <= 8:
                break
    count = int(window_s / step + 1e-9)
    scale = (WIDTH - LEFT) / window_s
    return [
        (round(LEFT + number * step * scale, 2), format_duration_s(number * step))
        for number in range(count + 1)
    ]
