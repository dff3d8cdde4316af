"""Edge lists and node tables in CSV or Parquet, with integer or text ids."""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fivefold.errors import ConfigurationError, DataError, FivefoldError, StorageError
from fivefold.gnn.data._ingest import graph_is_current, no_progress
from fivefold.gnn.data._names import number_names, read_numbering, write_numbering
from fivefold.gnn.data._tables import (
    NodeTable,
    TableColumns,
    TableReader,
    check_column,
    check_whole,
    open_table,
    rest_of,
)
from fivefold.gnn.data.arrays import ArrayEdges, check_gaps, count_ids, file_stamp, npy_rows
from fivefold.gnn.data.parts import EdgeBlock, LabelPart, Progress
from fivefold.gnn.storage.arrays import Ids

_LOG = logging.getLogger(__name__)
_SOURCES = ("source", "src", "from", "head", "u")
_TARGETS = ("target", "dst", "destination", "to", "tail", "v")


def table_source(
    edges: Sequence[str | Path],
    *,
    nodes: str | Path | None = None,
    columns: TableColumns | None = None,
    ids: Literal["auto", "number", "text"] = "auto",
    num_nodes: int | None = None,
    name: str = "edge list",
) -> TableSource:
    r"""Return a graph given as tables.

    Args:
        edges: Files, read one after another, each line an edge.
        nodes: Table with a row per node: features, label, split.
        columns: Which column is what.
        ids: "number": ids count from 0; "text": ids are any names, numbered in the order of the
            node table, or without one in an order of their own (``names.parquet`` in the data
            set's folder then lists them); "auto": by the columns' type.
        num_nodes: Number of nodes; None: rows of the node table, or the largest id + 1.
        name: For people.

    Returns:
        The source, for ``ingest``.

    Raises:
        ConfigurationError: No file is given, or ``ids`` is none of these.
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
    r"""A source over tables; made by ``table_source``."""

    def __init__(  # table_source explains them
        self,
        edges: list[Path],
        nodes: Path | None,
        columns: TableColumns,
        ids: str,
        num_nodes: int | None,
        name: str,
    ) -> None:
        self.name, self.ids = name, ids
        self.tables = [open_table(path, header=columns.names) for path in edges]
        self.ends = [_edge_columns(table, columns) for table in self.tables]
        self.node_table = None if nodes is None else NodeTable(nodes, columns)
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
        count, num_edges = count_ids(_TableEdges(self))
        if self.ids == "auto":
            hint = (
                "--ids text numbers them anew; --ids number keeps the gaps as nodes without edges"
            )
            check_gaps(count, num_edges, hint=hint)
        return count

    def prepare(self, folder: Path, *, memory_bytes: int, progress: Progress | None) -> None:
        """Number the nodes, where ids are names; done once, kept in ``names.json``."""
        if not self.text_ids:
            return
        work = folder / "names.work"
        recipe = json.loads(json.dumps(dict(self.recipe)))
        state = read_numbering(folder)
        if state is not None and state["recipe"] != recipe:
            raise DataError(f"{folder} holds names of another source", hint="choose another folder")
        needed = not graph_is_current(folder)
        if state is None or (needed and not (work / "edges.npy").is_file()):
            try:
                count = self._number(folder, memory_bytes, progress)
                state = write_numbering(folder, recipe, count)
            except OSError as error:
                if isinstance(error, FivefoldError):
                    raise
                full = error.errno in {errno.ENOSPC, errno.EDQUOT}
                hint = "free some space" if full else "see that the folder can be written"
                raise StorageError(
                    f"writing names to {work} failed: {error.strerror or error}",
                    hint=f"{hint} and run the same command again",
                ) from error
        self.num_nodes = state["num_nodes"]
        if needed:
            weights = npy_rows(work / "weights.npy") if self.weighted else None
            self.numbered = ArrayEdges(npy_rows(work / "edges.npy"), weights, pairs=True)
        else:
            shutil.rmtree(work, ignore_errors=True)

    def finish(self, folder: Path) -> None:
        """Remove what was needed in between."""
        shutil.rmtree(folder / "names.work", ignore_errors=True)

    def _number(self, folder: Path, memory_bytes: int, progress: Progress | None) -> int:
        work = folder / "names.work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        paths = [table.path for table in self.tables]
        if self.node_table is not None:
            paths.append(self.node_table.table.path)
        sizes = sum(path.stat().st_size for path in paths), memory_bytes
        return number_names(
            self._named(work),
            work,
            folder / "names.parquet",
            num_rows=None if self.node_table is None else self.node_table.num_rows,
            sizes=sizes,
            progress=progress or no_progress,
        )

    def _named(self, work: Path) -> Iterator[tuple[Any, Ids]]:
        """Yield all names with their places; weights go to a file of their own on the way."""
        first = 0
        if self.node_table is not None:
            for names in self.node_table.names():
                yield names, np.arange(first, first + len(names))
                first += len(names)
        with _WeightFile(work / "weights.npy", enabled=self.weighted) as weights:
            for table, ends in zip(self.tables, self.ends, strict=True):
                columns = [name for name in ends if name is not None]
                types = [pa.string(), pa.string(), pa.float32()][: len(columns)]
                for batch in table.batches(columns, types):
                    check_whole(batch, table.path)
                    places = first + 2 * np.arange(batch.num_rows)
                    yield batch.column(0), places
                    yield batch.column(1), places + 1
                    first += 2 * batch.num_rows
                    if self.weighted:
                        weights.add(batch.column(2).to_numpy())

    def edges(self) -> Any:
        """Return the edges, numbered."""
        return _TableEdges(self) if self.numbered is None else self.numbered

    def features(self) -> Any:
        """Return the feature columns of the node table."""
        table = self.node_table
        return None if table is None or not table.feature_names else table

    def labels(self) -> LabelPart | None:
        """Return the label and split columns of the node table."""
        return None if self.node_table is None else self.node_table.labels()


def _edge_columns(table: TableReader, columns: TableColumns) -> tuple[str, str, str | None]:
    if len(table.names) < 2:
        raise DataError(
            f"{table.path} has {len(table.names)} columns", hint="an edge table has at least two"
        )
    for name in (columns.source, columns.target, columns.weight):
        check_column(table, name)
    source, target = _ends_of(table, columns)
    kept = (source, target, columns.weight)
    lost = [name for name in table.names if name not in kept]
    if lost:
        _LOG.warning("%s: columns not stored: %s", table.path, ", ".join(lost))
    return source, target, columns.weight


def _ends_of(table: TableReader, columns: TableColumns) -> tuple[str, str]:
    source = columns.source or _usual(table.names, _SOURCES)
    target = columns.target or _usual(table.names, _TARGETS)
    if source is None or target is None or source == target:
        rest = [name for name in table.names if name not in (columns.source, columns.target)]
        source = columns.source or (rest.pop(0) if rest else None)
        target = columns.target or (rest.pop(0) if rest else None)
    if source is None or target is None or source == target:
        raise DataError(
            f"source and target of {table.path} are both column {source or target!r}",
            hint="name them: --column source=NAME --column target=NAME",
        )
    return source, target


def _usual(names: list[str], usual: Sequence[str]) -> str | None:
    """Return the only column with one of these names."""
    found = [name for name in names if name.lower() in usual]
    return found[0] if len(found) == 1 else None


class _TableEdges:
    def __init__(self, source: TableSource) -> None:
        self.tables, self.ends = source.tables, source.ends
        self.weighted = source.weighted
        self.num_edges: int | None = None
        # A line takes at least four bytes; packed files hold some ten times their size.
        sizes = (table.path.stat().st_size for table in self.tables)
        self.expected_edges = sum(size // 4 for size in sizes)

    def blocks(self, position: int, max_edges: int) -> Iterator[EdgeBlock]:
        for part, row in rest_of(self._batches(), position, max_edges):
            arrays = [column.to_numpy() for column in part.columns]
            yield EdgeBlock(arrays[0], arrays[1], row, arrays[2] if len(arrays) > 2 else None)

    def _batches(self) -> Iterator[Any]:
        for table, ends in zip(self.tables, self.ends, strict=True):
            columns = [name for name in ends if name is not None]
            types = [pa.int64(), pa.int64(), pa.float32()][: len(columns)]
            for batch in table.batches(columns, types):
                check_whole(batch, table.path)
                yield batch


class _WeightFile:
    """A .npy file that grows; its length is put into the header at the end."""

    def __init__(self, path: Path, *, enabled: bool) -> None:
        self.path, self.enabled, self.count = path, enabled, 0

    def __enter__(self) -> Self:
        if self.enabled:
            self._file = self.path.open("wb")
            self._write_header()
        return self

    def _write_header(self) -> None:
        # NumPy leaves room in the header for the length to grow to twenty digits.
        shape = {"descr": "<f4", "fortran_order": False, "shape": (self.count,)}
        self._file.seek(0)
        np.lib.format.write_array_header_1_0(self._file, shape)

    def add(self, values: NDArray[np.float32]) -> None:
        values.astype("<f4").tofile(self._file)
        self.count += values.size

    def __exit__(self, *_: object) -> None:
        if self.enabled:
            self._write_header()
            self._file.close()
