"""Help texts from docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

from rich.markup import escape

_LINE_BREAK_INSIDE_A_PARAGRAPH = re.compile(r"(?<!\n)\n(?!\n)")


def help_text(command: Callable[..., None]) -> str:
    """Return a command's help, from its docstring."""
    return shown_help(inspect.cleandoc(command.__doc__ or ""))


def shown_help(docstring: str) -> str:
    """Return a docstring without the sections for programmers, ready to be wrapped."""
    text = docstring.partition("\nRaises:")[0].strip()
    return escape(_LINE_BREAK_INSIDE_A_PARAGRAPH.sub(" ", text))  # [plan] is a table, no style
