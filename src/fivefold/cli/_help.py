"""Help texts from docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

from rich.markup import escape

_LINE_BREAK_INSIDE_A_PARAGRAPH = re.compile(r"(?<!\n)\n(?!\n)")


def help_text(command: Callable[..., None]) -> str:
    """A command's docstring without the sections that are for programmers, ready to be wrapped."""
    text = inspect.cleandoc(command.__doc__ or "").partition("\nRaises:")[0].strip()
    return escape(_LINE_BREAK_INSIDE_A_PARAGRAPH.sub(" ", text))  # [plan] is a table, no style
