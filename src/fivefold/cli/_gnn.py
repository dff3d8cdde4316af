"""``fivefold gnn``: graph neural networks whose features do not fit in memory."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import typer

from fivefold.cli._help import help_text

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["app"]

_SUFFIX = "_command"
_MODULES = ("fivefold.cli._gnn_data", "fivefold.cli._gnn_store", "fivefold.cli._gnn_train")

app = typer.Typer(
    name="gnn",
    help="Train graph neural networks whose features are many times larger than memory.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@app.callback()
def _group() -> None:
    """Keep the commands subcommands, however many there are."""


def _register(module: ModuleType) -> None:
    """Add every exported ``NAME_command`` of a module as the command NAME."""
    for exported in module.__all__:
        if exported.endswith(_SUFFIX):
            command: Any = getattr(module, exported)
            name = exported.removesuffix(_SUFFIX).replace("_", "-")
            app.command(name, help=help_text(command))(command)


for _name in _MODULES:
    if importlib.util.find_spec(_name) is not None:
        _register(importlib.import_module(_name))
