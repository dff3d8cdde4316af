"""Edge lists and node tables in CSV or Parquet, with integer or text ids."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pyarrow import compute, parquet

from fivefold.errors import (
    ConfigurationError,
    DataError,
    InfeasibleError,
    StorageError,
    require_one_of,
    require_whole,
)
from fivefold.gnn.data._csv import CsvReader, ZeroFinder
from fivefold.gnn.data._dataset import GRAPH_FILE, NAMES_FILE
from fivefold.gnn.data._heads import check_counts, check_ends, direction_of_head, word_of_head
from fivefold.gnn.data._ingest import check_names_file, no_progress
from fivefold.gnn.data._node_table import NodeTable
from fivefold.gnn.data._tables import (
    TableColumns,
    TableReader,
    check_column,
    check_whole,
    open_table,
    rest_of,
)
from fivefold.gnn.data.arrays import ArrayEdges, ArrayRows, count_ids, file_stamp
from fivefold.gnn.data.parts import EdgeBlock, LabelPart, Progress
from fivefold.gnn.storage import Container
from fivefold.gnn.storage.pages import Array, Ids
from fivefold.reading import Reading

_LOG = logging.getLogger(__name__)
# Names of the two ends, in pairs: a line that has both of a pair is one of names.
_ENDS = (
    ("source", "target"), ("src", "dst"), ("src", "dest"), ("source", "destination"),
    ("from", "to"), ("head", "tail"), ("u", "v"), ("source_id", "target_id"),
    ("src_id", "dst_id"), ("fromnodeid", "tonodeid"), ("from_id", "to_id"), ("id1", "id2"),
    ("id_1", "id_2"), ("node1", "node2"), ("node_1", "node_2"), ("start", "end"),
    ("start_id", "end_id"), (":start_id", ":end_id"), ("sender", "receiver"),
)  # fmt: skip


_FEW_NODES = 1000  # so many without edges cost nothing
_MOST_SEEN = 1 << 26  # ids of which a byte each says whether they stand in an edge


def table_source(
    edges: Sequence[str | Path],
    *,
    nodes: str | Path | None = None,
    columns: TableColumns | None = None,
    ids: Literal["auto", "number", "text"] = "auto",
    num_nodes: int | None = None,
    name: str = "edge list",
    folder: Path | None = None,
) -> TableSource:
    r"""Return a graph given as tables.

    Args:
        edges: Files, read one after another, each line an edge.
        nodes: Table with a row per node: features, label, split.
        columns: Which column is what.
        ids: "number": ids count from 0; "text": ids are any names, numbered in the order of the
            node table, or without one in the order in which they come (``names.parquet`` in the
            data set's folder then lists them), in memory; "auto": by the columns' type.
        num_nodes: Number of nodes; None: rows of the node table, or the largest id + 1.
        name: For people.
        folder: From which the account names the files; None: the one in which all of them lie.

    Raises:
        ConfigurationError: No file is given, one twice, or ``ids`` is none of these.
        DataError: A file is missing or has not the columns.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "edges.csv"
        ...     _ = path.write_text("from,to\n0,1\n1,2\n")
        ...     table_source([path]).num_nodes
        3
    """
    if not edges:
        message = "no edge table is given"
        raise ConfigurationError(message, hint="give one or more CSV or Parquet files")
    require_one_of(ids, ("auto", "number", "text"), f"ids is {ids!r}")
    known = [Path(path).resolve() for path in edges]
    if len(set(known)) < len(known):
        message = "an edge table is given twice, and every edge of it would be there twice"
        raise ConfigurationError(message, hint="give each file once")
    if num_nodes is not None:
        num_nodes = require_whole("num_nodes", num_nodes, least=0)
    paths, table = [Path(path) for path in edges], None if nodes is None else Path(nodes)
    if folder is None:
        folder = Path(os.path.commonpath([path.absolute().parent for path in paths]))
    return TableSource(paths, table, columns or TableColumns(), ids, num_nodes, name, folder)


class TableSource:
    r"""A source over tables, which has their edges itself; made by ``table_source``."""

    num_edges: int | None = None

    def __init__(
        self,
        edges: list[Path],
        nodes: Path | None,
        columns: TableColumns,
        ids: str,
        num_nodes: int | None,
        name: str,
        folder: Path,
    ) -> None:
        self.name, self.ids = name, ids
        self.reading, self._columns = Reading(name), columns
        self.tables = [open_edges(path, columns) for path in edges]
        self.ends = [_edge_columns(table, columns) for table in self.tables]
        self.node_table = None if nodes is None else NodeTable(nodes, columns)
        self.direction, self.wants_reverse = self._find_direction()
        heads = {direction_of_head(table) for table in self.tables}
        self._head_says = heads.pop() if len(heads) == 1 else None
        self.wants_reverse |= bool(self._head_says)
        why = self._why_names() if ids == "auto" else "as was said" if ids == "text" else None
        self.text_ids = why is not None
        if self.node_table is not None and not self.text_ids:
            self.node_table.go_by_id()
        self._looked_at = set[Path]()  # for ids such as 007
        self._numbered_edges: Any = None  # the edges with numbers for names, once there are any
        self.weighted = columns.weight is not None
        # A line takes at least four bytes; packed files hold some ten times their size.
        self.expected_edges = sum(path.stat().st_size // 4 for path in edges)
        self.most_edges = sum(table.most_rows for table in self.tables)
        self.num_nodes, gaps = self._count_nodes(num_nodes)
        self.text_ids |= gaps is not None
        self._tell(columns, folder)
        if ids == "auto":
            kind, why = "names" if self.text_ids else "numbers from 0", why or gaps
            self.reading.assume(
                "ids", kind, why or "all are whole numbers, and most stand in edges"
            )
        self.recipe: Mapping[str, Any] = {
            "source": "tables",
            "edges": [file_stamp(path) for path in edges],
            "nodes": None if nodes is None else file_stamp(nodes),
            "columns": [list(ends) for ends in self.ends],
            "node_columns": None if self.node_table is None else self.node_table.describe(),
            "text_ids": self.text_ids,
            **({"edge_columns": list(columns.edge)} if columns.edge else {}),
            **({"rows": "by id"} if nodes is not None and not self.text_ids else {}),
            **({"names": "as they come"} if self.text_ids and nodes is None else {}),
            "num_nodes": num_nodes,
        }

    def _find_direction(self) -> tuple[str | None, bool]:
        """Return the column that says Directed or Undirected, as Gephi writes it, and which."""
        found: str | None = None
        words = set[str]()
        for table, ends in zip(self.tables, self.ends, strict=True):
            lower = {name.lower(): name for name in table.names if name not in ends}
            name = lower.get("type")
            if name is None or not _is_word(table.types[table.names.index(name)]):
                return None, False
            for batch in table.batches([name], [pa.string()]):
                words |= {str(word).lower() for word in batch.column(0).unique().to_pylist()}
                if not words <= {"directed", "undirected"}:
                    return None, False
            found = name
        if len(words) > 1:
            raise DataError(
                f"column {found!r} of {self.tables[0].path} says directed of some edges and "
                "undirected of others",
                hint="divide the table, or turn the undirected edges round yourself",
            )
        return found if words else None, words == {"undirected"}

    def _tell(self, columns: TableColumns, folder: Path) -> None:
        """Say what became of every file and every column."""
        told = self.reading
        for table in self.tables:
            told.take(os.path.relpath(table.path.absolute(), folder.absolute()), "edges")
        names = set[str]()
        for table, ends in zip(self.tables, self.ends, strict=True):
            self._tell_of_edges(table, ends, names)
        table = self.tables[0]
        if isinstance(table, CsvReader) and columns.names is None:
            told.assume("header", table.has_header, "from the first lines")
        if self._head_says is not None:
            told.take("% sym" if self._head_says else "% asym", "KONECT's word for the direction")
        elif (word := word_of_head(table)) is not None:
            why = f"the head says {word}, but not whether both directions of an edge stand there"
            told.assume("edges", "as they stand", f"{why}: --undirected adds the reverse")
        if self.node_table is not None:
            told.take(os.path.relpath(self.node_table.table.path.absolute(), folder.absolute()))
            self._tell_of_nodes(self.node_table)

    def _tell_of_edges(
        self, table: TableReader, ends: tuple[str, str, str | None], names: set[str]
    ) -> None:
        """Say what became of the columns, but for the names of which an earlier table told."""
        told, given = self.reading, {self._columns.source, self._columns.target}
        usual = _usual_ends(table.names) == ends[:2]
        roles = dict(zip(ends, ("source", "target", "weight"), strict=True))
        for name, kind in zip(table.names, table.types, strict=True):
            if name in names:
                continue
            names.add(name)
            column, role = f"column {name}", roles.get(name)
            if name == self.direction:
                both = "undirected" if self.wants_reverse else "directed"
                told.take(column, f"all edges are {both}")
            elif name in self._columns.edge:
                unit = f", in {_unit(kind)} since 1970" if _is_time(kind) else ""
                told.take(column, f"edges carry it by this name{unit}")
            elif role == "weight" or (role is not None and (usual or name in given)):
                told.take(column, role)
            elif role is not None:
                told.assume(column, role, "by its place, not by its name")
            else:
                take = f"; --column weight={name} or edge={name} takes it"
                more = take if _is_real(kind) else ""
                more = f"; --column edge={name} takes it" if _is_time(kind) else more
                told.leave_out(column, "neither end of an edge" + more)

    def _tell_of_nodes(self, table: NodeTable) -> None:
        for what in ("read", "assumed", "left_out", "harmless"):
            for note in getattr(table.reading, what):
                place = f"{table.table.path.name}: {note.name}"
                getattr(self.reading, what).append(replace(note, name=place))

    def _why_names(self) -> str | None:
        """Return why ids are names; None where they are numbers."""
        for table, (source, target, _weight) in zip(self.tables, self.ends, strict=True):
            types = dict(zip(table.names, table.types, strict=True))
            for end in (source, target):
                if not pa.types.is_integer(types[end]):
                    return f"column {end!r} is of type {types[end]}"
                # 007 is another name than 7
                fields = table.values(end) if isinstance(table, CsvReader) else []
                if any(re.fullmatch(r"\s*-?0\d+\s*", field) for field in fields):
                    return f"column {end!r} has numbers that begin with 0"
        if self.node_table is not None and not self.node_table.ids_are_numbers():
            return "the ids of the node table are not 0, 1, 2, ..."
        return None

    def _count_nodes(self, given: int | None) -> tuple[int, str | None]:
        """Return the number of nodes, 0 where names will tell, and why numbers are names."""
        if self.node_table is not None:
            rows: int = self.node_table.num_rows
            if given not in {None, rows}:
                raise DataError(
                    f"the node table has {rows} rows, num_nodes is {given}",
                    hint="leave num_nodes out",
                )
            return rows, None
        if given is not None or self.text_ids:
            return given or 0, None
        if self.ids == "number":
            return count_ids(self)[0], None
        count, used = self._count_used()
        if count > _FEW_NODES and 2 * used < count:
            return 0, (
                f"at most {used:,} of {count:,} numbers stand in edges; --ids number keeps "
                "the others as nodes without edges"
            )
        self.gaps_hint = (
            "--ids text numbers them anew; --ids number keeps the gaps as nodes without edges"
        )
        return count, None

    def _count_used(self) -> tuple[int, int]:
        """Return one more than the largest id, and how many stand in edges, or a bound of it."""
        count, num_edges, seen = 0, 0, np.zeros(_FEW_NODES, bool)
        for block in self.blocks(0, 1 << 20):
            ends = (block.sources, block.targets)
            if not block.sources.size or min(int(end.min()) for end in ends) < 0:
                continue  # the writer refuses what is below 0
            count = max(count, *(int(end.max()) + 1 for end in ends))
            num_edges = block.position
            if seen.size < count <= _MOST_SEEN:
                seen = np.append(seen, np.zeros(2 * count - seen.size, bool))
            for end in ends if count <= _MOST_SEEN else ():
                seen[end] = True
        used = 2 * num_edges if count > _MOST_SEEN else int(np.count_nonzero(seen))
        return count, min(count, used)

    def prepare(self, folder: Path, *, memory_bytes: int, progress: Progress | None) -> None:
        """Number the nodes where ids are names; their list goes to ``names.parquet``."""
        if self.node_table is not None:
            self.node_table.check_memory(memory_bytes)
        if not self.text_ids:
            return
        if (folder / GRAPH_FILE).is_file():  # nothing will be asked of the edges
            with Container.open(folder / GRAPH_FILE) as graph:
                check_names_file(folder, graph)
                self.num_nodes = int(graph.attributes["num_nodes"])
            return
        numbering = _Numbering(memory_bytes, self._doubtful())
        for names in () if self.node_table is None else self.node_table.names():
            numbering.add(names)
        known = numbering.places
        done, show = 0, progress or no_progress
        for batch in self._batches(pa.string()):
            numbering.add(batch.column(0), batch.column(1))
            if self.weighted:
                numbering.weights.append(batch.column(2).to_numpy())
            done += batch.num_rows
            show("names read", done, 0)
        names, codes = numbering.result()
        if self.node_table is None:
            self.num_nodes = len(names)
            _write_names(folder / NAMES_FILE, names)
        else:
            _check_named(names, codes, known)
        weights = np.concatenate([np.empty(0, np.float32), *numbering.weights])
        rows = ArrayRows(weights) if self.weighted else None
        edges = ArrayRows(codes[known:].reshape(-1, 2))
        self._numbered_edges = ArrayEdges(edges, rows, pairs=True)

    def _doubtful(self) -> dict[str, str]:
        """Return patterns of names that a misread line would make, unless they were asked for."""
        signs = "".join(sorted({t.delimiter for t in self.tables if isinstance(t, CsvReader)}))
        found = {}
        if signs and self._columns.quote is None:
            found = {
                r"[\r\n]": "a line break inside",
                f"[{re.escape(signs)}]": "a delimiter inside",
                '^"|"$': "a quotation mark at an end",
            }
        if signs and self._columns.comment is None:
            found["^[#%]"] = _LIKE_A_COMMENT
        return found

    def edges(self) -> Any:
        """Return the edges, numbered."""
        return self if self._numbered_edges is None else self._numbered_edges

    def blocks(self, position: int, max_edges: int) -> Iterator[EdgeBlock]:
        """Yield the edges from ``position`` on, in blocks of at most ``max_edges``."""
        for part, row in rest_of(self._batches(pa.int64()), position, max_edges):
            arrays = [column.to_numpy() for column in part.columns]
            yield EdgeBlock(arrays[0], arrays[1], row, arrays[2] if self.weighted else None)

    def _batches(self, of_ids: Any) -> Iterator[Any]:
        """Yield columns of sources, of targets and of weights where there are some."""
        types = [of_ids, of_ids, pa.float32()]
        for table, ends in zip(self.tables, self.ends, strict=True):
            columns, finder = [name for name in ends if name is not None], None
            kinds, more = types[: len(columns)], {}
            doubtful = (
                self.ids == "auto" and not self.text_ids and table.path not in self._looked_at
            )
            if isinstance(table, CsvReader) and doubtful:
                more["look"] = finder = ZeroFinder(table, columns[:2])
            for batch in table.batches(columns, kinds, **more):
                check_whole(batch, table.path)
                yield batch
            self._looked_at.add(table.path)
            if finder is not None and finder.found:
                _check_zeros(table, columns[:2])

    def edge_parts(self) -> dict[str, Any]:
        """Return what edges carry by the names of columns."""
        return {name: _Column(self.tables, name) for name in self._columns.edge}

    def features(self) -> Any:
        """Return the feature columns of the node table."""
        table = self.node_table
        return None if table is None or not table.feature_names else table

    def labels(self) -> LabelPart | None:
        """Return the label and split columns of the node table."""
        return None if self.node_table is None else self.node_table.labels()


class _Column:
    """A column of numbers of the edge tables, a row for each edge in their order."""

    dim = 1

    def __init__(self, tables: list[TableReader], name: str) -> None:
        self._tables, self._name = tables, name
        kinds = [table.types[table.names.index(name)] for table in tables]
        self._times = all(map(_is_time, kinds)) and len({_unit(kind) for kind in kinds}) == 1
        if not self._times and not all(map(_is_real, kinds)):
            raise DataError(
                f"column {name!r} of {tables[0].path} is of type {kinds[0]}",
                hint="edges carry numbers: leave it out, or number its values",
            )
        wholes = (pa.types.is_integer, pa.types.is_boolean, _is_time)
        whole = all(any(is_whole(kind) for is_whole in wholes) for kind in kinds)
        self.dtype = np.dtype(np.int64 if whole else np.float64)

    def blocks(self, first_row: int, max_rows: int) -> Iterator[Array]:
        """Yield rows from ``first_row`` on."""
        for part, _ in rest_of(self._batches(), first_row, max_rows):
            column = part.column(0)
            if self._times:  # dates are days in int32
                column = column.cast(pa.int32() if pa.types.is_date32(column.type) else pa.int64())
            yield column.to_numpy(zero_copy_only=False).astype(self.dtype)[:, None]

    def _batches(self) -> Iterator[Any]:
        for table in self._tables:
            kind = table.types[table.names.index(self._name)]
            if not pa.types.is_boolean(kind) and not self._times:
                kind = pa.from_numpy_dtype(self.dtype)
            for batch in table.batches([self._name], [kind]):
                check_whole(batch, table.path)
                yield batch


def _is_real(kind: Any) -> bool:
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    return any(is_kind(kind) for is_kind in kinds)


def _is_time(kind: Any) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date32(kind))


def _unit(kind: Any) -> str:
    """Return what times count since 1970, in UTC unless they say no zone."""
    return "days" if pa.types.is_date32(kind) else str(kind.unit)


def open_edges(path: Path, columns: TableColumns) -> TableReader:
    """Open an edge table."""
    chosen = {columns.source, columns.target} - {None}

    def known(names: list[str]) -> bool:
        given = bool(chosen) and chosen <= set(names)
        return given or _usual_ends(names) is not None

    def enough(names: list[str], above: list[bool]) -> bool:
        ends = [i for i, name in enumerate(names) if name in chosen] or [0, 1]
        told = all(above[end] or not names[end] for end in ends[: len(names)])
        return len(names) > 1 and told and any(above)

    return open_table(path, columns, known, enough)


def _check_zeros(table: TableReader, columns: list[str]) -> None:
    """Refuse ids that are one number and two names, such as 7 and 007."""
    for batch in table.batches(columns, [pa.string()] * len(columns)):
        for column in batch.columns:
            found = compute.match_substring_regex(column, r"^\s*-?0\d+\s*$")
            place = compute.index(found, pa.scalar(value=True)).as_py()
            if place >= 0:
                field = column[place].as_py()
                raise DataError(
                    f"{table.path} has the id {field!r}, which as a number is {int(field)}",
                    hint="--ids text takes ids as names; --ids number where they are numbers",
                )


def _is_word(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _usual_ends(names: Sequence[str]) -> tuple[str, str] | None:
    """Return the two columns that have the names of the only pair that is there."""
    lower = [name.lower() for name in names]
    found = [pair for pair in _ENDS if set(pair) <= set(lower)]
    if len(found) != 1:
        return None
    if any(lower.count(name) > 1 for name in found[0]):  # as src beside Src
        return None
    source, target = (names[lower.index(name)] for name in found[0])
    return source, target


def _edge_columns(table: TableReader, columns: TableColumns) -> tuple[str, str, str | None]:
    if len(table.names) < 2:
        raise DataError(
            f"{table.path} has {len(table.names)} columns",
            hint="an edge table has at least two; take a first line that counts them out",
        )
    for name in (columns.source, columns.target, columns.weight, *columns.edge):
        check_column(table, name)
    usual = _usual_ends(table.names)
    source, target = columns.source, columns.target
    if source is None and target is None and usual is not None:
        source, target = usual
    if source is None or target is None:
        source, target = _by_place(table, columns, usual)
    if source is None or target is None or source == target:
        raise DataError(
            f"source and target of {table.path} are both column {source!r}",
            hint="name them: --column source=NAME --column target=NAME",
        )
    taken = [source, target, *columns.edge, *([] if columns.weight is None else [columns.weight])]
    if twice := next((name for name in taken if taken.count(name) > 1), None):
        raise DataError(
            f"column {twice!r} of {table.path} was given two roles among the ends of the edges, "
            "their weight and what else they carry",
            hint="--column source=NAME --column target=NAME --column weight=NAME: each its own",
        )
    for end in (source, target):
        _check_one_number(table, end)
    if columns.source is None and columns.target is None:
        check_counts(table, (source, target))
        check_ends(table, (source, target), usual=usual is not None)
    return source, target, columns.weight


def _by_place(
    table: TableReader, columns: TableColumns, usual: tuple[str, str] | None
) -> tuple[str | None, str | None]:
    """Return the ends, of which at least one is the first column that has no other role."""
    source, target = columns.source, columns.target
    if usual is None and source is None and target is None:
        _check_first(table)
    taken = (source, target, columns.weight, *columns.edge)
    rest = [name for name in table.names if name not in taken]
    if usual is not None:
        rest.sort(key=lambda name: name not in usual)
    source = source or next(iter(rest), None)
    target = target or next((name for name in rest if name != source), None)
    return source, target


def _check_one_number(table: TableReader, end: str) -> None:
    """Refuse ends such as "1 2", where tabs and blanks both stand between columns."""
    values = table.values(end) if isinstance(table, CsvReader) else []
    fields = [field.strip() for field in values if field.strip()]
    if fields and all(re.fullmatch(r"-?\d+(\s+-?\d+)+", field) for field in fields):
        raise DataError(
            f"every field of column {end!r} of {table.path} holds several numbers: {fields[0]!r}",
            hint="put one delimiter between columns: tr -s ' \\t' '\\t' <FILE >NEW",
        )


def _check_first(table: TableReader) -> None:
    """Refuse to take the number of a row for the end of an edge."""
    if len(table.names) < 3 or not isinstance(table, CsvReader) or not table.has_header:
        return
    first = table.names[0]
    values = [value.strip() for value in table.values(first)]
    in_turn = len(values) > 1 and all(map(str.isdigit, values))
    if in_turn:
        numbers = list(map(int, values))
        in_turn = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    if in_turn or first.lower() in {"", "unnamed: 0", "index", "id", "edge_id", "eid"}:
        raise DataError(
            f"the first column of {table.path}, {first!r}, may be the number of the row: "
            f"{', '.join(values[:4])}, ...",
            hint="name the ends: --column source=NAME --column target=NAME",
        )


_LIKE_A_COMMENT = "a comment's mark at the front"


class _Numbering:
    """Numbers for names in the order in which they first come, within a bound of memory."""

    def __init__(self, memory_bytes: int, doubtful: Mapping[str, str]) -> None:
        self._memory_bytes, self._check_bytes = memory_bytes, memory_bytes // 4
        self._doubtful = {"^$": "it is empty", **doubtful}  # patterns, and what is wrong with them
        self._parts: list[Any] = []
        self._bytes = 0
        self.places = 0
        self.weights: list[Array] = []

    def add(self, *columns: Any) -> None:
        """Take columns of text whose rows stand side by side."""
        both = columns[0] if len(columns) == 1 else _in_turns(*columns)
        part = both.cast(pa.large_string()).dictionary_encode()
        self._parts.append(part)
        self._bytes += part.nbytes
        self.places += len(part)
        if self._bytes > self._check_bytes:
            self._unify()

    def _unify(self) -> None:
        """Give all parts one list of names; refuse where that leaves too little memory."""
        whole = pa.chunked_array(self._parts).unify_dictionaries()
        self._parts = whole.chunks
        indices = sum(part.indices.nbytes for part in self._parts)
        self._bytes = self._parts[0].dictionary.nbytes + indices
        # The codes come once more at the end, twice as wide, as edges; weights are joined.
        weights = 2 * sum(part.nbytes for part in self.weights)
        if self._bytes + 2 * indices + weights > self._memory_bytes:
            raise InfeasibleError(
                f"the names of nodes, and a number for each of {self.places} or more ends of "
                f"edges, take more than memory_bytes={self._memory_bytes}",
                hint="allow more (--memory), or number the nodes beforehand: ids from 0",
            )
        self._check_bytes = max(self._check_bytes, (self._bytes + self._memory_bytes) // 2)

    def result(self) -> tuple[Any, Ids]:
        """Return the distinct names, and the number of the name at each place."""
        self.add(pa.array([], pa.string()))
        self._unify()
        codes = np.empty(self.places, np.int64)  # not joined: that would take the memory twice
        place = 0
        for part in self._parts:
            codes[place : place + len(part)] = part.indices.to_numpy()
            place += len(part)
        return self._checked(self._parts[0].dictionary, codes)

    def _checked(self, names: Any, codes: Ids) -> tuple[Any, Ids]:
        """Return names without blanks around them; refuse what a misread line would make."""
        bare = compute.utf8_trim_whitespace(names)
        if not bare.equals(names):
            found = bare.dictionary_encode()
            _LOG.info("blanks around the names of nodes are left out")
            names, codes = found.dictionary, found.indices.to_numpy()[codes]
        for pattern, what in self._doubtful.items():
            found = compute.match_substring_regex(names, pattern)
            place = compute.index(found, pa.scalar(value=True)).as_py()
            if place >= 0:
                hint = (
                    "say what quotation marks mean: --quote none where they are parts of names, "
                    "--quote '\"' where they are around them"
                )
                if what == _LIKE_A_COMMENT:
                    hint = "--comment none where it is a name, --comment '#' where it is a comment"
                raise DataError(
                    f"a node has the name {names[place].as_py()[:60]!r}: {what}", hint=hint
                )
        return names, codes


def _in_turns(sources: Any, targets: Any) -> Any:
    """Return source, target, source, target, ..."""
    order = np.arange(2 * len(sources)).reshape(2, -1).T.reshape(-1)
    return pa.concat_arrays([sources, targets]).take(pa.array(order))


def _check_named(names: Any, codes: Ids, known: int) -> None:
    """Refuse names that the node table, whose rows come first, has twice or not at all."""
    twice = np.flatnonzero(codes[:known] != np.arange(known))
    if len(twice):
        raise DataError(
            f"the node table has node {names[int(codes[twice[0]])].as_py()!r} twice",
            hint="leave one row per node",
        )
    if len(names) > known:
        raise DataError(
            f"an edge names node {names[known].as_py()!r}, which the node table has not",
            hint="add it to the node table, or leave the edge out",
        )


def _write_names(path: Path, names: Any) -> None:
    """Write the list of names, whole or not at all."""
    unfinished = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.table({"name": names}), unfinished)
        unfinished.replace(path)
    except OSError as error:
        raise StorageError(
            f"writing {path} failed: {error.strerror or error}",
            hint="see that the folder can be written and has space; run the same command again",
        ) from error
