"""The rows of a store, moved by the way that the geometry names, in steps that are marked as done.

A step is a window (w) of the output or a range (g) of the features. ``finished`` is called in the
thread that writes, after all bytes of the step. Marks count rows of the output (while spilling
ranges), so that a run with another memory budget can go on where the last one stopped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.errors import DataError
from fivefold.gnn.data.parts import Progress
from fivefold.gnn.planning.geometry import Geometry
from fivefold.gnn.storage import Container, ContainerWriter, RowReader
from fivefold.gnn.storage.pages import PAGE_BYTES, Array, Bytes, Ids, aligned_empty, gather_rows
from fivefold.gnn.storage.parallel import WriteBehind, read_ahead

KIND_ROWS = "packed-rows"
_KIND_ROUTES = "packing-routes"
_KIND_SPILL = "packing-spill"
_RESIDENT_CHUNKS = 16  # read by one call: its threads wait for one another at the end

Finished = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Window:
    """Rows ``start`` to ``stop`` of one output section; ``first`` counts over all sections."""

    section: str
    start: int
    stop: int
    first: int

    @property
    def num_rows(self) -> int:
        """Rows of this window."""
        return self.stop - self.start


def cut_windows(sections: Mapping[str, int], window_rows: int) -> list[Window]:
    """Cut the sections, in their order, into windows of at most ``window_rows`` rows."""
    windows, first = [], 0
    for section, num_rows in sections.items():
        for start in range(0, num_rows, window_rows):
            stop = min(start + window_rows, num_rows)
            windows.append(Window(section=section, start=start, stop=stop, first=first + start))
        first += num_rows
    return windows


def pages_of(size_bytes: Any) -> Any:
    """Return the whole pages that so many bytes take, in bytes; also of an array of sizes."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, kw_only=True)
class Mover:
    """Source, destination and geometry, which all ways of moving rows need."""

    reader: RowReader  # of the features' rows
    engine: dict[str, Any]  # how it reads, as other files are read
    num_nodes: int
    dtype: np.dtype[Any]
    dim: int
    layouts: Container  # whose ``order`` has the node ids of the packed rows
    caches: Ids  # of the caches' rows, device first
    geometry: Geometry
    windows: Sequence[Window] = ()  # that are to be written

    @property
    def row_bytes(self) -> int:
        """Return bytes of a row."""
        return self.dtype.itemsize * self.dim

    def ids(self, first: int, num_rows: int) -> Ids:
        """Return the node ids [num_rows] of the output rows, over all sections, from ``first``."""
        packed, stop = self.layouts.sections["order"].shape[0], first + num_rows
        cached = self.caches[max(first - packed, 0) : max(stop - packed, 0)]
        if first >= packed:
            return cached
        rows = self.layouts.read("order", first, min(stop, packed)).astype(np.int64)
        return np.concatenate([rows, cached]) if len(cached) else rows

    def as_rows(self, buffer: Bytes, num_rows: int) -> Array:
        """Return the first rows of a buffer of bytes, in the features' type."""
        size = num_rows * self.row_bytes
        return buffer[:size].view(self.dtype).reshape(num_rows, self.dim)

    def read_range(self, request: tuple[int, int, int], out: Bytes) -> tuple[int, int, int]:
        """Read feature rows (start, stop, number) to the beginning of ``out``; return them."""
        start, stop, _ = request
        self.reader.read_runs([start], [stop - start], [0], self.as_rows(out, stop - start))
        return request

    def buffers(self, num_rows: int) -> tuple[Bytes, Bytes]:
        """Return two aligned buffers of ``num_rows`` rows, to be filled in turn."""
        size = max(num_rows * self.row_bytes, 1)
        return aligned_empty((size,), np.uint8), aligned_empty((size,), np.uint8)

    def chunks(self, extra_bytes: int = 0) -> list[Bytes]:
        """Return aligned buffers for what is written behind."""
        size = self.geometry.chunk_rows * self.row_bytes + extra_bytes
        return [aligned_empty((max(size, 1),), np.uint8) for _ in range(Geometry.NUM_CHUNKS)]


def write_rows(
    path: Path,
    mover: Mover,
    *,
    sections: Mapping[str, int],
    attributes: dict[str, Any],
    scratch: Path,
    progress: Progress,
) -> Container:
    """Write the packed rows and the caches' rows; what an earlier run has done is kept."""
    shapes = {name: (mover.dtype, (rows, mover.dim)) for name, rows in sections.items()}
    total, geometry = sum(sections.values()), mover.geometry
    with ContainerWriter(
        path, kind=KIND_ROWS, sections=shapes, attributes=attributes, resume=True
    ) as writer:
        done = int((writer.progress or {"rows": 0})["rows"])
        windows = cut_windows(sections, geometry.window_rows)
        if geometry.strategy != "spill":  # which is cut by all windows, also by those done
            windows = _remaining(windows, done)
        mover = dataclasses.replace(mover, windows=windows)

        def finished(number: int) -> None:
            window = windows[number]
            done = window.first + window.num_rows
            if (number + 1) % geometry.steps_per_mark == 0 or done == total:
                writer.mark({"rows": done})
            progress("rows", done, total)

        if done < total and geometry.strategy == "spill":
            first = sum(window.first + window.num_rows <= done for window in windows)
            with _fresh_if_damaged(scratch):
                cells, spill = _spill(mover, scratch, progress)
                with spill, RowReader(spill, "cells", **mover.engine) as reader:
                    _order_windows(mover, cells, reader, writer, done=first, finished=finished)
        elif done < total:
            move = _gather_resident if geometry.strategy == "resident" else _pass_over
            move(mover, writer, finished)
        return writer.commit()


def _remaining(windows: list[Window], done: int) -> list[Window]:
    """Return what is left of the windows when the first ``done`` rows are written."""
    left = []
    for window in windows:
        skip = min(max(done - window.first, 0), window.num_rows)
        if skip < window.num_rows:
            start, first = window.start + skip, window.first + skip
            left.append(dataclasses.replace(window, start=start, first=first))
    return left


@contextmanager
def _fresh_if_damaged(scratch: Path) -> Iterator[None]:
    """Remove scratch files that turn out to be damaged, so that the next run makes them anew."""
    try:
        yield
    except DataError as error:
        if str(scratch) not in error.message:
            raise
        for path in (*scratch.glob("spill*"), *scratch.glob("routes*")):
            path.unlink()
        hint = "it has been removed; run packing again, which makes it anew"
        raise DataError(error.message, hint=hint) from error


def _spill(mover: Mover, scratch: Path, progress: Progress) -> tuple[Cells, Container]:
    """Return the spill, complete, and where everything lies in it."""
    cells, path, routes_path = Cells.count(mover), scratch / "spill.fvf", scratch / "routes.fvf"
    attributes = {"geometry": dataclasses.asdict(mover.geometry)}
    if path.exists():
        return cells, Container.open(path, kind=_KIND_SPILL)
    if not routes_path.exists():
        ids = np.uint32 if mover.num_nodes < 2**32 else np.int64
        nodes = {"nodes": (ids, (int(cells.counts.sum()),))}
        with ContainerWriter(
            routes_path, kind=_KIND_ROUTES, sections=nodes, attributes=attributes
        ) as writer:
            place = 0
            for window in mover.windows:
                wanted = mover.ids(window.first, window.num_rows)
                order, _ = _by_range(wanted, mover.geometry.source_rows)
                writer.write("nodes", place, wanted[order].astype(ids))
                place += len(order)
            writer.commit().close()
    with (
        Container.open(routes_path, kind=_KIND_ROUTES) as route_file,
        ContainerWriter(
            path,
            kind=_KIND_SPILL,
            sections={"cells": (np.uint8, (cells.total_bytes, 1))},
            attributes=attributes,
            resume=True,
        ) as writer,
    ):
        done = int((writer.progress or {"ranges": 0})["ranges"])

        def finished(number: int) -> None:
            if (number + 1) % mover.geometry.steps_per_mark == 0:
                writer.mark({"ranges": number + 1})
            rows = min((number + 1) * mover.geometry.source_rows, mover.num_nodes)
            progress("spill", rows, mover.num_nodes)

        _spill_ranges(mover, cells, route_file, writer, done=done, finished=finished)
        spill = writer.commit()
    routes_path.unlink()
    return cells, spill


def _gather_resident(mover: Mover, writer: ContainerWriter, finished: Finished) -> None:
    """Read all features once, then write the output in order, window by window."""
    features = aligned_empty((mover.num_nodes, mover.dim), mover.dtype)
    step = mover.geometry.chunk_rows
    for start, count in _chunks(mover.num_nodes, _RESIDENT_CHUNKS * step):
        part = features[start : start + count]
        mover.read_range((start, start + count, 0), part.view(np.uint8).reshape(-1))
    with WriteBehind(mover.chunks()) as behind:
        for number, window in enumerate(mover.windows):
            _write_window(mover, writer, behind, window, features, None)
            behind.then(partial(finished, number))


def _pass_over(mover: Mover, writer: ContainerWriter, finished: Finished) -> None:
    """Fill one window of the output after the other, each by a pass over the features."""
    geometry = mover.geometry
    rows = min(geometry.window_rows, max((w.num_rows for w in mover.windows), default=0))
    out = aligned_empty((max(rows, 1), mover.dim), mover.dtype)
    buffers = mover.buffers(min(geometry.source_rows, mover.num_nodes))
    for number, window in enumerate(mover.windows):
        ids = mover.ids(window.first, window.num_rows)
        sources, offsets = _by_range(ids, geometry.source_rows)
        ids = ids[sources]
        needed = [
            (int(ids[start : offsets[g + 1]].min()), int(ids[start : offsets[g + 1]].max()) + 1, g)
            for g, start in enumerate(offsets[:-1].tolist())
            if offsets[g + 1] > start
        ]
        for (low, high, g), buffer in read_ahead(needed, mover.read_range, buffers):
            cell = slice(offsets[g], offsets[g + 1])
            gather_rows(mover.as_rows(buffer, high - low), ids[cell] - low, out, sources[cell])
        for start, count in _chunks(window.num_rows, geometry.chunk_rows):
            writer.write(window.section, window.start + start, out[start : start + count])
        finished(number)


class Cells:
    """Places in the spill where the rows of each range wait for their window.

    A cell holds the rows that one window takes from one range, in the window's order. Cells of a
    window stand next to one another, each from a page boundary on: a range is written as large
    pieces, one per window, and a window is read as one extent.
    """

    def __init__(self, counts: Ids, row_bytes: int, chunk_rows: int) -> None:
        self.counts = counts  # [w, g], rows in each cell
        self.row_bytes = row_bytes
        self.chunk_rows = chunk_rows
        whole, rest = np.divmod(counts, chunk_rows)
        padded = whole * pages_of(chunk_rows * row_bytes) + pages_of(rest * row_bytes)
        flat = np.concatenate([[0], np.cumsum(padded.ravel())])
        self.places = flat[:-1].reshape(counts.shape)  # bytes, in the spill
        self.total_bytes = int(flat[-1])
        rows = np.concatenate([[0], np.cumsum(counts.ravel())])
        self.rows = rows[:-1].reshape(counts.shape)  # in the list of routes

    @classmethod
    def count(cls, mover: Mover) -> Cells:
        """Return the cells of an order."""
        size = mover.geometry.source_rows
        num_ranges = -(-mover.num_nodes // size)
        counts = np.zeros((len(mover.windows), num_ranges), np.int64)
        for number, window in enumerate(mover.windows):
            ids = mover.ids(window.first, window.num_rows)
            counts[number] = np.bincount(ids // size, minlength=num_ranges)
        return cls(counts, mover.row_bytes, mover.geometry.chunk_rows)

    def extents(self, window: int) -> tuple[Ids, Ids]:
        """Return places and lengths in bytes of the pieces of a window's cells, by range."""
        counts = self.counts[window]
        pieces = -(-counts // self.chunk_rows)
        number = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        before = number * pages_of(self.chunk_rows * self.row_bytes)
        left = np.repeat(counts, pieces) - number * self.chunk_rows
        lengths = np.minimum(left, self.chunk_rows) * self.row_bytes
        return np.repeat(self.places[window], pieces) + before, lengths


def _spill_ranges(
    mover: Mover,
    cells: Cells,
    routes: Container,
    spill: ContainerWriter,
    *,
    done: int,
    finished: Finished,
) -> None:
    """Read the features range by range and write each row to the cells that want it."""
    size = mover.geometry.source_rows
    num_ranges = cells.counts.shape[1]
    ranges = [
        (g * size, min((g + 1) * size, mover.num_nodes), g)
        for g in range(done, num_ranges)
        if cells.counts[:, g].any()
    ]
    chunk_bytes = mover.geometry.chunk_rows * mover.row_bytes + PAGE_BYTES
    buffers = mover.buffers(min(size, mover.num_nodes))
    with WriteBehind(mover.chunks(PAGE_BYTES)) as behind:
        for (low, high, g), buffer in read_ahead(ranges, mover.read_range, buffers):
            rows = mover.as_rows(buffer, high - low)
            for pieces in batches_of_cells(cells, g, mover.geometry.chunk_rows, chunk_bytes):
                _spill_pieces(rows, low, pieces, routes, behind, spill)
            behind.then(partial(finished, g))


def _order_windows(
    mover: Mover,
    cells: Cells,
    spill_reader: RowReader,
    writer: ContainerWriter,
    *,
    done: int,
    finished: Finished,
) -> None:
    """Read each window's cells, put its rows in order and write them."""
    largest = max((window.num_rows for window in mover.windows), default=0)

    def read(number: int, out: Bytes) -> tuple[int, Ids]:
        """Fill ``out`` in order of arrival; return where each row of the window arrived."""
        places, lengths = cells.extents(number)
        size = int(lengths.sum())
        begins = np.cumsum(lengths) - lengths
        spill_reader.read_runs(places, lengths, begins, out[:size].reshape(size, 1))
        window = mover.windows[number]
        ids = mover.ids(window.first, window.num_rows)
        arrival = np.empty(window.num_rows, np.int64)
        arrival[_by_range(ids, mover.geometry.source_rows)[0]] = np.arange(window.num_rows)
        return number, arrival

    with WriteBehind(mover.chunks()) as behind:
        numbers = list(range(done, len(mover.windows)))
        for (number, arrival), buffer in read_ahead(numbers, read, mover.buffers(largest)):
            window = mover.windows[number]
            rows = mover.as_rows(buffer, window.num_rows)
            _write_window(mover, writer, behind, window, rows, arrival)
            behind.then(partial(finished, number))


def _write_window(
    mover: Mover,
    writer: ContainerWriter,
    behind: WriteBehind,
    window: Window,
    source: Array,
    places: Ids | None,
) -> None:
    """Gather a window's rows from ``places`` of the source, by node id where these are None."""
    for start, count in _chunks(window.num_rows, mover.geometry.chunk_rows):
        ids = mover.ids(window.first + start, count) if places is None else places[start:][:count]
        out = mover.as_rows(behind.take(), count)
        gather_rows(source, ids, out)
        behind.put(_write_of(writer, window.section, window.start + start, out))


def _by_range(ids: Ids, size: int) -> tuple[Ids, Ids]:
    """Return positions sorted by range of ``size`` ids, stable, and where each range begins."""
    keys = (ids // size).astype(np.uint16)
    offsets = np.zeros(int(keys.max(initial=0)) + 2, np.int64)
    np.cumsum(np.bincount(keys, minlength=len(offsets) - 1), out=offsets[1:])
    return np.argsort(keys, kind="stable"), offsets


def _chunks(num_rows: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(0, num_rows, step):
        yield start, min(step, num_rows - start)


def _write_of(writer: ContainerWriter, section: str, start: int, out: Array) -> Any:
    return lambda _buffer: writer.write(section, start, out)


@dataclass(frozen=True)
class _Piece:
    """Some rows of a cell: where they stand in the routes, the spill and the staging buffer."""

    route: int
    num_rows: int
    place: int
    offset: int


def batches_of_cells(
    cells: Cells, g: int, chunk_rows: int, chunk_bytes: int
) -> Iterator[list[_Piece]]:
    """Yield the cells of a range, cut and grouped so that each group fills a staging buffer."""
    row_bytes, group, used = cells.row_bytes, list[_Piece](), 0
    for number in np.flatnonzero(cells.counts[:, g]).tolist():
        left, route = int(cells.counts[number, g]), int(cells.rows[number, g])
        place = int(cells.places[number, g])
        while left:
            count = min(left, chunk_rows)
            size = pages_of(count * row_bytes)
            if used + size > chunk_bytes:
                yield group
                group, used = [], 0
            group.append(_Piece(route, count, place, used))
            used, left, route, place = used + size, left - count, route + count, place + size
    if group:
        yield group


def _spill_pieces(
    rows: Array,
    low: int,
    pieces: list[_Piece],
    routes: Container,
    behind: WriteBehind,
    spill: ContainerWriter,
) -> None:
    staging = behind.take()
    row_bytes = rows.dtype.itemsize * rows.shape[1]
    for piece in pieces:
        ids = routes.read("nodes", piece.route, piece.route + piece.num_rows).astype(np.int64)
        out = staging[piece.offset : piece.offset + piece.num_rows * row_bytes]
        gather_rows(rows, ids - low, out.view(rows.dtype).reshape(piece.num_rows, -1))
        end = piece.offset + piece.num_rows * row_bytes
        staging[end : pages_of(end)] = 0

    def write(staging: Bytes) -> None:
        for piece in pieces:
            size = pages_of(piece.num_rows * row_bytes)
            block = staging[piece.offset : piece.offset + size]
            spill.write("cells", piece.place, block.reshape(size, 1))

    behind.put(write)
