"""What a run, a plan or an algorithm came to, for people: HTML page, terminal text, Perfetto.

Reads the folders that training runs leave behind, compares them, and says what came out, also
where that is bad news. It knows the files of a run, not the code that wrote them: it imports
neither the trainer nor torch. A page is plain data, which whoever has something to show fills in.
"""

from __future__ import annotations

from fivefold.report._html import render_html, write_html
from fivefold.report._reader import Report, build_report, read_run, read_runs
from fivefold.report._text import print_page
from fivefold.report._training_page import page_server, report_page, report_text
from fivefold.report.perfetto import write_timeline

__all__ = [
    "Report",
    "build_report",
    "page_server",
    "print_page",
    "read_run",
    "read_runs",
    "render_html",
    "report_page",
    "report_text",
    "write_html",
    "write_timeline",
]
