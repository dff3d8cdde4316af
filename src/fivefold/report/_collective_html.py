"""The page of a synthesized collective as one self-contained HTML file."""

from __future__ import annotations

import base64
import importlib
from typing import TYPE_CHECKING

from fivefold.report._files import write_text_atomically
from fivefold.report._format import UNKNOWN, format_percent, format_ratio, format_seconds
from fivefold.report._html import make_environment, need_module

if TYPE_CHECKING:
    from pathlib import Path

    from fivefold.report._collective_page import CollectivePage

_PROVED = 1e-9  # relative: so close to the bound is on it


def write_collective_html(page: CollectivePage, path: Path) -> Path:
    """Write the page as one HTML file.

    Args:
        page: What to show.
        path: File to write.

    Returns:
        The path that was written.

    Raises:
        UnsupportedError: jinja2 or plotly is not installed.
        DataError: The file cannot be written.

    Examples:
        >>> import tempfile, pathlib
        >>> from fivefold.report import CollectivePage
        >>> page = CollectivePage(title="all-gather", finding="1 ms.", time_s=1e-3, bound_s=1e-3)
        >>> write_collective_html(page, pathlib.Path(tempfile.mkdtemp()) / "page.html").name
        'page.html'
    """
    return write_text_atomically(path, render_collective_html(page))


def render_collective_html(page: CollectivePage) -> str:
    """Render the page as the text of one HTML file.

    Args:
        page: What to show.

    Returns:
        The page.

    Raises:
        UnsupportedError: jinja2 or plotly is not installed.

    Examples:
        >>> from fivefold.report import CollectivePage
        >>> page = CollectivePage(title="a < b", finding="1 ms.", time_s=1e-3, bound_s=1e-3)
        >>> "a &lt; b" in render_collective_html(page)
        True
    """
    environment, offline = make_environment(), need_module("plotly.offline")
    curves = importlib.import_module("fivefold.report._collective_curves")
    figures = curves.collective_figures(page.curves)
    text: str = environment.get_template("_collective.html.jinja").render(
        page=page,
        tiles=_tiles(page),
        bound=format_seconds(page.bound_s),
        rows=[
            (row, _cells(page, row.time_s), format_seconds(row.solver_s)) for row in page.methods
        ],
        figures=figures,
        plotly_js=offline.get_plotlyjs() if figures else "",
        pictures=[(picture, _inlined(picture.content)) for picture in page.pictures],
    )
    return text


def _tiles(page: CollectivePage) -> list[tuple[str, str, str]]:
    """The few figures to see first: (value, what it is, more about it)."""
    tiles = [(format_seconds(page.time_s), "predicted time", "in the cost model")]
    if page.bound_s > 0:
        tiles.append((format_seconds(page.bound_s), "lower bound", "nothing can be faster"))
        proved = page.gap is not None and page.gap < _PROVED
        more = "optimal, and proved to be" if proved else "the optimum lies in between"
        tiles.append(("0 %" if proved else format_percent(page.gap), "above the bound", more))
    library = [row.time_s for row in page.methods if row.name == "library" and row.time_s]
    if library and page.time_s > 0:
        tiles.append((format_ratio(library[0] / page.time_s), "the speed", "of the library's best"))
    return tiles


def _cells(page: CollectivePage, time_s: float | None) -> tuple[str, str]:
    gap = page.gap_of(time_s)
    if time_s is None or gap is None:
        return format_seconds(time_s), UNKNOWN
    return format_seconds(time_s), "0 %" if gap < _PROVED else format_percent(gap)


def _inlined(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
