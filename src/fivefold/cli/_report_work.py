"""The work of ``fivefold report``."""

from __future__ import annotations

import contextlib
import webbrowser
from pathlib import Path

import typer

from fivefold.report import (
    Report,
    page_server,
    report_page,
    write_html,
    write_timeline,
)


def serve_page(runs: list[Path], *, host: str, port: int, open_page: bool) -> None:
    with page_server(runs, host=host, port=port) as server:
        address = f"http://{host}:{server.server_port}/"
        typer.echo(f"report: {address} (read again every few seconds; Ctrl-C ends it)", err=True)
        if open_page:
            webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def write_report(report: Report, page: Path) -> Path:
    for run in report.runs:
        timeline = write_timeline(run, run.path / "timeline.json")
        typer.echo(f"timeline: {timeline} (opens in ui.perfetto.dev)", err=True)
    typer.echo(f"report: {write_html(report_page(report), page)}", err=True)
    return page
