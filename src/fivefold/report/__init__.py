"""What a run did, for people: HTML page, terminal text, Perfetto timeline.

Reads the folders that training runs leave behind, compares them, and says what came out, also
where that is bad news. It knows the files of a run, not the code that wrote them: it imports
neither the trainer nor torch. The pages of a synthesized collective and of a plan are made from
plain data in the same way.
"""

from __future__ import annotations

from fivefold.report._collective_html import render_collective_html, write_collective_html
from fivefold.report._collective_page import CollectivePage, MethodRow, Picture, SizeCurve
from fivefold.report._html import render_html, write_html
from fivefold.report._perfetto import trace_events, write_timeline
from fivefold.report._plan_html import render_plan_html, write_plan_html
from fivefold.report._plan_page import (
    BarChart,
    BarRow,
    Choice,
    ChoiceLog,
    DataTable,
    LaneLoad,
    LaneSpan,
    PlanPage,
    PlanPart,
    PlanSection,
    PointChart,
    RangeChart,
    RangeRow,
    Timeline,
    TimelineLane,
)
from fivefold.report._records import Run
from fivefold.report._report import Report, build_report, configuration_differences
from fivefold.report._runs import find_runs, read_run, read_runs
from fivefold.report._summary import RunSummary, summarise, time_to_value
from fivefold.report._text import print_report

__all__ = [
    "BarChart",
    "BarRow",
    "Choice",
    "ChoiceLog",
    "CollectivePage",
    "DataTable",
    "LaneLoad",
    "LaneSpan",
    "MethodRow",
    "Picture",
    "PlanPage",
    "PlanPart",
    "PlanSection",
    "PointChart",
    "RangeChart",
    "RangeRow",
    "Report",
    "Run",
    "RunSummary",
    "SizeCurve",
    "Timeline",
    "TimelineLane",
    "build_report",
    "configuration_differences",
    "find_runs",
    "print_report",
    "read_run",
    "read_runs",
    "render_collective_html",
    "render_html",
    "render_plan_html",
    "summarise",
    "time_to_value",
    "trace_events",
    "write_collective_html",
    "write_html",
    "write_plan_html",
    "write_timeline",
]
