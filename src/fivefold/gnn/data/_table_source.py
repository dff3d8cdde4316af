"""Edge lists and node tables in CSV or Parquet, with integer or text ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.data._parts import EdgeBlock, LabelPart
from fivefold.gnn.data._rows import file_stamp
from fivefold.gnn.data._tables import TableReader, open_table

__all__ = ["TableColumns", "TableSource", "table_source"]

_SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "val": "valid",
    "validation": "valid",
    "test": "test",
}
_SPLITS = ("train", "valid", "test")
_MOST_CLASSES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class TableColumns:
    """Which column is what, by name; of a table without header the names are 0, 1, 2, ...

    Attributes:
        source: Of the edge tables; None: the first column.
        target: Of the edge tables; None: the second column.
        weight: Of the edge tables; None: edges have no weights.
        node: Id column of the node table; None: ``id`` or ``node`` if there is one, else rows
            are numbered.
        label: Of the node table; None: ``label`` or ``y`` if there is one.
        split: Of the node table, with train, valid or test; None: ``split`` if there is one.
        features: Of the node table; None: all other numeric columns.
        names: Whether CSV files begin with a line of names; None: if it holds no number.

    Example:
        >>> TableColumns(weight="amount").weight
        'amount'
    """

    source: str | None = None
    target: str | None = None
    weight: str | None = None
    node: str | None = None
    label: str | None = None
    split: str | None = None
    features: Sequence[str] | None = None
    names: bool | None = None


def table_source(
    edges: Sequence[str | Path],
    *,
    nodes: str | Path | None = None,
    columns: TableColumns | None = None,
    ids: Literal["auto", "number", "text"] = "auto",
    num_nodes: int | None = None,
    name: str = "edge list",
) -> TableSource:
    r"""A graph given as tables.

    Args:
        edges: Files, read one after another, each line an edge.
        nodes: Table with a row per node: features, label, split.
        columns: Which column is what.
        ids: "number": ids count from 0; "text": ids are any names, numbered in the order of the
            node table, or without one in an order of their own (``nodes.parquet`` in the data
            set's folder then lists them); "auto": by the columns' type.
        num_nodes: Number of nodes; None: rows of the node table, or the largest id + 1.
        name: For people.

    Returns:
        The source, for ``ingest``.

    Raises:
        ConfigurationError: No file is given, or ``ids`` is none of these.
        DataError: A file is missing or has not the columns.

    Example:
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
    if ids not in {"auto", "number", "text"}:
        raise ConfigurationError(f"ids is {ids!r}", hint="use auto, number or text")
    return TableSource(
        [Path(path) for path in edges],
        None if nodes is None else Path(nodes),
        columns or TableColumns(),
        ids,
        num_nodes,
        name,
    )


class TableSource:
    """A source over tables; made by ``table_source``.

    Attributes:
        name: For people.
        num_nodes: Nodes in all; with text ids known once ``prepare`` has numbered them.
        recipe: Files and columns.
    """

    def __init__(  # table_source explains them
        self,
        edges: list[Path],
        nodes: Path | None,
        columns: TableColumns,
        ids: str,
        num_nodes: int | None,
        name: str,
    ) -> None:
        self.name = name
        self.tables = [open_table(path, header=columns.names) for path in edges]
        self.ends = [_edge_columns(table, columns) for table in self.tables]
        self.node_table = None if nodes is None else _NodeTable(nodes, columns)
        self.text_ids = ids == "text" or (ids == "auto" and self._needs_names())
        self.weighted = columns.weight is not None
        self.recipe: Mapping[str, Any] = {
            "source": "tables",
            "edges": [file_stamp(path) for path in edges],
            "nodes": None if nodes is None else file_stamp(nodes),
            "columns": [list(ends) for ends in self.ends],
            "node_columns": None if self.node_table is None else self.node_table.describe(),
            "text_ids": self.text_ids,
            "num_nodes": num_nodes,
        }
        self.numbered: Any = None  # the edges with numbers for names, once there are any
        self.num_nodes = self._count_nodes(num_nodes)

    def _needs_names(self) -> bool:
        for table, (source, target, _weight) in zip(self.tables, self.ends, strict=True):
            types = dict(zip(table.names, table.types, strict=True))
            if not all(pa.types.is_integer(types[end]) for end in (source, target)):
                return True
        return self.node_table is not None and not self.node_table.ids_are_rows()

    def _count_nodes(self, given: int | None) -> int:
        if self.node_table is not None:
            rows: int = self.node_table.num_rows
            if given not in {None, rows}:
                raise DataError(
                    f"the node table has {rows} rows, num_nodes is {given}",
                    hint="leave num_nodes out",
                )
            return rows
        if given is not None or self.text_ids:
            return given or 0
        largest = -1
        for block in _TableEdges(self).blocks(0, 1 << 22):
            if block.sources.size:
                largest = max(largest, int(block.sources.max()), int(block.targets.max()))
        return largest + 1

    def edges(self) -> Any:
        """The edges, numbered."""
        return _TableEdges(self) if self.numbered is None else self.numbered

    def features(self) -> Any:
        """The feature columns of the node table."""
        table = self.node_table
        return None if table is None or not table.feature_names else table

    def labels(self) -> LabelPart | None:
        """Label and split columns of the node table."""
        return None if self.node_table is None else self.node_table.labels()


def _edge_columns(table: TableReader, columns: TableColumns) -> tuple[str, str, str | None]:
    if len(table.names) < 2:
        raise DataError(
            f"{table.path} has {len(table.names)} columns", hint="an edge table has at least two"
        )
    source = columns.source or table.names[0]
    target = columns.target or table.names[1]
    for name in (source, target, columns.weight):
        _check_column(table, name)
    return source, target, columns.weight


def _check_column(table: TableReader, name: str | None) -> None:
    if name is not None and name not in table.names:
        raise DataError(
            f"{table.path} has no column {name!r}", hint=f"it has {', '.join(table.names)}"
        )


class _TableEdges:
    sorted_by_target = False

    def __init__(self, source: TableSource) -> None:
        self.tables, self.ends = source.tables, source.ends
        self.weighted = source.weighted
        self.num_edges: int | None = None
        # A line takes at least four bytes; packed files hold some ten times their size.
        sizes = (table.path.stat().st_size for table in self.tables)
        self.expected_edges = sum(size // 4 for size in sizes)

    def blocks(self, position: int, max_edges: int) -> Iterator[EdgeBlock]:
        """A table cannot be entered in the middle: what is known is read past."""
        row = 0
        for table, ends in zip(self.tables, self.ends, strict=True):
            columns = [name for name in ends if name is not None]
            types = [pa.int64(), pa.int64(), pa.float32()][: len(columns)]
            for batch in table.batches(columns, types):
                for first in range(0, batch.num_rows, max_edges):
                    part = batch.slice(first, max_edges)
                    row += part.num_rows
                    if row > position:
                        new = part.slice(max(0, part.num_rows - (row - position)))
                        yield _as_edges(new, row, table.path)


def _as_edges(batch: Any, position: int, path: Path) -> EdgeBlock:
    if any(column.null_count for column in batch.columns):
        raise DataError(f"{path} has an edge with an empty field", hint="fill it or leave it out")
    arrays = [column.to_numpy() for column in batch.columns]
    weights = arrays[2] if len(arrays) > 2 else None
    return EdgeBlock(arrays[0], arrays[1], position, weights)


class _NodeTable:
    """Features, labels and splits by row."""

    def __init__(self, path: Path, columns: TableColumns) -> None:
        self.table = table = open_table(path, header=columns.names)
        self.types = dict(zip(table.names, table.types, strict=True))
        self.id = columns.node or _first_of(table.names, ("id", "node"))
        self.label = columns.label or _first_of(table.names, ("label", "y"))
        self.split = columns.split or _first_of(table.names, ("split",))
        for name in (self.id, self.label, self.split, *(columns.features or ())):
            _check_column(table, name)
        taken = {self.id, self.label, self.split}
        self.feature_names = (
            [name for name in table.names if name not in taken and _width(self.types[name])]
            if columns.features is None
            else list(columns.features)
        )
        widths = [_width(self.types[name]) for name in self.feature_names]
        for name, width in zip(self.feature_names, widths, strict=True):
            if not width:
                raise DataError(
                    f"feature column {name!r} is of type {self.types[name]}",
                    hint="use numbers or lists of one length",
                )
        self.dim = sum(widths)
        self.dtype = self._feature_dtype()
        first = [table.names[0]] if table.names else []
        self.num_rows = sum(batch.num_rows for batch in table.batches(first))

    def _feature_dtype(self) -> np.dtype[Any]:
        kinds = [_element(self.types[name]).to_pandas_dtype() for name in self.feature_names]
        if not kinds:
            return np.dtype(np.float32)
        kind = np.result_type(*kinds)
        # Text has no single precision: numbers of a CSV file are stored as float32.
        return np.dtype(np.float32) if self.table.path.suffix not in {".parquet", ".pq"} else kind

    def describe(self) -> list[Any]:
        """What decides the result, beside the file."""
        return [self.id, self.label, self.split, self.feature_names]

    def ids_are_rows(self) -> bool:
        """Whether the ids are 0, 1, 2, ... as without an id column."""
        if self.id is None:
            return True
        if not pa.types.is_integer(self.types[self.id]):
            return False
        row = 0
        for batch in self.table.batches([self.id]):
            ids = batch.column(0).to_numpy(zero_copy_only=False)
            if not np.array_equal(ids, np.arange(row, row + ids.size)):
                return False
            row += ids.size
        return True

    def blocks(self, first_row: int, max_rows: int) -> Iterator[NDArray[Any]]:
        """Feature rows."""
        row = 0
        for batch in self.table.batches(self.feature_names):
            for first in range(0, batch.num_rows, max_rows):
                part = batch.slice(first, max_rows)
                row += part.num_rows
                if row > first_row:
                    yield self._block(part.slice(max(0, part.num_rows - (row - first_row))))

    def _block(self, batch: Any) -> NDArray[Any]:
        block, place = np.empty((batch.num_rows, self.dim), self.dtype), 0
        for name, column in zip(self.feature_names, batch.columns, strict=True):
            width = _width(self.types[name])
            values = column.flatten() if pa.types.is_nested(column.type) else column
            if values.null_count or len(values) != width * batch.num_rows:
                raise DataError(
                    f"column {name!r} of {self.table.path} has empty fields",
                    hint="every node needs a whole feature row",
                )
            array = values.to_numpy(zero_copy_only=False)
            block[:, place : place + width] = array.reshape(batch.num_rows, width)
            place += width
        return block

    def labels(self) -> LabelPart | None:
        if self.label is None:
            return None
        names = self._label_names(self.label)
        return LabelPart(
            lambda _first: self._label_blocks(names), self._splits(), class_names=names
        )

    def _label_names(self, label: str) -> list[str] | None:
        """Classes of a text column in alphabetical order; None for numbers."""
        if not pa.types.is_string(self.types[label]):
            return None
        found: set[str] = set()
        for batch in self.table.batches([label], [pa.string()]):
            found.update(value for value in batch.column(0).unique().to_pylist() if value)
            if len(found) > _MOST_CLASSES:
                raise DataError(
                    f"column {label!r} has more than {_MOST_CLASSES} classes",
                    hint="name the label column",
                )
        return sorted(found)

    def _label_blocks(self, names: list[str] | None) -> Iterator[NDArray[np.int64]]:
        kind = [pa.float64() if names is None else pa.string()]
        for batch in self.table.batches([str(self.label)], kind):
            column = batch.column(0)
            if names is not None:
                column = pa.compute.index_in(column, value_set=pa.array(names, pa.string()))
            yield column.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)

    def _splits(self) -> dict[str, NDArray[np.int64]]:
        found: dict[str, list[NDArray[np.int64]]] = {name: [] for name in _SPLITS}
        row = 0
        for batch in self.table.batches([self.split], [pa.string()]) if self.split else ():
            values = np.array(
                [_SPLIT_NAMES.get((v or "").lower(), "") for v in batch.column(0).to_pylist()]
            )
            for name in _SPLITS:
                found[name].append(np.flatnonzero(values == name) + row)
            row += batch.num_rows
        nothing = [np.empty(0, np.int64)]
        return {name: np.concatenate(parts or nothing) for name, parts in found.items()}


def _first_of(names: list[str], wanted: Sequence[str]) -> str | None:
    return next((name for name in names if name.lower() in wanted), None)


def _element(kind: Any) -> Any:
    return kind.value_type if pa.types.is_nested(kind) else kind


def _width(kind: Any) -> int:
    """Elements of a feature column; 0 where it is none."""
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) if _width(kind.value_type) else 0
    numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return 1 if numeric else 0
