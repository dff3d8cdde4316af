"""A page as one self-contained HTML file.

Style, script and drawings are in the file. A content security policy forbids any request, so that
the page behaves the same offline, in a mail and on a web server.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from fivefold.errors import DataError
from fivefold.files import write_atomically
from fivefold.report._charts import Markup, curve_data, join, range_rows, tag, timeline_svg
from fivefold.report.format import format_seconds
from fivefold.report.page import (
    BarChart,
    CurveChart,
    DataTable,
    Decision,
    DecisionLog,
    Folded,
    Kinds,
    Page,
    PagePart,
    PageSection,
    Picture,
    RangeChart,
    SideBySide,
    TextBlock,
    Timeline,
)

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
        *([tag("div", *tiles, cls="tiles")] if tiles else []),
        *(tag("p", caveat, cls="warn", role="note") for caveat in page.caveats),
    )


def _section(section: PageSection, figures: dict[str, Any]) -> Markup | None:
    parts = [_part(part, figures) for part in section.parts if _holds(part)]
    if section.parts and not parts:
        return None
    how = [tag("p", section.how, cls="how")] if section.how else []
    return tag("section", tag("h2", section.heading), *how, *parts, id=section.key or None)


def _holds(part: PagePart) -> bool:
    """Return whether there is anything to show."""
    if isinstance(part, Folded):
        return _holds(part.part)
    if isinstance(part, SideBySide):
        return any(map(_holds, part.parts))
    if isinstance(part, BarChart):
        return any(row.length > 0 for row in part.rows)
    contents = ("rows", "lanes", "decisions", "curves", "content", "text")
    return any(getattr(part, name, ()) for name in contents)


def _part(part: PagePart, figures: dict[str, Any]) -> Markup:
    if isinstance(part, CurveChart):
        return _curves(part, figures)
    if isinstance(part, Folded):
        return tag("details", tag("summary", part.title), _part(part.part, figures))
    if isinstance(part, SideBySide):
        shown = [_part(one, figures) for one in part.parts if _holds(one)]
        return tag("div", *shown, cls="pair")
    return _DRAWN[type(part)](part)


def _text(block: TextBlock) -> Markup:
    heading = [tag("h3", block.heading)] if block.heading else []
    text = tag("pre", block.text) if block.verbatim else tag("p", block.text, cls="reason")
    return join([*heading, text])


def _how(caption: str) -> list[Markup]:
    return [tag("p", caption, cls="how")] if caption else []


def _legend(kinds: Kinds) -> list[Markup]:
    entries = [tag("li", tag("i", cls=f"k-{kind}"), name) for kind, name in kinds]
    return [tag("ul", *entries, cls="legend")] if entries else []


def _wide(content: Markup, about: str) -> Markup:
    # It scrolls where the screen is narrow: then the arrow keys must reach it.
    return tag("div", content, cls="wide", tabindex="0", role="group", aria_label=about)


def _table(table: DataTable) -> Markup:
    names = [
        tag(
            "th",
            name,
            scope="col",
            title=meaning or None,
            cls="text" if number in table.text_columns else None,
        )
        for number, (name, meaning) in enumerate(table.columns)
    ]
    rows = [_table_row(table, number, row) for number, row in enumerate(table.rows)]
    caption = [tag("caption", table.caption)] if table.caption else []
    head = [tag("thead", tag("tr", *names))] if any(name for name, _ in table.columns) else []
    whole = _wide(tag("table", *caption, *head, tag("tbody", *rows)), table.caption or "table")
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
    return join([*_how(chart.caption), *_legend(chart.kinds), bars])


def _timeline(timeline: Timeline) -> Markup:
    heading = [tag("h3", timeline.heading)] if timeline.heading else []
    drawing = _wide(timeline_svg(timeline), timeline.heading or "timeline")
    return join([*heading, *_how(timeline.caption), *_legend(timeline.kinds), drawing])


def _curves(chart: CurveChart, figures: dict[str, Any]) -> Markup:
    figures[chart.key] = curve_data(chart)
    first, dot, rest = chart.caption.partition(". ")
    caption = [tag("figcaption", tag("b", first + dot), rest)] if first else []
    about = f"{chart.y_name} against {chart.x_name}"
    plot = tag("div", cls="plot", id=f"plot-{chart.key}", role="img", aria_label=about)
    script = "The curves need JavaScript; every other part of this page does without."
    return tag("figure", *caption, plot, tag("noscript", tag("p", script, cls="warn")))


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
    caption = [tag("figcaption", picture.caption)] if picture.caption else []
    return tag("figure", *caption, image, cls="picture", tabindex="0")  # scrolls as _wide


def _ranges(chart: RangeChart) -> Markup:
    return join([*_how(chart.caption), range_rows(chart)])


_DRAWN: dict[type, Callable[[Any], Markup]] = {
    DataTable: _table,
    BarChart: _bars,
    RangeChart: _ranges,
    Timeline: _timeline,
    DecisionLog: _decisions,
    Picture: _picture,
    TextBlock: _text,
}
