"""A page as one self-contained HTML file.

Style, script and drawings are in the file. A content security policy forbids any request, so that
the page behaves the same offline, in a mail and on a web server. Charts are SVG. What lies outside
a timeline's stretch is cut off. A box is never thinner than a faint line, and what is written into
it is left out where it would not fit.
"""

from __future__ import annotations

import base64
import bisect
import html
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from fivefold.errors import DataError
from fivefold.files import write_atomically
from fivefold.report.format import COLOURS, format_seconds
from fivefold.report.page import (
    BarChart,
    Curve,
    CurveChart,
    DataTable,
    Decision,
    DecisionLog,
    Folded,
    Kinds,
    LaneLoad,
    LaneSpan,
    Page,
    PagePart,
    PageSection,
    Picture,
    RangeChart,
    SideBySide,
    TextBlock,
    Timeline,
    TimelineLane,
    has_content,
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


_SpanT = TypeVar("_SpanT")


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
        size = height / max(len(tracks), 1)
        for place, track in enumerate(tracks):
            for span in track:
                drawn += _box(timeline, span, scale, (y + place * size, size))
        drawn += _stacked(timeline, lane.loads, scale, (y, height))
        y += height + _GAP
    height = y + _AXIS
    ticks = _ticks(timeline, scale, height)
    looks = {"cls": "lanes", "viewBox": f"0 0 {_WIDTH:g} {height:g}", "role": "img"}
    about = timeline.heading or timeline.caption or "timeline"
    return tag("svg", *ticks, *rows, *drawn, **looks, aria_label=about)


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
    shown = [s for s in lane.spans if s.end_s > timeline.start_s and s.start_s < timeline.end_s]
    shown.sort(key=lambda span: (span.group, span.start_s, -span.end_s))
    return spread(shown, lambda a, b: a.group == b.group and a.end_s <= b.start_s + tolerance_s)


def spread(spans: Iterable[_SpanT], fits: Callable[[_SpanT, _SpanT], bool]) -> list[list[_SpanT]]:
    """Put each span behind the last of the first track that it fits, else on a new one."""
    tracks: list[list[_SpanT]] = []
    for span in spans:
        track = next((track for track in tracks if fits(track[-1], span)), None)
        if track is None:
            tracks.append([span])
        else:
            track.append(span)
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
        shares = (*load.shares, 0.0)  # the last: before it begins and after it ends
        above = [
            base + shares[bisect.bisect_right(load.times_s, moment) - 1]
            for base, moment in zip(below, moments, strict=False)
        ]
        path = "".join(
            _slab(_LEFT + (a - timeline.start_s) * scale, (b - a) * scale, low, high, place)
            for (a, b), low, high in zip(pairwise(moments), below, above, strict=True)
            if high > low
        )
        if path:
            yield tag("path", tag("title", load.title), cls=f"k-{load.kind}", d=path)
        below = above


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
    marks = tag("div", *names, cls="marks", aria_hidden="true")
    cells = [tag("div", cls="name"), marks, tag("div", cls="total")]
    lines = [tag("s", style=f"left:{share(value)}") for _, value in chart.marks]
    for row in chart.rows:
        interval = f"left:{share(row.low)};width:{share(max(0.0, row.high) - max(0.0, row.low))}"
        bar = (tag("i", style=f"width:{share(row.value)}"), tag("em", style=interval), *lines)
        about = {"role": "img", "aria_label": f"{row.label}: {row.text}"}
        cells += [
            tag("div", row.label, cls="name"),
            tag("div", *bar, cls="range", **about),
            tag("div", row.text, cls="total"),
        ]
    return tag("div", *cells, cls="bars ranges")


def curve_data(chart: CurveChart) -> dict[str, Any]:
    """Return what the page's script draws of a chart."""

    def axis(side: str) -> dict[str, Any]:
        fields = ("name", "log", "from_zero", "ticks")
        name, log, zero, ticks = (getattr(chart, f"{side}_{field}") for field in fields)
        return {"name": name, "log": log, "zero": zero, "ticks": list(map(list, ticks))}

    return {
        "x": axis("x"),
        "y": axis("y"),
        "marks": chart.marks,
        "curves": [_curve(curve, place) for place, curve in enumerate(chart.curves)],
    }


def _curve(curve: Curve, place: int) -> dict[str, Any]:
    """Return a curve in its own colour or by its place, so that no two curves look the same."""
    colour, dash = curve.colour, curve.dash
    if not colour:
        colour = COLOURS[place % len(COLOURS)]
        dash = dash or _DASHES[place // len(COLOURS) % len(_DASHES)]
    kept = ("name", "texts", "width", "marker", "filled", "stepped")
    return {name: getattr(curve, name) for name in kept} | {
        "colour": colour, "dash": dash, "key": curve.in_legend,
        "x": [_rounded(value) for value in curve.x], "y": [_rounded(value) for value in curve.y],
    }  # fmt: skip


def _rounded(value: float) -> float:
    """Drop digits that do not show; whole numbers stay as short as they are."""
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _at(value: float) -> float:
    return round(value, 2)


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_FEW_ALTERNATIVES = 3  # are shown without being asked for


def write_html(page: Page, path: Path | str) -> Path:
    """Write a page as one HTML file.

    Args:
        page: What to show.
        path: File to write; its folder is made.

    Raises:
        DataError: The file cannot be written.
    """
    return write_text_atomically(Path(path), render_html(page))


def write_text_atomically(path: Path, text: str) -> Path:
    """Write text whole or not at all, with the folder where it is missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror}",
            hint="check the folder, its permissions and the free space of the disk",
        ) from error
    return path


def render_html(page: Page) -> str:
    """Return a page as the text of one HTML file.

    Args:
        page: What to show; sections without content are left out.

    Examples:
        >>> from fivefold.report.page import Page
        >>> "A &lt; B" in render_html(Page(title="t", finding="A < B"))
        True
    """
    figures: dict[str, Any] = {}
    sections = [section for one in page.sections if (section := _section(one, figures))]
    if page.command:
        made = (tag("h2", "Make it again"), tag("pre", page.command))
        sections.append(tag("section", *made))
    end = "Written by fivefold. This page is complete in itself and asks nothing of the network."
    body = tag("main", _header(page), *sections, tag("footer", end))
    policy = f"{_POLICY}; script-src 'unsafe-inline'" if figures else _POLICY
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="description", content=page.finding),
        tag("title", f"fivefold: {page.title}"),
        tag("style", Markup(_resource("page.css"))),
    )
    return (
        f"<!doctype html>\n{tag('html', head, tag('body', body, *_script(figures)), lang='en')}\n"
    )


def _resource(name: str) -> str:
    return files("fivefold.report").joinpath(name).read_text(encoding="utf-8")


def _script(figures: dict[str, Any]) -> Iterator[Markup]:
    if not figures:
        return
    data = json.dumps(figures, separators=(",", ":"), allow_nan=False)
    for character in "<>&":  # within JSON they stand in strings alone
        data = data.replace(character, f"\\u{ord(character):04x}")
    yield tag("script", Markup(data), type="application/json", id="figures")
    yield tag("script", Markup(_resource("page.js")))


def _header(page: Page) -> Markup:
    tiles = [
        tag("div", tag("b", value), tag("span", what), tag("small", more), cls="tile")
        for value, what, more in page.tiles
    ]
    return tag(
        "header",
        tag("h1", f"fivefold: {page.title}"),
        tag("p", page.finding.replace(" %", "\u00a0%"), cls="finding"),
        tag("div", *tiles, cls="tiles") if tiles else "",
        *(tag("p", caveat, cls="warn", role="note") for caveat in page.caveats),
    )


def _section(section: PageSection, figures: dict[str, Any]) -> Markup | None:
    parts = [_part(part, figures) for part in section.parts if has_content(part)]
    if section.parts and not parts:
        return None
    heading = tag("h2", section.heading)
    return tag("section", heading, _how(section.how), *parts, id=section.key or None)


def _part(part: PagePart, figures: dict[str, Any]) -> Markup:
    if isinstance(part, CurveChart):
        return _curves(part, figures)
    if isinstance(part, Folded):
        return tag("details", tag("summary", part.title), _part(part.part, figures))
    if isinstance(part, SideBySide):
        shown = [_part(one, figures) for one in part.parts if has_content(one)]
        return tag("div", *shown, cls="pair")
    return _DRAWN[type(part)](part)


def _text(block: TextBlock) -> Markup:
    text = tag("pre", block.text) if block.verbatim else tag("p", block.text, cls="reason")
    return join([block.heading and tag("h3", block.heading), text])


def _how(caption: str) -> str:
    return caption and tag("p", caption, cls="how")


def _legend(kinds: Kinds) -> str:
    entries = [tag("li", tag("i", cls=f"k-{kind}"), name) for kind, name in kinds]
    return tag("ul", *entries, cls="legend") if entries else ""


def _wide(content: Markup, about: str) -> Markup:
    # It scrolls where the screen is narrow: then the arrow keys must reach it.
    return tag("div", content, cls="wide", tabindex="0", role="group", aria_label=about)


def _table(table: DataTable) -> Markup:
    names = []
    for number, (name, meaning) in enumerate(table.columns):
        words = "text" if number in table.text_columns else None
        names.append(tag("th", name, scope="col", title=meaning or None, cls=words))
    rows = [_table_row(table, number, row) for number, row in enumerate(table.rows)]
    caption = table.caption and tag("caption", table.caption)
    head = tag("thead", tag("tr", *names)) if any(name for name, _ in table.columns) else ""
    whole = _wide(tag("table", caption, head, tag("tbody", *rows)), table.caption or "table")
    if not table.explained:
        return whole
    terms = [
        join([tag("dt", name), tag("dd", meaning)]) for name, meaning in table.columns if meaning
    ]
    meanings = tag("dl", *terms, cls="terms")
    return join([whole, tag("details", tag("summary", "What the columns mean"), meanings)])


def _table_row(table: DataTable, number: int, row: tuple[str, ...]) -> Markup:
    badges = [tag("span", badge, cls="badge") for place, badge in table.badges if place == number]
    spanned = len(table.columns) - 1 if len(row) == 2 < len(table.columns) else None
    cells = [tag("th", row[0], *badges, scope="row")]
    for column, cell in enumerate(row[1:], start=1):
        shade = f"--load:{table.shades[number][column - 1]:g}" if table.shades else None
        words = "wrap" if spanned or column in table.text_columns else None
        cells.append(tag("td", cell, cls=words, style=shade, colspan=spanned))
    return tag("tr", *cells, cls="marked" if number in table.marked else None)


def _bars(chart: BarChart) -> Markup:
    rows = []
    for row in chart.rows:
        segments = [
            tag("i", cls=f"k-{kind}", style=f"width:{round(100 * share, 3)}%", title=text or None)
            for (kind, _, text), share in zip(row.segments, chart.shares(row), strict=True)
        ]
        about = {"role": "img", "aria_label": f"{row.label} {row.total}"}
        rows += [
            tag("span", row.label, cls="name"),
            tag("span", *segments, cls="bar", **about),
            tag("span", row.total, cls="total"),
        ]
    bars = tag("div", *rows, cls="bars tight" if chart.tight else "bars")
    return join([_how(chart.caption), _legend(chart.kinds), bars])


def _timeline(timeline: Timeline) -> Markup:
    heading = timeline.heading and tag("h3", timeline.heading)
    drawing = _wide(timeline_svg(timeline), timeline.heading or "timeline")
    return join([heading, _how(timeline.caption), _legend(timeline.kinds), drawing])


def _curves(chart: CurveChart, figures: dict[str, Any]) -> Markup:
    figures[chart.key] = curve_data(chart)
    first, dot, rest = chart.caption.partition(". ")
    caption = first and tag("figcaption", tag("b", first + dot), rest)
    about = f"{chart.y_name} against {chart.x_name}"
    plot = tag("div", cls="plot", id=f"plot-{chart.key}", role="img", aria_label=about)
    script = "The curves need JavaScript; every other part of this page does without."
    return tag("figure", caption, plot, tag("noscript", tag("p", script, cls="warn")))


def _decisions(log: DecisionLog) -> Markup:
    return tag("ol", *(_decision(one, log.seconds) for one in log.decisions), cls="choices")


def _decision(decision: Decision, seconds: str) -> Markup:
    when = f", round {decision.round}" if decision.round else ""
    words = [
        tag("span", decision.who, cls=f"who k-{decision.who}"), " ", tag("b", decision.decision),
        " ", tag("span", f"{decision.about}{when}", cls="about"),
    ]  # fmt: skip
    if not decision.taken:
        words.append(tag("span", "not taken", cls="badge"))
    lines = [tag("p", *words)]
    if decision.inputs:
        origins: list[str] = []
        for what, owner in decision.inputs:
            origins += [", " if origins else "from ", tag("code", what), f" of {owner}"]
        if decision.allowed_by:
            origins.append(f"; allowed by {', '.join(decision.allowed_by)}")
        lines.append(tag("p", *origins, cls="from"))
    if decision.alternatives:
        lines.append(_alternatives(decision, seconds))
    return tag("li", *lines, cls="choice" if decision.taken else "choice refused")


def _alternatives(decision: Decision, seconds: str) -> Markup:
    longest_s = max(time_s for _, time_s in decision.alternatives)
    options = []
    for name, time_s in decision.alternatives:
        share = round(100 * time_s / longest_s, 2) if longest_s > 0 else 0.0
        cells = (tag("span", name), tag("i", style=f"width:{share}%"))
        taken = "option taken" if name == decision.chosen else "option"
        options.append(tag("div", *cells, tag("b", format_seconds(time_s)), cls=taken))
    count = len(options)
    summary = tag("summary", f"{count} weighed, in {seconds} seconds")
    weighed = tag("div", *options, cls="weighed")
    return tag("details", summary, weighed, open=count <= _FEW_ALTERNATIVES)


def _picture(picture: Picture) -> Markup:
    content = base64.b64encode(picture.content).decode("ascii")
    about = f"{picture.title}. {picture.caption}" if picture.caption else picture.title
    image = tag("img", alt=about, src=f"data:{picture.media_type};base64,{content}")
    caption = picture.caption and tag("figcaption", picture.caption)
    return tag("figure", caption, image, cls="picture", tabindex="0")  # scrolls as _wide


_DRAWN: dict[type, Callable[[Any], Markup]] = {
    DataTable: _table,
    BarChart: _bars,
    RangeChart: lambda chart: join([_how(chart.caption), range_rows(chart)]),
    Timeline: _timeline,
    DecisionLog: _decisions,
    Picture: _picture,
    TextBlock: _text,
}
