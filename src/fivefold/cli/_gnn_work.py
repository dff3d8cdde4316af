"""The work of ``fivefold gnn``."""

from __future__ import annotations

from typing import Any

import typer

from fivefold.cli._options import (
    ArgumentError,
    write_json,
)
from fivefold.gnn.data import (
    Dataset,
    HeteroDataset,
    TableColumns,
)
from fivefold.gnn.data.statistics import describe
from fivefold.reading import Reading
from fivefold.runs import ProgressBar
from fivefold.units import format_bytes


def columns_of_pairs(
    values: list[str] | None, option: str, allowed: tuple[str, ...]
) -> dict[str, str]:
    pairs = {}
    for text in values or []:
        role, equals, value = text.partition("=")
        if not equals or not value or role not in allowed:
            raise ArgumentError(
                f"--{option} got {text!r}", hint=f"write ROLE=..., ROLE one of {', '.join(allowed)}"
            )
        pairs[role] = value
    return pairs


def table_columns(values: list[str] | None, *, header: str | None, **text: Any) -> TableColumns:
    roles = ("source", "target", "weight", "edge", "node", "label", "split", "features")
    pairs: dict[str, Any] = dict(columns_of_pairs(values, "column", roles))
    for role in {"edge", "features"} & {*pairs}:
        pairs[role] = pairs[role].split(",")
    if header not in {None, "yes", "no"}:
        raise ArgumentError(f"--header got {header!r}", hint="say yes or no")
    names = None if header is None else header == "yes"
    return TableColumns(names=names, **text, **pairs)


def write_facts(
    dataset: Dataset | HeteroDataset,
    *,
    as_json: bool,
    reading: Reading | None = None,
    verbose: bool = False,
    gaps_hint: str | None = None,
) -> None:
    with ProgressBar() as show:
        facts = describe(dataset, show)
    if reading is not None:
        facts["reading"] = reading.to_json()
    if as_json:
        write_json(facts)
        return
    if gaps_hint and facts["isolated_nodes"]:
        typer.echo(
            f"{facts['isolated_nodes']:,} of {facts['nodes']:,} ids stand in no edge and are nodes "
            f"without edges: {gaps_hint}",
            err=True,
        )
    if reading is not None:
        del facts["reading"]
        if verbose:
            typer.echo(reading.text())  # in one line it was logged
    for line in _lines(facts, ""):
        typer.echo(line)


def _lines(facts: dict[str, Any], indent: str) -> list[str]:
    """Write one fact a line, the nested ones below their name."""
    lines = []
    for key, value in facts.items():
        label = f"{indent}{key.replace('_', ' ')}:"
        if isinstance(value, dict):
            lines += [label, *_lines(value, indent + "  ")]
        elif key == "bytes":
            lines.append(f"{label} {format_bytes(value)}")
        elif isinstance(value, float):
            lines.append(f"{label} {value:.4g}")
        elif isinstance(value, int) and not isinstance(value, bool):
            lines.append(f"{label} {value:,}")
        else:
            lines.append(f"{label} {value}")
    return lines
