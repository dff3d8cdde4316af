"""Reading a container: checks on opening, verified reads of whole sections, memory maps."""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from fivefold.errors import DataError, require_one_of
from fivefold.files import storage_error
from fivefold.gnn.storage._format import Header, Section, decode_manifest, make_section
from fivefold.gnn.storage.files import Closing, closed_error, open_to_read, read_into
from fivefold.gnn.storage.pages import PAGE_BYTES, Array, aligned, aligned_empty, hash_pages
from fivefold.gnn.storage.reader import RowReader

_CHUNK_PAGES = 4096  # 16 MiB at a time when all is verified
_TOLD_EVERY_BYTES = 256 << 20
_LARGE_BYTES = 4 << 20  # from here on the engine is faster, and leaves the page cache alone
_ADVICE = {
    "random": mmap.MADV_RANDOM,
    "normal": mmap.MADV_NORMAL,
    "sequential": mmap.MADV_SEQUENTIAL,
}


class Container(Closing):
    """An open container file; made by :meth:`open` or :meth:`ContainerWriter.commit`.

    Attributes:
        path: Where the file is.
        kind: What it is for.
        attributes: What its writer noted.
        sections: The arrays in it, by name.
        file_id: Seed of its page checksums, a hash of kind, schema and first attributes.
        fingerprint: Hash over the manifest and the page checksums, so over all contents: 32
            hexadecimal digits, equal for equal files.
        page_checksums: One number per page before the table; the header's is 0.
        nbytes: Length of the file.

    Examples:
        >>> import tempfile
        >>> from fivefold.gnn.storage import ContainerWriter
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     schema = {"y": (np.int64, (4,))}
        ...     writer = ContainerWriter(
        ...         f"{folder}/a.fvf", kind="demo", sections=schema, attributes={"classes": 3}
        ...     )
        ...     writer.write("y", 0, np.array([2, 0, 1, 1]))
        ...     writer.commit().close()
        ...     with Container.open(f"{folder}/a.fvf", kind="demo", verify="full") as container:
        ...         print(container.attributes, container.read("y", 1, 3))
        {'classes': 3} [0 1]
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._lock = threading.Lock()
        header = _read_header(descriptor, path)
        table, manifest = _read_ends(descriptor, header, path)
        sections, attributes = decode_manifest(manifest, str(path))
        _check_places(sections, header, path)
        self.kind = header.kind
        self.file_id = header.file_id
        self.nbytes = header.file_bytes
        self.attributes: dict[str, Any] = attributes
        self.sections: Mapping[str, Section] = MappingProxyType(sections)
        self.page_checksums: NDArray[np.uint32] = table
        digest = hashlib.blake2b(manifest, digest_size=16)
        digest.update(table.tobytes())
        self.fingerprint = digest.hexdigest()
        self._descriptor = descriptor
        self._finalizer = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        kind: str | None = None,
        verify: Literal["manifest", "full"] = "manifest",
    ) -> Self:
        """Open a file and check it.

        Args:
            path: The file.
            kind: What it must be for; None takes any.
            verify: "manifest" checks header, length, manifest and the table of page checksums;
                "full" every page as well. Pages are checked in any case when they are read.

        Raises:
            ConfigurationError: ``verify`` is neither.
            DataError: There is no file, or it is foreign, of another kind or version, truncated
                or damaged.
            StorageError: The disk refused.
        """
        require_one_of(verify, ("manifest", "full"), f"verify is {verify!r}")
        place = Path(path).absolute()
        try:
            descriptor = open_to_read(place)
        except FileNotFoundError:
            hint = "check the path"
            if place.with_name(place.name + ".partial").exists():
                hint = "it is unfinished: run what makes it again, with resuming"
            raise DataError(f"there is no file {place}", hint=hint) from None
        except OSError as error:
            raise storage_error(error.errno or 0, place, "opening") from error
        container = None
        try:
            container = cls(place, descriptor)
            container.check_kind(kind)
            if verify == "full":
                container.verify()
        except BaseException:
            if container is None:
                os.close(descriptor)
            else:
                container.close()
            raise
        return container

    def check_kind(self, kind: str | None) -> None:
        """Check that the file is of a kind; None takes any.

        Raises:
            DataError: It is for something else.
        """
        if kind is not None and self.kind != kind:
            raise DataError(
                f"{self.path} is of kind {self.kind!r}, {kind!r} was expected",
                hint="check the path; files may have been swapped",
            )

    @property
    def descriptor(self) -> int:
        """Return the file descriptor.

        Raises:
            StorageError: The file has been closed.
        """
        if self._descriptor < 0:
            raise closed_error(self.path)
        return self._descriptor

    def section(self, name: str) -> Section:
        """Return a section by name.

        Raises:
            DataError: There is none.
        """
        try:
            return self.sections[name]
        except KeyError:
            raise DataError(
                f"{self.path} has no section {name!r}",
                hint=f"it has {', '.join(self.sections)}",
            ) from None

    def read(
        self,
        name: str,
        start: int = 0,
        stop: int | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> Array:
        """Return the rows of a section, their pages verified.

        Args:
            name: Section.
            start: First row.
            stop: Row after the last; None reads to the end.
            progress: Called with the rows read and their number.

        Returns:
            A new array.

        Raises:
            ConfigurationError: The range does not lie in the section.
            DataError: No such section, or a page is damaged.
            StorageError: The disk refused, or the file has been truncated or closed.
        """
        section = self.section(name)
        last = section.row_after(start, stop, section.num_rows)
        count = (last - start) * section.row_bytes
        if count < _LARGE_BYTES:
            return self._read_small(section, start, last)
        rows = aligned_empty((last - start, *section.shape[1:]), section.dtype)
        step = last - start
        if progress is not None:
            step = max(1, _TOLD_EVERY_BYTES // section.row_bytes)
        with self._reader(section) as reader:
            for first in range(start, last, step):
                part = min(step, last - first)
                reader.read_runs([first], [part], [first - start], rows)
                if progress is not None:
                    progress(first - start + part, last - start)
        return rows

    def blocks(self, name: str, rows: int = 1 << 20, *, overlap: int = 0) -> Iterator[Array]:
        """Yield a section in verified blocks of rows.

        Args:
            name: Section.
            rows: Rows of a block; the last has what remains.
            overlap: How many rows of the next block stand at the end of each, too.
        """
        num_rows = self.section(name).num_rows
        for start in range(0, max(num_rows - overlap, 1), rows):
            yield self.read(name, start, min(start + rows + overlap, num_rows))

    def _read_small(self, section: Section, start: int, stop: int) -> Array:
        """Return a few pages, through the page cache."""
        begin = section.offset + start * section.row_bytes
        count = (stop - start) * section.row_bytes
        shape = (stop - start, *section.shape[1:])
        if count == 0:
            self.descriptor  # noqa: B018 - raises if the file is closed
            return np.empty(shape, section.dtype)
        first = begin // PAGE_BYTES * PAGE_BYTES
        pages = aligned_empty(aligned(begin + count) - first)
        # The lock keeps close() from letting the number of the descriptor go to another file.
        with self._lock:
            read_into(self.descriptor, pages, first, self.path)
        page = first // PAGE_BYTES
        found = hash_pages(pages, self.file_id, page)
        wrong = np.flatnonzero(found != self.page_checksums[page : page + len(found)])
        if len(wrong):
            raise self.damaged_page(page + int(wrong[0]))
        return pages[begin - first :][:count].view(section.dtype).reshape(shape)

    def _reader(self, section: Section) -> RowReader:
        with self._lock:
            return RowReader(self, section)

    def damaged_page(self, page: int) -> DataError:
        """Return the error for a page whose checksum is wrong."""
        offset = page * PAGE_BYTES
        names = [s.name for s in self.sections.values() if s.offset <= offset < s.offset + s.nbytes]
        place = f" (section {names[0]!r})" if names else ""
        return DataError(
            f"page {page} of {self.path} at offset {offset}{place} is damaged: "
            "its checksum is wrong",
            hint="run `fivefold gnn verify`, then make the file again or copy it again",
        )

    def memory_map(
        self, name: str, advice: Literal["random", "normal", "sequential"] = "random"
    ) -> Array:
        """Return a section as a read-only array that the system pages in; nothing is verified here.

        Verify the file before, and guard the map with a :class:`WatchedFile`, as
        ``Adjacency.open`` does.

        Args:
            name: Section.
            advice: How it will be read. With "normal" each fault of a random access may read
                megabytes around it.

        Returns:
            The array. A file that is truncated while it is mapped ends the process (SIGBUS).

        Raises:
            ConfigurationError: Unknown advice.
            DataError: No such section.
            StorageError: The file has been closed, or cannot be mapped.
        """
        section = self.section(name)
        require_one_of(advice, _ADVICE, f"advice is {advice!r}")
        if section.nbytes == 0:
            return np.empty(section.shape, section.dtype)
        try:
            with self._lock:
                mapped = mmap.mmap(
                    self.descriptor,
                    section.nbytes,
                    prot=mmap.PROT_READ,
                    flags=mmap.MAP_SHARED,
                    offset=section.offset,
                )
            mapped.madvise(_ADVICE[advice])
        except ValueError as error:
            raise DataError(
                f"{self.path} cannot be mapped: {error}", hint="it may have been truncated"
            ) from error
        return np.frombuffer(mapped, section.dtype).reshape(section.shape)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Read every page and compare it with its checksum.

        Args:
            progress: Called with the bytes done and the bytes in all.

        Raises:
            DataError: A page is damaged.
            StorageError: The disk refused, or the file has been truncated or closed.
        """
        num_pages = len(self.page_checksums) - 1
        total = num_pages * PAGE_BYTES
        pages = make_section("pages", np.uint8, (num_pages, PAGE_BYTES), offset=PAGE_BYTES)
        buffer = aligned_empty((min(_CHUNK_PAGES, num_pages), PAGE_BYTES))
        with self._reader(pages) as reader:
            for first in range(0, num_pages, _CHUNK_PAGES):
                count = min(_CHUNK_PAGES, num_pages - first)
                reader.read_runs([first], [count], [0], buffer)
                if progress is not None:
                    progress((first + count) * PAGE_BYTES, total)

    def close(self) -> None:
        """Let go of the file; arrays and maps that were handed out stay valid."""
        with self._lock:
            self._descriptor = -1
            self._finalizer()

    def __repr__(self) -> str:
        return f"Container({str(self.path)!r}, kind={self.kind!r}, {len(self.sections)} sections)"


def _read_header(descriptor: int, path: Path) -> Header:
    found = os.fstat(descriptor).st_size
    page = np.empty(min(found, PAGE_BYTES), np.uint8)
    read_into(descriptor, page, 0, path)
    header = Header.decode(page.tobytes(), str(path))
    if found != header.file_bytes:
        state = "truncated" if found < header.file_bytes else "longer than it was written"
        raise DataError(
            f"{path} is {state}: it has {found} bytes, its header says {header.file_bytes}",
            hint="make the file again, or copy it again from its source",
        )
    return header


def _read_ends(descriptor: int, header: Header, path: Path) -> tuple[NDArray[np.uint32], bytes]:
    found = []
    for name, offset, count, expected in (
        ("table of page checksums", header.table_offset, header.table_bytes, header.table_hash),
        ("manifest", header.manifest_offset, header.manifest_bytes, header.manifest_hash),
    ):
        pages = np.empty(aligned(count), np.uint8)
        read_into(descriptor, pages, offset, path)
        if xxhash.xxh64_intdigest(pages.data) != expected:
            raise DataError(
                f"the {name} of {path} is damaged: its checksum is wrong",
                hint="make the file again, or copy it again from its source",
            )
        found.append(pages[:count])
    table, manifest = found
    checksums = table.view("<u4")
    checksums.flags.writeable = False
    return checksums, manifest.tobytes()


def _check_places(sections: dict[str, Section], header: Header, path: Path) -> None:
    covered = header.table_bytes // 4 * PAGE_BYTES
    for section in sections.values():
        offset = section.offset
        on_page = isinstance(offset, int) and offset >= PAGE_BYTES and offset % PAGE_BYTES == 0
        if not on_page or offset + section.nbytes > covered:
            raise DataError(
                f"section {section.name!r} of {path} does not lie in the file",
                hint="make the file again",
            )
