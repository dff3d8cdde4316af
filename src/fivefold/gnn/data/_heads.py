"""What stands before or around the rows of an edge table: heads, counts, ends that are no ids."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa

from fivefold.errors import DataError
from fivefold.gnn.data._csv import CsvReader

_KONECT = re.compile(r"%\s*(sym|asym|bip)\s+(unweighted|pos\w*|signed|weighted|multi\w*|dyn\w*)\b")
_SNAP = re.compile(r"#\s*(undirected|directed) graph\b", re.IGNORECASE)
_WHOLE = re.compile(r"\s*\d+\s*")
_TWO_NODES = re.compile(r"(?i)(.+?)[_ ]?(?:id|no|number|idx)")
_TEXT_FORMATS = {
    ".mtx": "scipy.io.mmread reads it: its row and col are edge_index of array_source",
    ".graphml": "networkx.read_graphml reads it",
    ".gexf": "networkx.read_gexf reads it, or let Gephi export tables",
    ".gml": "networkx.read_gml reads it",
    ".net": "networkx.read_pajek reads it",
    ".graph": "if it is of METIS, its lines are lists of neighbours from 1, no edges",
    ".adjlist": "its lines are lists of neighbours: networkx.read_adjlist reads it",
    ".json": "networkx.node_link_graph reads it",
    ".jsonl": "pandas.read_json(lines=True) reads it",
    ".dot": "networkx.nx_pydot.read_dot reads it",
    ".xlsx": "save each sheet as CSV",
    ".xls": "save each sheet as CSV",
    ".mat": "scipy.io.loadmat reads it: give the arrays to array_source",
    ".pkl": "a pickle can run any code: load it yourself, and give the arrays to array_source",
    ".pickle": "a pickle can run any code: load it yourself, and give the arrays to array_source",
    ".feather": "pyarrow.feather.read_table reads it: write it as Parquet",
    ".arrow": "pyarrow.ipc reads it: write it as Parquet",
    ".nt": "its lines are sentences of RDF: write a table of subject and object",
    ".ttl": "it is of RDF: write a table of subject and object",
}
_EDGES_AFTER = "; write its edges as a table with two columns, source and target"


def other_format(path: Path) -> str:
    """Return what to do with a file that is neither arrays nor a table by its name."""
    suffix = next((end for end in reversed(path.suffixes) if end in _TEXT_FORMATS), "")
    advice = _TEXT_FORMATS.get(suffix)
    if advice is None:
        return "--kind table reads lines of two or more columns, whatever the name"
    return advice + ("" if "array_source" in advice or " as " in advice else _EDGES_AFTER)


def direction_of_head(table: Any) -> bool | None:
    """Return whether the lines before a table say that each edge stands once for both directions.

    Returns:
        True or False where KONECT's head says so, else None.

    Raises:
        DataError: The ends are of two kinds of nodes, numbered each on its own.
    """
    found = [_KONECT.match(line) for line in getattr(table, "head", ())]
    kind = next((match[1] for match in found if match), None)
    if kind == "bip":
        raise DataError(
            f"{table.path} says bip: its two columns number nodes of two kinds, each from 1",
            hint="make two types of nodes: HeteroData, with a number of their own each",
        )
    return None if kind is None else kind == "sym"


def word_of_head(table: Any) -> str | None:
    """Return Directed or Undirected, where SNAP's head says so; it does not say which edges stand.

    Some of SNAP's undirected graphs have each edge once, others have it in both directions.
    """
    found = (_SNAP.match(line) for line in getattr(table, "head", ()))
    return next((match[1].lower() for match in found if match), None)


def check_counts(table: Any, ends: tuple[str, str]) -> None:
    """Ask whether a first line such as ``34 34 78`` counts nodes and edges."""
    if not isinstance(table, CsvReader) or table.has_header or table.dialect.header is not None:
        return
    first = table.first_row
    if len(first) not in {2, 3} or not all(map(_WHOLE.fullmatch, first)):
        return
    num_nodes, num_edges = max(map(int, first[:-1])), int(first[-1])
    fields = [field for end in ends for field in table.values(end)[1:]]
    if not all(_WHOLE.fullmatch(field) and int(field) <= num_nodes for field in fields):
        return
    rows = sum(batch.num_rows for batch in table.batches([ends[0]], [pa.string()]))
    if rows == num_edges + 1 > 1:
        raise DataError(
            f"the first line of {table.path}, {' '.join(first)}, may be the numbers of nodes and "
            f"edges: {num_edges} lines follow",
            hint="take the line out: tail -n +2 <FILE >NEW; or --header no where it is an edge",
        )


def check_ends(table: Any, ends: tuple[str, str], *, usual: bool) -> None:
    """Refuse ends that nobody chose and that are no ids, or are ids of two kinds of nodes.

    Names as usual as source and target say that the columns are ends, whatever they hold.
    """
    types = dict(zip(table.names, table.types, strict=True))
    hint = "name the ends: --column source=NAME --column target=NAME"
    for end in ends:
        kind = types[end]
        no_id = pa.types.is_boolean(kind) or pa.types.is_nested(kind)
        no_id |= pa.types.is_temporal(kind) and not usual
        if pa.types.is_floating(kind) and isinstance(table, CsvReader) and not usual:
            no_id = any("." in field and float(field) % 1 for field in _numbers(table.values(end)))
        if no_id:
            raise DataError(
                f"column {end!r} of {table.path} is of type {kind}: no ids of nodes", hint=hint
            )
    if usual:
        return
    stems = [found[1].lower() if (found := _TWO_NODES.fullmatch(end)) else "" for end in ends]
    if all(stems) and stems[0] not in stems[1] and stems[1] not in stems[0]:
        raise DataError(
            f"columns {ends[0]!r} and {ends[1]!r} of {table.path} may number nodes of two kinds, "
            "and equal numbers would become one node",
            hint="--column source=NAME --column target=NAME where both number the same nodes; else "
            "make two types of nodes: HeteroData",
        )


def _numbers(fields: list[str]) -> list[str]:
    return [field for field in fields if re.fullmatch(r"\s*-?\d*\.?\d+\s*", field)]
