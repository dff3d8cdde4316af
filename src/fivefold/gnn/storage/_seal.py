"""The end of writing a file: every page known, then table and manifest, and last the header."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fivefold.errors import ConfigurationError
from fivefold.gnn.storage._format import Header, Section, aligned, encode_json, padded
from fivefold.gnn.storage._ledger import DIRTY, NEVER, PageLedger
from fivefold.gnn.storage._partial import PartialFile
from fivefold.gnn.storage._xxhash import PAGE_BYTES, hash_pages, xxh64

_CHUNK_PAGES = 2048


def seal(
    file: PartialFile,
    ledger: PageLedger,
    *,
    kind: str,
    sections: Mapping[str, Section],
    attributes: Mapping[str, Any],
    data_end: int,
) -> None:
    """Complete a file and wait until it is on the disk."""
    ledger.grow(data_end // PAGE_BYTES)
    for section in sections.values():
        _check_written(ledger, section)
    _read_back(file, ledger, data_end // PAGE_BYTES)
    table = ledger.checksums[: data_end // PAGE_BYTES].astype("<u4")
    entries = [section.to_json() for section in sections.values()]
    manifest = encode_json({"sections": entries, "attributes": attributes})
    table_pages, manifest_pages = padded(table.view(np.uint8)), padded(manifest)
    manifest_offset = data_end + len(table_pages)
    header = Header(
        kind=kind,
        file_id=ledger.file_id,
        file_bytes=manifest_offset + len(manifest_pages),
        table_offset=data_end,
        table_bytes=table.nbytes,
        table_hash=xxh64(table_pages),
        manifest_offset=manifest_offset,
        manifest_bytes=len(manifest),
        manifest_hash=xxh64(manifest_pages),
    )
    file.cut(header.file_bytes)
    file.put(table_pages, header.table_offset, None)
    file.put(manifest_pages, header.manifest_offset, None)
    file.sync()
    # Last, so that a file without its header is an unfinished one.
    file.put(np.frombuffer(header.encode(), np.uint8), 0, None)
    file.sync()


def _check_written(ledger: PageLedger, section: Section) -> None:
    first = section.offset // PAGE_BYTES
    missing = ledger.pages_in(NEVER, first, first + aligned(section.nbytes) // PAGE_BYTES)
    if len(missing):
        row = (int(missing[0]) * PAGE_BYTES - section.offset) // section.row_bytes
        raise ConfigurationError(
            f"section {section.name!r} was not written: {len(missing)} pages are missing, "
            f"the first near row {row}",
            hint="write every row, zeros as well, before commit",
        )


def _read_back(file: PartialFile, ledger: PageLedger, stop_page: int) -> None:
    """Hash the pages that came in pieces, from the file."""
    pages = ledger.pages_in(DIRTY, 1, stop_page)
    if len(pages) == 0:
        return
    for run in np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1):
        for begin in range(0, len(run), _CHUNK_PAGES):
            part = run[begin : begin + _CHUNK_PAGES]
            first = int(part[0])
            buffer = np.empty(len(part) * PAGE_BYTES, np.uint8)
            file.get(buffer, first * PAGE_BYTES)
            ledger.set_checksums(first, hash_pages(buffer, ledger.file_id, first))
