"""What a run did, for people: HTML page, terminal text, Perfetto timeline; benchmark results.

Reads the folders that training runs leave behind, compares them, and says what came out, also
where that is bad news. It knows the files of a run, not the code that wrote them: it imports
neither the trainer nor torch.
"""

from __future__ import annotations

from fivefold.report._html import render_html, write_html
from fivefold.report._perfetto import trace_events, write_timeline
from fivefold.report._report import Report, build_report, configuration_differences
from fivefold.report._runs import find_runs, read_run, read_runs
from fivefold.report._summary import RunSummary, summarise, time_to_value

__all__ = [
    "Report",
    "RunSummary",
    "build_report",
    "configuration_differences",
    "find_runs",
    "read_run",
    "read_runs",
    "render_html",
    "summarise",
    "time_to_value",
    "trace_events",
    "write_html",
    "write_timeline",
]
