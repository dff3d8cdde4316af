"""Numbers for names: edge tables whose ids are text, or integers with gaps, larger than memory.

Three passes over files, none of which holds all names. First every name of the tables, with its
place, goes to the bucket of its hash. Then each bucket alone finds its distinct names, exactly,
and gives each a number: its row in the node table, or without one the next free number. Last the
(place, number) pairs are brought into the order of places by the same counting sort that orders
edges, and written as a plain array of edges.

The number of buckets follows from the tables' sizes alone, so that the numbers do not depend on
the memory.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import ipc, parquet

from fivefold._compiler import njit
from fivefold.errors import DataError
from fivefold.files import read_checked_json, write_checked_json
from fivefold.gnn.data._dataset import NAMES_FILE
from fivefold.gnn.data._write_graph import EdgeBuckets
from fivefold.gnn.data.parts import EdgeBlock, Progress
from fivefold.gnn.storage.arrays import Ids

_BUCKET_BYTES = 16 << 20
_CHUNK_BYTES = 4 << 20
_FILES = ("names.parquet", "names.work/edges.npy", "names.work/weights.npy")
_MOST_BUCKETS = 256
_SCHEMA = pa.schema([("name", pa.string()), ("place", pa.int64())])
_OFFSET, _PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)
_SHIFT = np.uint64(32)


@njit
def hash_texts(offsets: Any, data: Any, out: Any) -> None:
    """Hash the bytes ``data[offsets[i]:offsets[i + 1]]`` by FNV-1a, its halves folded together."""
    for index in range(out.size):
        value = _OFFSET
        for place in range(offsets[index], offsets[index + 1]):
            value = (value ^ np.uint64(data[place])) * _PRIME
        out[index] = value ^ (value >> _SHIFT)


class NameBuckets:
    """Names with their places, by hash, in files."""

    def __init__(self, folder: Path, table_bytes: int) -> None:
        self.folder = folder
        self.count = min(_MOST_BUCKETS, 1 + table_bytes // _BUCKET_BYTES)
        self.places = 0
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._writers = [
            ipc.new_stream(str(self._path(bucket)), _SCHEMA) for bucket in range(self.count)
        ]

    def _path(self, bucket: int) -> Path:
        return self.folder / f"names_{bucket:04d}.arrow"

    def add(self, names: Any, places: Ids) -> None:
        """Take an Arrow array of text, each with its place."""
        if len(names) == 0:
            return
        hashes = np.empty(len(names), np.uint64)
        _, offsets, data = names.buffers()
        first = np.frombuffer(offsets, np.int32)[names.offset : names.offset + len(names) + 1]
        text = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
        hash_texts(first, text, hashes)
        buckets = (hashes % np.uint64(self.count)).astype(np.int64)
        order = np.argsort(buckets, kind="stable")
        ends = np.searchsorted(buckets[order], np.arange(self.count + 1))
        table = pa.record_batch(
            [names.take(pa.array(order)), pa.array(places[order])], schema=_SCHEMA
        )
        for bucket in np.flatnonzero(np.diff(ends)).tolist():
            part = table.slice(ends[bucket], ends[bucket + 1] - ends[bucket])
            self._writers[bucket].write_batch(part)

    def close(self) -> None:
        """Close the files: no more names come."""
        for writer in self._writers:
            writer.close()
        self._writers = []

    def distinct(self, bucket: int) -> tuple[Any, Ids, Ids]:
        """Return a bucket's distinct names, the code of every entry, and every entry's place."""
        with ipc.open_stream(str(self._path(bucket))) as reader:
            table = reader.read_all()
        encoded = table.column("name").combine_chunks().dictionary_encode()
        if isinstance(encoded, pa.ChunkedArray):  # an empty bucket, in some versions of Arrow
            encoded = encoded.combine_chunks()
        codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        return encoded.dictionary, codes, table.column("place").to_numpy()


def number_names(
    batches: Iterator[tuple[Any, Ids]],
    work: Path,
    names_file: Path,
    *,
    num_rows: int | None,
    sizes: tuple[int, int],
    progress: Progress,
) -> int:
    """Write ``edges.npy`` in the work folder, with numbers for names."""
    table_bytes, memory_bytes = sizes
    buckets = NameBuckets(work / "names", table_bytes)
    places = 0
    for names, at in batches:
        buckets.add(names, at)
        places += at.size
        progress("names read", places, 0)
    buckets.close()
    ends = EdgeBuckets(
        work / "ends",
        num_nodes=max(1, places - (num_rows or 0)),
        num_sources=max(1, places),
        expected_edges=places,
        weighted=False,
        memory_bytes=memory_bytes,
    )
    ends.resume("")  # from the start: numbering is done as a whole or not at all
    if num_rows is None:
        count = _by_bucket(buckets, ends, names_file)
    else:
        _by_row(buckets, ends, num_rows)
        count = num_rows
    ends.finish_adding()
    _write_edges(work / "edges.npy", ends, progress)
    shutil.rmtree(work / "names")
    ends.remove()
    return count


def _by_bucket(buckets: NameBuckets, ends: EdgeBuckets, names_file: Path) -> int:
    """Give free numbers, bucket after bucket; write the names to a file in that order."""
    first = 0
    with parquet.ParquetWriter(names_file, pa.schema([("name", pa.string())])) as writer:
        for bucket in range(buckets.count):
            names, codes, places = buckets.distinct(bucket)
            writer.write_table(pa.table({"name": names.cast(pa.string())}))
            ends.add(EdgeBlock(first + codes, places, bucket + 1))
            first += len(names)
    return first


def _by_row(buckets: NameBuckets, ends: EdgeBuckets, num_rows: int) -> None:
    """Number names by their row in the node table."""
    for bucket in range(buckets.count):
        names, codes, places = buckets.distinct(bucket)
        in_table = places < num_rows
        rows = np.full(len(names), -1, np.int64)
        rows[codes[in_table]] = places[in_table]
        if np.count_nonzero(in_table) != np.count_nonzero(rows >= 0):
            twice = int(np.argmax(np.bincount(codes[in_table])))
            raise DataError(
                f"the node table has node {names[twice].as_py()!r} twice",
                hint="leave one row per node",
            )
        if np.any(rows < 0):
            unknown = int(np.flatnonzero(rows < 0)[0])
            raise DataError(
                f"an edge names node {names[unknown].as_py()!r}, which the node table has not",
                hint="add it to the node table, or leave the edge out",
            )
        ends.add(EdgeBlock(rows[codes[~in_table]], places[~in_table] - num_rows, bucket + 1))


def _write_edges(path: Path, ends: EdgeBuckets, progress: Progress) -> None:
    """Write the numbers in the order of places: they are the edges, end after end."""
    total = ends.num_edges
    with path.open("wb") as file:
        header = {
            "descr": np.dtype(np.int64).str,
            "fortran_order": False,
            "shape": (total // 2, 2),
        }
        np.lib.format.write_array_header_1_0(file, header)
        done = 0
        for bucket in range(ends.num_buckets) if total else ():
            for piece in ends.pieces(bucket):
                numbers = piece.values["sources"]
                numbers.astype(np.int64).tofile(file)
                done += numbers.size
                progress("names numbered", done, total)


def write_numbering(folder: Path, recipe: Mapping[str, Any], num_nodes: int) -> dict[str, Any]:
    """Note in ``names.json`` what was numbered, with checksums of the files that came of it."""
    files = {name: _checksum(folder / name) for name in _FILES if (folder / name).is_file()}
    state = {"recipe": dict(recipe), "num_nodes": num_nodes, "files": files}
    write_checked_json(folder / NAMES_FILE, state)
    return state


def read_numbering(folder: Path) -> dict[str, Any] | None:
    """Return what ``names.json`` says; None where names were not numbered."""
    if not (folder / NAMES_FILE).is_file():
        return None
    try:
        state = read_checked_json(folder / NAMES_FILE)
    except DataError as error:
        hint = f"remove {folder / NAMES_FILE} and run the same command again"
        raise DataError(error.message, hint=hint) from error
    for name, expected in state["files"].items():
        if (folder / name).is_file() and _checksum(folder / name) != expected:
            raise DataError(
                f"{folder / name} is damaged: its checksum is wrong",
                hint=f"remove {folder / NAMES_FILE} and run the same command again",
            )
    return state


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum
