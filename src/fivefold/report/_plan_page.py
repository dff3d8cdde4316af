"""What the page of a plan shows, as plain data: headed sections of tables, bars and timelines.

Who makes a page fills these in; nothing here knows what a job, a topology or a layer is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fivefold.errors import ConfigurationError
from fivefold.report._collective_page import Picture


@dataclass(frozen=True, kw_only=True)
class DataTable:
    """A table.

    Args:
        columns: Name and meaning of each.
        rows: Text of each cell; as many as columns.
        caption: What it lists.
        text_columns: Which columns are words; the others are figures.
        marked: Rows that stand out.

    Raises:
        ConfigurationError: A row has another number of cells than there are columns.

    Examples:
        >>> DataTable(columns=(("job", ""), ("time", "")), rows=(("a", "1 s"),)).rows[0]
        ('a', '1 s')
    """

    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    text_columns: tuple[int, ...] = ()
    marked: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ConfigurationError(
                    f"a row has {len(row)} cells, the table {len(self.columns)} columns: {row}"
                )


@dataclass(frozen=True, kw_only=True)
class BarRow:
    """One stacked bar.

    Args:
        label: Whose it is.
        total: Text at its end.
        segments: Kind, length and text of each; lengths in one unit over the whole chart.

    Examples:
        >>> BarRow(label="a", total="3 s", segments=(("compute", 3.0, "3 s"),)).length
        3.0
    """

    label: str
    total: str
    segments: tuple[tuple[str, float, str], ...]

    @property
    def length(self) -> float:
        """Length of the whole bar."""
        return sum(length for _, length, _ in self.segments)


@dataclass(frozen=True, kw_only=True)
class BarChart:
    """Stacked bars to one scale.

    Args:
        rows: The bars.
        kinds: Name of each kind of segment, for the legend.
        caption: What they show.

    Examples:
        >>> BarChart(rows=(), kinds=(("compute", "compute"),)).caption
        ''
    """

    rows: tuple[BarRow, ...]
    kinds: tuple[tuple[str, str], ...] = ()
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class RangeRow:
    """A value with its interval.

    Args:
        label: Whose it is.
        value: The value.
        low: Lower end of its interval.
        high: Upper end.
        text: What is written at its end.

    Raises:
        ConfigurationError: A number is not finite, or the ends are the wrong way round.

    Examples:
        >>> RangeRow(label="V", value=0.9, low=0.8, high=1.0, text="0.900").low
        0.8
    """

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
    """Bars from 0 with intervals, and lines that they are compared to.

    Args:
        rows: The bars.
        marks: Name and value of each line.
        caption: What they show.

    Examples:
        >>> RangeChart(rows=(), marks=(("B0", 1.0),)).marks
        (('B0', 1.0),)
    """

    rows: tuple[RangeRow, ...]
    marks: tuple[tuple[str, float], ...] = ()
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class LaneSpan:
    """A box on a timeline.

    Args:
        start_s: Where it begins.
        end_s: Where it ends.
        kind: What it is: decides its colour.
        title: What a pointer over it tells.
        label: Written into it where there is room.

    Examples:
        >>> LaneSpan(start_s=0.0, end_s=1.0, kind="forward", title="forward 0").label
        ''
    """

    start_s: float
    end_s: float
    kind: str
    title: str
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class LaneLoad:
    """What one of several asks of a lane, in steps.

    Args:
        kind: Whose load: decides the colour.
        title: What a pointer over it tells.
        times_s: Where each step begins; the last is where it ends.
        shares: Of the lane's capacity from each time to the next; one fewer than times.

    Raises:
        ConfigurationError: The numbers of times and shares do not go together.

    Examples:
        >>> LaneLoad(kind="job0", title="a", times_s=(0.0, 1.0), shares=(0.5,)).shares
        (0.5,)
    """

    kind: str
    title: str
    times_s: tuple[float, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.times_s) != len(self.shares) + 1:
            raise ConfigurationError(
                f"{len(self.shares)} shares need {len(self.shares) + 1} times; "
                f"got {len(self.times_s)}"
            )


@dataclass(frozen=True, kw_only=True)
class TimelineLane:
    """A row of a timeline: boxes, or loads on top of one another.

    Args:
        name: Its name.
        group: Name of the rows that begin with this one; empty within a group.
        spans: Its boxes; those at one time stand below one another.
        loads: Its loads.

    Examples:
        >>> TimelineLane(name="network", group="job a").spans
        ()
    """

    name: str
    group: str = ""
    spans: tuple[LaneSpan, ...] = ()
    loads: tuple[LaneLoad, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Rows over one stretch of time.

    Args:
        lanes: The rows.
        start_s: Where the stretch begins; ticks count from here.
        end_s: Where it ends.
        kinds: Name of each kind of box or load, for the legend.
        caption: How to read it.
        folded: Whether it is shown only when asked for, under its caption.

    Raises:
        ConfigurationError: The stretch has no length.

    Examples:
        >>> Timeline(lanes=(), start_s=0.0, end_s=2.0).folded
        False
    """

    lanes: tuple[TimelineLane, ...]
    start_s: float
    end_s: float
    kinds: tuple[tuple[str, str], ...] = ()
    caption: str = ""
    folded: bool = False

    def __post_init__(self) -> None:
        if not self.end_s > self.start_s:
            raise ConfigurationError(
                f"a timeline must have a length; it goes from {self.start_s} to {self.end_s} s"
            )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A decision: who took it, from what, against which alternatives.

    Args:
        who: Who decided.
        about: What it was about.
        decision: What was decided.
        taken: Whether a change came of it.
        alternatives: Name and predicted seconds of what was weighed.
        chosen: Which of the alternatives it was; None where a rule decided.
        inputs: What was used, and who owns it.
        allowed_by: What let those inputs through.
        round: When it was taken.

    Examples:
        >>> Choice(who="tasks", about="job a", decision="fifo").alternatives
        ()
    """

    who: str
    about: str
    decision: str
    taken: bool = True
    alternatives: tuple[tuple[str, float], ...] = ()
    chosen: str | None = None
    inputs: tuple[tuple[str, str], ...] = ()
    allowed_by: tuple[str, ...] = ()
    round: int = 0


@dataclass(frozen=True, kw_only=True)
class ChoiceLog:
    """Decisions in their order.

    Args:
        choices: The decisions.
        seconds: What the predicted seconds are.

    Examples:
        >>> ChoiceLog(choices=()).seconds
        'predicted'
    """

    choices: tuple[Choice, ...]
    seconds: str = "predicted"


@dataclass(frozen=True, kw_only=True)
class PointChart:
    """Points of one quantity against another.

    Args:
        x_name: What lies to the right, with its unit.
        y_name: What lies upward, with its unit.
        points: Right, up and the title of each.
        marked: Which ones stand out.
        caption: How to read it.

    Raises:
        ConfigurationError: A coordinate is not finite.

    Examples:
        >>> PointChart(x_name="time in s", y_name="memory in GiB", points=((1.0, 2.0, "a"),)).marked
        ()
    """

    x_name: str
    y_name: str
    points: tuple[tuple[float, float, str], ...]
    marked: tuple[int, ...] = ()
    caption: str = ""

    def __post_init__(self) -> None:
        for x, y, title in self.points:
            if not (math.isfinite(x) and math.isfinite(y)):
                raise ConfigurationError(f"point {title!r} lies at {x}, {y}")


PlanPart = DataTable | BarChart | RangeChart | Timeline | ChoiceLog | PointChart | Picture
"""What a section of a page may hold."""


@dataclass(frozen=True, kw_only=True)
class PlanSection:
    """A headed part of a page.

    Args:
        heading: Its heading.
        parts: What it shows.
        how: How to read it.

    Examples:
        >>> PlanSection(heading="Jobs", parts=()).how
        ''
    """

    heading: str
    parts: tuple[PlanPart, ...]
    how: str = ""


@dataclass(frozen=True, kw_only=True)
class PlanPage:
    """A page about a plan, a simulation, an ablation or an execution.

    Args:
        title: Title of the page.
        finding: The result in a sentence or two.
        tiles: The few figures to see first: value, what it is, more about it.
        caveats: What a reader must know to believe the right things.
        sections: The page's parts.
        command: How to make it again.

    Examples:
        >>> PlanPage(title="two jobs", finding="Nobody waits.").sections
        ()
    """

    title: str
    finding: str
    tiles: tuple[tuple[str, str, str], ...] = ()
    caveats: tuple[str, ...] = ()
    sections: tuple[PlanSection, ...] = ()
    command: str = ""
