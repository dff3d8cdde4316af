"""Tables in CSV (also packed) and Parquet, read in blocks through Arrow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike
from pyarrow import parquet

from fivefold.errors import ConfigurationError, DataError, require_flag
from fivefold.gnn.data._csv import NONE, CsvReader, Dialect
from fivefold.gnn.data.arrays import existing, file_stamp
from fivefold.gnn.storage.pages import Array

_BLOCK_ROWS = 1 << 16


def open_table(
    path: str | Path,
    columns: TableColumns | None = None,
    known: Callable[[list[str]], bool] = lambda _: False,
    enough: Callable[[list[str], list[bool]], bool] = lambda _, above: all(above),
) -> TableReader:
    """Open a table by its name: ``.parquet``, or else CSV, also ``.gz``, ``.bz2``, ``.zst``.

    ``known`` and ``enough`` say what a line of names is, as for ``CsvReader``.
    """
    path = existing(path)
    if path.suffix in {".parquet", ".pq"}:
        return ParquetReader(path)
    return CsvReader(path, Dialect() if columns is None else columns.dialect, known, enough)


class CsvRows:
    """A CSV file without a header as an array of rows; without ``num_rows`` these are not known."""

    def __init__(self, path: Path, dtype: DTypeLike, num_rows: int | None = None) -> None:
        self.table = CsvReader(existing(path), Dialect(header=False))
        self.shape: tuple[int, ...] = (num_rows or 0, self.table.num_columns or 2)
        self.dtype = np.dtype(dtype)
        self.stamp = file_stamp(path)
        self._num_rows = num_rows

    def blocks(self, first_row: int, max_rows: int) -> Iterator[Array]:
        """Yield rows; those before ``first_row`` are read past."""
        names, row = self.table.names, first_row
        batches = self.table.batches(names, [pa.from_numpy_dtype(self.dtype)] * len(names))
        for part, row in rest_of(batches, first_row, max_rows):  # noqa: B007 - used below
            columns = [column.to_numpy(zero_copy_only=False) for column in part.columns]
            yield np.stack(columns, axis=1).astype(self.dtype, copy=False)
        if self._num_rows is not None and row != self._num_rows:
            raise DataError(
                f"{self.table.path} has {row} rows, the benchmark's lists say {self._num_rows}",
                hint="unpack the benchmark's archive again",
            )


def rest_of(batches: Iterator[Any], first_row: int, max_rows: int) -> Iterator[tuple[Any, int]]:
    """Yield batches from a row on in parts of ``max_rows``, each with the row after it."""
    begin = 0
    for batch in batches:
        for first in range(max(0, first_row - begin), batch.num_rows, max_rows):
            part = batch.slice(first, max_rows)
            yield part, begin + first + part.num_rows
        begin += batch.num_rows


class ParquetReader:
    """A Parquet file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = parquet.ParquetFile(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"cannot read {path}: {error}", hint="check the file") from error
        schema = self._file.schema_arrow
        self.names: list[str] = list(schema.names)
        if twice := [name for name in self.names if self.names.count(name) > 1]:
            hint = "give every column its own name"
            raise DataError(f"{path} has two columns {twice[0]!r}", hint=hint)
        self.types: list[Any] = list(schema.types)
        self.most_rows: int = self._file.metadata.num_rows

    def batches(self, columns: Sequence[str], types: Sequence[Any] | None = None) -> Iterator[Any]:
        """Yield record batches."""
        schema = None
        if types is not None:
            schema = pa.schema(list(zip(columns, types, strict=True)))
        try:
            for batch in self._file.iter_batches(batch_size=_BLOCK_ROWS, columns=list(columns)):
                chosen = batch.select(list(columns))
                yield chosen if schema is None else chosen.cast(schema)
        except (pa.ArrowInvalid, pa.ArrowKeyError, pa.ArrowNotImplementedError, OSError) as error:
            hint = "check the file"
            if "out of bounds" in str(error) or "not in range" in str(error):
                hint = "ids beyond int64 are names: --ids text; or number the nodes from 0"
            message = f"{self.path} cannot be read: {str(error)[:300]}"
            raise DataError(message, hint=hint) from error


TableReader: TypeAlias = CsvReader | ParquetReader


@dataclass(frozen=True, kw_only=True)
class TableColumns:
    """Names of the columns of tables; without a header they are 0, 1, 2, ...

    Attributes:
        source: Of the edge tables; None: the first column.
        target: Of the edge tables; None: the second column.
        weight: Of the edge tables; None: edges have no weights.
        edge: Further columns of numbers of the edge tables, which edges carry by these names.
        node: Id column of the node table; None: by its name (``id``, ``node_id``, ...), and rows
            are numbered where there is none.
        label: Of the node table; None: ``label``, ``y`` or ``class``, ... if there is one.
        split: Of the node table, with train, valid or test; None: ``split`` if there is one.
        features: Of the node table; None: all other numeric columns.
        names: Whether CSV files begin with a line of names; None: found, where that is safe.
        quote: What stands around fields of CSV files, or "none"; None: a quotation mark, where
            no id holds a delimiter and no line is joined with the next.
        comment: What comments of CSV files begin with, or "none"; None: # or %, at the head.
        missing: Words of CSV files that stand for an empty field.
    """

    source: str | None = None
    target: str | None = None
    weight: str | None = None
    node: str | None = None
    label: str | None = None
    split: str | None = None
    features: Sequence[str] | None = None
    names: bool | None = None
    quote: str | None = None
    comment: str | None = None
    missing: Sequence[str] = ()
    edge: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.names is not None:
            require_flag("names", self.names)
        for name in ("quote", "comment"):
            value = getattr(self, name)
            if value is not None and value != NONE and (len(value) != 1 or not value.isascii()):
                raise ConfigurationError(
                    f"{name} is {value!r}", hint=f'give one character, or "{NONE}"'
                )

    @property
    def dialect(self) -> Dialect:
        """Return what it says of tables as text."""
        return Dialect(
            header=self.names, quote=self.quote, comment=self.comment, missing=tuple(self.missing)
        )


def check_column(table: TableReader, name: str | None) -> None:
    """Raise unless the table has the column; None is none."""
    if name is not None and name not in table.names:
        raise DataError(
            f"{table.path} has no column {name!r}", hint=f"it has {', '.join(table.names)}"
        )


def check_whole(batch: Any, path: Path) -> None:
    """Raise where a field is empty."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if column.null_count:
            raise DataError(
                f"column {name!r} of {path} has an empty field", hint="fill it or leave it out"
            )
