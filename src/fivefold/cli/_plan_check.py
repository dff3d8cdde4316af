"""``fivefold plan --check``: verdicts on the recipes of a folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from fivefold.cli._options import show, write_json
from fivefold.cli._plan_columns import PLAN_COLUMNS, plan_record
from fivefold.report.columns import Column, csv_of, record_of, row_table
from fivefold.strategy import load_cluster, load_model
from fivefold.strategy.hugging_face import is_configuration, read_model
from fivefold.strategy.recipes import RecipeVerdict, check_recipes

_FAILED = ("invalid", "memory")


def check_folder(
    folder: Path, *, cluster: str, form: str, model: str | None = None, verbose: bool = False
) -> None:
    """Check the recipes of a folder and show what was found; exit code 1 where one is no good."""
    spec, reading = None, None
    if model is not None:
        spec, reading = read_model(model) if is_configuration(model) else (load_model(model), None)
    where = load_cluster(cluster)
    found = list(check_recipes(folder, where, model=spec, model_reading=reading))
    records = [_verdict_record(one) for one in found]
    if form == "json":
        write_json(records)
    elif form == "csv":
        typer.echo(csv_of(records), nl=False)
    elif form == "github":
        for one in found:
            typer.echo(_annotation(one))
    else:
        _show_verdicts(found, records, cluster, verbose=verbose)
    if any(one.status in _FAILED for one in found):
        raise typer.Exit(1)


_COLUMNS = [
    Column("path", "recipe", str, lambda one: str(one.path), words=True),
    Column("line", "line", detail=True),
    Column("program", "program", words=True, detail=True),
    Column("status", "status", words=True),
    Column("message", "message", words=True, detail=True),
    Column("hint", "hint", words=True, detail=True),
    Column("assumed", "assumed", str, lambda one: ", ".join(one.assumed), words=True, detail=True),
]
_SHOWN = ("memory_gib", "tokens_per_s_per_gpu")  # of the plan
_WHAT = Column("what", "what", words=True)  # program, message, hint and assumptions in one cell


def _verdict_record(one: RecipeVerdict) -> dict[str, Any]:
    record = record_of(_COLUMNS, one) | {"reading": one.reading.to_json()}
    if one.prediction is not None and one.model is not None:
        record |= {"model": one.model.name} | plan_record(one.model, one.prediction)
    return record


def _annotation(one: RecipeVerdict) -> str:
    kind = {"ok": "notice", "no training": "notice", "unknown": "warning"}.get(one.status, "error")
    path = one.path
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    title = f"fivefold plan: {one.status}"
    where = f"file={_property(os.fspath(path))},line={one.line},title={_property(title)}"
    return f"::{kind} {where}::{_data(_said(one))}"


def _said(one: RecipeVerdict) -> str:
    said = one.message + (f"; {one.hint}" if one.hint else "")
    return said + (f"; assumed: {', '.join(one.assumed)}" if one.assumed else "")


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _show_verdicts(
    found: Sequence[RecipeVerdict],
    records: Sequence[dict[str, Any]],
    cluster: str,
    *,
    verbose: bool,
) -> None:
    told = {column.key: column for column in PLAN_COLUMNS}
    columns = [*_COLUMNS, *(told[key] for key in _SHOWN), _WHAT]
    rows = [
        record | {"what": f"{one.program}: {_said(one)}"}
        for one, record in zip(found, records, strict=True)
    ]
    table = row_table(columns, rows)
    counts = {status: sum(one.status == status for one in found) for status in
              ("ok", *_FAILED, "unknown", "no training")}  # fmt: skip
    said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    accounts = [one.reading.text() for one in found] if verbose else []
    show(f"recipes on {cluster}: {len(found)}", table, said, *accounts)
