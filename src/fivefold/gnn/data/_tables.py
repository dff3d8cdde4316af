"""Tables in CSV (also packed) and Parquet, read in blocks through Arrow."""

from __future__ import annotations

import csv as plain_csv
import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fivefold.errors import DataError, UnsupportedError

try:
    import pyarrow as pa
    from pyarrow import csv, parquet
except ImportError as _error:  # pragma: no cover - the development environment has it
    _message = "pyarrow is not installed, and tables are read with it"
    raise UnsupportedError(_message, hint="pip install 'fivefold[gnn]'") from _error

_BLOCK_BYTES = 4 << 20
_PEEK_BYTES = 1 << 16
_COMMENTS = ("#", "%")
_ROLES = {"source", "target", "src", "dst", "from", "to", "head", "tail", "u", "v", "weight"}
_ROLES |= {"id", "node", "label", "y", "split", "name"}
_DELIMITERS = ("\t", ",", ";", "|", " ")
_PACKED = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\x28\xb5\x2f\xfd": ".zst"}


class TableReader(Protocol):
    """A table that is read in blocks.

    Attributes:
        path: Of the file.
        names: Of the columns.
    """

    path: Path
    names: list[str]

    @property
    def types(self) -> list[Any]:
        """Return the Arrow types of the columns."""
        ...

    def batches(self, columns: Sequence[str], types: Sequence[Any] | None = None) -> Iterator[Any]:
        """Yield Arrow record batches of these columns, converted to these types where given."""
        ...


def open_table(path: str | Path, *, header: bool | None = None) -> TableReader:
    """Open a table by its name: ``.parquet``, or else CSV, also ``.gz``, ``.bz2``, ``.zst``."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"there is no file {path}", hint="check the path")
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
        self._skip = 0
        while self._skip < len(lines) and _is_prelude(lines[self._skip]):
            self._skip += 1
        first = lines[self._skip] if self._skip < len(lines) else ""
        self._delimiter = next((d for d in _DELIMITERS if d in first), ",")
        fields = self._fields(first)
        second = self._fields(next(filter(None, lines[self._skip + 1 :]), ""))
        self._header = _is_header(fields, second, path) if header is None else header
        self.num_columns = len(fields)
        generated = [str(index) for index in range(len(fields))]
        self.names = [name.strip().strip('"') for name in fields] if self._header else generated
        check_names(self.names, path)
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
        return head.decode("utf-8-sig", "replace").splitlines()

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

    def arrays(
        self, dtype: DTypeLike, *, first_row: int = 0, max_rows: int = 1 << 62
    ) -> Iterator[tuple[NDArray[Any], int]]:
        """Yield all columns as blocks ``[rows, columns]``, each with the row after it."""
        kind = pa.from_numpy_dtype(np.dtype(dtype))
        batches = self.batches(self.names, [kind] * len(self.names))
        for part, row in rest_of(batches, first_row, max_rows):
            block = np.empty((part.num_rows, part.num_columns), dtype)
            for index, column in enumerate(part.columns):
                block[:, index] = column.to_numpy(zero_copy_only=False)
            yield block, row


def rest_of(batches: Iterator[Any], first_row: int, max_rows: int) -> Iterator[tuple[Any, int]]:
    """Yield batches from a row on in parts of ``max_rows``, each with the row after it.

    A table cannot be entered in the middle: what is known is read past.
    """
    begin = 0
    for batch in batches:
        for first in range(max(0, first_row - begin), batch.num_rows, max_rows):
            part = batch.slice(first, max_rows)
            yield part, begin + first + part.num_rows
        begin += batch.num_rows


def _is_prelude(line: str) -> bool:
    """Return whether a line stands before the table: a comment or an empty one."""
    return line.startswith(_COMMENTS) or not line.strip()


def check_names(names: list[str], path: Path) -> None:
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
        check_names(self.names, path)
        self._types: list[Any] = list(schema.types)

    @property
    def types(self) -> list[Any]:
        """Return the types of the columns."""
        return self._types

    def batches(self, columns: Sequence[str], types: Sequence[Any] | None = None) -> Iterator[Any]:
        """Yield record batches."""
        schema = None
        if types is not None:
            schema = pa.schema(list(zip(columns, types, strict=True)))
        try:
            for batch in self._file.iter_batches(batch_size=1 << 16, columns=list(columns)):
                chosen = batch.select(list(columns))
                yield chosen if schema is None else chosen.cast(schema)
        except (pa.ArrowInvalid, pa.ArrowKeyError, pa.ArrowNotImplementedError, OSError) as error:
            raise DataError(
                f"{self.path} cannot be read: {str(error)[:300]}", hint="check the file"
            ) from error
