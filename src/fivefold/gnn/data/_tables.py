"""Tables in CSV (also packed) and Parquet, read in blocks through Arrow, and tables of nodes."""

from __future__ import annotations

import csv as plain_csv
import gzip
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from fivefold.errors import DataError, UnsupportedError, require_flag
from fivefold.gnn.data.arrays import as_labels, existing, file_stamp
from fivefold.gnn.data.parts import SPLITS, LabelPart
from fivefold.gnn.storage.pages import Array, Ids

try:
    import pyarrow as pa
    from pyarrow import compute, csv, parquet
except ImportError as _error:  # pragma: no cover - the development environment has it
    _message = "pyarrow is not installed, and tables are read with it"
    raise UnsupportedError(_message, hint="pip install 'fivefold[gnn]'") from _error

_BLOCK_BYTES, _BLOCK_ROWS = 4 << 20, 1 << 16
_PEEK_BYTES = 1 << 20  # holds a line of many columns
_COMMENTS = ("#", "%")
_ROLES = {"source", "target", "src", "dst", "from", "to", "head", "tail", "u", "v", "weight"}
_ROLES |= {"id", "node", "label", "y", "split", "name"}
_DELIMITERS = ("\t", ",", ";", "|", " ")
_PACKED = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\x28\xb5\x2f\xfd": ".zst"}


def open_table(path: str | Path, *, header: bool | None = None) -> TableReader:
    """Open a table by its name: ``.parquet``, or else CSV, also ``.gz``, ``.bz2``, ``.zst``."""
    path = existing(path)
    if path.suffix in {".parquet", ".pq"}:
        return ParquetReader(path)
    return CsvReader(path, header=header)


class CsvReader:
    """A CSV file.

    The delimiter is found from the first line; lines of ``#`` or ``%`` at the head are skipped.
    """

    def __init__(self, path: Path, *, header: bool | None) -> None:
        self.path = path
        lines = self._first_lines()
        table = (n for n, line in enumerate(lines) if line.strip() and line[0] not in _COMMENTS)
        self._skip = next(table, len(lines))
        first, *rest = [*lines[self._skip :], ""]
        self._delimiter = _delimiter_of(first, path)
        fields = self._fields(first)
        second = self._fields(next(filter(None, rest), ""))
        self._header = _is_header(fields, second, path) if header is None else header
        self.num_columns = len(fields)
        generated = [str(index) for index in range(len(fields))]
        self.names = [name.strip().strip('"') for name in fields] if self._header else generated
        _check_names(self.names, path)
        self._types: list[Any] | None = None

    def _fields(self, line: str) -> list[str]:
        if self._delimiter == " " and "  " in line.strip():
            raise DataError(
                f"the columns of {self.path} stand apart by several blanks",
                hint="put one delimiter between them: tr -s ' ' <FILE >NEW",
            )
        return next(plain_csv.reader([line], delimiter=self._delimiter)) if line else []

    def _first_lines(self) -> list[str]:
        try:
            with pa.input_stream(str(self.path)) as stream:
                head: bytes = stream.read(_PEEK_BYTES)
        except (OSError, gzip.BadGzipFile) as error:
            raise DataError(f"cannot read {self.path}: {error}", hint="check the file") from error
        for mark, end in _PACKED.items():
            if head.startswith(mark):
                raise DataError(
                    f"{self.path} is packed, but its name does not say so",
                    hint=f"let the name end in {end}",
                )
        if head.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise DataError(f"{self.path} is UTF-16", hint="iconv -f UTF-16 -t UTF-8 <FILE >NEW")
        if head.lower().startswith(b"%%matrixmarket"):
            raise DataError(
                f"{self.path} is a Matrix Market file, whose ids count from 1",
                hint="read it with scipy.io.mmread and give its row and col to array_source",
            )
        # Lines as Arrow has them: text may end one at a form feed, too.
        return [line.decode("utf-8-sig", "replace") for line in head.splitlines()]

    @property
    def types(self) -> list[Any]:
        """Return the types as Arrow guesses them from the first block."""
        if self._types is None:
            self._types = [pa.int64()] * self.num_columns
            for batch in self.batches(self.names):
                self._types = list(batch.schema.types)
                break
        return self._types

    def batches(self, columns: Sequence[str], types: Sequence[Any] | None = None) -> Iterator[Any]:
        """Yield record batches."""
        if self.num_columns == 0:
            return
        kinds = None if types is None else dict(zip(columns, types, strict=True))
        try:
            reader = csv.open_csv(
                str(self.path),
                read_options=csv.ReadOptions(
                    block_size=_BLOCK_BYTES,
                    use_threads=False,
                    skip_rows=self._skip + int(self._header),
                    column_names=self.names,
                ),
                parse_options=csv.ParseOptions(delimiter=self._delimiter),
                convert_options=csv.ConvertOptions(
                    include_columns=list(columns),
                    column_types=kinds,
                    null_values=[""],  # a node may well be named NA
                    strings_can_be_null=True,
                ),
            )
            yield from reader
        except (pa.ArrowInvalid, pa.ArrowKeyError, OSError) as error:
            if "Empty CSV" in str(error):
                return
            reason = str(error).replace("\n", " ")[:300]
            raise DataError(
                f"{self.path} cannot be read as a table: {reason}", hint="mend the line it names"
            ) from error


class CsvRows:
    """A CSV file without a header as an array of rows; without ``num_rows`` these are not known."""

    def __init__(self, path: Path, dtype: DTypeLike, num_rows: int | None = None) -> None:
        self.table = CsvReader(existing(path), header=False)
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


def _delimiter_of(line: str, path: Path) -> str:
    """Return what stands between the fields of a line; what is in quotes does not count."""
    bare = re.sub(r'"[^"]*"', "", line)
    found = [delimiter for delimiter in _DELIMITERS if delimiter in bare]
    if len(found) > 1 and found[0] != "\t" and found[1] != " ":
        raise DataError(
            f"the columns of {path} may be divided by {found[0]!r} or {found[1]!r}: {line[:80]}",
            hint="put quotes around fields that hold one of them, or divide columns by tabs",
        )
    return found[0] if found else ","


def _check_names(names: list[str], path: Path) -> None:
    """Raise where two columns have one name: one of them would be taken for both."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path} has two columns {twice!r}", hint="give every column its own name")


def _is_header(first: list[str], second: list[str], path: Path) -> bool:
    """Return whether a first line names the columns; no guess that could lose an edge."""
    if not first or any(map(_is_number, first)):
        return False
    if any(map(_is_number, second)) or {_bare(field) for field in first} & _ROLES:
        return True
    raise DataError(
        f"cannot tell whether the first line of {path} names the columns: {','.join(first)[:80]}",
        hint="say so: --header or --no-header (names=True or False in TableColumns)",
    )


def _bare(field: str) -> str:
    return field.strip().strip('"').lower()


def _is_number(field: str) -> bool:
    try:
        float(_bare(field))
    except ValueError:
        return False
    return True


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
        _check_names(self.names, path)
        self.types: list[Any] = list(schema.types)

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
            raise DataError(
                f"{self.path} cannot be read: {str(error)[:300]}", hint="check the file"
            ) from error


TableReader: TypeAlias = CsvReader | ParquetReader

_SPLIT_NAMES = {"train": "train", "training": "train", "test": "test", "": "", "none": ""}
_SPLIT_NAMES |= dict.fromkeys(("valid", "val", "validation", "dev"), "valid")
_MASKS = {"train": ["train_mask"], "valid": ["val_mask", "valid_mask"], "test": ["test_mask"]}
_MOST_CLASSES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class TableColumns:
    """Names of the columns of tables; without a header they are 0, 1, 2, ...

    Attributes:
        source: Of the edge tables; None: the first column.
        target: Of the edge tables; None: the second column.
        weight: Of the edge tables; None: edges have no weights.
        node: Id column of the node table; None: ``id`` or ``node`` if there is one, else rows
            are numbered.
        label: Of the node table; None: ``label`` or ``y`` if there is one.
        split: Of the node table, with train, valid or test; None: ``split`` if there is one.
        features: Of the node table; None: all other numeric columns.
        names: Whether CSV files begin with a line of names; None: found, where that is safe.
    """

    source: str | None = None
    target: str | None = None
    weight: str | None = None
    node: str | None = None
    label: str | None = None
    split: str | None = None
    features: Sequence[str] | None = None
    names: bool | None = None

    def __post_init__(self) -> None:
        if self.names is not None:
            require_flag("names", self.names)


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


class NodeTable:
    """Features, labels and splits by row."""

    def __init__(self, path: Path, columns: TableColumns) -> None:
        self.table = table = open_table(path, header=columns.names)
        self.types = dict(zip(table.names, table.types, strict=True))
        self.id = columns.node or _first_of(table.names, ("id", "node"))
        self.label = columns.label or _first_of(table.names, ("label", "y"))
        self.split = columns.split or _first_of(table.names, ("split",))
        for name in (self.id, self.label, self.split, *(columns.features or ())):
            check_column(table, name)
        masks = {} if self.split else {k: _first_of(table.names, v) for k, v in _MASKS.items()}
        self.masks = {
            split: name
            for split, name in masks.items()
            if name is not None and pa.types.is_boolean(self.types[name])
        }
        taken = {self.id, self.label, self.split, *self.masks.values()}
        self.feature_names = (
            [name for name in table.names if name not in taken and self._width(name)]
            if columns.features is None
            else list(columns.features)
        )
        self.widths = {name: self._width(name) for name in self.feature_names}
        for name, width in self.widths.items():
            if not width:
                raise DataError(
                    f"feature column {name!r} is of type {self.types[name]}",
                    hint="use numbers or lists of one length",
                )
        self.dim = sum(self.widths.values())
        first, as_text = table.names[:1], None
        self.dtype, self._feature_types = np.dtype(np.float32), None
        kinds = [self.types[name] for name in self.feature_names]
        if isinstance(table, CsvReader):
            # Arrow would guess by the first block, where 1.5 may come later; text has no precision.
            self._feature_types = [k if pa.types.is_boolean(k) else pa.float32() for k in kinds]
            as_text = [pa.string()] * len(first)
        elif kinds:
            elements = (kind.value_type if _is_list(kind) else kind for kind in kinds)
            self.dtype = np.result_type(*(kind.to_pandas_dtype() for kind in elements))
        self.num_rows = sum(batch.num_rows for batch in table.batches(first, as_text))

    def _width(self, name: str) -> int:
        """Return the number of elements of a feature column; 0 where it is none."""
        kind = self.types[name]
        if _is_list(kind):
            if not _is_numeric(kind.value_type):
                return 0
            for batch in self.table.batches([name]):
                if batch.num_rows:
                    return len(batch.column(0)[0] or ())  # the others must be as long
            return 0
        return int(_is_numeric(kind))

    def names(self) -> Iterator[Any]:
        """Yield the ids as text, in the order of rows; without an id column the rows' numbers."""
        if self.id is None:
            for first in range(0, self.num_rows, _BLOCK_ROWS):
                numbers = np.arange(first, min(first + _BLOCK_ROWS, self.num_rows))
                yield pa.array(numbers).cast(pa.string())
            return
        for batch in self.table.batches([self.id], [pa.string()]):
            check_whole(batch, self.table.path)
            yield batch.column(0)

    def describe(self) -> list[Any]:
        """Return what decides the result, beside the file."""
        return [self.id, self.label, self.split, self.feature_names, *self.masks.values()]

    def ids_are_rows(self) -> bool:
        """Return whether the ids are 0, 1, 2, ... as without an id column."""
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

    def blocks(self, first_row: int, max_rows: int) -> Iterator[Array]:
        """Yield the feature rows from ``first_row`` on, in blocks of at most ``max_rows``."""
        batches = self.table.batches(self.feature_names, self._feature_types)
        for part, _ in rest_of(batches, first_row, max_rows):
            yield self._block(part)

    def _block(self, batch: Any) -> Array:
        block, place = np.empty((batch.num_rows, self.dim), self.dtype), 0
        for name, column in zip(self.feature_names, batch.columns, strict=True):
            width, values, even = self.widths[name], column, True
            if _is_list(column.type):
                values = column.flatten()
                even = compute.all(compute.equal(compute.list_value_length(column), width)).as_py()
            if column.null_count or values.null_count or even is False:
                raise DataError(
                    f"column {name!r} of {self.table.path} has empty fields or lists of several "
                    "lengths",
                    hint="every node needs a whole feature row",
                )
            array = values.to_numpy(zero_copy_only=False)
            block[:, place : place + width] = array.reshape(batch.num_rows, width)
            place += width
        return block

    def labels(self) -> LabelPart | None:
        """Return the label and split columns."""
        if self.label is None:
            return None
        names = self._label_names(self.label)
        return LabelPart(
            lambda _first: self._label_blocks(names), self._splits(), class_names=names
        )

    def _label_names(self, label: str) -> list[str] | None:
        """Return the classes of a text column in alphabetical order; None for numbers."""
        kind = self.types[label]
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
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

    def _label_blocks(self, names: list[str] | None) -> Iterator[Ids]:
        kind = [pa.float64() if names is None else pa.string()]
        for batch in self.table.batches([str(self.label)], kind):
            column = batch.column(0)
            if names is not None:
                column = compute.index_in(column, value_set=pa.array(names, pa.string()))
            yield as_labels(column.fill_null(-1).to_numpy(zero_copy_only=False))

    def _splits(self) -> dict[str, Ids]:
        found: dict[str, list[Ids]] = {name: [np.empty(0, np.int64)] for name in SPLITS}
        row = 0
        columns = [self.split] if self.split else list(self.masks.values())
        kinds = [pa.string() if self.split else pa.bool_()] * len(columns)
        for batch in self.table.batches(columns, kinds) if columns else ():
            for name, member in self._members(batch).items():
                found[name].append(np.flatnonzero(member) + row)
            row += batch.num_rows
        return {name: np.concatenate(parts) for name, parts in found.items()}

    def _members(self, batch: Any) -> dict[str, Array]:
        """Return by split which rows of a batch are in it."""
        if not self.split:
            columns = [column.fill_null(False) for column in batch.columns]
            arrays = [column.to_numpy(zero_copy_only=False) for column in columns]
            return dict(zip(self.masks, arrays, strict=True))
        words = [(word or "").strip().lower() for word in batch.column(0).to_pylist()]
        unknown = sorted(set(words) - set(_SPLIT_NAMES))
        if unknown:
            raise DataError(
                f"column {self.split!r} of {self.table.path} has {unknown[0]!r}",
                hint="it says train, valid or test, or nothing for nodes of no split",
            )
        splits = np.array([_SPLIT_NAMES[word] for word in words], np.str_)
        return {name: splits == name for name in SPLITS}


def _first_of(names: list[str], wanted: Sequence[str]) -> str | None:
    return next((name for name in names if name.lower() in wanted), None)


def _is_list(kind: Any) -> bool:
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(kind) for is_kind in kinds)


def _is_numeric(kind: Any) -> bool:
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    return any(is_kind(kind) for is_kind in kinds)
