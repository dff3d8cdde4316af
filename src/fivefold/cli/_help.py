"""Help texts from docstrings, and groups of commands that have them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

import typer
from rich.markup import escape

# An indented line is an example, which stays a line of its own.
_LINE_BREAK_INSIDE_A_PARAGRAPH = re.compile(r"(?<!\n)\n(?![\n ])")


def help_text(command: Callable[..., None]) -> str:
    """Return a command's help, from its docstring."""
    return shown_help(inspect.cleandoc(command.__doc__ or ""))


def shown_help(docstring: str) -> str:
    """Return a docstring without the sections for programmers, ready to be wrapped."""
    text = docstring.partition("\nRaises:")[0].strip()
    return escape(_LINE_BREAK_INSIDE_A_PARAGRAPH.sub(" ", text))  # [plan] is a table, no style


def command_group(
    name: str,
    *,
    help: str,  # noqa: A002 - as typer calls it
    commands: Mapping[str, Callable[..., None]] = MappingProxyType({}),
) -> typer.Typer:
    """Return a group of commands whose help texts are their docstrings."""
    app = typer.Typer(
        name=name, help=help, no_args_is_help=True, add_completion=False, rich_markup_mode="rich"
    )
    app.callback()(lambda: None)  # keeps a single command a subcommand
    for word, command in commands.items():
        app.command(word, help=help_text(command))(command)
    return app
