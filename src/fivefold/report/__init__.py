"""What a run, a plan or an algorithm came to, for people: HTML page, terminal text, Perfetto.

Reads the folders that training runs leave behind, compares them, and says what came out, also
where that is bad news. It knows the files of a run, not the code that wrote them: it imports
neither the trainer nor torch. A page is plain data, which whoever has something to show fills in.
"""

from __future__ import annotations

from fivefold.report._format import format_percent, format_ratio, format_seconds
from fivefold.report._html import render_html, write_html
from fivefold.report._page import (
    BarChart,
    BarRow,
    Curve,
    CurveChart,
    DataTable,
    Decision,
    DecisionLog,
    Folded,
    LaneLoad,
    LaneSpan,
    Page,
    PagePart,
    PageSection,
    Picture,
    RangeChart,
    RangeRow,
    SideBySide,
    TextBlock,
    Timeline,
    TimelineLane,
)
from fivefold.report._perfetto import trace_events, write_timeline
from fivefold.report._pictures import picture_of
from fivefold.report._reader import find_runs, read_run, read_runs
from fivefold.report._records import Run
from fivefold.report._report import Report, build_report, configuration_differences
from fivefold.report._summary import RunSummary, summarise, time_to_value
from fivefold.report._text import print_page
from fivefold.report._training_page import report_page, report_text

__all__ = [
    "BarChart",
    "BarRow",
    "Curve",
    "CurveChart",
    "DataTable",
    "Decision",
    "DecisionLog",
    "Folded",
    "LaneLoad",
    "LaneSpan",
    "Page",
    "PagePart",
    "PageSection",
    "Picture",
    "RangeChart",
    "RangeRow",
    "Report",
    "Run",
    "RunSummary",
    "SideBySide",
    "TextBlock",
    "Timeline",
    "TimelineLane",
    "build_report",
    "configuration_differences",
    "find_runs",
    "format_percent",
    "format_ratio",
    "format_seconds",
    "picture_of",
    "print_page",
    "read_run",
    "read_runs",
    "render_html",
    "report_page",
    "report_text",
    "summarise",
    "time_to_value",
    "trace_events",
    "write_html",
    "write_timeline",
]
