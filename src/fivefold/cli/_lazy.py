"""Commands that are imported when they are called, so that ``fivefold --help`` loads no torch."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from fivefold.cli._help import help_text, shown_help

# Name of each command, the module beside this one, and the function or group in it.
_COMMANDS = {
    "demo": ("_demo", "demo_command"),
    "new": ("_new", "new_command"),
    "train": ("_train", "train_command"),
    "plan": ("_plan", "plan_command"),
    "explain": ("_explain", "explain_command"),
    "advise": ("_advise", "advise_command"),
    "simulate": ("_codesign", "simulate_command"),
    "execute": ("_execute", "execute_command"),
    "ablate": ("_codesign", "ablate_command"),
    "profile": ("_profile", "profile_command"),
    "report": ("_report", "report_command"),
    "doctor": ("_doctor", "doctor_command"),
    "lab": ("_lab", "app"),
    "elastic": ("_elastic", "app"),
    "gnn": ("_gnn", "app"),
    "topology": ("_topology", "app"),
    "collectives": ("_collectives", "app"),
}


class _Commands(Mapping[str, Any]):
    """The commands above; each is imported when it is looked up."""

    def __init__(self) -> None:
        self.only_listed = False  # then what is looked up has a help text and does nothing

    def __getitem__(self, name: str) -> Any:
        module, function = _COMMANDS[name]
        if self.only_listed:
            return TyperCommand(name, help=_summary(module, function))
        found = getattr(importlib.import_module(f"fivefold.cli.{module}"), function)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(
                add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
            )
            alone.command(name, help=help_text(found))(found)
            found = alone
        return _with_uppercase_arguments(typer.main.get_command(found))

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


def _with_uppercase_arguments(command: Any) -> Any:
    """Show arguments as CONFIG, as the help texts call them, and not as {config}."""
    for each in [command, *getattr(command, "commands", {}).values()]:
        for parameter in each.params:
            if parameter.param_type_name == "argument" and parameter.metavar is None:
                parameter.metavar = parameter.name.upper()
    return command


class LazyGroup(TyperGroup):
    """A group whose commands are imported when they are called, and not to list them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands()  # type: ignore[assignment]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the list of all commands without importing any."""
        self.commands.only_listed = True  # type: ignore[attr-defined]
        try:
            super().format_help(ctx, formatter)
        finally:
            self.commands.only_listed = False  # type: ignore[attr-defined]


def _summary(module: str, name: str) -> str:
    """Read the help of a command or group from the file that it stands in."""
    spec = importlib.util.find_spec(f"fivefold.cli.{module}")
    assert spec is not None, "the table names files beside this one"
    assert spec.origin is not None, "they are files"
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return shown_help(ast.get_docstring(node) or "")
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            texts = [word.value for word in node.value.keywords if word.arg == "help"]
            if texts and isinstance(texts[0], ast.Constant):
                return str(texts[0].value)
    raise AssertionError(f"fivefold.cli.{module} has no {name}")
