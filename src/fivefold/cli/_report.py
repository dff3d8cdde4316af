"""``fivefold report``: what runs did, as text, as a page and as timelines."""

from __future__ import annotations

import contextlib
import os
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli._options import JsonOption, output_option, require_writable

if TYPE_CHECKING:
    from fivefold.report import Report


def report_command(  # noqa: PLR0913 - each option is a parameter
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders, or folders of runs.", exists=True),
    ],
    *,
    output: Annotated[
        Path | None,
        output_option("The page; default: report.html in the (common) folder."),
    ] = None,
    as_json: JsonOption = False,
    html: Annotated[
        bool, typer.Option("--html/--no-html", help="Write report.html and timeline.json.")
    ] = True,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page and follow the runs, until Ctrl-C.")
    ] = False,
    host: Annotated[
        str, typer.Option(help="With --serve: address; the default is this machine alone.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="With --serve: port; 0 for a free one.")] = 8000,
) -> None:
    """Compare runs: print the figures, write report.html and a timeline.json per run.

    The text (or JSON) goes to standard output; what was written where goes to standard error.
    """
    from fivefold.report import build_report, print_page, report_text

    if serve:
        _serve(runs, host=host, port=port, open_page=open_page)
        return
    require_writable(output)
    report = build_report(runs)
    if as_json:
        typer.echo(report.to_json())
    else:
        print_page(report_text(report))
    if html:
        above = Path(os.path.commonpath([run.resolve() for run in runs]))
        folder = runs[0] if len(runs) == 1 else above
        page = _write(report, output or folder / "report.html")
        if open_page:
            webbrowser.open(page.resolve().as_uri())


def _serve(runs: list[Path], *, host: str, port: int, open_page: bool) -> None:
    from fivefold.report import page_server

    with page_server(runs, host=host, port=port) as server:
        address = f"http://{host}:{server.server_port}/"
        typer.echo(f"report: {address} (read again every few seconds; Ctrl-C ends it)", err=True)
        if open_page:
            webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def _write(report: Report, page: Path) -> Path:
    from fivefold.report import report_page, write_html, write_timeline

    for run in report.runs:
        timeline = write_timeline(run, run.path / "timeline.json")
        typer.echo(f"timeline: {timeline} (opens in ui.perfetto.dev)", err=True)
    typer.echo(f"report: {write_html(report_page(report), page)}", err=True)
    return page
