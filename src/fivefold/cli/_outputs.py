"""Where a command will write, looked at before the work and not after it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import typer

from fivefold.cli._arguments import ArgumentError
from fivefold.errors import ConfigurationError

_PICTURES = (".png", ".svg", ".pdf")


def require_writable(*paths: Path | None) -> None:
    """Refuse files and folders that cannot be made where they are wanted.

    Args:
        paths: Files or folders to be written; None for one that was not asked for.

    Raises:
        ConfigurationError: One cannot be written; the message names what is in the way.
    """
    for path in paths:
        if path is None:
            continue
        above = path if path.is_dir() else path.parent
        while not above.exists() and above != above.parent:
            above = above.parent
        if not above.is_dir():
            raise ConfigurationError(
                f"{path} cannot be written: {above} is a file", hint="name another place"
            )
        if not os.access(path if path.exists() else above, os.W_OK):
            raise ConfigurationError(
                f"{path} cannot be written: no permission to write to {above}",
                hint="name another place, or change its permissions",
            )


def require_picture(path: Path | None) -> None:
    """Refuse a picture in a format that is not drawn.

    Raises:
        ArgumentError: The ending is not that of a picture.
    """
    if path is not None and path.suffix not in _PICTURES:
        raise ArgumentError(
            f"a picture cannot be saved as {str(path)!r}", hint="use .png, .svg or .pdf"
        )


def write_json(value: Any) -> None:
    """Write a result to standard output, for programs."""
    typer.echo(json.dumps(value))
