"""Charts as SVG, and the data of those that the page's script draws.

What lies outside a timeline's stretch is cut off. A box is never thinner than a faint line, and
what is written into it is left out where it would not fit.
"""

from __future__ import annotations

import bisect
import html
import math
from collections.abc import Iterator, Sequence
from typing import Any

from fivefold.report.format import COLOURS
from fivefold.report.page import (
    Curve,
    CurveChart,
    LaneLoad,
    LaneSpan,
    RangeChart,
    Timeline,
    TimelineLane,
)
from fivefold.units import format_duration_s

_WIDTH, _LEFT, _RIGHT = 1000.0, 170.0, 8.0
_ROW, _LOAD_ROW, _TRACK, _MOST_HEIGHT = 18.0, 26.0, 12.0, 120.0
_GAP, _GROUP_GAP, _AXIS = 4.0, 12.0, 26.0
_THINNEST = 0.2
_LABEL_WIDTH = 6.2  # of one character at the size that the style sheet gives it
_NAME_WIDTH = 24  # characters that fit left of a lane
_DASHES = ("", "6 4", "2 3", "8 3 2 3")
_DIGITS = 5  # of a curve's points: more do not show


class Markup(str):
    """Text that is markup."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: object) -> Markup:
    """Return an element.

    Attributes that are None or False are left out, True stands without a value; ``cls`` is the
    class, and an underscore is a hyphen.
    """
    written = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = "class" if key == "cls" else key.replace("_", "-")
        plain = f"{value:g}" if isinstance(value, float) else str(value)
        written.append(f" {attribute}" if value is True else f' {attribute}="{_escaped(plain)}"')
    start = f"<{name}{''.join(written)}>"
    if name in ("br", "img", "meta"):
        return Markup(start)
    return Markup(f"{start}{join(children)}</{name}>")


def join(children: tuple[str, ...] | list[str]) -> Markup:
    """Return elements and escaped text, one behind the other."""
    return Markup(
        "".join(child if isinstance(child, Markup) else _escaped(child) for child in children)
    )


def _escaped(text: str) -> str:
    """Return text that may stand between tags, and between double quotes."""
    return html.escape(text, quote=False).replace('"', "&quot;")


def timeline_svg(timeline: Timeline) -> Markup:
    """Return the drawing of a timeline."""
    scale = (_WIDTH - _LEFT - _RIGHT) / (timeline.end_s - timeline.start_s)
    rows: list[Markup] = []
    drawn: list[Markup] = []
    y = 4.0
    for number, lane in enumerate(timeline.lanes):
        if lane.group:
            y += _GROUP_GAP * (number > 0) + 14
        tracks = _tracks(timeline, lane)
        height = max(_ROW, min(_TRACK * len(tracks), _MOST_HEIGHT))
        height = _LOAD_ROW if lane.loads else height
        rows += _row(lane, y, height)
        for place, track in enumerate(tracks):
            size = height / len(tracks)
            for span in track:
                drawn += _box(timeline, span, scale, (y + place * size, size))
        drawn += _stacked(timeline, lane.loads, scale, (y, height))
        y += height + _GAP
    height = y + _AXIS
    return tag(
        "svg",
        *_ticks(timeline, scale, height),
        *rows,
        *drawn,
        cls="lanes",
        viewBox=f"0 0 {_WIDTH:g} {height:g}",
        role="img",
        aria_label=timeline.heading or timeline.caption or "timeline",
    )


def _row(lane: TimelineLane, y: float, height: float) -> Iterator[Markup]:
    if lane.group:
        yield tag("text", lane.group, cls="rank", x=0, y=_at(y - 5))
    width = _WIDTH - _LEFT - _RIGHT
    yield tag("rect", cls="row", x=_LEFT, y=_at(y), width=width, height=_at(height))
    short = lane.name
    if len(short) > _NAME_WIDTH:
        short = short[: _NAME_WIDTH - 1] + "\N{HORIZONTAL ELLIPSIS}"
    place = {"x": _LEFT - 8, "y": _at(y + height / 2 + 4), "text_anchor": "end"}
    yield tag("text", short, tag("title", lane.name), **place)


def _tracks(timeline: Timeline, lane: TimelineLane) -> list[list[LaneSpan]]:
    """Spread a lane's boxes over as few tracks as keep those at one time apart."""
    tolerance_s = max(timeline.touching_s, 1e-6 * (timeline.end_s - timeline.start_s))
    tracks: list[list[LaneSpan]] = []
    for span in sorted(lane.spans, key=lambda span: (span.group, span.start_s, -span.end_s)):
        if span.end_s <= timeline.start_s or span.start_s >= timeline.end_s:
            continue
        for track in tracks:
            last = track[-1]
            if last.group == span.group and last.end_s <= span.start_s + tolerance_s:
                track.append(span)
                break
        else:
            tracks.append([span])
    return tracks


def _box(
    timeline: Timeline, span: LaneSpan, scale: float, place: tuple[float, float]
) -> Iterator[Markup]:
    start_s = max(span.start_s, timeline.start_s)
    x = _LEFT + (start_s - timeline.start_s) * scale
    width = max(_THINNEST, (min(span.end_s, timeline.end_s) - start_s) * scale)
    title = f"{span.title}, {format_duration_s(span.end_s - span.start_s)}"
    size = {"x": _at(x), "y": _at(place[0]), "width": _at(width), "height": _at(place[1])}
    yield tag("rect", tag("title", title), cls=f"box k-{span.kind}", **size)
    fits = place[1] >= _TRACK and len(span.label) * _LABEL_WIDTH + 6 < width
    if span.label and fits:
        yield tag("text", span.label, cls="in", x=_at(x + 3), y=_at(place[0] + place[1] / 2 + 4))


def _stacked(
    timeline: Timeline, loads: Sequence[LaneLoad], scale: float, place: tuple[float, float]
) -> Iterator[Markup]:
    """Draw loads on top of one another, the first at the bottom; the row is the capacity."""
    moments = sorted(
        {timeline.start_s, timeline.end_s}
        | {t for load in loads for t in load.times_s if timeline.start_s < t < timeline.end_s}
    )
    below = [0.0] * (len(moments) - 1)
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
            yield tag("path", tag("title", load.title), cls=f"k-{load.kind}", d=path)
        below = above


def _share_at(load: LaneLoad, moment_s: float) -> float:
    place = bisect.bisect_right(load.times_s, moment_s) - 1
    return load.shares[place] if 0 <= place < len(load.shares) else 0.0


def _slab(x: float, width: float, low: float, high: float, place: tuple[float, float]) -> str:
    y, height = place
    top, bottom = (y + height * (1 - min(1.0, share)) for share in (high, low))
    return f"M{x:.2f} {bottom:.2f}V{top:.2f}h{width:.2f}V{bottom:.2f}z"


def _ticks(timeline: Timeline, scale: float, height: float) -> Iterator[Markup]:
    length_s = timeline.end_s - timeline.start_s
    step_s = round_step(length_s, most=8)
    for number in range(int(length_s / step_s + 1e-9) + 1):
        x = _at(_LEFT + number * step_s * scale)
        yield tag("line", cls="tick", x1=x, x2=x, y1=4, y2=_at(height - 22))
        anchor = "middle" if number else "start"
        text = format_duration_s(number * step_s)
        yield tag("text", text, x=x, y=_at(height - 6), text_anchor=anchor)


def round_step(length: float, *, most: int) -> float:
    """Return the smallest of 1, 2, 5, 10, ... that cuts a length into at most so many parts."""
    power = 10.0 ** math.floor(math.log10(length / most))
    return next(power * f for f in (1, 2, 5, 10, 20) if length / (power * f) <= most)


def range_rows(chart: RangeChart) -> Markup:
    """Return bars, intervals and lines on tracks that begin at 0."""
    ends = [end for row in chart.rows for end in (row.high, row.value)]
    top = 1.03 * max([*ends, *(value for _, value in chart.marks), 1e-300])

    def share(value: float) -> str:
        return f"{round(100 * max(0.0, value) / top, 3)}%"

    names = [tag("b", name, style=f"left:{share(value)}") for name, value in chart.marks]
    head = [
        tag("div", cls="name"),
        tag("div", *names, cls="marks", aria_hidden="true"),
        tag("div", cls="total"),
    ]
    lines = [tag("s", style=f"left:{share(value)}") for _, value in chart.marks]
    rows = []
    for row in chart.rows:
        interval = f"left:{share(row.low)};width:{share(max(0.0, row.high) - max(0.0, row.low))}"
        bar = (tag("i", style=f"width:{share(row.value)}"), tag("em", style=interval), *lines)
        about = {"role": "img", "aria_label": f"{row.label}: {row.text}"}
        rows += [
            tag("div", row.label, cls="name"),
            tag("div", *bar, cls="range", **about),
            tag("div", row.text, cls="total"),
        ]
    return tag("div", *head, *rows, cls="bars ranges")


def curve_data(chart: CurveChart) -> dict[str, Any]:
    """Return what the page's script draws of a chart."""
    return {
        "x": _axis(chart.x_name, chart.x_ticks, log=chart.x_log, zero=chart.x_from_zero),
        "y": _axis(chart.y_name, chart.y_ticks, log=chart.y_log, zero=chart.y_from_zero),
        "marks": [[name, value] for name, value in chart.marks],
        "curves": [
            {
                **_look(curve, place),
                "name": curve.name,
                "key": curve.in_legend,
                "x": [_rounded(value) for value in curve.x],
                "y": [_rounded(value) for value in curve.y],
                "texts": list(curve.texts),
                "width": curve.width,
                "marker": curve.marker,
                "filled": curve.filled,
                "stepped": curve.stepped,
            }
            for place, curve in enumerate(chart.curves)
        ],
    }


def _look(curve: Curve, place: int) -> dict[str, str]:
    """Return colour and dash: its own, or by its place, so that no two curves look the same."""
    if curve.colour:
        return {"colour": curve.colour, "dash": curve.dash}
    dash = curve.dash or _DASHES[place // len(COLOURS) % len(_DASHES)]
    return {"colour": COLOURS[place % len(COLOURS)], "dash": dash}


def _axis(
    name: str, ticks: Sequence[tuple[float, str]], *, log: bool, zero: bool
) -> dict[str, Any]:
    return {"name": name, "log": log, "zero": zero, "ticks": [list(tick) for tick in ticks]}


def _rounded(value: float) -> float:
    """Drop digits that do not show; whole numbers stay as short as they are."""
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _at(value: float) -> float:
    return round(value, 2)
