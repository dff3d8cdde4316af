"""How packing moves the rows: row ``order[i]`` of the features becomes row i of the output.

- ``resident``: the features (F bytes) fit the memory; the output (R) is gathered in order.
- ``passes``: each window of the output is filled by one pass over F; needs no scratch.
- ``spill``: one pass over F to cells on disk by window, then window by window: F + R, 2 R.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fivefold.errors import InfeasibleError
from fivefold.gnn.planning._caches import Caches
from fivefold.gnn.planning.id_sets import IdSet, is_dense
from fivefold.gnn.sampling import SampleFile
from fivefold.gnn.storage.pages import PAGE_BYTES
from fivefold.units import format_bytes

STRATEGIES = ("resident", "passes", "spill")
INDEX_BYTES_PER_ROW = 40  # numbers that routing keeps for each row of a window or a chunk
_SMALLEST_MEMORY_BYTES = 1 << 19
_LARGEST_CHUNK_BYTES = 8 << 20  # written while the next one is filled; larger ones gain nothing
_LARGEST_SOURCE_BYTES = 32 << 20  # read at a time; all threads wait at the end of each
_THREADS_FROM_BYTES = 32 << 20  # with less, buffers would be too small for more threads
_CELL_BYTES = 3 << 19  # large enough for a direct write, small enough for windows to be many
_LEAST_WINDOW_BYTES = 16 << 20  # smaller ones cost more calls than they save memory
_LARGEST_MARK_BYTES = 128 << 20  # a mark waits for the disk; this much is redone after a kill
_RESIDENT_WINDOW_BYTES = 256 << 20  # how much is redone after a kill
_LEDGER_BYTES_PER_PAGE = 10
_BYTES_PER_NODE = 96  # of each batch whose record is being built
_SAMPLED_COPIES = 5  # of its sampled record: read, decoded, renumbered, encoded
_MOST_RECORDING_THREADS = 2
DENSE_SHARE = 8  # a table may take an eighth of the memory, or answers come from sorted lists
RECORD_WRITER_BYTES = 4 << 20  # through which a writer of records copies what is not aligned
_PROBE_ERROR = 0.15  # two probes of one disk differ by as much
_DEARER = 1.1  # bytes that rows may cost more, so that records are made in the same time
_LARGEST_RANGES = 65_535  # range numbers are sorted as 16-bit keys, which is a radix sort


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A way of packing: its cost, and its sizes, with which a resumed run agrees."""

    NUM_CHUNKS: ClassVar[int] = 3  # one is filled while two are written

    strategy: str
    read_bytes: int
    written_bytes: int
    scratch_bytes: int  # largest space that the spill takes
    seconds: float  # what the disk needs for both
    source_rows: int  # of the features, read at a time
    window_rows: int  # of the output, put in order at a time
    chunk_rows: int  # written at a time
    steps_per_mark: int = 1  # windows or ranges after which progress is made durable

    @property
    def moved_bytes(self) -> int:
        """Return bytes read and written."""
        return self.read_bytes + self.written_bytes

    def buffer_bytes(self, row_bytes: int) -> int:
        """Return the memory of the buffers and of their rows' indices."""
        chunks = self.NUM_CHUNKS * self.chunk_rows * row_bytes
        indexed = self.window_rows * (row_bytes + INDEX_BYTES_PER_ROW)
        if self.strategy == "resident":
            return chunks + self.source_rows * row_bytes
        if self.strategy == "passes":
            return chunks + indexed + 2 * self.source_rows * row_bytes
        return chunks + 2 * indexed


@dataclass(frozen=True, kw_only=True)
class PackingTask:
    """Rows to be moved into the output's sections, and the speeds of the disk that has them."""

    num_nodes: int
    row_bytes: int
    sections: Mapping[str, int]  # rows of each
    read_bytes_per_s: float
    write_bytes_per_s: float

    @property
    def output_bytes(self) -> int:
        """Return the bytes of all sections."""
        return self.row_bytes * sum(self.sections.values())

    @property
    def ledger_bytes(self) -> int:
        """Return the memory of the pages' checksums and states, of rows and spill."""
        return _LEDGER_BYTES_PER_PAGE * self.output_bytes // PAGE_BYTES

    def ways(self, memory_bytes: int) -> list[Geometry]:
        """Return every way that fits the memory of buffers and indices, cheapest first.

        Several passes, which fill all of the memory, come after a spill that costs as much: else
        the noise of a probe would decide whether gigabytes are taken.
        """
        threads, block_bytes = reader_shape(memory_bytes)
        memory_bytes -= 2 * threads * block_bytes  # of two engines
        if memory_bytes < _smallest_bytes(self.row_bytes):
            least = least_memory_bytes(self.row_bytes) + self.ledger_bytes
            raise InfeasibleError(
                f"memory for packing rows of {self.row_bytes} bytes is short",
                hint=f"give {format_bytes(least)} or more",
            )
        sizes = [_size(name, self, memory_bytes) for name in STRATEGIES]
        ways = [
            Geometry(
                **way,
                seconds=way["read_bytes"] / self.read_bytes_per_s
                + way["written_bytes"] / self.write_bytes_per_s,
            )
            for way in sizes
            if way is not None
        ]

        def seconds(way: Geometry) -> float:
            passes = way.strategy == "passes" and way.read_bytes > self.num_nodes * self.row_bytes
            return way.seconds * (1 + _PROBE_ERROR if passes else 1)

        return sorted(ways, key=seconds)

    def choose(
        self, memory_bytes: int, *, free_bytes: float = math.inf, strategy: str | None = None
    ) -> Geometry:
        """Return the cheapest way that fits the memory and the free disk space."""
        ways = [way for way in self.ways(memory_bytes) if strategy in (None, way.strategy)]
        if not ways:
            raise InfeasibleError(
                f"strategy {strategy!r} does not fit {format_bytes(memory_bytes)} of memory",
                hint="leave the strategy open, or give more memory",
            )
        for way in ways:
            if self.output_bytes + way.scratch_bytes <= free_bytes:
                return way
        short = self.output_bytes + min(way.scratch_bytes for way in ways) - free_bytes
        raise InfeasibleError(
            f"the packed rows take {format_bytes(self.output_bytes)}, {format_bytes(short)} more "
            "than is free on the disk or left of its budget",
            hint="free some space, or plan again with a disk budget that fits",
        )

    def settle(self, memory_bytes: int, beside_bytes: int, **limits: Any) -> tuple[Geometry, bool]:
        """Choose with room for ``beside_bytes`` of the records where that costs little.

        Returns the way, and whether records are made in the same time.
        """
        memory_bytes -= self.ledger_bytes
        alone = self.choose(memory_bytes, **limits)
        try:
            beside = self.choose(memory_bytes - beside_bytes, **limits)
        except InfeasibleError:
            return alone, False
        cheap = beside.moved_bytes <= _DEARER * alone.moved_bytes
        return (beside, True) if cheap else (alone, False)


def recording_bytes(
    samples: SampleFile, caches: Caches, *, segment_rows: int, memory_bytes: int
) -> int:
    """Return the memory for making records: tables of the caches, a segment, batches under way."""
    numbers, num_nodes = range(samples.num_batches), samples.num_nodes
    nodes = max(map(samples.num_nodes_of, numbers), default=0)
    sampled = max(map(samples.record_bytes_of, numbers), default=0)
    batch, bits = _BYTES_PER_NODE * nodes + _SAMPLED_COPIES * sampled, IdSet.bytes_for(num_nodes)
    if is_dense(nodes, num_nodes):
        batch += bits
    cached = len(caches.device_rows) + len(caches.host_rows)
    if caches.schedule is not None:
        rows = np.concatenate([caches.device_rows, caches.schedule.admitted_rows])
        cached = len(np.unique(rows)) + 2 * caches.num_host_slots
    tables = 4 * cached + (bits if bits <= memory_bytes // DENSE_SHARE else 8 * cached)
    order = segment_rows * (4 if num_nodes < 2**32 else 8)
    return tables + order + recording_threads() * batch


def recording_threads() -> int:
    """Return how many threads make records: one core is left to those who move rows."""
    return min(_MOST_RECORDING_THREADS, max(1, (os.cpu_count() or 1) - 1))


def least_memory_bytes(row_bytes: int) -> int:
    """Return memory with which rows of this size can be packed."""
    return _smallest_bytes(row_bytes) * 5 // 4


def reader_shape(memory_bytes: int) -> tuple[int, int]:
    """Return the threads of a reading engine and the bytes of a request.

    The buffers of two engines take an eighth of the memory or less. With four threads the disk
    reads for two of them while the other two check and copy.
    """
    threads = 4 if memory_bytes >= _THREADS_FROM_BYTES else 2
    most = memory_bytes // (16 * threads)
    return threads, 1 << max(14, min(20, most.bit_length() - 1))


def _smallest_bytes(row_bytes: int) -> int:
    return max(_SMALLEST_MEMORY_BYTES, 16 * (row_bytes + INDEX_BYTES_PER_ROW))


def _num_windows(sections: Mapping[str, int], window_rows: int) -> int:
    return sum(-(-rows // window_rows) for rows in sections.values())


def _size(name: str, task: PackingTask, memory_bytes: int) -> dict[str, Any] | None:
    """Return sizes and bytes of one way, or None where it cannot be."""
    num_nodes, row_bytes, sections = task.num_nodes, task.row_bytes, task.sections
    cost = row_bytes + INDEX_BYTES_PER_ROW
    features, output = num_nodes * row_bytes, task.output_bytes
    chunk_bytes = min(memory_bytes // (4 * Geometry.NUM_CHUNKS), _LARGEST_CHUNK_BYTES)
    chunk_rows = _whole_pages(chunk_bytes // cost, row_bytes)
    rest = memory_bytes - Geometry.NUM_CHUNKS * chunk_rows * cost
    way: dict[str, Any] = {"strategy": name, "chunk_rows": chunk_rows, "scratch_bytes": 0}
    if name == "resident":
        if features > rest:
            return None
        return way | {
            "source_rows": max(num_nodes, 1),
            "window_rows": _whole_pages(_RESIDENT_WINDOW_BYTES // row_bytes, row_bytes),
            "read_bytes": features,
            "written_bytes": output,
        }
    if name == "passes":
        # Read into two buffers; written from the window itself, without any.
        source_bytes = min(memory_bytes // 8, _LARGEST_SOURCE_BYTES)
        source_rows = _whole_pages(source_bytes // cost, row_bytes)
        rows = _whole_pages((memory_bytes - 2 * source_rows * cost) // cost, row_bytes)
        windows = _num_windows(sections, rows)
        return way | {
            "source_rows": source_rows,
            "window_rows": rows,
            "read_bytes": windows * features,
            "written_bytes": output,
        }
    most = _whole_pages(rest // 2 // cost, row_bytes)
    rows = _spill_rows(num_nodes, row_bytes, most=most)
    if rows > most:
        return None
    cells = _num_windows(sections, rows) * -(-max(num_nodes, 1) // rows)
    spill = output + cells * PAGE_BYTES
    mark_bytes = min(_LARGEST_MARK_BYTES, memory_bytes // 3)
    return way | {
        "source_rows": rows,
        "window_rows": rows,
        "steps_per_mark": max(1, mark_bytes // (rows * row_bytes)),
        "read_bytes": features + spill,
        "written_bytes": output + spill,
        "scratch_bytes": spill,
    }


def _spill_rows(num_nodes: int, row_bytes: int, *, most: int) -> int:
    """Return the rows of a window and a range of the spill; above ``most`` where none will do.

    A cell is what one window takes from one range: with windows and ranges of W bytes each and F
    bytes of features, about W W / F bytes. Small windows stay in the processor's cache, touch less
    fresh memory and wait less at both ends, so they are only as large as cells need.
    """
    wanted = math.isqrt(_CELL_BYTES * num_nodes * row_bytes)
    rows = _whole_pages(max(wanted, _LEAST_WINDOW_BYTES) // row_bytes, row_bytes)
    return max(min(rows, most), -(-num_nodes // _LARGEST_RANGES))


def _whole_pages(rows: int, row_bytes: int) -> int:
    """Return the largest number of rows up to ``rows`` that ends on a page, where there is one."""
    step = PAGE_BYTES // math.gcd(PAGE_BYTES, row_bytes)
    return rows // step * step if rows >= step else max(rows, 1)
