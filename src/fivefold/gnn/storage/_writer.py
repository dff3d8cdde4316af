"""Writing a container: rows in any order, checksummed as they pass, resumable, in place at once.

Everything goes to ``NAME.partial``, beside which lie a journal (the caller's last token) and the
checksums of the pages written until then. ``commit`` reads back the few pages whose bytes came in
pieces, writes table, manifest and, last, the header, waits for the disk and renames.

Sections of known length are laid out at once, one after another. Of the growing ones the first
declared grows at the end of the file; each further one grows in a file of its own and is copied at
commit, so declare the largest first.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fivefold.errors import ConfigurationError, DataError, StorageError
from fivefold.gnn.storage._container import Container
from fivefold.gnn.storage._errors import closed_error, free_bytes, storage_error
from fivefold.gnn.storage._files import read_into, sync_folder, write_all, write_atomically
from fivefold.gnn.storage._format import (
    Header,
    Section,
    aligned,
    encode_json,
    encode_kind,
    make_file_id,
    make_section,
)
from fivefold.gnn.storage._ledger import DIRTY, NEVER, PageLedger
from fivefold.gnn.storage._xxhash import PAGE_BYTES, hash_pages, xxh64
from fivefold.units import format_bytes

__all__ = ["ContainerWriter"]

_CHUNK_BYTES = 8 << 20
_JOURNAL_VERSION = 1
_DAMAGED = "its journal is damaged"
_DIFFERENT = "it has another kind, other sections or other attributes"
_SHORT = "it is shorter than its sections"
Shape = tuple[int | None, ...]


class ContainerWriter:
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

    Example:
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
        self._partial = self.path.with_name(self.path.name + ".partial")
        self._journal = self.path.with_name(self.path.name + ".partial.journal")
        self._sums = self.path.with_name(self.path.name + ".partial.sums")
        self._progress: Any = None
        self._descriptors: dict[str, int] = {}
        self._ledger = PageLedger(self.file_id, self._end // PAGE_BYTES)
        self._start(resume=resume)

    # --- layout -----------------------------------------------------------------------------

    def _lay_out(self, sections: Mapping[str, tuple[DTypeLike, Shape]]) -> None:
        if not sections:
            message = "a container needs a section"
            raise ConfigurationError(message, hint="name at least one")
        self._sections: dict[str, Section] = {}
        end = PAGE_BYTES
        grown = [name for name, (_, shape) in sections.items() if shape and shape[0] is None]
        for name, (dtype, shape) in sections.items():
            sizes = (0, *shape[1:]) if name in grown else shape
            if any(size is None for size in sizes):
                raise ConfigurationError(
                    f"section {name!r} has shape {shape}", hint="only the first may be None"
                )
            section = make_section(name, dtype, sizes, offset=end)  # type: ignore[arg-type]
            self._sections[name] = section
            end += aligned(section.nbytes)
        self._end = end
        self._grown = grown
        self._rows = dict.fromkeys(grown, 0)

    def _file_of(self, name: str) -> Path:
        """Where a growing section's bytes go."""
        index = self._grown.index(name)
        suffix = ".partial" if index == 0 else f".partial.{index}"
        return self.path.with_name(self.path.name + suffix)

    # --- opening ----------------------------------------------------------------------------

    def _start(self, *, resume: bool) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._open(self._partial)
        except OSError as error:
            raise storage_error(error.errno or 0, self._partial, "opening") from error
        try:
            self._lock()
            if not (resume and self._take_over()):
                self._begin()
            self._open_side_files()
        except BaseException:
            self._close_files()
            raise

    def _open(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(
                f"{self._partial} is being written by another process",
                hint="wait for it to end, or choose another path",
            ) from None

    def _take_over(self) -> bool:
        """Continue an unfinished file; False where there is none."""
        try:
            journal = json.loads(self._journal.read_bytes())
        except FileNotFoundError:
            return False
        except ValueError as error:
            raise self._refused(_DAMAGED) from error
        if journal.get("version") != _JOURNAL_VERSION or journal.get("id") != self.file_id:
            raise self._refused(_DIFFERENT)
        if os.fstat(self._descriptor).st_size < self._end:
            raise self._refused(_SHORT)
        self._ledger.load(self._sums)
        self._rows = {name: int(journal["rows"][name]) for name in self._grown}
        self._progress = journal["token"]
        if self._grown:
            self._cut(self._grown[0])
        return True

    def _refused(self, reason: str) -> DataError:
        return DataError(
            f"{self._partial} cannot be resumed: {reason}",
            hint=f"delete {self._partial}* or write with resume=False to begin anew",
        )

    def _cut(self, name: str) -> None:
        """Drop what was appended after the last mark."""
        section = self._sections[name]
        stop = self._end + self._rows[name] * section.row_bytes
        os.ftruncate(self._descriptor, stop)
        self._ledger.grow(-(-stop // PAGE_BYTES))
        self._ledger.forget(-(-stop // PAGE_BYTES))
        if stop % PAGE_BYTES:
            self._ledger.states[stop // PAGE_BYTES] = DIRTY

    def _begin(self) -> None:
        self._remove_side_files()
        os.ftruncate(self._descriptor, 0)
        free = free_bytes(self.path.parent)
        if free < self._end:
            raise StorageError(
                f"{self.path} needs {format_bytes(self._end)}, {format_bytes(free)} are free",
                hint="free some space or choose another disk",
            )
        try:
            # Space that is set aside now cannot run out in the middle of the work.
            os.posix_fallocate(self._descriptor, 0, self._end)
        except OSError as error:
            action = f"setting aside {self._end} bytes"
            raise storage_error(error.errno or 0, self._partial, action) from error

    def _open_side_files(self) -> None:
        for name in self._grown[1:]:
            descriptor = self._open(self._file_of(name))
            self._descriptors[name] = descriptor
            os.ftruncate(descriptor, self._rows[name] * self._sections[name].row_bytes)

    # --- writing ----------------------------------------------------------------------------

    def write(self, name: str, start_row: int, array: NDArray[Any]) -> None:
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
        self._put_rows(self._descriptor, section.offset + start_row * section.row_bytes, rows)

    def append(self, name: str, array: NDArray[Any]) -> None:
        """Put rows at the end of a growing section.

        Args:
            name: Section whose first dimension was given as None.
            array: Rows, of the section's dtype and row shape.

        Raises:
            ConfigurationError: No such section, its length is fixed, or dtype or shape differ.
            StorageError: The disk refused; what was written stays for resuming.
        """
        section, rows = self._checked(name, array)
        if name not in self._rows:
            raise ConfigurationError(f"section {name!r} has a fixed length", hint="use write")
        place = self._rows[name] * section.row_bytes
        if name == self._grown[0]:
            self._put_rows(self._descriptor, self._end + place, rows)
        else:
            self._put_rows(self._descriptors[name], place, rows, noted=False)
        self._rows[name] += len(rows)

    def rows(self, name: str) -> int:
        """Rows of a section so far: its length, or what has been appended to a growing one."""
        return self._rows.get(name, self._sections[name].num_rows)

    def _checked(self, name: str, array: NDArray[Any]) -> tuple[Section, NDArray[Any]]:
        if self._descriptor < 0:
            raise closed_error(self._partial)
        section = self._sections.get(name)
        if section is None:
            raise ConfigurationError(
                f"there is no section {name!r}", hint=f"there are {', '.join(self._sections)}"
            )
        rows = np.asarray(array)
        same = rows.dtype.newbyteorder("<") == section.dtype
        if not same or rows.ndim == 0 or rows.shape[1:] != section.shape[1:]:
            raise ConfigurationError(
                f"section {name!r} got {rows.dtype} rows of shape {rows.shape[1:]}",
                hint=f"give {section.dtype} rows of shape {section.shape[1:]}",
            )
        return section, rows

    def _put_rows(
        self, descriptor: int, offset: int, rows: NDArray[Any], *, noted: bool = True
    ) -> None:
        if rows.size == 0:
            return
        row_bytes = rows[:1].nbytes
        step = max(1, _CHUNK_BYTES // row_bytes)
        little = rows.dtype.newbyteorder("<")
        for first in range(0, len(rows), step):
            block = np.ascontiguousarray(rows[first : first + step], little)
            data = block.reshape(-1).view(np.uint8)
            place = offset + first * row_bytes
            write_all(descriptor, data, place, self._partial)
            if noted:
                self._ledger.note(place, data)

    # --- progress ---------------------------------------------------------------------------

    @property
    def progress(self) -> Any:
        """The last token that is safely on the disk, or None."""
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
        if self._descriptor < 0:
            raise closed_error(self._partial)
        journal = {
            "version": _JOURNAL_VERSION,
            "id": self.file_id,
            "token": token,
            "rows": self._rows,
        }
        data = encode_json(journal)
        try:
            for descriptor in (self._descriptor, *self._descriptors.values()):
                os.fdatasync(descriptor)
            self._ledger.save(self._sums)
        except OSError as error:
            raise storage_error(error.errno or 0, self._partial, "syncing") from error
        write_atomically(self._journal, data)
        self._progress = json.loads(data)["token"]

    # --- ending -----------------------------------------------------------------------------

    def commit(self, attributes: Mapping[str, Any] | None = None) -> Container:
        """Complete the file, wait for the disk and put it in place.

        Args:
            attributes: More attributes, known only now.

        Returns:
            The file, opened.

        Raises:
            ConfigurationError: Rows of a section were never written.
            StorageError: The disk refused; what was written stays for resuming.
        """
        if self._descriptor < 0:
            raise closed_error(self._partial)
        self.attributes.update(attributes or {})
        encode_json(self.attributes)
        self._place_grown()
        self._check_written()
        self._read_back()
        try:
            self._write_ends()
            os.replace(self._partial, self.path)  # noqa: PTH105 - both are absolute
            sync_folder(self.path.parent)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise storage_error(error.errno or 0, self.path, "committing") from error
        self._close_files()
        self._remove_side_files()
        return Container.open(self.path)

    def _place_grown(self) -> None:
        """Give the growing sections their final places; copy all but the first."""
        end = self._end
        for index, name in enumerate(self._grown):
            old = self._sections[name]
            shape = (self._rows[name], *old.shape[1:])
            section = make_section(name, old.dtype, shape, offset=end)
            self._sections[name] = section
            if index:
                self._copy(section)
            end += aligned(section.nbytes)
        os.ftruncate(self._descriptor, end)
        self._data_end = end

    def _copy(self, section: Section) -> None:
        for first in range(0, section.nbytes, _CHUNK_BYTES):
            buffer = np.empty(min(_CHUNK_BYTES, section.nbytes - first), np.uint8)
            read_into(self._descriptors[section.name], buffer, first, self._file_of(section.name))
            write_all(self._descriptor, buffer, section.offset + first, self._partial)
            self._ledger.note(section.offset + first, buffer)

    def _check_written(self) -> None:
        self._ledger.grow(self._data_end // PAGE_BYTES)
        for section in self._sections.values():
            first = section.offset // PAGE_BYTES
            last = first + aligned(section.nbytes) // PAGE_BYTES
            missing = self._ledger.pages_in(NEVER, first, last)
            if len(missing):
                row = (int(missing[0]) * PAGE_BYTES - section.offset) // section.row_bytes
                raise ConfigurationError(
                    f"section {section.name!r} was not written: {len(missing)} pages are missing, "
                    f"the first near row {row}",
                    hint="write every row, zeros as well, before commit",
                )

    def _read_back(self) -> None:
        """Hash the pages that came in pieces, from the file."""
        buffer = np.empty(PAGE_BYTES, np.uint8)
        for page in self._ledger.pages_in(DIRTY, 1, self._data_end // PAGE_BYTES).tolist():
            read_into(self._descriptor, buffer, page * PAGE_BYTES, self._partial)
            self._ledger.set_checksums(page, hash_pages(buffer, self.file_id, page))

    def _write_ends(self) -> None:
        table = self._ledger.checksums[: self._data_end // PAGE_BYTES].astype("<u4")
        table_bytes = table.view(np.uint8)
        manifest = np.frombuffer(self._manifest(), np.uint8)
        manifest_offset = self._data_end + aligned(len(table_bytes))
        header = Header(
            kind=self.kind,
            file_id=self.file_id,
            file_bytes=manifest_offset + aligned(len(manifest)),
            table_offset=self._data_end,
            table_bytes=len(table_bytes),
            table_hash=xxh64(table_bytes),
            manifest_offset=manifest_offset,
            manifest_bytes=len(manifest),
            manifest_hash=xxh64(manifest),
        )
        os.ftruncate(self._descriptor, header.file_bytes)
        write_all(self._descriptor, table_bytes, header.table_offset, self._partial)
        write_all(self._descriptor, manifest, header.manifest_offset, self._partial)
        os.fsync(self._descriptor)
        # Last, so that a file without its header is an unfinished one.
        write_all(self._descriptor, np.frombuffer(header.encode(), np.uint8), 0, self._partial)
        os.fsync(self._descriptor)

    def _manifest(self) -> bytes:
        sections = [section.to_json() for section in self._sections.values()]
        return encode_json({"sections": sections, "attributes": self.attributes})

    def abort(self) -> None:
        """Throw the unfinished file away."""
        self._close_files()
        self._partial.unlink(missing_ok=True)
        self._remove_side_files()

    def _close_files(self) -> None:
        for descriptor in (self._descriptor, *self._descriptors.values()):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = -1
        self._descriptors = {}

    def _remove_side_files(self) -> None:
        self._journal.unlink(missing_ok=True)
        self._sums.unlink(missing_ok=True)
        for name in self._grown[1:]:
            self._file_of(name).unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the file without committing: the unfinished one stays for resuming."""
        self._close_files()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
