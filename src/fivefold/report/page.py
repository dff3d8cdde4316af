"""A page as plain data: sections of typed parts. Producers fill it in, renderers draw it.

Nothing here knows what a run, a plan or a topology is. Kinds (``"compute"``, ``"job0"``, ...) name
colours, which are the style sheet's business.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fivefold.errors import ConfigurationError

Kinds = tuple[tuple[str, str], ...]
"""Kind and name of what a chart shows, for its legend."""


@dataclass(frozen=True, kw_only=True)
class DataTable:
    """Rows of text: a cell for each column, the first being the row's name.

    A row of a name and one more cell: that cell spans all columns.

    Raises:
        ConfigurationError: A row has another number of cells than there are columns.
    """

    columns: tuple[tuple[str, str], ...]  # name and meaning of each
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    text_columns: tuple[int, ...] = ()  # which are words; the others are figures
    marked: tuple[int, ...] = ()  # rows that stand out
    badges: tuple[tuple[int, str], ...] = ()  # row, and a word beside its name
    # Depth of each cell's background from 0 to 1, by row, without the names.
    shades: tuple[tuple[float, ...], ...] = ()
    explained: bool = False  # whether the meanings of the columns are listed below

    @classmethod
    def of(cls, names: Sequence[str], rows: Iterable[tuple[str, ...]], **looks: Any) -> DataTable:
        """Return a table whose columns have names and no meanings to explain."""
        return cls(columns=tuple((name, "") for name in names), rows=tuple(rows), **looks)

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns) and not len(row) == 2 < len(self.columns):
                raise ConfigurationError(
                    f"a row has {len(row)} cells, the table {len(self.columns)} columns: {row}"
                )


@dataclass(frozen=True, kw_only=True)
class BarRow:
    """One stacked bar: its label, kind, length and text of each segment, the text at its end."""

    label: str
    total: str
    segments: tuple[tuple[str, float, str], ...]

    @property
    def length(self) -> float:
        """Return the length of the whole bar."""
        return sum(length for _, length, _ in self.segments)


@dataclass(frozen=True, kw_only=True)
class BarChart:
    """Stacked bars, whose lengths are in one unit."""

    rows: tuple[BarRow, ...]
    kinds: Kinds = ()  # for the legend
    caption: str = ""
    tight: bool = False  # whether there are many: thinner, in groups that begin with a label
    full: float | None = None  # the whole track; None: the longest bar, 0: each bar is the whole

    def shares(self, row: BarRow) -> tuple[float, ...]:
        """Return what each segment of a row takes of the track, from 0 to 1."""
        longest = max((row.length for row in self.rows), default=0.0)
        full = longest if self.full is None else self.full or row.length
        return tuple(length / full if full > 0 else 0.0 for _, length, _ in row.segments)


@dataclass(frozen=True, kw_only=True)
class RangeRow:
    """A value with its interval, and what is written at its end."""

    label: str
    value: float
    low: float
    high: float
    text: str

    def __post_init__(self) -> None:
        numbers = (self.value, self.low, self.high)
        if not all(math.isfinite(number) for number in numbers) or self.low > self.high:
            raise ConfigurationError(f"{self.label!r} has no proper interval: {numbers}")


@dataclass(frozen=True, kw_only=True)
class RangeChart:
    """Bars from 0 with intervals, and named lines that they are compared to."""

    rows: tuple[RangeRow, ...]
    marks: tuple[tuple[str, float], ...] = ()
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class LaneSpan:
    """A box on a timeline."""

    start_s: float
    end_s: float
    kind: str  # its colour
    title: str  # what a pointer over it tells, beside its length
    label: str = ""  # written into it where there is room
    group: int = 0  # spans of different groups never share a track of their lane


@dataclass(frozen=True, kw_only=True)
class LaneLoad:
    """Load that one of several puts on a lane, in steps.

    Raises:
        ConfigurationError: The numbers of times and shares do not go together.
    """

    kind: str  # its colour
    title: str  # what a pointer over it tells
    times_s: tuple[float, ...]  # where each step begins; the last is where it ends
    shares: tuple[float, ...]  # of the lane's capacity from each time to the next

    def __post_init__(self) -> None:
        if len(self.times_s) != len(self.shares) + 1:
            needed = f"{len(self.shares)} shares need {len(self.shares) + 1} times"
            raise ConfigurationError(f"{needed}; got {len(self.times_s)}")


@dataclass(frozen=True, kw_only=True)
class TimelineLane:
    """A row of a timeline: boxes, those at one time below one another, or stacked loads.

    A group's name stands above its first row; the others of the group have none.
    """

    name: str
    group: str = ""
    spans: tuple[LaneSpan, ...] = ()
    loads: tuple[LaneLoad, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Rows over one stretch of time.

    Raises:
        ConfigurationError: The stretch has no length.
    """

    lanes: tuple[TimelineLane, ...]
    start_s: float  # ticks count from here
    end_s: float
    kinds: Kinds = ()  # for the legend
    caption: str = ""  # how to read it
    heading: str = ""  # what it is of, where there are several
    touching_s: float = 0.0  # boxes that overlap by less lie side by side

    def __post_init__(self) -> None:
        if not self.end_s > self.start_s:
            raise ConfigurationError(
                f"a timeline must have a length; it goes from {self.start_s} to {self.end_s} s"
            )


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One curve, or a set of points.

    Raises:
        ConfigurationError: There are not as many positions upward as to the right, or one of them
            is not finite.
    """

    name: str  # curves of one name are shown and hidden together
    x: tuple[float, ...]  # to the right
    y: tuple[float, ...]  # upward
    texts: tuple[str, ...] = ()  # what a pointer near each point tells; empty: the two numbers
    colour: str = ""  # as CSS has it; empty for the next of the page's own
    width: float = 2.0  # of the line; 0 draws none
    dash: str = ""  # SVG's pattern
    marker: str = ""  # "circle", "diamond", "square" or "triangle"
    filled: bool = False  # the area below it
    stepped: bool = False  # whether it goes up and then right, as a count does
    in_legend: bool = True

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or len(self.texts) not in (0, len(self.x)):
            sizes = f"{len(self.x)}, {len(self.y)} and {len(self.texts)}"
            raise ConfigurationError(f"curve {self.name!r} has {sizes} positions and texts")
        if not all(map(math.isfinite, (*self.x, *self.y))):
            raise ConfigurationError(f"curve {self.name!r} has a point that lies nowhere")

    @classmethod
    def through(cls, name: str, points: Iterable[tuple[float, float]], **looks: Any) -> Curve:
        """Return the curve through some points, in their order."""
        listed = list(points)
        x, y = zip(*listed, strict=True) if listed else ((), ())
        return cls(name=name, x=x, y=y, **looks)


@dataclass(frozen=True, kw_only=True)
class CurveChart:
    """Curves of one quantity against another, to hover over and to zoom into.

    Raises:
        ConfigurationError: A logarithmic axis would have to show 0 or less.
    """

    key: str  # unique on its page
    x_name: str  # what lies to the right, with its unit
    y_name: str  # what lies upward
    curves: tuple[Curve, ...]  # the last on top
    caption: str = ""  # how to read it; its first sentence stands out
    x_log: bool = False
    y_log: bool = False
    x_ticks: tuple[tuple[float, str], ...] = ()  # positions and texts; empty for round numbers
    y_ticks: tuple[tuple[float, str], ...] = ()
    x_from_zero: bool = False
    y_from_zero: bool = False
    marks: tuple[tuple[str, float], ...] = ()  # name and height of lines to compare with

    def __post_init__(self) -> None:
        for curve in self.curves:
            shown = (*(curve.x if self.x_log else ()), *(curve.y if self.y_log else ()))
            if min(shown, default=1) <= 0:
                raise ConfigurationError(
                    f"curve {curve.name!r} does not fit the logarithmic axis of {self.key!r}"
                )


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A decision: who took it, from what, against which alternatives."""

    who: str
    about: str
    decision: str
    taken: bool = True  # whether a change came of it
    alternatives: tuple[tuple[str, float], ...] = ()  # name and predicted seconds
    chosen: str | None = None  # which of them; None where a rule decided
    inputs: tuple[tuple[str, str], ...] = ()  # what was used, and who owns it
    allowed_by: tuple[str, ...] = ()  # what let those inputs through
    round: int = 0  # when it was taken


@dataclass(frozen=True, kw_only=True)
class DecisionLog:
    """Decisions in their order, and what the seconds of their alternatives are."""

    decisions: tuple[Decision, ...]
    seconds: str = "predicted"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawing that is put into the page itself: an SVG or PNG file's content."""

    title: str
    content: bytes
    caption: str = ""
    media_type: str = "image/svg+xml"


@dataclass(frozen=True)
class TextBlock:
    """A paragraph, or text to be shown as it was typed."""

    text: str
    heading: str = ""
    verbatim: bool = False


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A part that is shown when it is asked for, by its title."""

    title: str
    part: PagePart


@dataclass(frozen=True, kw_only=True)
class SideBySide:
    """Parts beside one another, two in a row where the page is wide enough."""

    parts: tuple[PagePart, ...]


PagePart = (
    DataTable | BarChart | RangeChart | Timeline | CurveChart | DecisionLog | Picture | TextBlock
    | Folded | SideBySide
)  # fmt: skip
"""What a section of a page may hold."""


def has_content(part: PagePart) -> bool:
    """Return whether a part has anything to show; renderers leave out those that have not."""
    if isinstance(part, Folded):
        return has_content(part.part)
    if isinstance(part, SideBySide):
        return any(map(has_content, part.parts))
    if isinstance(part, BarChart):
        return any(row.length > 0 for row in part.rows)
    contents = ("rows", "lanes", "decisions", "curves", "content", "text")
    return any(getattr(part, name, ()) for name in contents)


@dataclass(frozen=True, kw_only=True)
class PageSection:
    """A headed part of a page, and how to read it.

    The key is the section's address within the page; empty where nothing points at it.
    """

    heading: str
    parts: tuple[PagePart, ...] = ()
    how: str = ""
    key: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page about runs, a plan, a simulation, an ablation or an algorithm.

    Examples:
        >>> table = DataTable(columns=(("job", ""), ("time", "")), rows=(("a", "1 s"),))
        >>> sections = (PageSection(heading="Jobs", parts=(table,)),)
        >>> page = Page(title="two jobs", finding="Nobody waits.", sections=sections)
    """

    title: str
    finding: str  # the result in a sentence or two
    tiles: tuple[tuple[str, str, str], ...] = ()  # figures to see first: value, what it is, more
    caveats: tuple[str, ...] = ()  # what a reader must know to believe the right things
    sections: tuple[PageSection, ...] = ()
    command: str = ""  # how to make it again


_MOST_SVG_BYTES = 90_000  # beyond, the same picture in pixels is smaller and draws faster
_DOTS_PER_INCH = 100
_COLOURS = 64


def picture_of(figure: Any, title: str, caption: str = "") -> Picture:
    """Return a figure of matplotlib as SVG, or as PNG where that would be large.

    The same picture is the same file: it holds no date, and no ids that depend on the run.
    """
    import matplotlib as mpl  # noqa: PLC0415 - optional, and the figure shows that it is there
    from PIL import Image  # noqa: PLC0415 - comes with matplotlib

    content = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "fivefold"}):
        figure.savefig(content, format="svg", bbox_inches="tight", metadata={"Date": None})
    if content.tell() <= _MOST_SVG_BYTES:
        return Picture(title=title, caption=caption, content=content.getvalue())
    pixels = io.BytesIO()
    figure.savefig(pixels, format="png", bbox_inches="tight", dpi=_DOTS_PER_INCH)
    content = io.BytesIO()
    Image.open(pixels).convert("RGB").quantize(_COLOURS).save(content, "png", optimize=True)
    return Picture(title=title, caption=caption, content=content.getvalue(), media_type="image/png")
