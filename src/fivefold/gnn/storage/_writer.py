"""Writing a container: rows in any order, checksummed as they pass, resumable, in place at once.

Everything goes to ``NAME.partial``, beside which lie a journal (the caller's last token) and the
checksums of the pages so far. Sections of known length are laid out at once; the first growing
one grows at the end, each further one in a file of its own that is copied at commit.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import DTypeLike

from fivefold.errors import ConfigurationError, DataError, require_flag
from fivefold.files import read_checked_json, storage_error, sync_folder, write_checked_json
from fivefold.gnn.storage._container import Container
from fivefold.gnn.storage._format import (
    Header,
    Section,
    encode_json,
    encode_kind,
    make_file_id,
    make_section,
    padded,
)
from fivefold.gnn.storage._partial import DIRTY, NEVER, PartialFile
from fivefold.gnn.storage.files import Closing, closed_error
from fivefold.gnn.storage.pages import PAGE_BYTES, Array, Bytes, aligned, hash_pages

_CHUNK_BYTES = 8 << 20
_JOURNAL_VERSION = 2
_DAMAGED = "its journal is damaged"
_DIFFERENT = "it has another kind, other sections or other attributes"
_NO_SUMS = "its checksums are missing"
_SHORT = "it is shorter than its sections"
Shape = tuple[int | None, ...]


class ContainerWriter(Closing):
    """Writes one container file; nothing stands under its name until :meth:`commit`.

    Args:
        path: Where the file shall be. Its folder is made if need be.
        kind: What the file is for, at most 32 bytes; readers can insist on it.
        sections: Dtype and shape of each array. A first dimension of None grows by
            :meth:`append`; several growing sections may take turns (declare the largest first:
            the others are copied once at commit).
        attributes: Anything that JSON can hold.
        resume: Go on with an unfinished file of the same kind, sections and attributes, if there
            is one; :attr:`progress` then is its last token. Otherwise such a file is discarded.

    Raises:
        ConfigurationError: A name, dtype, shape, kind or attribute cannot be stored.
        DataError: ``resume`` with an unfinished file of other kind, sections or attributes.
        StorageError: The disk is too full or refuses, or another process is writing this file.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> rows = np.arange(6, dtype=np.float32).reshape(3, 2)
        >>> schema = {"x": (np.float32, (3, 2)), "log": (np.int64, (None,))}
        >>> with ContainerWriter(
        ...     Path(folder.name) / "a.fvf", kind="demo", sections=schema, attributes={"n": 3}
        ... ) as writer:
        ...     writer.write("x", 1, rows[1:])
        ...     writer.write("x", 0, rows[:1])
        ...     writer.append("log", np.array([7, 8]))
        ...     container = writer.commit()
        >>> container.read("x", 1).tolist(), container.read("log").tolist()
        ([[2.0, 3.0], [4.0, 5.0]], [7, 8])
        >>> container.close(); folder.cleanup()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        kind: str,
        sections: Mapping[str, tuple[DTypeLike, Shape]],
        attributes: Mapping[str, Any],
        resume: bool = False,
    ) -> None:
        self.path = Path(path).absolute()
        self.kind = kind
        self.attributes = dict(attributes)
        encode_kind(kind)
        self._lay_out(sections)
        schema = {
            name: [self._sections[name].dtype.str, *shape] for name, (_, shape) in sections.items()
        }
        self.file_id = make_file_id(kind, schema, attributes)
        self._journal = self._beside(".partial.journal")
        self._sums = self._beside(".partial.sums")
        self._progress: Any = None
        self._closed = False
        # Several threads may write; marking takes a moment's state.
        self._lock = threading.Condition(threading.RLock())
        self._under_way = 0  # writes without the lock, for which closing waits
        self._file = PartialFile(self._beside(".partial"), self.file_id)
        self._files = {"": self._file}
        try:
            self._start(resume=require_flag("resume", resume))
        except BaseException:
            self.close()
            raise

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    def _lay_out(self, sections: Mapping[str, tuple[DTypeLike, Shape]]) -> None:
        if not sections:
            message = "a container needs a section"
            raise ConfigurationError(message, hint="name at least one")
        self._sections: dict[str, Section] = {}
        end = PAGE_BYTES
        self._grown = [name for name, (_, shape) in sections.items() if tuple(shape[:1]) == (None,)]
        for name, (dtype, shape) in sections.items():
            sizes = (0, *shape[1:]) if name in self._grown else shape
            if any(size is None for size in sizes):
                raise ConfigurationError(
                    f"section {name!r} has shape {shape}", hint="only the first may be None"
                )
            section = make_section(name, dtype, sizes, offset=end)  # type: ignore[arg-type]
            self._sections[name] = section
            end += aligned(section.nbytes)
        self._end = end
        self._rows = dict.fromkeys(self._grown, 0)

    def _start(self, *, resume: bool) -> None:
        if not (resume and self._take_over()):
            self._remove_side_files()
            self._file.begin(self._end)
        self._file.try_direct()
        self._files.update(dict.fromkeys(self._grown[:1], self._file))
        for index, name in enumerate(self._grown[1:], 1):
            self._files[name] = PartialFile(self._beside(f".partial.{index}"), self.file_id)
            self._files[name].cut(self._grown_bytes(name))

    def _take_over(self) -> bool:
        """Continue an unfinished file; False where there is none."""
        if self._file.size == 0:
            return False  # a journal beside it is a leftover of a file that was completed
        try:
            journal = read_checked_json(self._journal)
        except FileNotFoundError:
            return False
        except DataError as error:
            raise self._refused(_DAMAGED) from error
        if journal.get("version") != _JOURNAL_VERSION or journal.get("id") != self.file_id:
            raise self._refused(_DIFFERENT)
        self._rows = {name: int(journal["rows"][name]) for name in self._grown}
        if self._file.size < self._end + sum(self._grown_bytes(name) for name in self._grown[:1]):
            raise self._refused(_SHORT)
        try:
            self._file.load(self._sums)
        except FileNotFoundError as error:
            raise self._refused(_NO_SUMS) from error
        self._progress = journal["token"]
        if self._grown:
            self._file.drop(self._end + self._grown_bytes(self._grown[0]))
        return True

    def _refused(self, reason: str) -> DataError:
        return DataError(
            f"{self._file.path} cannot be resumed: {reason}",
            hint=f"delete {self._file.path}* or write with resume=False to start over",
        )

    def _grown_bytes(self, name: str) -> int:
        return self._rows[name] * self._sections[name].row_bytes

    def write(self, name: str, start_row: int, array: Array) -> None:
        """Put rows into a section of known length, in any order.

        Args:
            name: Section.
            start_row: Row of the section at which the first row of the array goes.
            array: Rows, of the section's dtype and row shape.

        Raises:
            ConfigurationError: No such section, it grows, or dtype, shape or place do not fit.
            StorageError: The disk refused; what was written stays for resuming.
        """
        section, rows = self._checked(name, array)
        if name in self._rows:
            raise ConfigurationError(f"section {name!r} grows", hint="use append")
        if not 0 <= start_row <= section.num_rows - len(rows):
            raise ConfigurationError(
                f"rows {start_row} to {start_row + len(rows)} do not lie in section {name!r}",
                hint=f"it has {section.num_rows} rows",
            )
        self._put_rows(self._file, section.offset + start_row * section.row_bytes, rows)

    def append(self, name: str, array: Array) -> None:
        """Put rows at the end of a growing section.

        Args:
            name: Section whose first dimension was given as None.
            array: Rows, of the section's dtype and row shape.

        Raises:
            ConfigurationError: No such section, its length is fixed, or dtype or shape differ.
            StorageError: The disk refused; what was written stays for resuming.
        """
        _, rows = self._checked(name, array)
        if name not in self._rows:
            raise ConfigurationError(f"section {name!r} has a fixed length", hint="use write")
        with self._lock:
            place = self._base(name) + self._grown_bytes(name)
            self._put_rows(self._files[name], place, rows)
            self._rows[name] += len(rows)

    def rows(self, name: str) -> int:
        """Return the rows of a section so far: its length, or what was appended to it."""
        return self._rows.get(name, self._sections[name].num_rows)

    def _section(self, name: str) -> Section:
        section = self._sections.get(name)
        if section is None:
            raise ConfigurationError(
                f"there is no section {name!r}", hint=f"there are {', '.join(self._sections)}"
            )
        return section

    def _checked(self, name: str, array: Array) -> tuple[Section, Array]:
        self._check_open()
        section = self._section(name)
        rows = np.asarray(array)
        same = rows.dtype.newbyteorder("<") == section.dtype
        if not same or rows.ndim == 0 or rows.shape[1:] != section.shape[1:]:
            raise ConfigurationError(
                f"section {name!r} got {rows.dtype} rows of shape {rows.shape[1:]}",
                hint=f"give {section.dtype} rows of shape {section.shape[1:]}",
            )
        return section, rows

    def _put_rows(self, file: PartialFile, offset: int, rows: Array) -> None:
        if rows.size == 0:
            return
        little, row_bytes = rows.dtype.newbyteorder("<"), rows[:1].nbytes
        as_they_are = rows.flags.c_contiguous and rows.dtype == little
        step = len(rows) if as_they_are else max(1, _CHUNK_BYTES // row_bytes)
        for first in range(0, len(rows), step):
            block = np.ascontiguousarray(rows[first : first + step], little)
            place = offset + first * row_bytes
            self._put_bytes(file, place, block.reshape(-1).view(np.uint8))

    def _put_bytes(self, file: PartialFile, offset: int, data: Bytes) -> None:
        with self._lock:
            self._check_open()
            if not file.takes_pages(data, offset):
                file.put(data, offset)
                return
            self._under_way += 1
        try:  # the lock is free: other pages may be written meanwhile
            checksums = file.put_pages(data, offset)
            with self._lock:
                file.set_checksums(offset // PAGE_BYTES, checksums)
        finally:
            with self._lock:
                self._under_way -= 1
                self._lock.notify_all()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Return rows that have been written, before the file is committed; nothing is verified.

        Args:
            name: Section.
            start: First row.
            stop: Row after the last; None reads what there is.

        Returns:
            A new array. Rows of a section of known length that were not written are zeros.

        Raises:
            ConfigurationError: No such section, or the range does not lie in it.
            StorageError: The disk refused, or the writer is closed.
        """
        self._check_open()
        section = self._section(name)
        last = section.row_after(start, stop, self.rows(name))
        rows = np.empty((last - start, *section.shape[1:]), section.dtype)
        file, place = self._files.get(name, self._file), self._base(name)
        if rows.size:
            file.get(rows.reshape(-1).view(np.uint8), place + start * section.row_bytes)
        return rows

    def _base(self, name: str) -> int:
        """Return where a section begins in the file that it is in now."""
        if name not in self._rows:
            return self._sections[name].offset
        return self._end if self._files[name] is self._file else 0

    def _check_open(self) -> None:
        if self._closed:
            raise closed_error(self._file.path)

    @property
    def progress(self) -> Any:
        """Return the last token that is safely on the disk, or None."""
        return self._progress

    def mark(self, token: Any) -> None:
        """Make all that was written so far durable, together with a token.

        After a crash, a writer with ``resume=True`` has this token as :attr:`progress`, and its
        growing sections have the length they had here. It costs a wait for the disk.

        Args:
            token: Anything that JSON can hold: what a resumed run needs to know to go on.

        Raises:
            ConfigurationError: The token is not JSON.
            StorageError: The disk refused.
        """
        self._check_open()
        with self._lock:
            journal = {
                "version": _JOURNAL_VERSION,
                "id": self.file_id,
                "token": json.loads(encode_json(token)),
                "rows": self._rows,
            }
            for file in set(self._files.values()):
                file.sync()
            try:
                self._file.save(self._sums)
            except OSError as error:
                raise storage_error(error.errno or 0, self._sums, "writing checksums") from error
            write_checked_json(self._journal, journal)
        self._progress = journal["token"]

    def commit(self) -> Container:
        """Complete the file, wait for the disk and put it in place.

        Raises:
            ConfigurationError: Rows of a section were never written.
            StorageError: The disk refused; what was written stays for resuming.
        """
        self._check_open()
        self._seal(self._place_grown())
        try:
            self._file.path.replace(self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise storage_error(error.errno or 0, self.path, "renaming") from error
        self.close()
        self._remove_side_files()
        return Container.open(self.path)

    def _place_grown(self) -> int:
        """Give the growing sections their final places, copy all but the first; return the end."""
        end = self._end
        for index, name in enumerate(self._grown):
            old = self._sections[name]
            shape = (self._rows[name], *old.shape[1:])
            section = make_section(name, old.dtype, shape, offset=end)
            self._sections[name] = section
            for first in range(0, section.nbytes if index else 0, _CHUNK_BYTES):
                buffer = np.empty(min(_CHUNK_BYTES, section.nbytes - first), np.uint8)
                self._files[name].get(buffer, first)
                self._file.put(buffer, section.offset + first)
            end += aligned(section.nbytes)
        self._file.cut(end)
        return end

    def _seal(self, data_end: int) -> None:
        """Make every page known; write table, manifest and last the header; wait for the disk."""
        file = self._file
        file.grow(data_end // PAGE_BYTES)
        for section in self._sections.values():
            self._check_written(section)
        self._read_back(data_end // PAGE_BYTES)
        table = file.checksums[: data_end // PAGE_BYTES].astype("<u4")
        table[0] = 0  # the header is not there yet, unless committing failed before
        entries = [section.to_json() for section in self._sections.values()]
        manifest = encode_json({"sections": entries, "attributes": self.attributes})
        table_pages, manifest_pages = padded(table.view(np.uint8)), padded(manifest)
        manifest_offset = data_end + len(table_pages)
        header = Header(
            kind=self.kind,
            file_id=self.file_id,
            file_bytes=manifest_offset + len(manifest_pages),
            table_offset=data_end,
            table_bytes=table.nbytes,
            table_hash=xxhash.xxh64_intdigest(table_pages.data),
            manifest_offset=manifest_offset,
            manifest_bytes=len(manifest),
            manifest_hash=xxhash.xxh64_intdigest(manifest_pages.data),
        )
        file.cut(header.file_bytes)
        file.put(table_pages, header.table_offset)
        file.put(manifest_pages, header.manifest_offset)
        file.sync()
        # Last, so that a file without its header is an unfinished one.
        file.put(np.frombuffer(header.encode(), np.uint8), 0)
        file.sync()

    def _check_written(self, section: Section) -> None:
        first = section.offset // PAGE_BYTES
        last = first + aligned(section.nbytes) // PAGE_BYTES
        missing = self._file.pages_in(NEVER, first, last)
        if len(missing):
            row = (int(missing[0]) * PAGE_BYTES - section.offset) // section.row_bytes
            raise ConfigurationError(
                f"section {section.name!r} was not written: {len(missing)} pages are missing, "
                f"the first near row {row}",
                hint="write every row, zeros as well, before commit",
            )

    def _read_back(self, stop_page: int) -> None:
        """Hash the pages that came in pieces, from the file."""
        pages = self._file.pages_in(DIRTY, 1, stop_page)
        step = _CHUNK_BYTES // PAGE_BYTES
        for run in np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1):
            for begin in range(0, len(run), step):
                first = int(run[begin])
                buffer = np.empty(len(run[begin : begin + step]) * PAGE_BYTES, np.uint8)
                self._file.get(buffer, first * PAGE_BYTES)
                self._file.set_checksums(first, hash_pages(buffer, self.file_id, first))

    def abort(self) -> None:
        """Throw the unfinished file away."""
        self.close()
        self._file.path.unlink(missing_ok=True)
        self._remove_side_files()

    def _remove_side_files(self) -> None:
        self._journal.unlink(missing_ok=True)
        self._sums.unlink(missing_ok=True)
        for index in range(1, len(self._grown)):
            self._beside(f".partial.{index}").unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the file without committing: the unfinished one stays for resuming."""
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: self._under_way == 0)
            for file in self._files.values():
                file.close()
