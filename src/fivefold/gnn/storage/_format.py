"""The container format: where things lie in a file, and how its header and manifest are coded.

Page 0 is the header; then come the sections, the page checksums (one uint32 per page before this
place; the header's is 0) and the manifest in JSON, each padded with zeros to whole pages. All is
little-endian, every byte is under a checksum, and equal contents give equal files.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash

from fivefold.errors import ConfigurationError, DataError
from fivefold.files import parse_json
from fivefold.gnn.storage.pages import PAGE_BYTES, Bytes, aligned

MAGIC = b"\x89FVF\r\n\x1a\n"  # as PNG's: a transfer in text mode, or cut to 7 bits, is seen
FORMAT_VERSION = 1
_HEADER = struct.Struct("<8sIIQ32sQQQQQQQ")
_CHECKED = PAGE_BYTES - 8
_KIND_BYTES = 32


def padded(data: bytes | Bytes) -> Bytes:
    """Return the bytes followed by zeros up to a page boundary."""
    pages = np.zeros(aligned(len(data)), np.uint8)
    pages[: len(data)] = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    return pages


@dataclass(frozen=True, kw_only=True)
class Section:
    """One array in a container; the first dimension of its shape counts rows."""

    name: str
    dtype: np.dtype[Any]  # little-endian
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file, a multiple of 4096

    @property
    def num_rows(self) -> int:
        """Return the length of the first dimension."""
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Return the bytes of the array, without the padding."""
        return self.num_rows * self.row_bytes

    def row_after(self, start: int, stop: int | None, num_rows: int) -> int:
        """Return where a range of rows ends that must lie in the first ``num_rows``."""
        last = num_rows if stop is None else stop
        if not 0 <= start <= last <= num_rows:
            raise ConfigurationError(
                f"rows {start} to {last} of section {self.name!r} were asked for",
                hint=f"it has {num_rows} rows",
            )
        return last

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's entry."""
        return {
            "name": self.name,
            "dtype": self.dtype.str,
            "shape": list(self.shape),
            "offset": self.offset,
            "bytes": self.nbytes,
        }


def make_section(name: str, dtype: Any, shape: tuple[int, ...], *, offset: int) -> Section:
    """Return a section, checked."""
    kind = np.dtype(dtype).newbyteorder("<")
    if kind.hasobject or kind.fields is not None or kind.subdtype is not None:
        raise ConfigurationError(
            f"section {name!r} has dtype {kind}, which has no fixed plain layout",
            hint="use one section per field, of numbers or fixed-length bytes",
        )
    if not name or not shape or any(size < 0 for size in shape):
        raise ConfigurationError(
            f"section {name!r} has shape {shape}",
            hint="name each section and give it a first dimension that counts rows",
        )
    return Section(name=name, dtype=kind, shape=tuple(int(n) for n in shape), offset=offset)


class Header(NamedTuple):
    """The first page of a file; hashes are XXH64 of a part and its padding."""

    file_id: int  # seed of its page checksums
    kind: str  # what the file is for
    file_bytes: int
    table_offset: int  # of the page checksums
    table_bytes: int  # without padding
    table_hash: int
    manifest_offset: int
    manifest_bytes: int
    manifest_hash: int

    def encode(self) -> bytes:
        """Return the page."""
        fields = (MAGIC, FORMAT_VERSION, PAGE_BYTES, self.file_id, encode_kind(self.kind))
        page = _HEADER.pack(*fields, *self[2:]).ljust(_CHECKED, b"\0")
        return page + struct.pack("<Q", xxhash.xxh64_intdigest(page))

    @classmethod
    def decode(cls, page: bytes, path: str) -> Header:
        """Read the first page of a file."""
        if not page.startswith(MAGIC):
            state = "an unfinished or foreign file" if page else "empty"
            raise DataError(
                f"{path} is no fivefold container ({state}: it does not start with the magic "
                "bytes)",
                hint="check the path; a file being written ends in .partial until it is complete",
            )
        version = struct.unpack("<I", page[8:12].ljust(4, b"\0"))[0]
        if version != FORMAT_VERSION:
            raise DataError(
                f"{path} has format version {version}, this fivefold reads {FORMAT_VERSION}",
                hint="make the file again with this version, or use the version that wrote it",
            )
        if len(page) < PAGE_BYTES:
            raise DataError(
                f"{path} is truncated: its header has {len(page)} of {PAGE_BYTES} bytes",
                hint="make the file again",
            )
        if struct.unpack("<Q", page[_CHECKED:])[0] != xxhash.xxh64_intdigest(page[:_CHECKED]):
            raise DataError(
                f"the header of {path} is damaged: its checksum is wrong",
                hint="make the file again, or copy it again from its source",
            )
        file_id, kind, *places = _HEADER.unpack(page[: _HEADER.size])[3:]
        return cls(file_id, kind.rstrip(b"\0").decode(), *places)


def encode_kind(kind: str) -> bytes:
    """Return a kind as 32 bytes."""
    code = kind.encode()
    if not 0 < len(code) <= _KIND_BYTES:
        raise ConfigurationError(
            f"kind {kind!r} has {len(code)} bytes", hint=f"use 1 to {_KIND_BYTES} bytes"
        )
    return code.ljust(_KIND_BYTES, b"\0")


def encode_json(value: Any) -> bytes:
    """Return JSON with sorted keys and no spaces; NumPy's values become plain ones."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"attributes cannot be stored as JSON: {error}",
            hint="use numbers, text, booleans, None, lists and dictionaries with text keys",
        ) from error
    return text.encode()


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def make_file_id(kind: str, schema: Mapping[str, Any], attributes: Mapping[str, Any]) -> int:
    """Return the id of a file: a hash of what is known before its contents."""
    return xxhash.xxh64_intdigest(
        encode_json({"kind": kind, "schema": schema, "attributes": attributes})
    )


def decode_manifest(data: bytes, path: str) -> tuple[dict[str, Section], dict[str, Any]]:
    """Return the sections and attributes from a manifest whose hash was right."""
    try:
        manifest = parse_json(data, where=f"the manifest of {path}", finite=False)
        sections = [
            make_section(entry["name"], entry["dtype"], entry["shape"], offset=entry["offset"])
            for entry in manifest["sections"]
        ]
        return {section.name: section for section in sections}, manifest["attributes"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"the manifest of {path} cannot be read: {error!r}", hint="make the file again"
        ) from error
