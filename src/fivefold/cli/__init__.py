"""The one command, ``fivefold``: every room's work from a shell.

Each command group lives in a file of its own, which is imported when it is called, so that
``fivefold --help`` loads no torch. Errors become two lines and an exit code in one place.
"""

from __future__ import annotations

from fivefold.cli._main import main

__all__ = ["main"]
