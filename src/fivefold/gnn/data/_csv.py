"""Tables as text, also packed: their delimiter, names, quotes and comments, and their rows.

What the text does not say is not guessed where a wrong guess would lose or join rows: it is asked.
"""

from __future__ import annotations

import codecs
import csv as plain_csv
import gzip
import io
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.errors import DataError, UnsupportedError
from fivefold.gnn.storage.pages import Array

try:
    import pyarrow as pa
    from pyarrow import csv
except ImportError as _error:  # pragma: no cover - the development environment has it
    _message = "pyarrow is not installed, and tables are read with it"
    raise UnsupportedError(_message, hint="pip install 'fivefold[gnn]'") from _error

_BLOCK_BYTES = 4 << 20
_IN_CACHE = 1 << 18
_PEEK_BYTES = 1 << 20  # holds a line of many columns
_PEEK_LINES = 1000
_COMMENTS = ("#", "%")
_DELIMITERS = ("\t", ",", ";", "|", " ")
_MOST_PACKED = 50_000  # times its own size that a packed file may hold (zstd)
_PACKED = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\x28\xb5\x2f\xfd": ".zst"}
_EXCEL = re.compile("sep=(.)\\s*", re.IGNORECASE)  # a first line that names the delimiter
DECIMAL_COMMA = re.compile(r"\s*-?(\d+|\d{1,3}(\.\d{3})+),\d+\s*")
_EMPTY_WORDS = {"", "na", "n/a", "nan", "null", "none", "?", "-", "."}
_NO_TABLES = {b"<?xml": "XML", b"<g": "XML", b"*vertices": "of Pajek", b"graph [": "GML"}
_NO_TABLES |= {b"digraph": "of Graphviz", b"strict ": "of Graphviz", b"{": "JSON", b"[{": "JSON"}
NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """What a person says of tables as text.

    Attributes:
        header: Whether they begin with a line of names; None: found, where that is safe.
        quote: What stands around fields, or "none"; None: a quotation mark, where the text fits.
        comment: What comments begin with, or "none"; None: # or %, at the head.
        missing: Words of fields that are empty.
    """

    header: bool | None = None
    quote: str | None = None
    comment: str | None = None
    missing: Sequence[str] = ()


class CsvReader:
    """A table as text.

    Args:
        path: The file.
        dialect: What a person says of it.
        known: Whether a line of names names all columns that are needed.
        enough: Whether words tell a line of names, given the names and whether each stands above
            numbers alone.
    """

    def __init__(
        self,
        path: Path,
        dialect: Dialect,
        known: Callable[[list[str]], bool] = lambda _: False,
        enough: Callable[[list[str], list[bool]], bool] = lambda _, above: all(above),
    ) -> None:
        self.path, self.dialect = path, dialect
        self._marks: tuple[str, ...] = _COMMENTS
        if dialect.comment is not None:
            self._marks = () if dialect.comment == NONE else (dialect.comment,)
        lines = self._first_lines()
        head = list(itertools.takewhile(self._is_before, map(_decoded, lines)))
        told = _EXCEL.fullmatch(_decoded(lines[len(head)])) if len(head) < len(lines) else None
        head += [] if told is None else [told[0]]
        self.head, self._skip = head, len(head)
        first = _decoded(lines[self._skip]) if len(head) < len(lines) else ""
        rest = lines[self._skip + 1 :]
        self.delimiter = _delimiter_of(first, path) if told is None else told[1]
        filled = (line for line in map(_decoded, rest) if line.strip())
        below = list(itertools.islice(filled, _PEEK_LINES))
        self.quoted = dialect.quote not in {None, NONE} or (
            dialect.quote is None and any(map(self._has_quote, [first, *below]))
        )
        fields = self._fields(first)
        rows = [self._fields(line) for line in below] if fields else []
        self._columns = [
            [row[i] for row in rows if i < len(row)] for i in range(len(fields))
        ]  # of the lines that were looked at
        self.has_header = (
            self._is_header(fields, known, enough) if dialect.header is None else dialect.header
        )
        self.num_columns = len(fields)
        generated = [str(index) for index in range(len(fields))]
        self.names = [name.strip() for name in fields] if self.has_header else generated
        self._check_names()
        self._check_comments(head, fields)
        self._types: list[Any] | None = None

    @property
    def quote(self) -> str:
        """Return what stands around fields."""
        given = self.dialect.quote
        return '"' if given is None or given == NONE else given

    def values(self, name: str) -> list[str]:
        """Return the fields of a column in the first lines."""
        own = self._columns[self.names.index(name)]
        return own if self.has_header else [self._first[self.names.index(name)], *own]

    @property
    def first_row(self) -> list[str]:
        """Return the fields of the first line, a row or names."""
        return self._first if self.num_columns else []

    def _has_quote(self, line: str) -> bool:
        return '"' in line and re.search(rf'(^|{re.escape(self.delimiter)})"', line) is not None

    def _fields(self, line: str) -> list[str]:
        if self.delimiter == " " and "  " in line.strip():
            raise DataError(
                f"the columns of {self.path} stand apart by several blanks",
                hint="put one delimiter between them: tr -s ' ' <FILE >NEW",
            )
        if not line:
            return []
        if not self.quoted:
            found = line.split(self.delimiter)
        else:
            found = next(
                plain_csv.reader([line], delimiter=self.delimiter, quotechar=self.quote), []
            )
        if not hasattr(self, "_first"):
            self._first = found
        return found

    def _is_before(self, line: str) -> bool:
        """Return whether a line at the head is blank or a comment."""
        return not line.strip() or line[0] in self._marks

    def _first_lines(self) -> list[bytes]:
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
        begin = head.removeprefix(codecs.BOM_UTF8).lstrip().lower()
        other = next((what for mark, what in _NO_TABLES.items() if begin.startswith(mark)), None)
        if other is not None:
            raise DataError(
                f"{self.path} is {other}, no table",
                hint="networkx or pandas reads it: write its edges as a table with two columns, "
                "source and target",
            )
        self.ends_in_cr = b"\n" not in head  # as on old machines
        # Lines as Arrow has them: text may end one at a form feed, too.
        lines = head.splitlines()
        return lines[:-1] if len(head) == _PEEK_BYTES and len(lines) > 1 else lines

    def _check_names(self) -> None:
        """Raise where two columns have one name: one of them would be taken for both."""
        twice = next((name for name in self.names if self.names.count(name) > 1), None)
        if twice is not None:
            raise DataError(
                f"{self.path} has two columns {twice!r}", hint="give every column its own name"
            )

    def _is_header(
        self,
        first: list[str],
        known: Callable[[list[str]], bool],
        enough: Callable[[list[str], list[bool]], bool],
    ) -> bool:
        """Return whether a first line names the columns; no guess that could lose a row."""
        if not first:
            return False
        names = [name.strip() for name in first]
        words = {_bare(name) for name in names if not is_number(name)} - _EMPTY_WORDS
        again = any(not words.isdisjoint(map(_bare, column)) for column in self._columns)
        if known(names) and words and not again:
            return True
        above = list(map(_stands_out, names, self._columns))
        with_number = any(map(is_number, names))
        if not with_number and not again and enough(names, above):
            return True
        if with_number and not any(above) and not known(names):
            return False
        raise DataError(
            f"cannot tell whether the first line of {self.path} names the columns: "
            f"{','.join(first)[:80]}",
            hint="say so: --header yes or --header no (names=True or False in TableColumns)",
        )

    def _check_comments(self, head: list[str], fields: list[str]) -> None:
        """Ask whether lines before the table are rows whose names begin with a mark."""
        if self.dialect.comment is not None or len(fields) < 2:
            return
        numbers = [bool(column) and all(map(is_number, column)) for column in self._columns]

        def is_like_rows(line: str) -> bool:
            found = self._fields(line)
            if any(numbers) and not line[1:2].strip():
                return False  # "% 200 80 80" of KONECT is a comment: no name begins with a blank
            return len(found) == len(fields) and all(
                is_number(field.lstrip("#% "))
                for field, only in zip(found, numbers, strict=True)
                if only
            )

        like_rows = [line for line in head if line and is_like_rows(line)]
        if like_rows and self.dialect.header is None and not self.has_header:
            raise DataError(
                f"cannot tell whether a line of {self.path} is a comment or a row: "
                f"{like_rows[-1][:80]}",
                hint="say so: --comment '#' or --comment none",
            )

    @property
    def most_rows(self) -> int:
        """Return a bound of the number of rows: three bytes and the end of the line each."""
        packed = self.path.suffix in _PACKED.values()
        return (1 + self.path.stat().st_size // 4) * (_MOST_PACKED if packed else 1)

    @property
    def types(self) -> list[Any]:
        """Return the types as Arrow guesses them from the first block."""
        if self._types is None:
            self._types = [pa.int64()] * self.num_columns
            for batch in self.batches(self.names):
                self._types = list(batch.schema.types)
                break
        return self._types

    def batches(
        self,
        columns: Sequence[str],
        types: Sequence[Any] | None = None,
        *,
        look: Callable[[Array], None] | None = None,
    ) -> Iterator[Any]:
        """Yield record batches; ``look`` is shown the bytes of all lines, block by block."""
        if self.num_columns == 0:
            return
        kinds = None if types is None else dict(zip(columns, types, strict=True))
        checked = self.quoted or self.dialect.comment not in {None, NONE}
        lines = _Lines(self, look, counted=checked) if checked or look is not None else None
        try:
            reader = csv.open_csv(
                str(self.path) if lines is None else pa.PythonFile(lines, mode="r"),
                read_options=csv.ReadOptions(
                    block_size=_BLOCK_BYTES,
                    use_threads=False,
                    skip_rows=(self._skip if lines is None else 0) + int(self.has_header),
                    column_names=self.names,
                ),
                parse_options=csv.ParseOptions(
                    delimiter=self.delimiter,
                    quote_char=self.quote if self.quoted else False,
                    newlines_in_values=self.quoted and self.dialect.quote is not None,
                    # In one column a blank line is a row without a value: the next is not its.
                    ignore_empty_lines=len(self.names) > 1,
                ),
                convert_options=csv.ConvertOptions(
                    include_columns=list(columns),
                    column_types=kinds,
                    null_values=["", *self.dialect.missing],  # a node may well be named NA
                    strings_can_be_null=True,
                ),
            )
            rows = 0
            for batch in reader:
                rows += batch.num_rows
                yield batch
        except (pa.ArrowInvalid, pa.ArrowKeyError, OSError) as error:
            if "Empty CSV" in str(error):
                return
            raise self._reading_error(error) from error
        if lines is not None and checked and self.dialect.quote is None:
            self._check_rows(rows, lines.count - int(self.has_header))

    def _check_rows(self, rows: int, lines: int) -> None:
        if rows != lines:
            raise DataError(
                f"{self.path} has {lines} lines, but {rows} rows: a quotation mark joins lines",
                hint="say what it means: --quote none where it is a part of names, --quote '\"' "
                "where fields hold line breaks",
            )

    def _reading_error(self, error: Exception) -> DataError:
        reason = str(error).replace("\n", " ")[:300]
        hint = "mend the line it names"
        if found := re.search(r"conversion error to (\w+): invalid value '(.*?)'", reason):
            hint = f"mend the row; --missing {found[2]} where the word stands for an empty field"
            if found[1].startswith("int"):
                hint = "--ids text takes ids as names; or mend the row"
            if DECIMAL_COMMA.fullmatch(found[2]):
                hint = "write a point for the comma of decimals, such as 0.5"
            if found[2][:1] in _COMMENTS:
                hint = f"--comment '{found[2][:1]}' leaves such lines out everywhere"
            if '"' in found[2]:
                hint = "--quote '\"' takes quotation marks off"
        elif "UTF8" in reason:
            hint = "iconv -f LATIN1 -t UTF-8 <FILE >NEW, or whatever encoding it has"
        elif "Expected" in reason and "columns" in reason:
            hint = "mend the line it names; --quote '\"' or --quote none say what a quotation mark "
            hint += "means, --comment '#' leaves out comments between rows"
        return DataError(f"{self.path} cannot be read as a table: {reason}", hint=hint)


class _Lines(io.RawIOBase):
    """The text of a table from its first line on, without comments; lines are counted."""

    def __init__(
        self, table: CsvReader, look: Callable[[Array], None] | None, *, counted: bool
    ) -> None:
        super().__init__()
        self._look, self._counted, self._begun = look, counted, False
        self._stream = pa.input_stream(str(table.path))
        self._table, self._rest, self._ended = table, b"", False
        self._to_skip = table._skip  # noqa: SLF001 - a part of the reader
        self.count = 0  # of lines that are neither empty nor comments
        mark, between = table.dialect.comment, re.escape(table.delimiter).encode()
        self._comment = self._stray = None
        if mark not in {None, NONE}:
            begin = rb"(?m)^" + re.escape(str(mark)).encode()
            self._comment = re.compile(begin + rb"[^\r\n]*\r?\n?")
        if table.quoted and table.dialect.quote is None:
            before, after = rb"(?<![" + between + rb"\n])", rb"(?![" + between + rb"\r\n])"
            self._stray = re.compile(before + b'"' + after)

    def readable(self) -> bool:
        """Return True: Arrow asks."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return the next whole lines, some ``size`` bytes."""
        while not self._ended:
            chunk = self._stream.read(max(1 << 16, min(size, _BLOCK_BYTES)))
            self._ended = not chunk
            if not self._begun:
                chunk, self._begun = chunk.removeprefix(codecs.BOM_UTF8), True
            if self._table.ends_in_cr:
                chunk = chunk.replace(b"\r", b"\n")
            text = self._rest + chunk
            cut = len(text) if self._ended else text.rfind(b"\n") + 1
            text, self._rest = text[:cut], text[cut:]
            text = self._cleaned(text)
            if text:
                return text
        return b""

    def _cleaned(self, text: bytes) -> bytes:
        some = b"\r" in text and self._table.dialect.quote is None
        if some and text.count(b"\r") != text.count(b"\r\n"):
            text = re.sub(rb"\r(?!\n)", b"\n", text)  # some lines end so
        while self._to_skip and text:
            end = text.find(b"\n") + 1 or len(text)
            text, self._to_skip = text[end:], self._to_skip - 1
        if self._comment is not None:
            text = self._comment.sub(b"", text)
        if self._stray is not None and b'"' in text:
            self._check_quotes(text)
        view = np.frombuffer(text, np.uint8)
        if self._look is not None:
            self._look(view)
        if self._counted:
            lines = np.count_nonzero(view == 10)
            lines += bool(text) and not text.endswith(b"\n")
            self.count += int(lines) - len(re.findall(rb"(?m)^[\r]?\n", text))
        return text

    def _check_quotes(self, text: bytes) -> None:
        bare = b"\n" + text.replace(b'""', b"") + b"\n"
        found = None if self._stray is None else self._stray.search(bare)
        if found is not None:
            start = bare.rfind(b"\n", 0, found.start()) + 1
            line = bare[start : bare.find(b"\n", start)].decode("utf-8", "replace")
            raise DataError(
                f"{self._table.path} has a quotation mark that neither begins nor ends a field: "
                f"{line[:80]}",
                hint="say what they mean: --quote none where they are a part of names, "
                "--quote '\"' where they stand around fields",
            )


class ZeroFinder:
    """Looks for fields of some columns that begin with 0 before a digit, as in 007.

    As numbers they are the same as 7, as names they are not. Delimiters in quotes move columns, so
    where there are quotes any such field counts; what is found must be looked at again.
    """

    def __init__(self, table: CsvReader, columns: Sequence[str]) -> None:
        self._delimiter = ord(table.delimiter)
        self._columns = [table.names.index(name) for name in columns]
        self._quoted, self.found = table.quoted, False

    def __call__(self, text: Array) -> None:
        """Look at the bytes of whole lines."""
        if self.found:
            return
        parts = [np.flatnonzero(text[:1] == ord("0"))]
        for first in range(0, len(text) - 2, _IN_CACHE):  # temporaries of a whole block are slow
            digits = text[first : first + _IN_CACHE + 2] - np.uint8(ord("0"))  # 0 to 9 are digits
            marks = (digits[1:-1] == 0) & (digits[2:] < 10) & (digits[:-2] > 9)
            if marks.any():
                parts.append(np.flatnonzero(marks) + first + 1)
        places = np.concatenate(parts)
        after = text[np.minimum(places + 1, len(text) - 1)] - np.uint8(ord("0"))
        places = places[(text[places - 1] != ord(".")) & (after < 10)]
        if self._quoted or not places.size:
            self.found = bool(places.size)
            return
        signs = np.flatnonzero(text == self._delimiter)
        ends = np.flatnonzero(text == ord("\n"))
        starts = np.concatenate([[-1], ends])[np.searchsorted(ends, places)]
        column = np.searchsorted(signs, places) - np.searchsorted(signs, starts)
        self.found = bool(np.isin(column, self._columns).any())


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


def _decoded(line: bytes) -> str:
    return line.decode("utf-8-sig", "replace")


def _stands_out(name: str, column: list[str]) -> bool:
    """Return whether a word stands above numbers alone."""
    told = [value for value in column if _bare(value) not in _EMPTY_WORDS]
    is_word = not is_number(name) and _bare(name) not in _EMPTY_WORDS
    return is_word and bool(told) and all(map(is_number, told))


def _bare(field: str) -> str:
    return field.strip().strip('"').lower()


def is_number(field: str) -> bool:
    """Return whether a field is a number."""
    try:
        float(_bare(field))
    except ValueError:
        return False
    return _bare(field) not in _EMPTY_WORDS
