"""``fivefold plan --check``: recipes of a folder, checked as a test of a repository would be."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fivefold.cli._later import later
from fivefold.cli._outputs import write_json
from fivefold.cli._plan_compare import plan_record, write_csv

with later():
    from fivefold.strategy import load_cluster
    from fivefold.strategy.recipes import RecipeVerdict, check_recipes


Form = Literal["text", "json", "csv", "github"]
_FAILED = ("invalid", "memory")


def check(folder: Path, *, cluster: str, form: Form) -> None:
    """Check the recipes of a folder and show what was found.

    Args:
        folder: The folder, or one file.
        cluster: A name or file.
        form: How it is written; "github" is the form of annotations in GitHub's pages.

    Raises:
        Exit: A recipe is invalid or does not fit; the exit code is 1.
    """
    found = list(check_recipes(folder, load_cluster(cluster)))
    records = [_record(one) for one in found]
    if form == "json":
        write_json(records)
    elif form == "csv":
        write_csv(records)
    elif form == "github":
        for one in found:
            typer.echo(_annotation(one))
    else:
        _show(found, cluster)
    if any(one.status in _FAILED for one in found):
        raise typer.Exit(1)


def _record(one: RecipeVerdict) -> dict[str, Any]:
    record: dict[str, Any] = {
        "path": str(one.path), "line": one.line, "program": one.program, "status": one.status,
        "message": one.message, "hint": one.hint, "assumed": ", ".join(one.assumed),
    }  # fmt: skip
    if one.prediction is not None and one.model is not None:
        record |= {"model": one.model.name} | plan_record(one.model, one.prediction)
    return record


def _annotation(one: RecipeVerdict) -> str:
    kind = {"ok": "notice", "unknown": "warning"}.get(one.status, "error")
    path = one.path
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    said = one.message + (f"; {one.hint}" if one.hint else "")
    said += f"; assumed: {', '.join(one.assumed)}" if one.assumed else ""
    title = f"fivefold plan: {one.status}"
    where = f"file={_property(os.fspath(path))},line={one.line},title={_property(title)}"
    return f"::{kind} {where}::{_data(said)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _show(found: Sequence[RecipeVerdict], cluster: str) -> None:
    console = Console(highlight=False)
    table = Table(title=f"recipes on {escape(cluster)}: {len(found)}", title_justify="left")
    table.add_column("recipe", overflow="fold")
    table.add_column("status", no_wrap=True)
    for name in ("memory", "tokens/s\n/GPU"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what")
    for one in found:
        memory = rate = ""
        if one.prediction is not None and one.model is not None:
            record = plan_record(one.model, one.prediction)
            memory = f"{record['memory_gib']:.1f} GiB"
            rate = f"{record['tokens_per_s_per_gpu']:,.0f}"
        what = f"{one.program}: {one.message}"
        what += f"; {one.hint}" if one.hint else ""
        what += f" (assumed: {', '.join(one.assumed)})" if one.assumed else ""
        table.add_row(escape(str(one.path)), one.status, memory, rate, escape(what))
    console.print(table)
    counts = {status: sum(one.status == status for one in found) for status in
              ("ok", *_FAILED, "unknown")}  # fmt: skip
    said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    console.print(said, markup=False)
