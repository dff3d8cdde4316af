"""The page of a plan as one self-contained HTML file: no script, no request, all text escaped."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from fivefold.report._collective_page import Picture
from fivefold.report._files import write_text_atomically
from fivefold.report._format import format_seconds
from fivefold.report._html import make_environment
from fivefold.report._plan_charts import (
    bar_rows,
    point_picture,
    range_picture,
    timeline_picture,
)
from fivefold.report._plan_page import (
    BarChart,
    Choice,
    ChoiceLog,
    DataTable,
    PointChart,
    RangeChart,
    Timeline,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fivefold.report._plan_page import PlanPage, PlanPart

_COLOURS = 8  # of jobs, before they come round again


def write_plan_html(page: PlanPage, path: Path) -> Path:
    """Write the page as one HTML file.

    Args:
        page: What to show.
        path: File to write.

    Returns:
        The path that was written.

    Raises:
        UnsupportedError: jinja2 is not installed.
        DataError: The file cannot be written.

    Examples:
        >>> import tempfile, pathlib
        >>> from fivefold.report import PlanPage
        >>> page = PlanPage(title="two jobs", finding="Nobody waits.")
        >>> write_plan_html(page, pathlib.Path(tempfile.mkdtemp()) / "plan.html").name
        'plan.html'
    """
    return write_text_atomically(path, render_plan_html(page))


def render_plan_html(page: PlanPage) -> str:
    """Render the page as the text of one HTML file.

    Args:
        page: What to show.

    Returns:
        The page.

    Raises:
        UnsupportedError: jinja2 is not installed.

    Examples:
        >>> from fivefold.report import PlanPage
        >>> "a &lt; b" in render_plan_html(PlanPage(title="a < b", finding="Nobody waits."))
        True
    """
    sections = [
        (section, [_shown(part) for part in section.parts if _holds(part)])
        for section in page.sections
    ]
    text: str = (
        make_environment()
        .get_template("_plan.html.jinja")
        .render(
            page=page,
            sections=[(one, parts) for one, parts in sections if parts or not one.parts],
            num_colours=_COLOURS,
        )
    )
    return text


def _holds(part: PlanPart) -> bool:
    """Whether there is anything to show: empty parts leave no heading."""
    contents = ("rows", "lanes", "choices", "points", "content")
    return any(getattr(part, name, ()) for name in contents)


def _shown(part: PlanPart) -> tuple[str, PlanPart, Any]:
    """What draws the part, the part, and where its pieces lie."""
    name, drawn = next(draw for kind, draw in _DRAWN.items() if isinstance(part, kind))
    return name, part, drawn(part)


def _choice(choice: Choice) -> tuple[Choice, list[tuple[str, str, float, bool]]]:
    """A decision and its alternatives: name, time, share of the longest, whether it was taken."""
    longest = max((seconds for _, seconds in choice.alternatives), default=0.0)
    return choice, [
        (
            name,
            format_seconds(seconds),
            round(100 * seconds / longest, 2) if longest > 0 else 0.0,
            name == choice.chosen,
        )
        for name, seconds in choice.alternatives
    ]


_DRAWN: dict[type, tuple[str, Callable[[Any], Any]]] = {
    DataTable: ("table", lambda _part: None),
    BarChart: ("bars", bar_rows),
    RangeChart: ("ranges", range_picture),
    Timeline: ("timeline", timeline_picture),
    ChoiceLog: ("choices", lambda part: [_choice(choice) for choice in part.choices]),
    PointChart: ("points", point_picture),
    Picture: ("picture", lambda part: base64.b64encode(part.content).decode("ascii")),
}
