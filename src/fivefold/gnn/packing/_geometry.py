"""How packing moves the rows: windows, chunks and which of three ways is cheapest.

Packing is one large permutation with repetition: row ``order[i]`` of the features becomes row i
of the output. Three ways move the bytes; F are the features' bytes, R those of the output:

- ``resident``: the features fit the memory; each is read once, the output is gathered in order.
- ``passes``: a window of the output is held in memory and filled by one pass over the features;
  as many passes as there are windows. Reads ``windows * F``, writes R, needs no scratch.
- ``spill``: one pass over the features in ranges; the rows of a range go to the spill of the
  bucket (a window of the output) that wants them, then each bucket is read and put in order.
  Reads F + R, writes 2 R, needs R of scratch.

The output is the packed rows followed by the two caches' rows; a window never crosses from one of
these sections into the next. This module decides and does no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fivefold.errors import InfeasibleError
from fivefold.units import format_bytes

STRATEGIES = ("resident", "passes", "spill")
PAGE_BYTES = 4096
INDEX_BYTES_PER_ROW = 40  # numbers that routing keeps for each row of a window or a chunk
_SMALLEST_MEMORY_BYTES = 1 << 19
_LARGEST_CHUNK_BYTES = 8 << 20  # written while the next one is filled; larger ones gain nothing
_LARGEST_SOURCE_BYTES = 32 << 20  # read at a time; all threads wait at the end of each
_THREADS_FROM_BYTES = 32 << 20  # with less, buffers would be too small for more threads
_CELL_BYTES = 3 << 19  # large enough for a direct write, small enough for windows to be many
CHUNKS = 3  # one is filled while two are written
_LEAST_WINDOW_BYTES = 16 << 20  # smaller ones cost more calls than they save memory
_LARGEST_MARK_BYTES = 128 << 20  # a mark waits for the disk; this much is redone after a kill
_RESIDENT_WINDOW_BYTES = 256 << 20  # how much is redone after a kill
_LARGEST_RANGES = 65_535  # range numbers are sorted as 16-bit keys, which is a radix sort


@dataclass(frozen=True, kw_only=True)
class Window:
    """Rows ``start`` to ``stop`` of one output section; ``first`` counts over all sections."""

    section: str
    start: int
    stop: int
    first: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The way chosen and its sizes, in rows; kept in the job file, so that a resumed run agrees.

    Args:
        strategy: "resident", "passes" or "spill".
        source_rows: Rows of the features that are read at a time.
        window_rows: Rows of the output that are put in order at a time.
        chunk_rows: Rows that are written at a time.
        seconds: Predicted time.
        read_bytes: Bytes that will be read.
        written_bytes: Bytes that will be written.
        scratch_bytes: Largest space that the spill takes.
        steps_per_mark: Windows or ranges after which progress is made durable.
    """

    strategy: str
    source_rows: int
    window_rows: int
    chunk_rows: int
    seconds: float
    read_bytes: int
    written_bytes: int
    scratch_bytes: int
    steps_per_mark: int = 1

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain numbers and names."""
        return asdict(self)


def choose_geometry(  # noqa: PLR0913 - facts of the disk and of the rows, all by name
    *,
    num_nodes: int,
    row_bytes: int,
    sections: Mapping[str, int],
    memory_bytes: int,
    read_bytes_per_s: float,
    write_bytes_per_s: float,
    free_bytes: float = float("inf"),
    strategy: str | None = None,
) -> Geometry:
    """The cheapest way that fits the memory and the free disk space.

    Args:
        num_nodes: Rows of the features.
        row_bytes: Bytes of a row.
        sections: Rows of each output section.
        memory_bytes: What buffers and indices may take together.
        read_bytes_per_s: Sequential read speed of the disk.
        write_bytes_per_s: Sequential write speed.
        free_bytes: Free space, of which the output and the spill must leave something.
        strategy: Take this one; None lets the cost decide.

    Raises:
        InfeasibleError: No way fits.
    """
    threads, block_bytes = reader_shape(memory_bytes)
    memory_bytes -= 2 * threads * block_bytes  # of two engines
    smallest = max(_SMALLEST_MEMORY_BYTES, 16 * (row_bytes + INDEX_BYTES_PER_ROW))
    if memory_bytes < smallest:
        raise InfeasibleError(
            f"memory for packing rows of {row_bytes} bytes is short",
            hint=f"give {format_bytes(smallest * 5 // 4)} or more",
        )
    ways = [
        way
        for name in STRATEGIES
        if strategy in (None, name)
        for way in [_size(name, num_nodes, row_bytes, sections, memory_bytes)]
        if way is not None
    ]
    priced = [
        Geometry(
            **way,
            seconds=way["read_bytes"] / read_bytes_per_s + way["written_bytes"] / write_bytes_per_s,
        )
        for way in ways
    ]
    output_bytes = row_bytes * sum(sections.values())
    fitting = [way for way in priced if output_bytes + way.scratch_bytes <= free_bytes]
    if not priced:
        raise InfeasibleError(
            f"strategy {strategy!r} does not fit {format_bytes(memory_bytes)} of memory",
            hint="leave the strategy open, or give more memory",
        )
    if not fitting:
        short = output_bytes + min(way.scratch_bytes for way in priced) - free_bytes
        raise InfeasibleError(
            f"the packed rows take {format_bytes(output_bytes)}, {format_bytes(short)} more than "
            "is free on the disk or left of its budget",
            hint="free some space, or plan again with a disk budget that fits",
        )
    return min(fitting, key=lambda way: (way.seconds, STRATEGIES.index(way.strategy)))


def cut_windows(sections: Mapping[str, int], window_rows: int) -> list[Window]:
    """Windows of at most ``window_rows`` rows over the sections, in their order."""
    windows, first = [], 0
    for section, num_rows in sections.items():
        for start in range(0, num_rows, window_rows):
            stop = min(start + window_rows, num_rows)
            windows.append(Window(section=section, start=start, stop=stop, first=first + start))
        first += num_rows
    return windows


def reader_shape(memory_bytes: int) -> tuple[int, int]:
    """Threads of a reading engine and bytes of a request.

    The buffers of two engines take an eighth of the memory or less. With four threads the disk
    reads for two of them while the other two check and copy.
    """
    threads = 4 if memory_bytes >= _THREADS_FROM_BYTES else 2
    most = memory_bytes // (16 * threads)
    return threads, 1 << max(14, min(20, most.bit_length() - 1))


def pages_of(size_bytes: Any) -> Any:
    """The whole pages that so many bytes take, in bytes; also of an array of sizes."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _size(
    name: str, num_nodes: int, row_bytes: int, sections: Mapping[str, int], memory_bytes: int
) -> dict[str, Any] | None:
    """Sizes and bytes of one way, or None where it cannot be."""
    cost = row_bytes + INDEX_BYTES_PER_ROW
    features, output = num_nodes * row_bytes, sum(sections.values()) * row_bytes
    chunk_bytes = min(memory_bytes // (4 * CHUNKS), _LARGEST_CHUNK_BYTES)
    chunk_rows = _whole_pages(chunk_bytes // cost, row_bytes)
    rest = memory_bytes - CHUNKS * chunk_rows * cost
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
        windows = len(cut_windows(sections, rows))
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
    cells = len(cut_windows(sections, rows)) * -(-max(num_nodes, 1) // rows)
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
    """Rows of a window and of a range of the spill, at most ``most`` unless there is no way.

    A cell is what one window takes from one range: with windows and ranges of W bytes each and F
    bytes of features, about W W / F bytes. Small windows stay in the processor's cache, touch less
    fresh memory and wait less at both ends, so they are only as large as cells need.
    """
    wanted = math.isqrt(_CELL_BYTES * num_nodes * row_bytes)
    rows = _whole_pages(max(wanted, _LEAST_WINDOW_BYTES) // row_bytes, row_bytes)
    return max(min(rows, most), -(-num_nodes // _LARGEST_RANGES))


def _whole_pages(rows: int, row_bytes: int) -> int:
    """The largest number of rows up to ``rows`` that ends on a page, where there is one."""
    step = PAGE_BYTES // math.gcd(PAGE_BYTES, row_bytes)
    return rows // step * step if rows >= step else max(rows, 1)
