"""Where the boxes of a plan's charts lie: pure geometry, in SVG units or percent of a track.

The template draws what comes out. Timelines are as wide as those of a training report.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fivefold.units import format_duration_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fivefold.report._plan_page import (
        BarChart,
        LaneLoad,
        LaneSpan,
        PointChart,
        RangeChart,
        Timeline,
        TimelineLane,
    )

_WIDTH, _LEFT, _RIGHT = 1000.0, 170.0, 8.0
_ROW, _LOAD_ROW, _TRACK, _GAP, _GROUP_GAP, _AXIS = 18.0, 26.0, 12.0, 4.0, 12.0, 26.0
_THINNEST = 0.2  # faint, but there
_LABEL_WIDTH = 6.2  # of one character at the size that the template uses
_NAME_WIDTH = 24  # characters that fit left of a lane
_POINT_WIDTH, _POINT_HEIGHT, _POINT_LEFT, _POINT_BOTTOM = 640.0, 320.0, 70.0, 46.0


@dataclass(frozen=True, slots=True)
class _Box:
    x: float
    y: float
    width: float
    height: float
    kind: str
    title: str
    label: str


@dataclass(frozen=True, slots=True)
class _Area:
    path: str
    kind: str
    title: str


@dataclass(frozen=True, slots=True)
class _Row:
    y: float
    height: float
    name: str
    full_name: str
    group: str


@dataclass(frozen=True, slots=True)
class _TimelinePicture:
    width: float
    height: float
    left: float
    rows: tuple[_Row, ...]
    boxes: tuple[_Box, ...]
    areas: tuple[_Area, ...]
    ticks: tuple[tuple[float, str], ...]


def timeline_picture(timeline: Timeline) -> _TimelinePicture:
    """Boxes, areas and ticks of a timeline; what lies outside the stretch is cut off."""
    scale = (_WIDTH - _LEFT - _RIGHT) / (timeline.end_s - timeline.start_s)
    rows: list[_Row] = []
    boxes: list[_Box] = []
    areas: list[_Area] = []
    y = 4.0
    for number, lane in enumerate(timeline.lanes):
        if lane.group:
            y += _GROUP_GAP * (number > 0) + 14
        tracks = _tracks(timeline, lane)
        height = _LOAD_ROW if lane.loads else max(_ROW, _TRACK * len(tracks))
        rows.append(_Row(y, height, _short(lane.name), lane.name, lane.group))
        for place, track in enumerate(tracks):
            size = height / len(tracks)
            boxes += [_box(timeline, span, scale, (y + place * size, size)) for span in track]
        areas += _stacked(timeline, lane.loads, scale, (y, height))
        y += height + _GAP
    ticks = [(round(_LEFT + at * scale, 2), label) for at, label in _ticks(timeline)]
    return _TimelinePicture(
        _WIDTH, y + _AXIS, _LEFT, tuple(rows), tuple(boxes), tuple(areas), tuple(ticks)
    )


def _short(name: str) -> str:
    return name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _tracks(timeline: Timeline, lane: TimelineLane) -> list[list[LaneSpan]]:
    """Boxes of a lane on as few tracks as keep those at one time apart."""
    tracks: list[list[LaneSpan]] = []
    tolerance = 1e-6 * (timeline.end_s - timeline.start_s)
    for span in sorted(lane.spans, key=lambda span: (span.start_s, -span.end_s)):
        if span.end_s <= timeline.start_s or span.start_s >= timeline.end_s:
            continue
        free = next((t for t in tracks if t[-1].end_s <= span.start_s + tolerance), None)
        if free is None:
            tracks.append([span])
        else:
            free.append(span)
    return tracks


def _box(timeline: Timeline, span: LaneSpan, scale: float, place: tuple[float, float]) -> _Box:
    start_s = max(span.start_s, timeline.start_s)
    width = max(_THINNEST, (min(span.end_s, timeline.end_s) - start_s) * scale)
    fits = place[1] >= _TRACK and len(span.label) * _LABEL_WIDTH + 6 < width
    return _Box(
        x=round(_LEFT + (start_s - timeline.start_s) * scale, 2),
        y=round(place[0], 2),
        width=round(width, 2),
        height=round(place[1], 2),
        kind=span.kind,
        title=f"{span.title}, {format_duration_s(span.end_s - span.start_s)}",
        label=span.label if fits else "",
    )


def _stacked(
    timeline: Timeline, loads: Sequence[LaneLoad], scale: float, place: tuple[float, float]
) -> list[_Area]:
    """Loads on top of one another, the first at the bottom; the row's height is the capacity."""
    moments = sorted(
        {timeline.start_s, timeline.end_s}
        | {t for load in loads for t in load.times_s if timeline.start_s < t < timeline.end_s}
    )
    below = [0.0] * (len(moments) - 1)
    areas = []
    for load in loads:
        above = [
            base + _share_at(load, moment) for base, moment in zip(below, moments[:-1], strict=True)
        ]
        path = "".join(
            _slab(_LEFT + (a - timeline.start_s) * scale, (b - a) * scale, low, high, place)
            for a, b, low, high in zip(moments, moments[1:], below, above, strict=False)
            if high > low
        )
        if path:
            areas.append(_Area(path, load.kind, load.title))
        below = above
    return areas


def _share_at(load: LaneLoad, moment_s: float) -> float:
    place = bisect.bisect_right(load.times_s, moment_s) - 1
    return load.shares[place] if 0 <= place < len(load.shares) else 0.0


def _slab(x: float, width: float, low: float, high: float, place: tuple[float, float]) -> str:
    y, height = place
    top, bottom = (y + height * (1 - min(1.0, share)) for share in (high, low))
    return f"M{x:.2f} {bottom:.2f}V{top:.2f}h{width:.2f}V{bottom:.2f}z"


def _ticks(timeline: Timeline) -> list[tuple[float, str]]:
    length_s = timeline.end_s - timeline.start_s
    step = round_step(length_s, most=8)
    return [
        (number * step, format_duration_s(number * step))
        for number in range(int(length_s / step + 1e-9) + 1)
    ]


def round_step(length: float, *, most: int) -> float:
    """The smallest of 1, 2, 5, 10, ... that divides a length into at most so many parts."""
    power = 10.0 ** math.floor(math.log10(length / most))
    return next(power * f for f in (1, 2, 5, 10, 20) if length / (power * f) <= most)


def bar_rows(chart: BarChart) -> list[tuple[str, str, list[tuple[str, float, str]]]]:
    """Label, total and segments in percent of the longest bar."""
    longest = max((row.length for row in chart.rows), default=0.0)
    if longest <= 0:
        return []
    return [
        (
            row.label,
            row.total,
            [(kind, round(100 * size / longest, 3), text) for kind, size, text in row.segments],
        )
        for row in chart.rows
    ]


@dataclass(frozen=True, slots=True)
class _RangePicture:
    """All in percent of the track."""

    rows: tuple[tuple[str, float, float, float, str], ...]
    marks: tuple[tuple[str, float], ...]


def range_picture(chart: RangeChart) -> _RangePicture:
    """Bars, intervals and lines in percent of a track that begins at 0."""
    ends = [row.high for row in chart.rows] + [row.value for row in chart.rows]
    top = 1.03 * max([*ends, *(value for _, value in chart.marks), 1e-300])

    def at(value: float) -> float:
        return round(100 * max(0.0, value) / top, 3)

    rows = tuple(
        (row.label, at(row.value), at(row.low), round(at(row.high) - at(row.low), 3), row.text)
        for row in chart.rows
    )
    return _RangePicture(rows, tuple((name, at(value)) for name, value in chart.marks))


@dataclass(frozen=True, slots=True)
class _PointPicture:
    width: float
    height: float
    left: float
    bottom: float
    points: tuple[tuple[float, float, bool, str], ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]


def point_picture(chart: PointChart) -> _PointPicture:
    """Points and ticks; both axes begin near their smallest value."""
    xs, ys = [p[0] for p in chart.points], [p[1] for p in chart.points]
    x_low, x_high = _padded(xs)
    y_low, y_high = _padded(ys)
    right, base = _POINT_WIDTH - 14, _POINT_HEIGHT - _POINT_BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            round(_POINT_LEFT + (x - x_low) / (x_high - x_low) * (right - _POINT_LEFT), 2),
            round(base - (y - y_low) / (y_high - y_low) * (base - 8), 2),
        )

    points = tuple(
        (*place(x, y), number in chart.marked, title)
        for number, (x, y, title) in enumerate(chart.points)
    )
    return _PointPicture(
        _POINT_WIDTH,
        _POINT_HEIGHT,
        _POINT_LEFT,
        base,
        points,
        tuple((place(x, y_low)[0], f"{x:.4g}") for x in _values(x_low, x_high)),
        tuple((place(x_low, y)[1], f"{y:.4g}") for y in _values(y_low, y_high)),
    )


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high + room


def _values(low: float, high: float) -> list[float]:
    step = round_step(high - low, most=6)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]
