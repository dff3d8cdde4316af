"""``fivefold gnn``: graph neural networks whose features do not fit in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from fivefold.cli import _gnn_data, _gnn_store, _gnn_train
from fivefold.cli._help import help_text

_SUFFIX = "_command"
_ORDER = (  # as one uses them
    "ingest",
    "generate",
    "info",
    "verify",
    "probe",
    "sample",
    "plan",
    "pack",
    "train",
    "infer",
)

app = typer.Typer(
    name="gnn",
    help="Train graph neural networks whose features are many times larger than memory.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)


@app.callback()
def _group() -> None:
    """Keep the commands subcommands, however many there are."""


def _commands() -> Iterator[tuple[str, Any]]:
    """Every exported ``NAME_command`` of the modules, as the command NAME."""
    for module in (_gnn_data, _gnn_store, _gnn_train):
        for exported in module.__all__:
            if exported.endswith(_SUFFIX):
                name = exported.removesuffix(_SUFFIX).replace("_", "-")
                yield name, getattr(module, exported)


for _name, _command in sorted(_commands(), key=lambda found: _ORDER.index(found[0])):
    app.command(_name, help=help_text(_command))(_command)
