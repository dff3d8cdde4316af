"""The page of runs that still go on, made anew each time that a browser asks for it."""

from __future__ import annotations

import html
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fivefold.errors import ConfigurationError, FivefoldError
from fivefold.report._html import render_html
from fivefold.report._report import build_report
from fivefold.report._training_page import report_page

_READING_S = 5  # between two readings of the runs, by the browser's own clock


def page_server(
    paths: Sequence[Path], *, host: str = "127.0.0.1", port: int = 0
) -> ThreadingHTTPServer:
    """Return a server of the report of runs, which follows them; ``serve_forever`` starts it.

    Args:
        paths: Run folders, or folders of runs, which may appear later.
        host: Address to listen on; the default can be reached from this machine alone.
        port: Port; 0 for a free one, then in ``server_port``.

    Raises:
        ConfigurationError: The address cannot be listened on.
    """
    reading = threading.Lock()  # one reading at a time, however many browsers ask

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/":
                self.send_error(404)
                return
            with reading:
                text = _page(paths)
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Refresh", str(_READING_S))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing of single requests."""

    try:
        return ThreadingHTTPServer((host, port), Handler)
    except (OSError, OverflowError) as error:
        message = f"{host}:{port} cannot be listened on: {error}"
        raise ConfigurationError(
            message, hint="choose another --port, or 0 for a free one"
        ) from None


def _page(paths: Sequence[Path]) -> str:
    """Return the page, or why there is none yet."""
    try:
        return render_html(report_page(build_report(paths)))
    except FivefoldError as error:
        words = html.escape(f"{error.message}. {error.hint or ''}")
        return f'<!doctype html><html lang="en"><title>waiting</title><p>Waiting: {words}</p>'
