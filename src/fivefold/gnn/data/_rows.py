"""Arrays that are read in blocks of rows: in memory, in .npy files and inside .npz archives.

Files are read from front to back with plain reads. A memory map would do as well, but its pages
count as memory of the process, and a member of an archive cannot be mapped.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from fivefold.errors import DataError


class Rows(Protocol):
    """An array of at least one dimension, in C order.

    Attributes:
        shape: Of the whole.
        dtype: Of one element.
        stamp: Says which array this is, as JSON: name, size and date of a file, or a hash.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stamp: Any

    def blocks(self, first_row: int, max_rows: int, *, stop: int | None = None) -> Iterator[Any]:
        """Yield rows ``first_row`` to ``stop`` (None: the end), at most ``max_rows`` at a time."""
        ...


class ArrayRows:
    """An array in memory, or a memory map."""

    def __init__(self, array: NDArray[Any], stamp: Any = None) -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype
        self.stamp = stamp or [list(array.shape), array.dtype.str, self._hash()]

    def _hash(self) -> str:
        total = 0
        for block in self.blocks(0, max(1, (8 << 20) // max(1, self.array[:1].nbytes))):
            data = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
            total = xxhash.xxh64_intdigest(data.data, total)
        return f"{total:016x}"

    def blocks(self, first_row: int, max_rows: int, *, stop: int | None = None) -> Iterator[Any]:
        """Yield views of the array."""
        end = self.shape[0] if stop is None else stop
        for first in range(first_row, end, max_rows):
            yield self.array[first : min(first + max_rows, end)]


class FileRows:
    """An array in a .npy file, or in a member of an archive."""

    def __init__(self, path: Path, member: str | None = None) -> None:
        self.path = path
        self.member = member
        self.place = str(path) if member is None else f"{path}:{member}"
        with self._open() as file:
            self.shape, fortran, self.dtype = _read_header(file, self.place)
            self._data_offset = file.tell()
        if not self.shape:
            self.shape = (1,)
        if fortran and len(self.shape) > 1:
            # In C order it is the transpose: the columns come one after another.
            self.shape = self.shape[::-1]
        self.transposed = fortran and len(self.shape) > 1
        self.stamp = file_stamp(path)

    def _open(self) -> IO[bytes]:
        try:
            if self.member is None:
                return self.path.open("rb")
            return zipfile.ZipFile(self.path).open(self.member)
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise DataError(f"cannot read {self.place}: {error}", hint="check the path") from error

    def blocks(self, first_row: int, max_rows: int, *, stop: int | None = None) -> Iterator[Any]:
        """Yield rows read from the file."""
        end = self.shape[0] if stop is None else stop
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        with self._open() as file:
            file.seek(self._data_offset + first_row * row_bytes)
            for first in range(first_row, end, max_rows):
                count = min(max_rows, end - first)
                buffer = bytearray(count * row_bytes)
                _fill(file, buffer, self.place)
                block = np.frombuffer(buffer, self.dtype)
                yield block.reshape(count, *self.shape[1:])


def one_split(rows: Rows, column: int | None) -> Rows:
    """Return one of several masks that stand side by side; one column is handed back."""
    if column is None or len(rows.shape) < 2:
        return rows
    turned = getattr(rows, "transposed", False)
    if not 0 <= column < rows.shape[0 if turned else 1]:
        raise DataError(
            f"split {column} was asked for, but masks have shape {list(rows.shape)}",
            hint="columns count from 0",
        )
    if turned:
        parts = [block[0] for block in rows.blocks(column, 1, stop=column + 1)]
    else:
        parts = [block[:, column] for block in rows.blocks(0, 1 << 20)]
    return ArrayRows(np.concatenate(parts), stamp=[rows.stamp, column])


def _fill(file: IO[bytes], buffer: bytearray, place: str) -> None:
    view, filled = memoryview(buffer), 0
    while filled < len(buffer):
        try:
            count = file.readinto(view[filled:])  # type: ignore[attr-defined]
        except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"{place} is damaged: {error}", hint="get the file again") from error
        if not count:
            raise DataError(
                f"{place} is cut short: {len(buffer) - filled} bytes are missing",
                hint="get the file again",
            )
        filled += count


def _read_header(file: IO[bytes], place: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        version = np.lib.format.read_magic(file)
        shape, fortran, dtype = readers[version](file)
    except (ValueError, KeyError) as error:
        raise DataError(
            f"{place} is no .npy array: {error}", hint="write it with np.save"
        ) from error
    if dtype.hasobject:
        raise DataError(
            f"{place} holds Python objects", hint="save an array of numbers; pickles are not read"
        )
    return shape, fortran, dtype


def file_stamp(path: Path) -> list[Any]:
    """Return the name, size and date of a file: when they are the same, so are its contents."""
    state = path.stat()
    return [path.name, state.st_size, state.st_mtime_ns]


def npy_rows(path: str | Path) -> FileRows:
    """Return the array in a .npy file."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"there is no file {path}", hint="check the path")
    return FileRows(path)


def npz_members(path: Path) -> list[str]:
    """Return the names of the arrays in an archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot read {path}: {error}", hint="get the file again") from error


def npz_rows(path: Path, name: str) -> FileRows:
    """Return an array in an archive, read without unpacking the archive."""
    return FileRows(path, f"{name}.npy")
