"""``fivefold doctor``: what this machine can do, what is missing and how to get it."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

from fivefold.cli._options import JsonOption


def doctor_command(*, as_json: JsonOption = False) -> None:
    """Say what this machine can do, what is missing and how to get it.

    Everything is tried, nothing is changed. The exit code is 0: what is missing only matters to
    those who need it.
    """
    from fivefold.cli._doctor_work import all_checks, show_checks

    checks = all_checks()
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        show_checks(checks)
