"""The work of ``fivefold gnn``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from fivefold.cli._options import ArgumentError, typed_arguments, write_json
from fivefold.errors import DataError
from fivefold.gnn.data import Dataset, HeteroDataset, TableColumns
from fivefold.gnn.data.statistics import describe
from fivefold.gnn.planning.estimate import KNOWN_GRAPHS, GraphSize
from fivefold.gnn.sampling import SampleFile
from fivefold.gnn.storage import probe_disk
from fivefold.reading import Reading
from fivefold.runs import ProgressBar
from fivefold.units import format_bytes, parse_bytes_per_s


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


def speed_of_disk(given: str | None) -> tuple[float, float]:
    """Return bytes per second that are read and written."""
    if given is not None:
        with typed_arguments():
            return (parse_bytes_per_s(given),) * 2
    probed = probe_disk(Path.cwd())
    return probed.sequential_read_bytes_per_s, probed.sequential_write_bytes_per_s


def graph_size(text: str) -> GraphSize:
    """Return the counts of a known graph, of a data set, or as they are written."""
    known = {name.lower(): size for name, size in KNOWN_GRAPHS.items()}
    if text.lower() in known:
        return known[text.lower()]
    if "=" in text:
        return _written_size(text)
    with Dataset.open(text) as data:
        return GraphSize(
            name=data.name,
            nodes=data.num_nodes,
            edges=data.num_edges,
            row_bytes=data.row_bytes,
            seeds=max(1, len(data.train)),
        )


def _written_size(text: str) -> GraphSize:
    names = ("nodes", "edges", "row_bytes", "seeds")
    hint = "write nodes=1e8,edges=1.6e9,row_bytes=512,seeds=1e6"
    counts: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            counts[name] = int(float(value))
        except (ValueError, OverflowError):
            raise ArgumentError(f"{part!r} is no count", hint=hint) from None
    if odd := sorted(set(counts) ^ set(names)):
        raise ArgumentError(f"counts are missing or unknown: {', '.join(odd)}", hint=hint)
    with typed_arguments():
        return GraphSize(**counts, name="graph")


def check_graph(data: Dataset, sampled: SampleFile) -> None:
    """Refuse samples of another graph, whose rows would be right and whose edges would not."""
    if sampled.topology_fingerprint != data.graph.fingerprint:
        raise DataError(
            f"{sampled.path} was sampled from another graph than that of {data.folder}",
            hint="sample this data set, or name the one that was sampled",
        )
